"""The client with several servers, which leave and join, and with one behind TLS and headers."""

import os
import signal
import socket
import socketserver
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest

from tests.support.certificates import write_certificate
from tests.support.client_toy import (
    DIM,
    EMBED,
    STEP,
    Call,
    Toy,
    caller,
    expected,
    expected_all,
    opened,
    texts_of_many_lengths,
    wait_until,
    write_model,
    write_repository,
)
from tests.support.processes import repeated
from triptych.base.errors import UserError
from triptych.base.releases import Release
from triptych.client import (
    AccessDeniedError,
    Client,
    DeadlineExceededError,
    InferenceError,
    InvalidRequestError,
    PipelineNotReadyError,
    Retry,
    ServerUnreachableError,
    Tls,
)
from triptych.client.connection import check_single, read_target
from triptych.client.retry import Deadline, Retries
from triptych.serving.embedded import find_release
from triptych.serving.server import Server, ServerAddress

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

    def executed(self) -> int:
        """Requests so far."""
        file = self.repository / "toy" / "seen.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0


@contextmanager
def serve_fleet(folder: Path) -> Iterator[list[Replica]]:
    """A server on each of `HOSTS`, all on the first one's port."""
    settings = STEP.format(max_batch_size=4, instances=2, dim=DIM, queue_policy="")
    with ExitStack() as stack:
        replicas: list[Replica] = []
        for host in HOSTS:
            port = int(replicas[0].url.rpartition(":")[2]) if replicas else 0
            write_model(folder / host / "toy", settings, EMBED)
            server = Server(folder / host, address=ServerAddress(host=host, grpc_port=port))
            stack.callback(server.stop)
            server.start()
            replicas.append(Replica(server, folder / host))
        for replica in replicas:
            replica.server.wait_ready()
        yield replicas
        for replica in replicas:
            with suppress(RuntimeError, ProcessLookupError):  # a test has ended it
                os.kill(replica.server.pid, signal.SIGKILL)  # to end politely takes seconds


class FakeNameServer(socketserver.UDPServer):
    """Answers every question over UDP with the addresses that it is given; a fake."""

    addresses: Sequence[str] = ()

    def finish_request(self, request: Any, client_address: Any) -> None:
        # RFC 1035: a header of 12 bytes, then the question: a name, a type and a class.
        asked, own = request
        end = asked.index(b"\0", 12) + 5
        (kind,) = struct.unpack(">H", asked[end - 4 : end - 2])
        addresses = self.addresses if kind == 1 else ()
        header = asked[:2] + struct.pack(">HHHHH", 0x8180, 1, len(addresses), 0, 0)
        record = struct.pack(">HHHIH", 0xC00C, 1, 1, 0, 4)
        records = [record + socket.inet_aton(address) for address in addresses]
        own.sendto(header + asked[12:end] + b"".join(records), client_address)


@contextmanager
def serve_names() -> Iterator[FakeNameServer]:
    with FakeNameServer(("127.0.0.1", 0), socketserver.DatagramRequestHandler) as names:
        thread = threading.Thread(target=names.serve_forever, args=(0.05,))
        thread.start()
        yield names
        names.shutdown()
        thread.join()


@contextmanager
def under_load(client: Client, threads: int, mark: str) -> Iterator[Counter[str]]:
    """Embed texts with one client in several threads while the block runs.

    Yields:
        How many answers are ``right`` and ``wrong``, and how often each error was raised.
    """
    numbers = count()

    def embed() -> str:
        text = f"{mark} {next(numbers)}"
        return "right" if np.array_equal(client.embed([text]), [expected(text)]) else "wrong"

    with repeated(*[embed] * threads) as results:
        yield results


pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    with serve_fleet(tmp_path_factory.mktemp("fleet")) as replicas:
        yield replicas


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of every loopback address that nobody listens on."""
    with socket.socket() as unused:
        unused.bind(("0.0.0.0", 0))
        yield unused.getsockname()[1]


@pytest.mark.parametrize("style", ["sync", "async"])
def test_servers_get_even_turns(fleet: list[Replica], style: str) -> None:
    texts = [f"{style} turn {number}" for number in range(120)]
    cold = [replica.executed() for replica in fleet]
    urls = [replica.url for replica in fleet]
    with opened(style, "toy", urls, rows_per_request=1, timeout_s=300) as start:

        def all_had_turns() -> bool:
            start("embed", ["warm"]).result()
            return all(one.executed() > old for one, old in zip(fleet, cold, strict=True))

        wait_until(all_had_turns, "connections to all servers")
        before = [replica.executed() for replica in fleet]
        np.testing.assert_array_equal(start("embed", texts).result(), expected_all(texts))
    shares = [replica.executed() - old for replica, old in zip(fleet, before, strict=True)]
    assert sum(shares) == 120
    assert max(shares) <= 1.15 * 40, shares


def test_a_server_that_joins_gets_traffic(fleet: list[Replica]) -> None:
    port = fleet[0].url.rpartition(":")[2]
    with serve_names() as names, ExitStack() as stack:
        url = f"dns://127.0.0.1:{names.server_address[1]}/toy.test:{port}"
        names.addresses = HOSTS[:2]
        newest = fleet[2].executed()
        renewed, first = (
            stack.enter_context(Client("toy", url, dns_refresh_s=dns_refresh_s, timeout_s=300))
            for dns_refresh_s in (0.3, None)
        )
        for number in range(10):
            for client in (renewed, first):
                client.embed([f"before it joined {number}"])
        assert fleet[2].executed() == newest
        names.addresses = HOSTS
        with under_load(renewed, 2, "joined") as load:
            wait_until(lambda: fleet[2].executed() > newest + 10, "traffic for the new server")
            newest = fleet[2].executed()
        assert load.keys() == {"right"}
        newest = fleet[2].executed()
        for number in range(10):
            first.embed([f"after it joined {number}"])
        # The contrast: gRPC alone does not look again while nothing breaks.
        assert fleet[2].executed() == newest
        with pytest.raises(InvalidRequestError, match="Open a client of one server"):
            first.step_statistics()


def test_servers_leave_and_no_request_fails(fleet: list[Replica]) -> None:
    """Goes last: of the fleet one server is left, and one comes back at its address."""
    left, stopped, killed = fleet
    for leaving, how in ((killed, signal.SIGKILL), (stopped, signal.SIGTERM)):
        urls = f"{left.url},{stopped.url}" + (f",{killed.url}" if leaving is killed else "")
        with (
            Client("toy", urls, timeout_s=300) as client,
            Client("toy", urls, retry=None, timeout_s=300) as without,
        ):
            with under_load(client, 40, f"retried {how.name}") as load:
                with under_load(without, 3, f"plain {how.name}") as plain:
                    with busy(leaving):
                        wait_until(lambda: load["right"] > 50, "load")
                        os.kill(leaving.server.pid, how)
                        # Newer servers tell clients to leave; one that is killed may have had none.
                        if how is signal.SIGTERM and find_release() < Release(25, 5):
                            wait_until(lambda: plain.keys() - {"right"}, "a failure")
                    leaving.server.stop()
                wanted = load["right"] + 50
                wait_until(lambda: load["right"] > wanted, "answers of the others")  # noqa: B023
            assert load.keys() == {"right"}
            assert plain["wrong"] == 0
            np.testing.assert_array_equal(client.embed(["left"]), [expected("left")])
    host, _, port = killed.url.rpartition(":")
    with Client("toy", killed.url) as client:
        with pytest.raises(ServerUnreachableError):
            client.embed(["nobody there"])
        address = ServerAddress(host=host, grpc_port=int(port))
        with Server(killed.repository, address=address) as server:
            with under_load(client, 1, "back") as load:
                wait_until(lambda: load["right"], "a connection to the new server")
            assert load["wrong"] == 0
            os.kill(server.pid, signal.SIGKILL)


@contextmanager
def busy(replica: Replica) -> Iterator[None]:
    """With a request in flight: so long a server that stops refuses others."""
    toy = Toy(replica.url, replica.repository)
    with opened("sync", "toy", replica.url, retry=None, timeout_s=None) as start:
        request = start("embed", ["sleep:600"])
        toy.wait_begun("sleep:600", "toy")
        yield
        start("close").result()
        assert isinstance(request.exception(), InferenceError)


@pytest.mark.parametrize("style", ["sync", "async"])
def test_tries_end_with_their_number_the_budget_or_the_deadline(
    style: str, closed_port: int
) -> None:
    urls = f"127.0.0.1:{closed_port},127.0.0.2:{closed_port}"
    call, quick = caller(style, urls), Retry(first_pause_s=0.001, longest_pause_s=0.05)
    for rows, method in ((1, "embed"), (2, "embed"), (1, "interface")):
        texts = [["a"] * rows] if method == "embed" else []
        few = {"retry": replace(quick, attempts=3)}
        with pytest.raises(ServerUnreachableError, match=r"Tried 3 times, at .*`retry` allows 3\."):
            call("toy", method, *texts, options=few)
        poor = {"retry": replace(quick, attempts=10_000, budget=4)}
        with pytest.raises(
            ServerUnreachableError, match=r"Tried 5 times.*budget for more is spent"
        ):
            call("toy", method, *texts, options=poor)
        endless = {"retry": replace(quick, attempts=10_000, budget=10_000)}
        late = (ServerUnreachableError, DeadlineExceededError)
        with pytest.raises(late, match=r"deadline of 0\.2 s"):
            call("toy", method, *texts, options=endless, timeout_s=0.2)


def test_a_fleet_that_stays_unready_is_asked_so_often_and_no_more() -> None:
    forever, unready = Deadline.after(None), PipelineNotReadyError("The server is stopping.")
    few = Retry(attempts=3, first_pause_s=0.001)
    for is_several, most in ((False, 3), (True, 11)):
        retries = Retries(replace(few, budget=0 if is_several else 3), is_several=is_several)
        for sent in range(1, most):
            assert retries.pause_s(unready, ["a:1"] * sent, forever) <= 2
        told = rf"a:1 \({most} times\); `retry` allows {most}"
        with pytest.raises(PipelineNotReadyError, match=told):
            retries.pause_s(unready, ["a:1"] * most, forever)


def test_addresses_are_read_or_refused() -> None:
    assert read_target(["127.0.0.1:1", " localhost:2"]).uri == "ipv4:127.0.0.1:1,127.0.0.1:2"
    assert read_target("[::1]:1,[fe80::1]:2").uri == "ipv6:[::1]:1,[fe80::1]:2"
    several = read_target("dns:///triton.models:8001")
    assert (several.is_several, several.is_named) == (True, True)
    one = read_target("triton:8001")
    assert (one.uri, one.is_several, one.is_named) == ("triton:8001", False, True)
    assert not read_target("unix:/run/triton.sock").is_named
    for mixed in ("triton-1:8001,triton-2:8001", "127.0.0.1:1,[::1]:1"):
        with pytest.raises(UserError, match=r"IP addresses of one version.*dns:///name:port"):
            Client("toy", mixed)
    wrong: tuple[Any, ...] = ("", "triton", [], "a:1,", "http://a:1", ["127.0.0.1:1", "https://b"])
    for url in wrong:
        with pytest.raises(UserError, match="must be the host and port"):
            Client("toy", url)
    with pytest.raises(UserError, match="must be a single server to measure it"):
        check_single("127.0.0.1:1,127.0.0.2:1", "measure it")
    with pytest.raises(UserError, match="server_name"):
        Client("toy", "127.0.0.1:1,127.0.0.2:1", tls=Tls())
    settings: dict[str, Any]
    for name, settings in (
        ("max_in_flight", {"max_in_flight": 0}),
        ("rows_per_request", {"rows_per_request": 0}),
        ("dns_refresh_s", {"dns_refresh_s": 0}),
        ("tls.root_certificates", {"tls": Tls(Path("no/such/file.pem"))}),
    ):
        with pytest.raises(UserError) as caught:
            Client("toy", **settings)
        assert caught.value.field == name
    with pytest.raises(UserError, match="must have both `certificate` and `key`"):
        Tls(certificate=Path("client.pem"))
    for fields in ({"attempts": 0}, {"first_pause_s": -1}, {"longest_pause_s": -1}, {"budget": -1}):
        with pytest.raises(UserError, match=rf"retry\.{next(iter(fields))}"):
            Retry(**fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of a server and of a client, and those of an authority that is not trusted."""
    folder = tmp_path_factory.mktemp("certificates")
    (folder / "stranger").mkdir()
    write_certificate(folder, "server")
    write_certificate(folder, "client", "client")
    write_certificate(folder / "stranger", "stranger")
    return folder


