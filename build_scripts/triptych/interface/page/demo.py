"""Demo page of a pipeline; of an encoder: a form with its answer and the times of the request."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError
from triptych.client import Client, InferenceError, StepStatistics
from triptych.client.rows import plain_outputs
from triptych.core.inputs import task_of
from triptych.interface.page.chat import ChatPage, TextPage
from triptych.interface.page.form import (
    SECOND,
    AnswerView,
    Form,
    FormRequest,
    is_file,
    view_answer,
)
from triptych.interface.page.web import EXAMPLE, MAX_EXAMPLES, PageServer, read_text
from triptych.interface.report.pages import render
from triptych.models.fields import name_of_source
from triptych.repository.manifest import find_settings
from triptych.spec.any_spec import AnySpec
from triptych.spec.generation_fields import GenerationSpec, Text2TextSpec
from triptych.spec.model_fields import CompiledSpec, ModelSpec, is_own
from triptych.spec.spec import PipelineSpec
from triptych.spec.traffic import (
    PARAMETERS,
    TRAFFIC_FILE,
    TrafficRow,
    read_lines,
    read_traffic,
)

_COUNTED_WITHIN_S = 0.5
"""Maximum delay until Triton's statistics include an answered request, in seconds."""
_MAX_ROWS = 2


@dataclass(frozen=True)
class RequestTimes:
    """Times of one answer of the page.

    Attributes:
        total_us: Time from sending the first request until the last response, in microseconds.
        steps: Statistics of the server for each step; empty if the server does not report them.
        requests: Number of requests that the page sent.
        unknown_reason: Reason why `steps` is empty, or "".
    """

    total_us: float
    steps: tuple[StepStatistics, ...]
    requests: int
    unknown_reason: str = ""

    @property
    def alone(self) -> bool:
        """Whether the statistics cover the requests of this page only."""
        return all(step.requests == self.requests for step in self.steps)

    @property
    def outside_us(self) -> float:
        """Time spent outside the steps (gRPC, and the server between steps), in microseconds."""
        return max(0.0, self.total_us - sum(map(step_time_us, self.steps)))


def step_time_us(step: StepStatistics) -> float:
    """Return the mean time of a request in `step` with its queue, in microseconds."""
    return step.queue_us + step.compute_input_us + step.compute_infer_us + step.compute_output_us


@dataclass(frozen=True)
class TimedAnswer:
    """Outputs of each row as plain data, with the times of the request."""

    rows: tuple[dict[str, Any], ...]
    times: RequestTimes


