"""The page of a pipeline: a form, its answer, and where the time went.

One request of the page to a served pipeline, and what the server counted of it.

The page of a pipeline that generates text, whose answers appear as they come.

It is a conversation, or, of a pipeline that makes one text of another, a text and its answer.
"""

from __future__ import annotations

import base64
import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

from triptych.base.errors import UserError
from triptych.client import Client, Completion, Generation, InferenceError, Sampling, StepStatistics
from triptych.client.questions import plain_outputs
from triptych.client.server_info import read_settings
from triptych.core.inputs import task_of
from triptych.interface.page.form import SECOND, Asked, Form, Shown, show
from triptych.interface.page.web import EXAMPLE, PageServer, read_text
from triptych.interface.report.pages import lines, render
from triptych.spec.generation_fields import GenerationSpec, Text2TextSpec
from triptych.spec.spec import PipelineSpec
from triptych.spec.traffic import TRAFFIC_FILE, TrafficRow, read_lines, read_traffic

_COUNTED_WITHIN_S = 0.5
"""Triton counts a request shortly after it has answered it."""
_ROWS = 2


@dataclass(frozen=True)
class Times:
    """Where the time of one request went.

    Attributes:
        whole_us: from here to the server and back.
        steps: what the server counted of each step meanwhile; empty where it does not tell.
        requests: sent from here.
        unknown: why there are no steps; empty where there are.
    """

    whole_us: float
    steps: tuple[StepStatistics, ...]
    requests: int
    unknown: str = ""

    @property
    def alone(self) -> bool:
        """Whether the server counted this page's requests and no others."""
        return all(step.requests == self.requests for step in self.steps)

    @property
    def outside_us(self) -> float:
        """Of the whole, what no step accounts for: gRPC, and the server between the steps."""
        return max(0.0, self.whole_us - sum(map(total_us, self.steps)))


def total_us(step: StepStatistics) -> float:
    """The mean time of a request in `step`, its queue included."""
    return step.queue_us + step.compute_input_us + step.compute_infer_us + step.compute_output_us


@dataclass(frozen=True)
class Reply:
    """An answer: every output of each row as plain data, and the times."""

    rows: tuple[dict[str, Any], ...]
    times: Times


