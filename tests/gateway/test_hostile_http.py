"""Hostile and malformed HTTP against a gateway: each gets a clear error, and others are served."""

import asyncio
import gzip
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError

from tests.support.browser import open_tab
from tests.support.client_toy import wait_until
from triptych.client import AsyncClient
from triptych.gateway import pipelines, serve
from triptych.gateway.chat import ChatRequest, CompletionRequest
from triptych.gateway.cohere import RerankRequest
from triptych.gateway.errors import from_validation
from triptych.gateway.http import Body, RequestLimits, Shared
from triptych.gateway.openai import EmbeddingRequest
from triptych.gateway.pipelines import Pipeline, Pipelines
from triptych.gateway.tasks import TaskRequest
from triptych.gateway.tei import PredictRequest

JSON = {"content-type": "application/json"}
Address = tuple[str, int]


@contextmanager
def gateway(
    url: str, *, timeout_s: float = 300.0, body_s: float = 300.0, origins: Sequence[str] = ()
) -> Iterator[Address]:
    """A gateway in this process in front of a server that does not answer.

    A request may wait for the server for `timeout_s`; its body has to arrive within `body_s`.
    """
    ready: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "HEADERS_S", 300.0)
        patch.setattr(serve, "MAX_CONNECTIONS", 20)
        options = {"url": url, "timeout_s": timeout_s}
        served = Pipelines(["minilm"], {"small": "minilm"}, None, options)
        limits = RequestLimits(body_bytes=200_000, body_s=body_s, items=100)
        server = serve.make_server(
            served,
            Shared(limits=limits, origins=origins),
            host="127.0.0.1",
            port=0,
            on_ready=ready.append,
        )
        thread = threading.Thread(target=server.run)
        thread.start()
        wait_until(lambda: ready, "the gateway listens")
        yield "127.0.0.1", ready[0]
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    with gateway("127.0.0.1:1") as address:
        yield address


@pytest.fixture
def client(address: Address) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url="http://{}:{}".format(*address), timeout=300) as client:
        yield client


def send(address: Address, data: bytes) -> bytes:
    """Send bytes and return all that comes back until the gateway closes the connection."""
    received = b""
    with socket.create_connection(address, timeout=300) as connection:
        with suppress(ConnectionError):  # reset by a gateway that does not read the whole body
            connection.sendall(data)
        with suppress(ConnectionError):
            while part := connection.recv(65536):
                received += part
    return received


