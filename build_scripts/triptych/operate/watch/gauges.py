"""A look as a file for Prometheus's node exporter (its textfile collector).

The gauges of the last look on a port of their own, as Prometheus scrapes them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from triptych.base.errors import UserError
from triptych.operate.watch.findings import Look

Sample = tuple[str, dict[str, str], float]
_HELP = {
    "triptych_watch_at_seconds": "When the last look was",
    "triptych_watch_rows": "Sampled rows that it compared",
    "triptych_watch_alarms": "What is wrong with the answers, counted",
    "triptych_watch_drifts": "What moved in the requests, counted",
    "triptych_watch_mean_loss": "Mean loss of a test since the build",
    "triptych_watch_allowed_loss": "Mean loss that is still right",
    "triptych_watch_evidence": "Evidence of a test, over what an alarm needs: 1 and more is one",
    "triptych_watch_value": "A metric of the last look",
}


def gauges_text(look: Look) -> str:
    """The text of the file."""
    lines: list[str] = []
    found = list(_samples(look))
    for name, says in _HELP.items():
        own = [(labels, value) for one, labels, value in found if one == name]
        if own:
            lines += [f"# HELP {name} {says}", f"# TYPE {name} gauge"]
            lines += [f"{name}{{{_labels(labels)}}} {value!r}" for labels, value in own]
    return "\n".join(lines) + "\n"


def _samples(look: Look) -> Iterator[Sample]:
    mine = {"pipeline": look.pipeline}
    yield "triptych_watch_at_seconds", mine, look.at
    yield "triptych_watch_rows", mine, float(look.rows)
    yield "triptych_watch_alarms", mine, float(len(look.alarms))
    yield "triptych_watch_drifts", mine, float(len(look.drifts))
    for test in look.tests:
        own = {**mine, "test": test.name}
        yield "triptych_watch_allowed_loss", own, test.allowed
        yield "triptych_watch_evidence", own, test.evidence / test.needed
        if test.mean is not None:
            yield "triptych_watch_mean_loss", own, test.mean
    for figure in look.figures:
        yield "triptych_watch_value", {**mine, "metric": figure.metric}, figure.value


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{value}"' for name, value in labels.items())


PATH = "/metrics"
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class GaugesPage(ThreadingHTTPServer):
    """Serves `text`, which may be exchanged at any time; empty before the first look."""

    daemon_threads = True
    text = ""


class _Handler(BaseHTTPRequestHandler):
    server: GaugesPage

    def do_GET(self) -> None:
        if self.path != PATH:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body = self.server.text.encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", _TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """A scrape is no news."""


@contextmanager
def gauges_page(host: str, port: int) -> Iterator[GaugesPage]:
    """A page that is served until the context ends; port 0 takes a free one.

    Raises:
        UserError: the port is taken, or the host is none of this machine's.
    """
    try:
        page = GaugesPage((host, port), _Handler)
    except OSError as error:
        raise UserError(
            "--port", "must be free on an address of this machine", given=f"{host}:{port}: {error}"
        ) from error
    thread = threading.Thread(target=page.serve_forever, name="gauges", daemon=True)
    thread.start()
    try:
        yield page
    finally:
        page.shutdown()
        page.server_close()
        thread.join()