class Asker:
    """Sends what the page asks to the pipeline, one request at a time.

    Args:
        pipeline: its name.
        url: ``host:port`` of the server's gRPC endpoint.
        timeout_s: of a request.

    Raises:
        UserError: the address is none.
    """

    def __init__(self, pipeline: str, url: str, timeout_s: float) -> None:
        self.url = url
        self._client = Client(pipeline, url, timeout_s=timeout_s, rows_per_request=_ROWS)
        self._turn = threading.Lock()

    def settings(self) -> dict[str, Any]:
        """What the first step was built with: rules and values of parameters among others.

        Raises:
            InferenceError: the pipeline is not served there.
            UserError: its step is not.
        """
        return read_settings(self.url, self._client.interface().steps[0])

    def ask(self, asked: Asked) -> Reply:
        """Send one request.

        Raises:
            InferenceError: the pipeline refuses it, or fails.
        """
        inputs = {name: [row[name] for row in asked.rows] for name in asked.rows[0]}
        with self._turn:
            config = self._client.interface()
            before, unknown = self._counts()
            began = time.perf_counter()
            outputs = self._client.infer(inputs, parameters=asked.parameters)
            whole_us = (time.perf_counter() - began) * 1e6
            requests = -(-len(asked.rows) // min(_ROWS, config.max_batch_size))
            steps = () if unknown else self._since(before, requests)
        columns = plain_outputs(config, outputs)
        rows = tuple(
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        )
        return Reply(rows, Times(whole_us, steps, requests, unknown))

    def close(self) -> None:
        self._client.close()

    def _counts(self) -> tuple[list[StepStatistics], str]:
        try:
            return self._client.step_statistics(), ""
        except InferenceError as error:  # a server may keep its counts to itself
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


EXAMPLES = 8
"""Prompts of the traffic that a page offers."""

PARAMETERS = ("max_tokens", "temperature")
Messages = Sequence[Mapping[str, str]]


class ChatPage(PageServer):
    """Page of a pipeline that generates text, until it is closed.

    Args:
        spec: of the pipeline.
        folder: where its traffic is, if there is any.
        grpc_url: ``host:port`` of the server's gRPC endpoint.
        host: to listen on.
        port: 0 picks a free one.
        timeout_s: of an answer.

    Raises:
        OSError: nothing can listen there.
        UserError: its traffic cannot be read.
    """

    talks = True
    """Whether a request is a whole conversation; else it is one text."""

    def __init__(
        self,
        spec: GenerationSpec | Text2TextSpec,
        folder: Path,
        grpc_url: str,
        host: str,
        port: int,
        timeout_s: float,
    ) -> None:
        examples = _examples(folder / TRAFFIC_FILE)
        super().__init__(host, port)
        self._spec = spec
        self._examples = examples
        self._grpc_url = grpc_url
        self._client = Client(spec.name, grpc_url, timeout_s=timeout_s)

    def page(self, example: str) -> str:
        known = example.isdecimal() and int(example) < len(self._examples)
        said = self._examples[int(example)] if known else ""
        return self._render((), {"say": said})

    def answer(self, sent: Mapping[str, bytes]) -> tuple[HTTPStatus, Iterator[str]]:
        given = {name: str(read_text(content)) for name, content in sent.items()}
        try:
            messages = json.loads(given.get("messages") or "[]") if self.talks else []
            roles = [message["role"] + message["content"] for message in messages]
        except (ValueError, TypeError, KeyError):
            return HTTPStatus.UNPROCESSABLE_ENTITY, iter([self._render((), given)])
        if not roles and not given.get("say"):
            return HTTPStatus.UNPROCESSABLE_ENTITY, iter([self._render((), given)])
        said = {"role": "user", "content": given.get("say", "")}
        return HTTPStatus.OK, self._answered([*messages, said], given)

    def end(self) -> None:
        self._client.close()

    def _answered(self, messages: Messages, given: Mapping[str, str]) -> Iterator[str]:
        """The page up to the answer, the answer piece by piece, and the rest."""
        # What comes before the answer and behind it is cut out of one page.
        mark = secrets.token_hex(16)
        kept = {**given, "say": ""}
        yield self._render(messages, kept, mark=mark).split(mark)[0]
        began, first_s, error = time.monotonic(), 0.0, ""
        chunks = []
        try:
            with self._ask(messages, _sampling(given)) as answer:
                for chunk in answer:
                    first_s = first_s or time.monotonic() - began
                    chunks.append(chunk)
                    yield str(lines(chunk.text))
        except InferenceError as fault:
            error = fault.message
        took_s = time.monotonic() - began
        if not chunks:
            after = self._render(messages[:-1], given, mark=mark, error=error)
            yield after.split(mark)[1]
            return
        whole = Completion.join(chunks)
        told = {
            "tokens": len(whole.token_ids),
            "prompt_tokens": "" if whole.usage is None else whole.usage.prompt_tokens,
            "finish": whole.finish_reason or "broke off",
            "first_us": first_s * 1e6,
            "whole_us": took_s * 1e6,
        }
        turns = [*messages, {"role": "assistant", "content": whole.text}]
        after = self._render(turns, kept, mark=mark, error=error, told=told)
        yield after.split(mark)[1]

    def _ask(self, messages: Messages, sampling: Sampling) -> Generation:
        if self.talks:
            return self._client.chat(messages, **sampling)
        return self._client.generate(messages[-1]["content"], **sampling)

    def _render(
        self,
        messages: Messages,
        values: Mapping[str, str],
        *,
        mark: str = "",
        error: str = "",
        told: Mapping[str, Any] | None = None,
    ) -> str:
        return render(
            "chat.html.j2",
            name=self._spec.name,
            task=self._spec.task,
            talks=self.talks,
            model=self._spec.model.source,
            url=self._grpc_url,
            # The last answer has been sent where the page goes on behind it.
            messages=messages if told is None else messages[:-1],
            history=json.dumps(list(messages)),
            values=values,
            parameters=PARAMETERS,
            defaults=self._spec.parameters,
            examples=self._examples,
            mark=mark,
            error=error,
            told=told,
        )


class TextPage(ChatPage):
    """Page of a pipeline that summarizes or translates, until it is closed; see `ChatPage`."""

    talks = False


def _sampling(given: Mapping[str, str]) -> Sampling:
    """Parameters as the form has them; the pipeline says what is wrong with one."""
    sampling: dict[str, Any] = {}
    for name in PARAMETERS:
        text = given.get(name, "").strip()
        try:
            value: Any = json.loads(text) if text else None
        except ValueError:
            value = text
        if value is not None:
            sampling[name] = value
    return cast("Sampling", sampling)


def _examples(path: Path) -> list[str]:
    """What users say last in the first prompts of the traffic."""
    if not path.is_file():
        return []
    found = []
    for _, _, row in read_lines(path):
        talk = (row or {}).get("messages") or [{"content": (row or {}).get("text_input", "")}]
        found.append(str(talk[-1].get("content", "")))
    return found[:EXAMPLES]


"""Rows of the traffic that a page offers."""

_MAX_PREVIEW = 4 << 20


@dataclass(frozen=True)
class Pipeline:
    """What the page is about.

    Attributes:
        spec: as it was built.
        form: its fields.
        asker: sends what they hold.
        examples: rows of its traffic.
        folder: that images of examples lie in.
    """

    spec: PipelineSpec
    form: Form
    asker: Asker
    examples: tuple[TrafficRow, ...]
    folder: Path


def open_pipeline(spec: PipelineSpec, folder: Path, url: str, timeout_s: float) -> Pipeline:
    """What a page needs of a pipeline that is served.

    Args:
        spec: of the pipeline.
        folder: where its traffic is, if there is any.
        url: ``host:port`` of the server's gRPC endpoint.
        timeout_s: of a request.

    Raises:
        UserError: it is not served there, or its traffic cannot be read.
    """
    task = task_of(spec)
    asker = Asker(spec.name, url, timeout_s)
    try:
        form = Form.of(task, asker.settings())
    except InferenceError as error:
        raise UserError(
            f"{spec.name} at {url}", "must be served there", given=error, remedy="See --url"
        ) from error
    names = [tensor.name for tensor in task.inputs]
    rows = read_traffic(folder, names) if (folder / TRAFFIC_FILE).is_file() else []
    return Pipeline(spec, form, asker, tuple(rows[:EXAMPLES]), folder)


class DemoPage(PageServer):
    """Answers browsers until it is closed.

    Args:
        pipeline: that the page is about.
        host: to listen on.
        port: 0 picks a free one.

    Raises:
        OSError: nothing can listen there.
    """

    def __init__(self, pipeline: Pipeline, host: str, port: int) -> None:
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
        self.pipeline.asker.close()


def open_demo_page(
    spec: PipelineSpec, folder: Path, url: str, host: str, port: int, timeout_s: float
) -> DemoPage:
    """Return the page of a served encoder; see `open_pipeline` and `DemoPage`."""
    return DemoPage(open_pipeline(spec, folder, url, timeout_s), host, port)


def _chosen(pipeline: Pipeline, number: str) -> TrafficRow | None:
    known = number.isdecimal() and int(number) < len(pipeline.examples)
    return pipeline.examples[int(number)] if known else None


def answer(pipeline: Pipeline, sent: Mapping[str, bytes]) -> tuple[HTTPStatus, str]:
    """What becomes of a submitted form, given by field: the status, and the page."""
    images = [tensor.name for tensor in pipeline.form.inputs if tensor.content == "image"]
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
        asked = pipeline.form.read(given)
        reply = pipeline.asker.ask(asked)
    except (InferenceError, OSError) as error:
        alone = not given.get(SECOND)  # no row needs to be named
        said = error.message if isinstance(error, InferenceError) and alone else str(error)
        page = _page(pipeline, values, chosen, error=said)
        return HTTPStatus.UNPROCESSABLE_ENTITY, page
    shown = show(pipeline.form.view.kind, asked.rows, reply.rows)
    preview = [given[name] for name in images]
    return HTTPStatus.OK, _page(pipeline, values, chosen, reply=reply, shown=shown, images=preview)


def _page(
    pipeline: Pipeline,
    values: Mapping[str, str],
    example: str,
    *,
    error: str = "",
    reply: Reply | None = None,
    shown: Shown | None = None,
    images: Sequence[Any] = (),
) -> str:
    return render(
        "demo.html.j2",
        name=pipeline.spec.name,
        task=pipeline.spec.task,
        model=pipeline.spec.model.source,
        url=pipeline.asker.url,
        fields=pipeline.form.fields,
        values=values,
        example=example,
        examples=[" | ".join(row.inputs.values()) for row in pipeline.examples],
        error=error,
        shown=shown,
        times=None if reply is None else reply.times,
        total_us=total_us,
        images=[base64.b64encode(each).decode() for each in images if len(each) < _MAX_PREVIEW],
    )
