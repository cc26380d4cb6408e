"""API keys, their limits and revocation, TLS, traces and the access log of a gateway."""

import asyncio
import json
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import grpc  # type: ignore[import-untyped]
import httpx2
import numpy as np
import openai
import pytest
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from typer.testing import CliRunner

from certificates import sign_token, under_load, write_certificate, wrong_tokens
from client_toy import wait_until
from deploy_cases import write_built
from triptych.base.api_keys import IssuerEntry, KeyEntry, KeyFile, print_keys
from triptych.base.server_tls import ServerTls
from triptych.deploy.http_api import health_script
from triptych.gateway.http import Shared
from triptych.gateway.keys import CALLER, Caller, Keys
from triptych.gateway.pipelines import Pipeline, Pipelines
from triptych.gateway.serve import make_server
from triptych.interface.cli import app

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@dataclass
class Recorder(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """A server that embeds each text as zeros, and records the headers of requests."""

    headers: list[dict[str, str]] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)

    def ModelConfig(self, request: Any, _: Any) -> Any:
        config = model_config_pb2.ModelConfig(name=request.name, max_batch_size=8)
        config.input.add(name="text", data_type=model_config_pb2.TYPE_STRING, dims=[1])
        config.output.add(name="embedding", data_type=model_config_pb2.TYPE_FP32, dims=[2])
        config.ensemble_scheduling.step.add(model_name=f"{request.name}_step")
        return service_pb2.ModelConfigResponse(config=config)

    def ModelReady(self, _request: Any, _: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=True)

    def ModelInfer(self, request: Any, context: Any) -> Any:
        self.headers.append(dict(context.invocation_metadata()))
        self.priorities.append(request.parameters["priority"].int64_param)
        rows = request.inputs[0].shape[0]
        made = service_pb2.ModelInferResponse(model_name=request.model_name)
        made.outputs.add(name="embedding", datatype="FP32", shape=[rows, 2])
        made.raw_output_contents.append(np.zeros((rows, 2), np.float32).tobytes())
        return made


@dataclass
class Running:
    """A gateway in this process."""

    port: int
    keys: Path
    recorder: Recorder
    log: list[str]
    folder: Path
    triton_url: str

    def client(self, key: str) -> openai.OpenAI:
        url = f"https://127.0.0.1:{self.port}/v1"
        trust = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        return openai.OpenAI(
            base_url=url, api_key=key, max_retries=0, http_client=httpx2.Client(verify=trust)
        )

    def command(self, *words: str) -> str:
        done = CliRunner().invoke(app, ["key", *words, "--keys", str(self.keys), "--json"])
        assert done.exit_code == 0, done.output
        return str(json.loads(done.stdout)["key"])


@contextmanager
def gateway(folder: Path, client_ca: Path | None = None) -> Iterator[Running]:
    """Run a gateway with the certificate and the keys in `folder`."""
    write_certificate(folder, "first")
    keys = folder / "keys.yaml"
    keys.write_text("keys: {}\n")
    recorder = Recorder()
    triton = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(recorder, triton)
    port = triton.add_insecure_port("127.0.0.1:0")
    triton.start()
    log: list[str] = []
    ready: list[int] = []
    pipelines = Pipelines(["a", "b"], {"small": "a"}, None, {"url": f"127.0.0.1:{port}"})
    server = make_server(
        pipelines,
        Shared(keys=Keys(keys), log=log.append),
        host="127.0.0.1",
        port=0,
        on_ready=ready.append,
        tls=ServerTls(folder / "server.pem", folder / "server.key", client_ca),
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: ready, "the gateway listens")
    yield Running(ready[0], keys, recorder, log, folder, f"127.0.0.1:{port}")
    server.should_exit = True
    thread.join()
    triton.stop(None)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with gateway(tmp_path_factory.mktemp("keys")) as made:
        yield made


def is_known(client: openai.OpenAI) -> bool:
    try:
        return bool(client.models.list().data)
    except openai.AuthenticationError:
        return False


def works(client: openai.OpenAI, model: str = "a") -> bool:
    try:
        client.embeddings.create(model=model, input="a private text")
    except openai.AuthenticationError:
        return False
    return True


def test_the_health_check_of_a_container_needs_no_key(running: Running) -> None:
    for port, code in ((running.port, 0), (1, 1)):
        script = [sys.executable, "-c", health_script(port, has_tls=True)]
        done = subprocess.run(script, capture_output=True, check=False)
        assert done.returncode == code, done.stderr


