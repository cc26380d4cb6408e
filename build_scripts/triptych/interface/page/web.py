"""HTTP server of a page with one form, without scripts."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from email.parser import BytesParser
from email.policy import HTTP
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from triptych.client.connection import is_loopback

EXAMPLE = "example"
"""Name of the form field and of the URL parameter that selects an example."""

MAX_EXAMPLES = 8
"""Maximum number of rows of the traffic that a page offers as examples."""

_MAX_PARTS = 200
_MAX_FORM_BYTES = 64 << 20
_MAX_DIGITS = 9
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
    """HTTP server of a page, which runs while its context is active.

    Raises:
        OSError: The server cannot listen on the address.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.is_local = is_loopback(f"{host}:0")
        super().__init__((host, port), _PageHandler)
        self.url = f"http://{host}:{self.server_port}/"

    @abstractmethod
    def page(self, example: str) -> str:
        """Return the page with an empty form, or with the values of an example."""

    @abstractmethod
    def answer(self, sent: Mapping[str, bytes]) -> tuple[HTTPStatus, Iterator[str]]:
        """Return the HTTP status and the page, in pieces, for the fields of a submitted form."""

    @abstractmethod
    def end(self) -> None:
        """Release the resources of the page."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of a failed request, unless its client has left."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def __enter__(self) -> Any:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self.end()


class _PageHandler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "triptych", ""
    timeout = _READ_TIMEOUT_S

    def do_GET(self) -> None:
        query = self._query()
        if query is None:
            self._plain(HTTPStatus.NOT_FOUND)
            return
        chosen = parse_qs(query).get(EXAMPLE, [""])[0]
        self._send(HTTPStatus.OK, iter([self.server.page(chosen)]))

    def do_POST(self) -> None:
        size = self.headers.get("Content-Length", "")
        if self._query() is None:
            self._plain(HTTPStatus.NOT_FOUND)
        elif not _is_number(size) or int(size) > _MAX_FORM_BYTES:
            self.close_connection = True
            self._plain(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        else:
            form = _read(self.headers.get("Content-Type", ""), self.rfile.read(int(size)))
            if form is None:
                self._plain(HTTPStatus.BAD_REQUEST)
            else:
                self._send(*self.server.answer(form))

    def log_message(self, *_: object) -> None:
        """Log nothing, because requests may contain private texts."""

    def _query(self) -> str | None:
        """Return the query of the page's address; None for other addresses and foreign requests."""
        try:
            address = urlsplit(self.path)
            return None if self._is_foreign() or address.path != "/" else address.query
        except ValueError:  # such as ``//[``
            return None

    def _is_foreign(self) -> bool:
        """Return whether the request comes from another site, or names another host."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if self.server.is_local and not is_loopback(host if ":" in host else f"{host}:80"):
            return True
        return origin is not None and urlsplit(origin).netloc != host

    def _plain(self, status: HTTPStatus) -> None:
        self._send(status, iter([f"{status.value} {status.phrase}\n"]))

    def _send(self, status: HTTPStatus, pieces: Iterator[str]) -> None:
        """Send each piece at once. The end of the connection ends the page, as in HTTP/1.0."""
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            for piece in pieces:
                self.wfile.write(piece.encode())
        except ConnectionError:  # The browser disconnected; `close` below ends the generator.
            self.close_connection = True
        finally:
            if close := getattr(pieces, "close", None):
                close()


def _is_number(text: str) -> bool:
    """Return whether a header is a number of ASCII digits that `int` converts."""
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def read_text(content: bytes) -> str | bytes:
    """Return the text of a field with LF line ends, because browsers send CRLF."""
    try:
        return content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError:
        return content


def _read(kind: str, body: bytes) -> dict[str, bytes] | None:
    """Return the fields of a submitted form (``multipart/form-data``); None if it is malformed."""
    head = f"Content-Type: {kind}\r\n\r\n".encode("latin-1", "replace")
    found = {}
    try:
        boundary = BytesParser(policy=HTTP).parsebytes(head).get_boundary("")
        # To read a part takes 0.2 ms.
        if body.count(b"--" + boundary.encode("latin-1", "replace")) > _MAX_PARTS:
            return None
        message = BytesParser(policy=HTTP).parsebytes(head + body)
        for part in message.iter_parts() if message.is_multipart() else ():
            name = part.get_param("name", header="content-disposition")
            content = part.get_payload(decode=True)
            if isinstance(name, str) and isinstance(content, bytes):
                found[name] = content
    except Exception:  # the parser raises anything on malformed headers
        return None
    return found
