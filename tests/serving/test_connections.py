"""Connections of gRPC: pings, their age, and requests that take longer than either."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc  # type: ignore[import-untyped]
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.support.echo_server import write_model
from tests.support.envoy_front import envoy, infer_request
from tests.support.processes import eventually, running
from triptych.container.flags import ServerFlags, production_flags
from triptych.serving.embedded import find_release
from triptych.serving.server import Server, ServerProfile

pytestmark = pytest.mark.server

PING = b"\0\0\10\6\0\0\0\0\0"
"""Header of a ping in HTTP/2 that is not an acknowledgment."""
SILENT_S = 6
"""More seconds than the server gives a connection that breaks a limit, without an answer."""


def ask(url: str, text: str) -> bytes:
    """Return the answer to a text, by a connection that pings every second."""
    pings = [("grpc.keepalive_time_ms", 1000), ("grpc.http2.max_pings_without_data", 0)]
    raw = struct.pack("<I", len(text)) + text.encode()
    with grpc.insecure_channel(url, pings) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(infer_request("echo", raw), timeout=60)
    return bytes(answer.raw_output_contents[0][4:])


class Relay:
    """Forwards the connections of a port to a server, and counts the server's pings."""

    def __init__(self, url: str) -> None:
        host, port = url.split(":")
        self._to = host, int(port)
        self._listener = socket.create_server((host, 0))
        self.url = f"{host}:{self._listener.getsockname()[1]}"
        self.connections = self.pings = 0

    def run(self) -> None:
        with self._listener, suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                server = socket.create_connection(self._to)
                for ends in ((client, server, self._ignore), (server, client, self._count)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)

    def _forward(
        self, source: socket.socket, to: socket.socket, see: Callable[[bytes], None]
    ) -> None:
        with source, suppress(OSError):
            while data := source.recv(1 << 16):
                see(data)
                to.sendall(data)
            to.shutdown(socket.SHUT_RDWR)

    def _ignore(self, data: bytes) -> None:
        pass

    def _count(self, data: bytes) -> None:
        self.pings += data.count(PING)


@contextmanager
def relayed(url: str) -> Iterator[Relay]:
    relay = Relay(url)
    threading.Thread(target=relay.run, daemon=True).start()
    try:
        yield relay
    finally:
        relay.close()


def test_pings_and_the_age_of_a_connection_end_no_request(tmp_path: Path) -> None:
    """Envoy pings every second, and a request may outlast the age of a connection."""
    repository = write_model(tmp_path / "repository", "echo")
    young = ServerFlags("a-key-of-the-operators", connection_age_s=1, exit_timeout_s=1)
    flags = production_flags(find_release(), young)
    text = f"sleep:{SILENT_S}:{tmp_path / 'begun'}"
    with (
        running(Server(repository)) as direct,
        running(Server(repository, profile=ServerProfile(production_flags=flags))) as behind,
        envoy(behind, tmp_path, "echo") as proxy,
        ThreadPoolExecutor() as pool,
    ):
        slow = [pool.submit(ask, url, text) for url in (direct.grpc_url, proxy.grpc_url)]
        assert [each.result() for each in slow] == [text.encode()] * 2


def test_a_connection_that_is_too_old_is_replaced_and_an_idle_one_is_pinged(tmp_path: Path) -> None:
    repository = write_model(tmp_path, "echo")
    more = ("--grpc-keepalive-time=200", "--grpc-max-connection-age=2000")
    server = Server(repository, extra_args=more)
    with (
        running(server),
        relayed(server.grpc_url) as relay,
        grpc.insecure_channel(relay.url) as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def answers() -> int:
            assert stub.ModelInfer(infer_request("echo"), timeout=60).outputs
            return relay.connections

        assert answers() == 1
        # With Triton's own setting two pings follow each other on an idle connection, no more.
        assert eventually(lambda: relay.pings > 3)
        assert eventually(lambda: answers() > 2)
