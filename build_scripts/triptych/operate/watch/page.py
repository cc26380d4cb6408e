"""The gauges of the last look on a port of their own, as Prometheus scrapes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from triptych.base.errors import UserError

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
