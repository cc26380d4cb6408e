"""A question to a server over HTTP, of which only the status matters."""

from __future__ import annotations

import http.client

_TIMEOUT_S = 2.0


def answers(url: str, path: str) -> bool:
    """Whether a GET of `path` at ``host:port`` is answered with 200."""
    host, _, port = url.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
