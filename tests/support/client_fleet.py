"""Several real tritonservers with the toy pipeline, a fake name server, and load on them."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from client_toy import DIM, EMBED, STEP, expected, write_model
from triptych.client import Client, InferenceError
from triptych.serving.server import Server

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
"""Of this machine alone, so that several servers can have one port, as pods have."""


@dataclass(frozen=True)
class Replica:
    """One server of the fleet, and the file in which its step writes down what it executes."""

    server: Server
    repository: Path

    @property
    def url(self) -> str:
        return self.server.grpc_url

    @property
    def pid(self) -> int:
        return self.server.pid

    def executed(self) -> int:
        """Requests so far."""
        file = self.repository / "toy" / "seen.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def has_begun(self, text: str) -> bool:
        file = self.repository / "toy" / "begun.txt"
        return file.exists() and text in file.read_text()


@contextmanager
def serve_fleet(folder: Path) -> Iterator[list[Replica]]:
    """A server on each of `HOSTS`, all on the first one's port."""
    settings = STEP.format(max_batch_size=4, instances=2, dim=DIM, queue_policy="")
    replicas: list[Replica] = []

    def start(host: str, port: int = 0) -> Replica:
        repository = folder / host
        write_model(repository / "toy", settings, EMBED)
        server = Server(repository, host=host, grpc_port=port)
        server.start()
        replicas.append(Replica(server, repository))
        return replicas[-1]

    try:
        first = start(HOSTS[0])
        port = int(first.url.rpartition(":")[2])
        for host in HOSTS[1:]:
            start(host, port)
        for replica in replicas:
            replica.server.wait_ready()
        yield sorted(replicas, key=lambda replica: replica.url)
    finally:
        for replica in replicas:
            with suppress(RuntimeError, ProcessLookupError):  # a test has ended it
                os.kill(replica.pid, signal.SIGKILL)  # to go politely takes Triton two seconds
            replica.server.stop()


class FakeNameServer:
    """Answers every question over UDP with the addresses that it is given; a fake."""

    def __init__(self) -> None:
        self.addresses: Sequence[str] = ()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.settimeout(0.1)
        self.port = self._socket.getsockname()[1]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> FakeNameServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._ended.is_set():
            try:
                asked, client = self._socket.recvfrom(4096)
            except TimeoutError:
                continue
            self._socket.sendto(self._answer(asked), client)

    def _answer(self, asked: bytes) -> bytes:
        # RFC 1035: a header of 12 bytes, then the question: a name, a type and a class.
        end = asked.index(b"\0", 12) + 5
        (kind,) = struct.unpack(">H", asked[end - 4 : end - 2])
        addresses = self.addresses if kind == 1 else ()
        header = asked[:2] + struct.pack(">HHHHH", 0x8180, 1, len(addresses), 0, 0)
        record = struct.pack(">HHHIH", 0xC00C, 1, 1, 0, 4)
        records = [record + socket.inet_aton(address) for address in addresses]
        return header + asked[12:end] + b"".join(records)


class Load:
    """Threads that embed one text after another with one client, until the context ends.

    Attributes:
        answers: right answers so far.
        wrong: answers that are not those of their texts.
        errors: what calls ended in.
    """

    def __init__(self, client: Client, threads: int, mark: str) -> None:
        self.answers = 0
        self.wrong = 0
        self.errors: list[InferenceError] = []
        self._client = client
        self._ended = threading.Event()
        self._turn = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(f"{mark} {number}",))
            for number in range(threads)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, mark: str) -> None:
        number = 0
        while not self._ended.is_set():
            number += 1
            text = f"{mark} {number}"
            try:
                vectors = self._client.embed([text])
            except InferenceError as error:
                with self._turn:
                    self.errors.append(error)
                continue
            right = np.array_equal(vectors, [expected(text)])
            with self._turn:
                self.answers += right
                self.wrong += not right
