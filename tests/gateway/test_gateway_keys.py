"""API keys, their limits and revocation, TLS, traces and the access log of a gateway."""

import asyncio
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import grpc  # type: ignore[import-untyped]
import httpx2
import numpy as np
import openai
import pytest
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from typer.testing import CliRunner

from benchmarks.local_envoy import local_envoy
from tests.support.certificates import under_load, write_certificate
from tests.support.client_toy import wait_until
from tests.support.deploy_cases import write_built
from tests.support.otlp_receiver import check_trace, otlp_receiver
from tests.support.served_command import endpoints_of, serving
from tests.support.served_command import gateway as served_gateway
from triptych.base.files import write_files
from triptych.client import AsyncClient
from triptych.deploy.envoy import proxy_settings
from triptych.deploy.http_api import health_script
from triptych.gateway import keys, serve
from triptych.gateway.http import Shared
from triptych.gateway.keys import CALLER, Caller, KeyEntry, Keys
from triptych.gateway.pipelines import Pipeline, Pipelines, PreprocessFiles
from triptych.gateway.traces import export_to
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
    """A gateway in this process with the pipelines ``a``, also as ``small``, and ``b``."""

    port: int
    keys: Path
    recorder: Recorder
    log: list[str]
    folder: Path
    triton_url: str

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.folder / "ca.pem"))

    def client(self, key: str) -> openai.OpenAI:
        http = httpx2.Client(verify=self.trust(), timeout=300)
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=http
        )

    def command(self, *words: str) -> str:
        done = CliRunner().invoke(app, ["key", *words, "--keys", str(self.keys), "--json"])
        assert done.exit_code == 0, done.output
        return str(json.loads(done.stdout)["key"])

    def write_keys(self, text: str) -> None:
        """Replace the file at once, so that the gateway reads no half of it."""
        write_files(self.keys.parent, {self.keys.name: text}, is_private=True)

    @contextmanager
    def caller(self, name: str, *words: str) -> Iterator[openai.OpenAI]:
        """A client with a new key of this name, once the gateway knows it."""
        with self.client(self.command("new", name, *words)) as client:
            wait_until(lambda: is_known(client), "the key is known")
            yield client