def test_a_key_opens_its_pipelines_until_it_is_revoked(running: Running) -> None:
    key = running.command("new", "shop", "--pipeline", "a")
    assert running.keys.stat().st_mode & 0o777 == 0o600
    assert key not in running.keys.read_text()
    with running.client(key) as client:
        wait_until(lambda: works(client), "the key is known")
        assert works(client, "small")
        assert [each.id for each in client.models.list()] == ["a", "small"]
        with pytest.raises(openai.PermissionDeniedError, match="Choose one of: a, small"):
            client.embeddings.create(model="b", input="a")
        for wrong in ("", "none", key[:-1], key + "a"):
            with running.client(wrong or "x") as other:
                assert not works(other)
        running.keys.write_text("keys: [")  # a mistake changes nothing
        time.sleep(1)
        assert works(client)


def test_a_revoked_key_is_refused_without_a_restart(running: Running) -> None:
    running.keys.write_text("keys: {}\n")
    key = running.command("new", "brief")
    with running.client(key) as client:
        wait_until(lambda: works(client), "the key is known")
        running.command("remove", "brief")
        wait_until(lambda: not works(client), "the key is revoked")
    again = CliRunner().invoke(app, ["key", "remove", "brief", "--keys", str(running.keys)])
    assert again.exit_code != 0


def test_a_key_over_its_limits_waits_and_others_do_not(running: Running) -> None:
    running.keys.write_text("keys: {}\n")
    slow = running.command("new", "slow", "--max-requests", "2", "--max-items", "5")
    free = running.command("new", "free")
    with running.client(slow) as client, running.client(free) as other:
        wait_until(lambda: works(other), "the keys are known")
        refused: list[openai.RateLimitError] = []
        for _ in range(8):
            try:
                client.embeddings.create(model="a", input="a")
            except openai.RateLimitError as error:
                refused.append(error)
            assert works(other)
        assert refused
        assert int(refused[0].response.headers["retry-after"]) >= 1
        assert refused[0].code == "rate_limit_exceeded"

        def many(count: int) -> bool:
            try:
                client.embeddings.create(model="a", input=["a"] * count)
            except openai.RateLimitError:
                return False
            return True

        wait_until(lambda: many(20), "a list above the limit passes alone")
        assert not many(1)  # and is paid for by those after it


def test_traces_are_continued_and_the_log_has_no_texts(running: Running) -> None:
    running.keys.write_text("keys: {}\n")
    key = running.command("new", "traced")
    with running.client(key) as client:
        wait_until(lambda: works(client), "the key is known")
        made = client.embeddings.with_raw_response.create(
            model="a", input="a private text", extra_headers={"traceparent": PARENT}
        )
        assert made.headers["x-request-id"] == PARENT.split("-")[1]
        assert running.recorder.headers[-1]["traceparent"] == PARENT
        for wrong in ("00-" + "0" * 32 + "-00f067aa0ba902b7-01", PARENT + "-x", "a\tb"):
            made = client.embeddings.with_raw_response.create(
                model="a", input="a", extra_headers={"traceparent": wrong}
            )
            assert re.fullmatch("[0-9a-f]{32}", made.headers["x-request-id"])
            assert "traceparent" not in running.recorder.headers[-1]
    lines = [json.loads(line) for line in running.log]
    (traced,) = [line for line in lines if line["trace_id"] == PARENT.split("-")[1]]
    assert (traced["endpoint"], traced["status"], traced["key"]) == (
        "/v1/embeddings",
        200,
        "traced",
    )
    assert "private" not in "".join(running.log)
    assert key not in "".join(running.log)


