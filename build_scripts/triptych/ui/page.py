"""The page's server: one form over HTTP, for people on this machine; no script runs on it."""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import BytesParser
from email.policy import HTTP
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from triptych.client import InferenceError
from triptych.client.address import is_loopback
from triptych.errors import UserError
from triptych.pipeline.spec import PipelineSpec
from triptych.pipeline.traffic import TRAFFIC_FILE, TrafficRow, read_traffic
from triptych.report.pages import render
from triptych.requests.inputs import task_of
from triptych.ui.asking import Asker, Reply, total_us
from triptych.ui.form import SECOND, Form
from triptych.ui.shown import Shown, show

EXAMPLES = 8
"""Rows of the traffic that a page offers."""

_EXAMPLE = "example"
_LARGEST_FORM = 64 << 20
_LARGEST_PREVIEW = 4 << 20
_READ_TIMEOUT_S = 30.0
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


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


class DemoPage(ThreadingHTTPServer):
    """Answers browsers until it is closed; as a context manager, from entry to exit.

    Args:
        pipeline: that the page is about.
        host: to listen on.
        port: 0 picks a free one.

    Raises:
        OSError: nothing can listen there.
    """

    daemon_threads = True

    def __init__(self, pipeline: Pipeline, host: str, port: int) -> None:
        self.pipeline = pipeline
        self.only_here = is_loopback(f"{host}:0")
        super().__init__((host, port), _Handler)
        self.url = f"http://{host}:{self.server_port}/"

    def __enter__(self) -> DemoPage:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self.pipeline.asker.close()


class _Handler(BaseHTTPRequestHandler):
    server: DemoPage
    server_version, sys_version = "triptych", ""
    timeout = _READ_TIMEOUT_S

    def do_GET(self) -> None:
        path = urlsplit(self.path)
        if self._is_foreign() or path.path != "/":
            self._plain(HTTPStatus.NOT_FOUND)
            return
        chosen = parse_qs(path.query).get(_EXAMPLE, [""])[0]
        example = _chosen(self.server.pipeline, chosen)
        values = self.server.pipeline.form.first_values(example)
        self._send(HTTPStatus.OK, _page(self.server.pipeline, values, chosen if example else ""))

    def do_POST(self) -> None:
        size = self.headers.get("Content-Length", "")
        if self._is_foreign() or urlsplit(self.path).path != "/":
            self._plain(HTTPStatus.NOT_FOUND)
        elif not size.isdecimal() or int(size) > _LARGEST_FORM:
            self.close_connection = True
            self._plain(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        else:
            kind = self.headers.get("Content-Type", "")
            self._send(*answer(self.server.pipeline, _read(kind, self.rfile.read(int(size)))))

    def log_message(self, *_: object) -> None:
        """Nothing: what people ask is not for a log."""

    def _is_foreign(self) -> bool:
        """Whether another site's page sent this, or a name that is made to point here."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if self.server.only_here and not is_loopback(host if ":" in host else f"{host}:80"):
            return True
        return origin is not None and urlsplit(origin).netloc != host

    def _plain(self, status: HTTPStatus) -> None:
        self._send(status, f"{status.value} {status.phrase}\n")

    def _send(self, status: HTTPStatus, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _read(kind: str, body: bytes) -> dict[str, bytes]:
    """The fields of a submitted form (``multipart/form-data``)."""
    head = f"Content-Type: {kind}\r\n\r\n".encode("latin-1", "replace")
    message = BytesParser(policy=HTTP).parsebytes(head + body)
    found = {}
    for part in message.iter_parts() if message.is_multipart() else ():
        name = part.get_param("name", header="content-disposition")
        content = part.get_payload(decode=True)
        if isinstance(name, str) and isinstance(content, bytes):
            found[name] = content
    return found


def _chosen(pipeline: Pipeline, number: str) -> TrafficRow | None:
    known = number.isdecimal() and int(number) < len(pipeline.examples)
    return pipeline.examples[int(number)] if known else None


def answer(pipeline: Pipeline, sent: Mapping[str, bytes]) -> tuple[HTTPStatus, str]:
    """What becomes of a submitted form, given by field: the status, and the page."""
    images = [tensor.name for tensor in pipeline.form.inputs if tensor.content == "image"]
    given: dict[str, str | bytes] = {
        name: content if name in images else _text(content) for name, content in sent.items()
    }
    chosen = str(given.get(_EXAMPLE, ""))
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


def _text(content: bytes) -> str | bytes:
    """A field as it was typed: browsers send ends of lines as CRLF."""
    try:
        return content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError:
        return content


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