def test_requests_that_are_too_large_or_slow_end(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    for rest in (
        b"content-length: 300000\r\n\r\n",
        b"content-length: 300000\r\nexpect: 100-continue\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n" + b"10000\r\n" + b"x" * 65536 + b"\r\n"
        b"30000\r\n" + b"x" * 190_000,
    ):
        received = send(address, head + rest)
        assert received.startswith(b"HTTP/1.1 413"), received[:200]
        assert b"connection: close" in received
        assert b"at most 200000 bytes" in received
        assert b"100 Continue" not in received
    slow = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{"
    with gateway("127.0.0.1:1", body_s=0.5) as hasty:
        received = send(hasty, slow)
    assert received.startswith(b"HTTP/1.1 408"), received[:200]
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error_type"] == "Validation"
    monkeypatch.setattr(serve, "HEADERS_S", 0.5)
    assert send(address, head) == b""  # its headers never end


def test_malformed_bodies_are_refused_and_named(client: httpx2.Client) -> None:
    cases: list[tuple[bytes, int, str]] = [
        (b"", 400, "body"),
        (b"{", 400, "body"),
        (b"\xff\xfe", 400, "body"),
        (b'{"model": "minilm", "input": "\xff"}', 400, "body"),
        (b'{"model": "minilm", "input": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", 400, "body"),
        (b'{"model": "minilm", "input": "' + b'\\ud800"}', 400, "body"),
        (b"[]", 400, "body"),
        (b'{"model": "minilm"}', 400, "input"),
        (b'{"model": 3, "input": "a"}', 400, "model"),
        (b'{"model": "minilm", "input": []}', 400, "input"),
        (b'{"model": "minilm", "input": [1, 2]}', 400, "input"),
        (b'{"model": "minilm", "input": ["a", 2]}', 400, "input[1]"),
        (b'{"model": "minilm", "input": [' + b'"a",' * 100 + b'"a"]}', 413, "input"),
        (b'{"model": "minilm", "input": [' + b"1," * 90_000 + b"1]}", 400, "input"),
        (b'{"model": "minilm", "input": [' + b"{}," * 60_000 + b"1]}", 400, "input[0]"),
        (b'{"model": "minilm", "input": "a", "encoding_format": "hex"}', 400, "encoding_format"),
        (b'{"model": "minilm", "input": "a", "dimensions": 0}', 400, "dimensions"),
        (b'{"model": "minilm", "input": "a", "temperature": 1}', 400, "temperature"),
        (b'{"model": "minilm_core", "input": "a"}', 404, "model"),
        (b'{"model": "' + b"x" * 100_000 + b'", "input": "a"}', 404, "model"),
    ]
    for body, status, param in cases:
        response = client.post("/v1/embeddings", content=body, headers=JSON)
        shown = f"{body[:60]!r}: {response.text[:300]}"
        assert response.status_code == status, shown
        error = response.json()["error"]
        assert error["param"] == param, shown
        assert error["type"] == "invalid_request_error", shown
        assert len(error["message"]) < 1000, shown


def test_many_mistakes_in_one_body_are_not_collected() -> None:
    """A list of them would take gigabytes."""
    many = ",".join(f'"{number}": {{}}' for number in range(1000))
    objects, numbers = "{}," * 1000 + "1", "1," * 1000 + "1"
    parts = f'{{"role": "user", "content": [{numbers}]}}'
    bodies: list[tuple[type[Body], str]] = [
        (EmbeddingRequest, f'{{"model": "a", "input": "a", {many}}}'),
        (EmbeddingRequest, f'{{"model": "a", "input": [{objects}]}}'),
        (TaskRequest, f'{{"rows": [{{{many}}}], "parameters": {{{many}}}, {many}}}'),
        (RerankRequest, f'{{"model": "a", "query": "a", "documents": [{objects}]}}'),
        (ChatRequest, f'{{"model": "a", "messages": [{objects}]}}'),
        (ChatRequest, f'{{"model": "a", "messages": [{parts}]}}'),
        (ChatRequest, f'{{"messages": [], "tools": [{numbers}]}}'),
        (CompletionRequest, f'{{"model": "a", "prompt": [{numbers}], "stop": [1, 2, {{}}]}}'),
        (PredictRequest, f'{{"inputs": [{numbers}]}}'),
    ]
    for kind, body in bodies:
        with pytest.raises(ValidationError) as caught:
            kind.model_validate_json(body)
        assert caught.value.error_count() < 10 or many in body, body[:80]
        assert len(from_validation(caught.value).message) < 500


def test_each_api_has_its_own_error_format(client: httpx2.Client) -> None:
    wrong: dict[str, Any] = {"inputs": 1, "documents": 1, "input": 1, "rows": 1}
    formats = {"/v1/embeddings": "error", "/v2/rerank": "message", "/embed": "error_type"}
    for path, key in formats.items():
        response = client.post(path, json=wrong)
        assert response.status_code == (400 if key == "error" else 422)
        assert key in response.json()
    for method, path, status, param in (
        ("GET", "/v2/nothing", 404, None),
        ("GET", "/v1/embeddings", 405, None),
        ("DELETE", "/v1/models", 405, None),
        ("GET", "/v1/models/minilm%2f..%2fx", 404, None),
    ):
        response = client.request(method, path)
        found = (response.status_code, response.json()["error"]["param"])
        assert found == (status, param), path
    assert client.post("/v1/embeddings", data={"model": "minilm"}).status_code == 415
    body = gzip.compress(b'{"model": "minilm", "input": "a"}')
    response = client.post(
        "/v1/embeddings", content=body, headers={**JSON, "content-encoding": "gzip"}
    )
    assert (response.status_code, response.headers["accept-encoding"]) == (415, "identity")
    assert (
        '`content-encoding` must be identity. Given: "gzip".' in response.json()["error"]["message"]
    )


def test_errors_show_values_as_json(client: httpx2.Client) -> None:
    bodies: tuple[tuple[str, Any, str], ...] = (
        ("/v1/embeddings", {"model": "minilm", "input": None}, "null"),
        ("/v1/embeddings", {"model": "minilm", "input": "a", "user": True}, "true"),
        ("/v1/embeddings", {"model": 'mini"lm', "input": "a"}, '"mini\\"lm"'),
        (
            "/v1/embeddings",
            {"model": "minilm", "input": "a", "more": {"b": [None]}},
            '{"b":[null]}',
        ),
        ("/tei/minilm/embed", {"inputs": "a", "truncate": "yes"}, '"yes"'),
    )
    for path, body, shown in bodies:
        error = client.post(path, json=body).json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert f" Given: {shown}. " in message, message
    response = client.post("/embed", content=b"a", headers={"content-type": b"text/\xe9"})
    assert 'Given: "text/\xe9".' in response.json()["error"]


def test_web_pages_of_another_origin_are_answered_if_it_is_named(address: Address) -> None:
    page = {"origin": "https://example.com"}
    asks = page | {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    with gateway("127.0.0.1:1", origins=["https://example.com"]) as named:
        for (host, port), origin in ((address, None), (named, "https://example.com")):
            with httpx2.Client(base_url=f"http://{host}:{port}", timeout=300) as client:
                got = client.get("/v1/models", headers=page)
                asked = client.options("/v1/embeddings", headers=asks)
                other = client.get("/v1/models", headers={"origin": "https://other.com"})
            assert got.status_code == 200
            assert got.headers.get("access-control-allow-origin") == origin
            assert other.headers.get("access-control-allow-origin") is None
            assert asked.status_code == (405 if origin is None else 200)
            assert asked.headers.get("access-control-allow-headers") == (origin and "x-a")


def test_swagger_ui_shows_the_endpoints_without_internet(address: Address) -> None:
    url = "http://{}:{}".format(*address)

    async def look() -> list[str]:
        async with open_tab() as tab:
            await tab.go(f"{url}/docs")
            for _ in range(3000):
                if await tab.run("document.querySelectorAll('.opblock').length"):
                    break
                await asyncio.sleep(0.1)
            shown: str = await tab.run("document.body.innerText")
        assert "/v1/chat/completions" in shown
        assert "Unable to render" not in shown
        return tab.requested

    requested = asyncio.run(look())
    assert f"{url}/openapi.json" in requested
    assert all(each.startswith((url, "data:", "blob:")) for each in requested), requested


def test_a_server_that_does_not_answer_is_a_503_with_a_time_to_retry_or_a_504(
    client: httpx2.Client,
) -> None:
    body = {"model": "small", "input": "a private text"}
    response = client.post("/v1/embeddings", json=body)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "server_unreachable"
    assert "127.0.0.1" not in response.text
    assert client.get("/health").status_code == 503
    page = client.get("/metrics").text
    assert 'triptych_gateway_requests_total{endpoint="/v1/embeddings",status="503"}' in page
    assert "private" not in page
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with gateway("{}:{}".format(*silent.getsockname()), timeout_s=0.3) as (host, port):
            response = httpx2.post(f"http://{host}:{port}/v1/embeddings", json=body, timeout=300)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"


def test_a_flood_of_connections_is_refused_and_ends(
    address: Address, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "HEADERS_S", 0.5)
    flood = [socket.create_connection(address, timeout=300) for _ in range(60)]
    try:
        # Idle connections end after the limit for headers.
        assert all(each.recv(10) == b"" for each in flood)
    finally:
        for each in flood:
            each.close()
    assert client.get("/v1/models").status_code == 200


def test_idle_connections_give_way_to_new_ones(address: Address) -> None:
    """The limit is 20 connections here, and each idle one may stay for 300 s."""
    request = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    begun = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"

    def is_answered(connection: socket.socket) -> bool:
        connection.sendall(request)
        return connection.recv(12) == b"HTTP/1.1 200"

    with ExitStack() as opened:

        def connect(sent: bytes = b"") -> socket.socket:
            made = opened.enter_context(socket.create_connection(address, timeout=300))
            made.sendall(sent)
            return made

        sending, first = connect(begun), connect()
        kept = connect()
        assert is_answered(kept)
        first.sendall(request[:9])
        flood = [connect() for _ in range(18)]
        # Of those that send no request, the one that has been idle for the longest time ends.
        assert first.recv(10) == b""
        assert is_answered(connect())
        assert is_answered(flood[-1])
        sending.sendall(b'{"a": 12}')
        assert sending.recv(12) == b"HTTP/1.1 400"
        # Where all are busy, another gets a 503.
        for _ in range(25):
            connect(begun)
        refused = connect(request)
        assert refused.recv(12) == b"HTTP/1.1 503"


def test_a_slow_disk_holds_up_nobody_else_and_is_not_asked_for_each_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of a pipeline are read beside the requests, and looked at once per second."""
    began, may_end, reads = threading.Event(), threading.Event(), []
    file = tmp_path / "p_preprocess/1/settings.json"
    file.parent.mkdir(parents=True)
    file.touch()

    def read(folder: Path) -> Path:
        reads.append(folder)
        began.set()
        assert may_end.wait(60), "nothing else runs meanwhile"
        return folder

    class Client(AsyncClient):
        async def interface(self, *, timeout_s: float | None = None) -> Any:
            return SimpleNamespace(steps=("p_preprocess", "p_core"))

    async def ask() -> None:
        async with Client("p", "127.0.0.1:1") as client:
            pipeline = Pipeline("p", client, tmp_path)
            steps = [asyncio.create_task(pipeline.step()) for _ in range(9)]
            while not began.is_set():
                await asyncio.sleep(0.01)
            may_end.set()
            found: list[Any] = await asyncio.gather(*steps)
            assert set(found) == {file.parent}
            assert reads == [file.parent]
            monkeypatch.setattr(pipelines, "_CHECK_S", 0.0)
            file.unlink()
            while await pipeline.step() is not None:
                await asyncio.sleep(0.01)

    monkeypatch.setattr(pipelines, "PreprocessFiles", read)
    asyncio.run(ask())


def test_the_openapi_document_names_each_type(client: httpx2.Client) -> None:
    document = client.get("/openapi.json").json()
    known = document["components"]["schemas"]
    text = json.dumps(document)
    references = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert references <= known.keys()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method == "post":
                (content,) = operation["requestBody"]["content"].values()
                type_ = known[content["schema"]["$ref"].rpartition("/")[2]]
                required = type_.get("required", ())  # none of a union
                assert content["example"].keys() >= set(required), path
