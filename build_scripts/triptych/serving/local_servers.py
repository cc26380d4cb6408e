"""Triton servers that run on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import psutil

SERVER = "tritonserver"
_GRPC_PORT = 8001


@dataclass(frozen=True)
class LocalServer:
    """A running server."""

    grpc_url: str  # Address ``host:port`` of gRPC
    pid: int  # Id of its process


def find_local_servers() -> Iterator[LocalServer]:
    """Yield the servers of this machine that the user may see, by their command lines."""
    for process in psutil.process_iter(["name", "cmdline"]):
        words = process.info["cmdline"] or ()
        if process.info["name"] == SERVER and len(words) > 1:
            given = dict(word.lstrip("-").partition("=")[::2] for word in words[1:])
            host = given.get("grpc-address") or "127.0.0.1"
            host = "127.0.0.1" if host == "0.0.0.0" else host
            yield LocalServer(f"{host}:{given.get('grpc-port') or _GRPC_PORT}", process.pid)