@pytest.fixture(scope="module")
def guarded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toy]:
    """A server that wants mutual TLS, one header to infer and another to tell its config."""
    repository = write_repository(tmp_path_factory.mktemp("guarded"))
    arguments = (
        "--grpc-use-ssl=1",
        "--grpc-use-ssl-mutual=1",
        f"--grpc-server-cert={folder / 'server.pem'}",
        f"--grpc-server-key={folder / 'server.key'}",
        f"--grpc-root-cert={folder / 'ca.pem'}",
        "--grpc-restricted-protocol=inference:infer-key=secret",
        "--grpc-restricted-protocol=model-config:config-key=other",
    )
    with Server(repository, models=("toy",), extra_args=arguments) as server:
        yield Toy(server.grpc_url, repository)
        os.kill(server.pid, signal.SIGKILL)  # to end politely takes seconds


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, guarded: Toy) -> Call:
    return caller(request.param, guarded.url)


INFER_HEADER = {"Triton-Grpc-Protocol-Infer-Key": "secret"}
BOTH_HEADERS = {**INFER_HEADER, "triton-grpc-protocol-config-key": "other"}


@pytest.fixture
def tls(folder: Path) -> Tls:
    return Tls(folder / "ca.pem", folder / "client.pem", folder / "client.key")


