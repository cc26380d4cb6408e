"""Trace context of the W3C: the caller's, or a new one."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import NamedTuple

_PARENT = re.compile(rb"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_STATE_BYTES = 512


class RequestTrace(NamedTuple):
    """Trace of a request.

    Attributes:
        trace_id: Id of the trace, 32 hexadecimal digits.
        headers: Headers of the request to the server, with the trace of the caller.
    """

    trace_id: str
    headers: tuple[tuple[str, str], ...]


def continue_trace(headers: Mapping[bytes, bytes]) -> RequestTrace:
    """Return the trace of a request with these headers; without a valid one, only a new id."""
    parent = headers.get(b"traceparent", b"")
    match = _PARENT.fullmatch(parent)
    if match is None:
        return RequestTrace(secrets.token_hex(16), ())
    passed = [("traceparent", parent.decode("ascii"))]
    state = headers.get(b"tracestate", b"")
    if state and len(state) <= _MAX_STATE_BYTES and state.isascii():
        passed.append(("tracestate", state.decode("ascii")))
    return RequestTrace(match[1].decode("ascii"), tuple(passed))
