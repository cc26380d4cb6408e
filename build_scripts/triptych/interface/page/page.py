"""The page of a pipeline: a form, its answer, and where the time went."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError
from triptych.client import InferenceError
from triptych.core.inputs import task_of
from triptych.interface.page.asking import Asker, Reply, total_us
from triptych.interface.page.form import SECOND, Form
from triptych.interface.page.shown import Shown, show
from triptych.interface.page.web import EXAMPLE, PageServer, read_text
from triptych.interface.report.pages import render
from triptych.spec.spec import PipelineSpec
from triptych.spec.traffic import TRAFFIC_FILE, TrafficRow, read_traffic

EXAMPLES = 8
"""Rows of the traffic that a page offers."""

_LARGEST_PREVIEW = 4 << 20


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
        images=[base64.b64encode(each).decode() for each in images if len(each) < _LARGEST_PREVIEW],
    )