def test_a_new_certificate_is_used_without_a_restart(running: Running) -> None:
    def served() -> str:
        trust = ssl.create_default_context(cafile=str(running.folder / "ca.pem"))
        with (
            socket.create_connection(("127.0.0.1", running.port)) as plain,
            trust.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            names: Any = connection.getpeercert()
            return str(dict(names["subject"][0])["commonName"])

    def is_served(name: str) -> bool:
        return served() == name

    assert served() == "first"
    key = (running.folder / "server.key").read_bytes()
    (running.folder / "server.key").write_bytes(b"no key")
    time.sleep(2.5)
    assert served() == "first"  # a pair that does not fit changes nothing
    (running.folder / "server.key").write_bytes(key)
    running.keys.write_text("keys: {}\n")
    secret = running.command("new", "busy")

    @contextmanager
    def connect() -> Iterator[Callable[[], object]]:
        with running.client(secret) as client:
            yield lambda: client.embeddings.create(model="a", input="a")

    with running.client(secret) as client:
        wait_until(lambda: works(client), "the key is known")
    with under_load(connect) as load:
        for name in ("second", "third"):
            write_certificate(running.folder, name)
            wait_until(partial(is_served, name), "the new certificate is used")
            load.goes_on()
    assert load.lost == []


def test_a_client_needs_a_certificate_of_the_authority(tmp_path: Path) -> None:
    write_certificate(tmp_path, "client", "client")
    (tmp_path / "other").mkdir()
    write_certificate(tmp_path / "other", "client", "client")
    with gateway(tmp_path, tmp_path / "ca.pem") as running:
        for folder, status in ((tmp_path, 401), (None, 0), (tmp_path / "other", 0)):
            trust = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
            if folder is not None:
                trust.load_cert_chain(folder / "client.pem", folder / "client.key")
            try:
                with httpx2.Client(verify=trust) as client:
                    found = client.get(f"https://127.0.0.1:{running.port}/v1/models").status_code
            except httpx2.TransportError:
                found = 0
            assert found == status, folder


def test_a_token_of_an_issuer_is_a_key(running: Running, tmp_path: Path) -> None:
    claims = {"iss": "https://login.example", "aud": "triptych", "sub": "ann"}
    token, bob = (sign_token(running.folder, **{**claims, "sub": n}) for n in ("ann", "bob"))
    entry = IssuerEntry(
        issuer=str(claims["iss"]),
        audiences=["triptych"],
        jwks=json.loads((running.folder / "jwks.json").read_text()),
        pipelines=["a"],
        requests_per_s=0.01,
    )
    running.keys.write_text(print_keys(KeyFile(issuers={"company": entry})))
    with running.client(token) as ann, running.client(bob) as other:
        wait_until(lambda: works(ann), "the issuer is known")
        with pytest.raises(openai.RateLimitError):
            works(ann)
        assert works(other)  # has a rate of his own
    carl = sign_token(running.folder, **{**claims, "sub": "carl"})
    with running.client(carl) as client, pytest.raises(openai.PermissionDeniedError):
        works(client, "b")
    for case, wrong in wrong_tokens(running.folder, tmp_path, claims).items():
        with running.client(wrong) as client:
            assert not works(client), case
    running.keys.write_text("keys: {}\n")
    with running.client(token) as client:

        def is_refused() -> bool:
            try:
                return not works(client)
            except openai.RateLimitError:
                return False

        wait_until(is_refused, "the issuer is revoked")


def test_requests_have_the_priority_of_their_key(running: Running, tmp_path: Path) -> None:
    levels = {"levels": 3, "default": 2}
    repository = write_built(tmp_path, "a", serving={"priority": levels, "slo": {"p99_ms": 50.0}})
    url = {"url": running.triton_url}
    pipelines = Pipelines(["a", "b"], {}, repository, url)

    async def embed(name: str, priority: int | None) -> int:
        CALLER.set(Caller("x", KeyEntry(sha256="0" * 64, priority=priority)))
        await pipelines.find(name).client.embed(["a"])
        return running.recorder.priorities[-1]

    async def embed_all() -> list[int]:
        found = [await embed("a", level) for level in (1, 9, None)] + [await embed("b", 1)]
        await pipelines.close()
        return found

    assert asyncio.run(embed_all()) == [1, 3, 0, 0]


class Counted:
    """A preprocess step whose tokenizer makes ten tokens of each text."""

    settings: ClassVar[dict[str, Any]] = {}

    def count(self, columns: dict[str, list[str]], _: Any) -> list[int]:
        return [10 for _ in columns["text"]]


def test_tokens_are_limited_after_they_are_counted(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def step(_: Pipeline) -> Counted:
        return Counted()

    monkeypatch.setattr(Pipeline, "step", step)
    requests = {
        "/v1/embeddings": {"model": "a", "input": ["a"] * 3},
        "/tei/a/embed": {"inputs": ["a"] * 3},
        "/v1/pipelines/a": {"rows": [{"text": "a"}] * 3},
    }
    running.keys.write_text("keys: {}\n")
    keys = {
        path: running.command("new", path.replace("/", "-")[1:], "--max-tokens", "1")
        for path in requests
    }
    trust = ssl.create_default_context(cafile=str(running.folder / "ca.pem"))
    with running.client(keys["/tei/a/embed"]) as last:
        wait_until(lambda: is_known(last), "the keys are known")
    with httpx2.Client(verify=trust, base_url=f"https://127.0.0.1:{running.port}") as client:
        for path, body in requests.items():
            headers = {"authorization": f"Bearer {keys[path]}"}
            answers = [client.post(path, json=body, headers=headers) for _ in range(2)]
            assert [each.status_code for each in answers] == [200, 429], path
            assert "limit of tokens per second" in answers[1].text, path
            assert 20 < int(answers[1].headers["retry-after"]) <= 29, path


def test_a_gateway_for_other_machines_needs_keys() -> None:
    done = CliRunner().invoke(app, ["gateway", "a", "--host", "0.0.0.0", "--port", "0"])
    assert done.exit_code != 0
    assert "--keys" in str(done.exception)
    for words in (["--tls-key", "x"], ["--client-ca", "x"], ["--alias", "x"], ["--keys", "absent"]):
        done = CliRunner().invoke(app, ["gateway", "a", "--port", "0", *words])
        assert done.exit_code != 0
        assert words[0].replace("--keys", "absent") in str(done.exception), words
