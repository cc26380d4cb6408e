"""The client and a guarded server: TLS, the client's own certificate, restricted protocols."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest

from certificates import write_certificate
from client_toy import (
    Call,
    Toy,
    caller,
    expected,
    expected_all,
    texts_of_many_lengths,
    write_repository,
)
from triptych.client import AccessDeniedError, Client, ServerUnreachableError, Tls
from triptych.serving.server import Server

pytestmark = pytest.mark.server


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
def call(request: pytest.FixtureRequest, guarded: Toy) -> Call:
    return caller(request.param, guarded.url)


INFER_HEADER = {"Triton-Grpc-Protocol-Infer-Key": "secret"}
BOTH_HEADERS = {**INFER_HEADER, "triton-grpc-protocol-config-key": "other"}


@pytest.fixture
def tls(folder: Path) -> Tls:
    return Tls(folder / "ca.pem", folder / "client.pem", folder / "client.key")


def test_mutual_tls_and_headers_open_a_guarded_server(call: Call, tls: Tls) -> None:
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
                call("toy", "embed", texts, options=options)
        else:
            vectors = call("toy", "embed", texts, options=options)
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


def test_strangers_do_not_get_through_tls(call: Call, guarded: Toy, folder: Path, tls: Tls) -> None:
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
            call("toy", "embed", ["a"], options=options)
    clear.stop(None)