def test_mutual_tls_and_headers_open_a_guarded_server(ask: Call, tls: Tls) -> None:
    """Without the header for the config, a call of one row still gets its answer."""
    many, denied = texts_of_many_lengths(50, "guarded"), "expecting header 'triton-grpc-protocol-"
    for headers, texts, error in (
        (BOTH_HEADERS, many, ""),
        (INFER_HEADER, ["single"], ""),
        (INFER_HEADER, ["a", "b"], f"{denied}config-key"),
        ({}, ["a"], f"{denied}infer-key"),
        ({"triton-grpc-protocol-infer-key": "wrong"}, ["a"], f"{denied}infer-key"),
    ):
        options = {"tls": tls, "headers": headers}
        if error:
            with pytest.raises(AccessDeniedError, match=error):
                ask("toy", "embed", texts, options=options)
        else:
            vectors = ask("toy", "embed", texts, options=options)
            np.testing.assert_array_equal(vectors, expected_all(texts))


def test_the_name_in_the_certificate_may_differ_from_the_host(guarded: Toy, tls: Tls) -> None:
    port = guarded.url.rpartition(":")[2]
    one, several = f"localhost:{port}", f"localhost:{port},127.0.0.1:{port}"
    for url, name, reaches in (
        (one, "127.0.0.1", True),
        (several, "127.0.0.1", True),
        (one, "elsewhere.example", False),
    ):
        named = replace(tls, server_name=name)
        with Client("toy", url, tls=named, headers=INFER_HEADER, keep_alive=None) as client:
            if reaches:
                np.testing.assert_array_equal(client.embed(["named"]), [expected("named")])
            else:
                with pytest.raises(ServerUnreachableError):
                    client.embed(["named"])


def test_strangers_do_not_get_through_tls(ask: Call, guarded: Toy, folder: Path, tls: Tls) -> None:
    stranger = replace(tls, root_certificates=folder / "stranger/ca.pem")
    nameless = Tls(folder / "ca.pem")
    clear = grpc.server(ThreadPoolExecutor(1))
    clear_url = f"127.0.0.1:{clear.add_insecure_port('127.0.0.1:0')}"
    clear.start()
    for url, wrong in (
        (guarded.url, stranger),  # the server's certificate is not of an authority we trust
        (guarded.url, nameless),  # the server wants a certificate of the client
        (guarded.url, None),
        (clear_url, tls),  # the server talks in the clear
    ):
        options = {"url": url, "tls": wrong, "headers": BOTH_HEADERS}
        with pytest.raises(ServerUnreachableError, match="Check the address and `tls`"):
            ask("toy", "embed", ["a"], options=options)
    clear.stop(None)