@contextmanager
def gateway(folder: Path, client_ca: Path | None = None) -> Iterator[Running]:
    """Run a gateway with the certificate and the keys in `folder`."""
    write_certificate(folder, "first")
    file = folder / "keys.yaml"
    file.write_text("keys: {}\n")
    recorder = Recorder()
    triton = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(recorder, triton)
    port = triton.add_insecure_port("127.0.0.1:0")
    triton.start()
    log: list[str] = []
    ready: list[int] = []
    pipelines = Pipelines(["a", "b"], {"small": "a"}, None, {"url": f"127.0.0.1:{port}"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "_LOOK_S", 0.05)
        patch.setattr(serve, "_TICKS_PER_LOOK", 1)
        server = serve.make_server(
            pipelines,
            Shared(keys=Keys(file), log=log.append),
            host="127.0.0.1",
            port=0,
            on_ready=ready.append,
            tls=serve.ServerTls(folder / "server.pem", folder / "server.key", client_ca),
        )
        thread = threading.Thread(target=server.run)
        thread.start()
        wait_until(lambda: ready, "the gateway listens")
        yield Running(ready[0], file, recorder, log, folder, f"127.0.0.1:{port}")
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


def embeds(client: openai.OpenAI, model: str = "a", texts: int = 1) -> str:
    """Embed and return an empty text, or the code of the error."""
    try:
        client.embeddings.create(model=model, input=["a private text"] * texts)
    except openai.APIStatusError as error:
        return str(error.code)
    return ""


def test_the_health_check_of_a_container_needs_no_key(running: Running) -> None:
    for port, code in ((running.port, 0), (1, 1)):
        script = [sys.executable, "-c", health_script(port, has_tls=True)]
        done = subprocess.run(script, capture_output=True, check=False)
        assert done.returncode == code, done.stderr


def test_a_key_opens_its_pipelines_until_it_is_revoked(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    with running.caller("shop", "--pipeline", "a") as client:
        key = client.api_key
        assert running.keys.stat().st_mode & 0o777 == 0o600
        assert key not in running.keys.read_text()
        assert embeds(client, "a") == embeds(client, "small") == ""
        assert [each.id for each in client.models.list()] == ["a", "small"]
        with pytest.raises(openai.PermissionDeniedError, match="Choose one of: a, small"):
            client.embeddings.create(model="b", input="a")
        for wrong in ("x", "none", key[:-1], key + "a"):
            with running.client(wrong) as other:
                assert embeds(other) == "invalid_api_key"
        usual = running.keys.read_text()
        running.write_keys("keys: [")  # a mistake changes nothing
        said: list[str] = []

        def is_told() -> bool:
            assert embeds(client) == ""
            said.append(capsys.readouterr().err)
            return "keys are not changed" in "".join(said)

        wait_until(is_told, "the mistake is seen")
        assert embeds(client) == ""
        running.write_keys(usual)
        running.command("remove", "shop")
        wait_until(lambda: embeds(client) == "invalid_api_key", "the key is revoked")
    again = CliRunner().invoke(app, ["key", "remove", "shop", "--keys", str(running.keys)])
    assert again.exit_code != 0


def test_a_key_over_its_limits_waits_and_others_do_not(running: Running) -> None:
    slow = running.command("new", "slow", "--max-requests", "0.01")
    many = running.command("new", "many", "--max-items", "0.1")
    clients = running.client(slow), running.client(many), running.caller("free")
    with clients[0] as client, clients[1] as items, clients[2] as other:
        assert embeds(client) == ""
        with pytest.raises(openai.RateLimitError) as caught:
            client.embeddings.create(model="a", input="a")
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.code == "rate_limit_exceeded"
        assert embeds(other) == ""
        assert embeds(items, texts=20) == ""  # a list above the limit passes alone,
        assert embeds(items) == "rate_limit_exceeded"  # and is paid for by those after it


def test_traces_are_continued_and_the_log_has_no_texts(running: Running) -> None:
    trace = PARENT.split("-")[1]
    with running.caller("traced") as client:
        for parent in (PARENT, "00-" + "0" * 32 + "-00f067aa0ba902b7-01", PARENT + "-x", "a\tb"):
            made = client.embeddings.with_raw_response.create(
                model="a", input="a private text", extra_headers={"traceparent": parent}
            )
            is_valid = parent is PARENT
            assert re.fullmatch("[0-9a-f]{32}", made.headers["x-request-id"])
            assert (made.headers["x-request-id"] == trace) == is_valid
            passed_on = running.recorder.headers[-1].get("traceparent")
            assert passed_on == (PARENT if is_valid else None)
        key = client.api_key
    lines = [json.loads(line) for line in running.log]
    (traced,) = [line for line in lines if line["trace_id"] == trace]
    found = (traced["endpoint"], traced["status"], traced["key"])
    assert found == ("/v1/embeddings", 200, "traced")
    assert "private" not in "".join(running.log)
    assert key not in "".join(running.log)


def test_a_new_certificate_is_used_without_a_restart(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    def served() -> str:
        with (
            socket.create_connection(("127.0.0.1", running.port)) as plain,
            running.trust().wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            names: Any = connection.getpeercert()
            return str(dict(names["subject"][0])["commonName"])

    assert served() == "first"
    file = running.folder / "server.key"
    key = file.read_bytes()
    file.write_bytes(b"no key")
    unchanged = "the certificate is not changed"
    wait_until(lambda: unchanged in capsys.readouterr().err, "the wrong key is seen")
    assert served() == "first"  # a pair that does not fit changes nothing
    file.write_bytes(key)
    with running.caller("busy") as known:
        secret = known.api_key

    @contextmanager
    def connect() -> Iterator[Callable[[], object]]:
        with running.client(secret) as client:
            yield lambda: client.embeddings.create(model="a", input="a")

    def is_served(name: str) -> bool:
        return served() == name

    with under_load(connect) as load:
        for name in ("second", "third"):
            write_certificate(running.folder, name)
            wait_until(partial(is_served, name), "the new certificate is used")
            load.goes_on()
    assert load.lost == []


def test_pages_need_no_key_and_name_no_pipeline(running: Running) -> None:
    with httpx2.Client(verify=running.trust(), base_url=running.url, timeout=300) as client:
        assert client.get("/openapi.json").status_code == 401
        index, docs = client.get("/"), client.get("/docs")
        assert "<code>/v1/embeddings</code>" in index.text
        links = re.findall(r'(?:href|src)="([^"]+)"', index.text + docs.text)
        assert links == ["docs", "openapi.json", "docs/swagger-ui.css", "docs/swagger-ui-bundle.js"]
        for page in (index, docs):
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            assert "small" not in page.text
        for name, kind in (("swagger-ui.css", "css"), ("swagger-ui-bundle.js", "javascript")):
            file = client.get(f"/docs/{name}")
            assert file.headers["content-type"] == f"text/{kind}; charset=utf-8"
            assert len(file.content) > 100_000
        with running.caller("reader") as known:
            key = {"authorization": f"Bearer {known.api_key}"}
        document = client.get("/openapi.json", headers=key).json()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert chat["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
    error = chat["responses"]["default"]["content"]["application/json"]["schema"]
    assert error["properties"]["error"]["required"] == ["message", "type", "param", "code"]
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    number = fields["temperature"]["anyOf"][0]
    assert (number["minimum"], number["maximum"]) == (0, 2)


def test_a_client_needs_a_certificate_of_the_authority(tmp_path: Path) -> None:
    write_certificate(tmp_path, "client", "client")
    (tmp_path / "other").mkdir()
    write_certificate(tmp_path / "other", "client", "client")
    with gateway(tmp_path, tmp_path / "ca.pem") as running:
        for folder, status in ((tmp_path, 401), (None, 0), (tmp_path / "other", 0)):
            trust = running.trust()
            if folder is not None:
                trust.load_cert_chain(folder / "client.pem", folder / "client.key")
            try:
                with httpx2.Client(verify=trust, timeout=300) as client:
                    found = client.get(f"{running.url}/v1/models").status_code
            except httpx2.TransportError:
                found = 0
            assert found == status, folder


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

    def __init__(self, *, is_busy: bool = False) -> None:
        self.is_busy = is_busy
        self.threads: list[threading.Thread] = []

    def count(self, columns: dict[str, list[str]], _: Any) -> list[int]:
        self.threads.append(threading.current_thread())
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
    with httpx2.Client(verify=running.trust(), base_url=running.url, timeout=300) as client:
        for path, body in requests.items():
            with running.caller(path.replace("/", "-")[1:], "--max-tokens", "0.1") as known:
                headers = {"authorization": f"Bearer {known.api_key}"}
            answers = [client.post(path, json=body, headers=headers) for _ in range(2)]
            assert [each.status_code for each in answers] == [200, 429], path
            assert "limit of tokens per second" in answers[1].text, path
            assert 200 < int(answers[1].headers["retry-after"]) <= 290, path


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_event_loop_does_not_wait_for_a_thread_that_tokenizes(
    monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    counted = Counted(is_busy=is_busy)

    async def step(_: Pipeline) -> Counted:
        return counted

    monkeypatch.setattr(Pipeline, "step", step)

    async def count() -> int | None:
        return await Pipeline("a", AsyncClient("a"), None).count_tokens({"text": ["a"]}, {})

    assert asyncio.run(count()) == 10
    assert (counted.threads == [threading.main_thread()]) is not is_busy


def test_tokens_of_rows_that_are_no_texts_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions of a user's own model are not run in the gateway."""
    (tmp_path / "settings.json").write_text('{"row_maker": "own_model.OwnRowMaker"}')
    files = PreprocessFiles(tmp_path)

    async def step(_: Pipeline) -> PreprocessFiles:
        return files

    monkeypatch.setattr(Pipeline, "step", step)

    async def count() -> int | None:
        return await Pipeline("own", AsyncClient("own"), None).count_tokens({"x": [0.5]}, {})

    assert asyncio.run(count()) is None
    assert files.tokenize(["a"], add_special_tokens=True) is None
    assert files.decode([[1]]) == [None]


def test_infer_sends_a_key_and_encrypts(tmp_path: Path) -> None:
    """To a server, or a proxy in front of it, that asks for a key and a certificate."""
    for file in ("server", "client"):
        write_certificate(tmp_path, file, file)
    recorder, triton = Recorder(), grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(recorder, triton)
    pair, ca = ((tmp_path / f"server.{end}").read_bytes() for end in ("key", "pem")), "ca.pem"
    guard = grpc.ssl_server_credentials([tuple(pair)], (tmp_path / ca).read_bytes(), True)
    port = triton.add_secure_port("127.0.0.1:0", guard)
    triton.start()
    key, key_file = "triptych-terminal", tmp_path / "key"
    key_file.write_text(f"{key}\n")
    words = ["infer", "a", "--text", "a", "--url", f"127.0.0.1:{port}", "--json"]
    certificate = ["--certificate", str(tmp_path / "client.pem")]
    tls = ["--ca", str(tmp_path / ca), *certificate]
    tls += ["--certificate-key", str(tmp_path / "client.key")]
    for more, environment in (
        (["--api-key-file", str(key_file)], {}),
        ([], {"TRIPTYCH_API_KEY": key}),
    ):
        recorder.headers.clear()
        done = CliRunner().invoke(app, [*words, *tls, *more], env=environment)
        assert done.exit_code == 0, (done.output, done.exception)
        assert len(json.loads(done.stdout)) == 1
        assert [sent["authorization"] for sent in recorder.headers] == [f"Bearer {key}"]
    refused = {
        "only supported with --ca": certificate,
        "must be a file with an API key": [*tls, "--api-key-file", str(tmp_path / "none")],
    }
    for message, more in refused.items():
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code != 0, message
        assert message in str(done.exception), message
        assert key not in f"{done.output} {done.exception}"
    triton.stop(None)


def test_a_gateway_for_other_machines_needs_keys() -> None:
    for words, named in (
        (["--host", "0.0.0.0"], "--keys"),
        (["--tls-key", "x"], "--tls-key"),
        (["--client-ca", "x"], "--client-ca"),
        (["--alias", "x"], "--alias"),
        (["--cors", "https://example.com/a"], "--cors"),
        (["--keys", "absent"], "absent"),
    ):
        done = CliRunner().invoke(app, ["gateway", "a", "--port", "0", *words])
        assert done.exit_code != 0
        assert named in str(done.exception), words


def test_a_share_of_the_requests_without_a_trace_is_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds
    with otlp_receiver() as (url, spans):
        tracer = export_to(url, 4)
        traces = [tracer.start("GET /health", {}) for _ in range(400)]
        for trace in traces:
            trace.end(503)
        sampled = {trace.trace_id for trace in traces if trace.headers}
        assert 50 < len(sampled) < 150  # 100 expected, with a standard deviation of 9
        wait_until(lambda: len(spans) >= len(sampled), "the spans are exported")
    assert {span.trace_id for span in spans} == sampled
    assert {span.attributes["http.response.status_code"] for span in spans} == {503}


class Served(NamedTuple):
    """Addresses of a server."""

    grpc_url: str
    http_url: str


@pytest.mark.server
@pytest.mark.long
def test_one_trace_goes_through_envoy(
    minilm_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, log_file = "minilm_packed", tmp_path / "envoy.log"
    settings = proxy_settings(replicas=1, max_request_mib=1)
    with otlp_receiver() as (url, spans):
        monkeypatch.setenv("TRIPTYCH_TRACE", url)
        monkeypatch.setenv("TRIPTYCH_TRACE_RATE", "1000000")
        with serving(minilm_repository, "--profile", "production") as run:
            said = endpoints_of(run)
            server = Served(said["grpc"], said["http"])
            with (
                local_envoy(settings, [name], [server], log_file=log_file, collector=url) as proxy,
                served_gateway(
                    name, "--url", proxy.grpc_url, "--repository", str(minilm_repository)
                ) as address,
            ):
                trace = check_trace(address, name, spans)
                exported = (trace, "ingress")
                wait_until(
                    lambda: exported in {(span.trace_id, span.name) for span in spans},
                    "Envoy exports",
                )
            run.send_signal(signal.SIGTERM)
            assert run.wait(timeout=300) == 0
    sampled = {span.name: span for span in spans if span.trace_id == trace}
    gateway, envoy = sampled["POST /v1/embeddings"], sampled["ingress"]
    assert envoy.parent_id == gateway.span_id
    assert gateway.began <= envoy.began <= sampled["InferRequest"].began
    assert envoy.attributes["upstream_cluster"] == "triton_grpc"
