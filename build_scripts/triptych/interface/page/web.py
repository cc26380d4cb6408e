"""A page's server: one form over HTTP, for people on this machine; no script runs on it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from email.parser import BytesParser
from email.policy import HTTP
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from triptych.client.address import is_loopback

EXAMPLE = "example"
"""The field, or part of the address, that chooses a row of the traffic."""

_MAX_FORM = 64 << 20
_READ_TIMEOUT_S = 30.0
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PageServer(ThreadingHTTPServer, ABC):
    """Answers browsers until it is closed; as a context manager, from entry to exit.

    Raises:
        OSError: nothing can listen there.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.only_here = is_loopback(f"{host}:0")
        super().__init__((host, port), _Handler)
        self.url = f"http://{host}:{self.server_port}/"

    @abstractmethod
    def page(self, example: str) -> str:
        """The page with an empty form, or with an example's values in it."""

    @abstractmethod
    def answer(self, sent: Mapping[str, bytes]) -> tuple[HTTPStatus, Iterator[str]]:
        """What becomes of a submitted form, given by field: the status, and the page in pieces."""

    @abstractmethod
    def end(self) -> None:
        """Let go of what the page holds."""

    def __enter__(self) -> Any:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self.end()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "triptych", ""
    timeout = _READ_TIMEOUT_S

    def do_GET(self) -> None:
        path = urlsplit(self.path)
        if self._is_foreign() or path.path != "/":
            self._plain(HTTPStatus.NOT_FOUND)
            return
        chosen = parse_qs(path.query).get(EXAMPLE, [""])[0]
        self._send(HTTPStatus.OK, iter([self.server.page(chosen)]))

    def do_POST(self) -> None:
        size = self.headers.get("Content-Length", "")
        if self._is_foreign() or urlsplit(self.path).path != "/":
            self._plain(HTTPStatus.NOT_FOUND)
        elif not size.isdecimal() or int(size) > _MAX_FORM:
            self.close_connection = True
            self._plain(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        else:
            kind = self.headers.get("Content-Type", "")
            self._send(*self.server.answer(_read(kind, self.rfile.read(int(size)))))

    def log_message(self, *_: object) -> None:
        """Nothing: what people ask is not for a log."""

    def _is_foreign(self) -> bool:
        """Whether another site's page sent this, or a name that is made to point here."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if self.server.only_here and not is_loopback(host if ":" in host else f"{host}:80"):
            return True
        return origin is not None and urlsplit(origin).netloc != host

    def _plain(self, status: HTTPStatus) -> None:
        self._send(status, iter([f"{status.value} {status.phrase}\n"]))

    def _send(self, status: HTTPStatus, pieces: Iterator[str]) -> None:
        """Send pieces as they come; the connection's end, as in HTTP/1.0, is that of the page."""
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            for piece in pieces:
                self.wfile.write(piece.encode())
        except ConnectionError:  # the browser left: what made the pieces ends, too
            self.close_connection = True
        finally:
            if close := getattr(pieces, "close", None):
                close()


def read_text(content: bytes) -> str | bytes:
    """A field as it was typed: browsers send ends of lines as CRLF."""
    try:
        return content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError:
        return content


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
