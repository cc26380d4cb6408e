"""Requests to pages of a local HTTP server, and a wait for a condition."""

import http.client
import http.server
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def page(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def comes_true(holds: Callable[[], bool]) -> bool:
    """Within five minutes; what does not listen yet is not true."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with suppress(OSError):
            if holds():
                return True
        time.sleep(0.05)
    return False


def fetch(request: Any) -> tuple[int, str]:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