class PageClient:
    """Client of a demo page that sends one request at a time.

    Args:
        pipeline: Name of the pipeline.
        url: Address ``host:port`` of the server's gRPC endpoint.
        timeout_s: Timeout of a request, in seconds.

    Raises:
        UserError: The address is invalid.
    """

    def __init__(self, pipeline: str, url: str, timeout_s: float) -> None:
        self.url = url
        self._client = Client(pipeline, url, timeout_s=timeout_s, rows_per_request=_MAX_ROWS)
        self._turn = threading.Lock()

    def options(self) -> dict[str, str]:
        """Return the datatype of each parameter of the pipeline that can be an input.

        Raises:
            InferenceError: The pipeline is not available at the address.
        """
        config = self._client.interface()
        return {n: kind for n, kind in config.options.items() if n not in config.row_types}

    def send(self, request: FormRequest) -> TimedAnswer:
        """Send a request and return its answer.

        Raises:
            InferenceError: The pipeline rejects the request, or fails.
        """
        inputs = {name: [row[name] for row in request.rows] for name in request.rows[0]}
        with self._turn:
            config = self._client.interface()
            before, unknown_reason = self._counts()
            began = time.perf_counter()
            outputs = self._client.infer(inputs, parameters=request.parameters)
            total_us = (time.perf_counter() - began) * 1e6
            requests = -(-len(request.rows) // min(_MAX_ROWS, config.max_batch_size))
            steps = () if unknown_reason else self._since(before, requests)
        columns = plain_outputs(config, outputs)
        rows = tuple(
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        )
        return TimedAnswer(rows, RequestTimes(total_us, steps, requests, unknown_reason))

    def close(self) -> None:
        self._client.close()

    def _counts(self) -> tuple[list[StepStatistics], str]:
        try:
            return self._client.step_statistics(), ""
        except InferenceError as error:  # A server may not offer statistics.
            return [], str(error)

    def _since(self, before: list[StepStatistics], requests: int) -> tuple[StepStatistics, ...]:
        until = time.monotonic() + _COUNTED_WITHIN_S
        while True:
            now = self._client.step_statistics()
            steps = tuple(new - old for new, old in zip(now, before, strict=True))
            counted = all(step.requests >= requests for step in steps)
            if counted or time.monotonic() > until:
                return steps
            time.sleep(0.01)


_MAX_PREVIEW_BYTES = 4 << 20


@dataclass(frozen=True)
class PagePipeline:
    """A served pipeline with the form of its page.

    Attributes:
        spec: Spec of the active build.
        examples: Rows of the pipeline's traffic.
        folder: Folder of the images of `examples`.
    """

    spec: CompiledSpec
    form: Form
    client: PageClient
    examples: tuple[TrafficRow, ...]
    folder: Path


def open_pipeline(
    spec: CompiledSpec, folder: Path, repository: Path, url: str, timeout_s: float
) -> PagePipeline:
    """Return a served pipeline with the form of its page.

    Args:
        spec: Spec of the pipeline.
        folder: Folder of the pipeline, which may contain traffic.
        repository: Model repository. If the pipeline is built there, the form has the defaults and
            choices of its parameters.
        url: Address ``host:port`` of the server's gRPC endpoint.
        timeout_s: Timeout of a request, in seconds.

    Raises:
        UserError: The pipeline is not available at the address, or its traffic cannot be read.
    """
    task = task_of(spec)
    client = PageClient(spec.name, url, timeout_s)
    try:
        form = Form.of(task, client.options(), find_settings(repository, spec.name))
    except InferenceError as error:
        raise UserError(
            f"{spec.name} at {url}",
            "is not available",
            given=error,
            remedy=f"Start it with `triptych serve {spec.name}`, or pass --url",
        ) from error
    names = [tensor.name for tensor in task.inputs]
    rows: Sequence[TrafficRow] = ()
    if (folder / TRAFFIC_FILE).is_file():
        rows = _typed_rows(folder) if is_own(spec) else read_traffic(folder, names)
    return PagePipeline(spec, form, client, tuple(rows[:MAX_EXAMPLES]), folder)


def _typed_rows(folder: Path) -> list[TrafficRow]:
    """Return the traffic of a pipeline with typed inputs, with numbers and lists as text."""
    rows = []
    for number, _, row in islice(read_lines(folder / TRAFFIC_FILE), MAX_EXAMPLES):
        parameters = (row or {}).pop(PARAMETERS, {})
        inputs = {n: v if isinstance(v, str) else json.dumps(v) for n, v in (row or {}).items()}
        rows.append(TrafficRow(number, inputs, parameters))
    return rows


class DemoPage(PageServer):
    """Demo page of an encoder.

    Raises:
        OSError: The server cannot listen on the address.
    """

    def __init__(self, pipeline: PagePipeline, host: str, port: int) -> None:
        super().__init__(host, port)
        self.pipeline = pipeline

    def page(self, example: str) -> str:
        row = _chosen(self.pipeline, example)
        values = self.pipeline.form.first_values(row)
        return _page(self.pipeline, values, example if row else "")

    def answer(self, sent: Mapping[str, bytes]) -> tuple[HTTPStatus, Iterator[str]]:
        status, text = answer(self.pipeline, sent)
        return status, iter([text])

    def end(self) -> None:
        self.pipeline.client.close()


def open_page(
    spec: AnySpec,
    folder: Path,
    repository: Path,
    url: str,
    host: str,
    port: int,
    timeout_s: float,
) -> PageServer:
    """Return the page of a served pipeline of any kind; see `open_pipeline` and `DemoPage`."""
    match spec:
        case PipelineSpec() | ModelSpec():
            return DemoPage(open_pipeline(spec, folder, repository, url, timeout_s), host, port)
        case GenerationSpec():
            return ChatPage(spec, folder, url, host, port, timeout_s)
        case Text2TextSpec():
            return TextPage(spec, folder, url, host, port, timeout_s)


def _chosen(pipeline: PagePipeline, number: str) -> TrafficRow | None:
    known = number.isdecimal() and int(number) < len(pipeline.examples)
    return pipeline.examples[int(number)] if known else None


def answer(pipeline: PagePipeline, sent: Mapping[str, bytes]) -> tuple[HTTPStatus, str]:
    """Return the HTTP status and the page for a submitted form, with the content of each field."""
    images = [tensor.name for tensor in pipeline.form.inputs if is_file(tensor)]
    given: dict[str, str | bytes] = {
        name: content if name in images else read_text(content) for name, content in sent.items()
    }
    chosen = str(given.get(EXAMPLE, ""))
    example = _chosen(pipeline, chosen)
    values = {name: value for name, value in given.items() if isinstance(value, str)}
    try:
        for name in images:
            if example is not None and not given.get(name):
                given[name] = (pipeline.folder / example.inputs[name]).read_bytes()
        request = pipeline.form.read(given)
        answered = pipeline.client.send(request)
    except (InferenceError, OSError) as error:
        one_row = not given.get(SECOND)  # The message then need not name the row.
        message = error.message if isinstance(error, InferenceError) and one_row else str(error)
        page = _page(pipeline, values, chosen, error=message)
        return HTTPStatus.UNPROCESSABLE_ENTITY, page
    view = view_answer(pipeline.form.view.kind, request.rows, answered.rows)
    preview = [given[name] for name in images]
    page = _page(pipeline, values, chosen, answered=answered, view=view, images=preview)
    return HTTPStatus.OK, page


def _page(
    pipeline: PagePipeline,
    values: Mapping[str, str],
    example: str,
    *,
    error: str = "",
    answered: TimedAnswer | None = None,
    view: AnswerView | None = None,
    images: Sequence[Any] = (),
) -> str:
    return render(
        "demo.html.j2",
        name=pipeline.spec.name,
        task=pipeline.spec.task,
        model=name_of_source(pipeline.spec.model.source),
        url=pipeline.client.url,
        fields=pipeline.form.fields,
        values=values,
        example=example,
        examples=[" | ".join(row.inputs.values()) for row in pipeline.examples],
        error=error,
        view=view,
        times=None if answered is None else answered.times,
        step_time_us=step_time_us,
        images=[
            base64.b64encode(each).decode() for each in images if len(each) < _MAX_PREVIEW_BYTES
        ],
    )
