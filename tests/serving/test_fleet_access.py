"""Keys, limits and certificates at a real Envoy before a real server."""

import http.client
import json
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from typer.testing import CliRunner

from certificates import under_load, write_certificate
from envoy_front import NAME, OTHER, SERVICE, STEP, envoy, infer_request, send_http
from http_pages import page
from processes import eventually
from triptych.base.api_keys import KeyEntry, KeyFile, make_key, print_keys
from triptych.base.errors import UserError
from triptych.base.server_tls import ServerTls
from triptych.client import AccessDeniedError, Client, OverloadedError, Tls
from triptych.interface.cli import app
from triptych.serving.fleet.access import Access
from triptych.serving.fleet.proxy import Proxy

pytestmark = pytest.mark.server

PATH = f"/v2/models/{NAME}/infer"


@dataclass
class Guarded:
    """Envoy with keys and mutual TLS."""

    proxy: Proxy
    folder: Path
    entries: KeyFile

    def new_key(self, name: str, **limits: Any) -> str:
        key, digest = make_key()
        self.entries.keys[name] = KeyEntry(sha256=digest, **limits)
        self.write_keys()
        assert eventually(lambda: self.knows(key))
        return key

    def knows(self, key: str) -> bool:
        """Whether both listeners have read the key."""
        return self.code(key) != "UNAUTHENTICATED" and self.post("/v2", key, b"")[0] != 401

    def write_keys(self) -> None:
        (self.folder / "keys.yaml").write_text(print_keys(self.entries))
        self.proxy.renew_access()

    @property
    def tls(self) -> Tls:
        return Tls(self.folder / "ca.pem", self.folder / "client.pem", self.folder / "client.key")

    def channel(self) -> grpc.Channel:
        return grpc.secure_channel(self.proxy.grpc_url, self.tls.credentials())

    def client(self, key: str, name: str = NAME, **options: Any) -> Client:
        headers = {"Authorization": f"Bearer {key}"}
        return Client(name, self.proxy.grpc_url, tls=self.tls, headers=headers, **options)

    def call(self, key: str | None, message: Any = None, method: str = "ServerReady") -> Any:
        """Send a message; return the code, text and headers of its error."""
        metadata = [("authorization", f"Bearer {key}")] if key is not None else []
        with self.channel() as channel:
            data = b"" if message is None else message.SerializeToString()
            try:
                channel.unary_unary(f"{SERVICE}/{method}")(data, metadata=metadata, timeout=60)
            except grpc.RpcError as error:
                return error.code().name, error.details(), dict(error.trailing_metadata() or ())
        return "OK", "", {}

    def code(self, key: str | None, message: Any = None, method: str = "ServerReady") -> str:
        return str(self.call(key, message, method)[0])

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        context.load_cert_chain(self.folder / "client.pem", self.folder / "client.key")
        return context

    def post(
        self, path: str, key: str | None = None, body: bytes = b"{}", **more: str
    ) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPSConnection(
            self.proxy.http_url, timeout=60, context=self.context()
        )
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        headers |= {name.replace("_", "-"): value for name, value in more.items()}
        return send_http(connection, path, body, headers)

    def stream(self, key: str, *requests: Any) -> list[str]:
        """Return the errors of the answers to requests of one stream."""
        metadata = [("authorization", f"Bearer {key}")]
        with self.channel() as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            answers = stub.ModelStreamInfer(iter(requests), metadata=metadata, timeout=60)
            return [answer.error_message for answer in answers]

    def presented(self) -> str:
        """Return the certificate that Envoy presents."""
        host, _, port = self.proxy.grpc_url.rpartition(":")
        plain = socket.create_connection((host, int(port)), timeout=60)
        with self.context().wrap_socket(plain, server_hostname=host) as secure:
            return ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"")

    def presents(self, certificate: str) -> bool:
        return self.presented() == certificate


@pytest.fixture(scope="module")
def guarded(minilm_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    for file in ("server", "client"):
        write_certificate(folder, file, file)
    (folder / "keys.yaml").write_text("keys: {}\n")
    tls = ServerTls(folder / "server.pem", folder / "server.key", folder / "ca.pem")
    access, pipelines = Access(tls, folder / "keys.yaml"), (NAME, OTHER)
    with envoy(
        minilm_server, folder, *pipelines, access=access, gateway_socket=folder / "grpc.sock"
    ) as proxy:
        yield Guarded(proxy, folder, KeyFile())


def infer_body(rows: int = 1, **parameters: int) -> bytes:
    entry: dict[str, Any] = {"name": "text", "datatype": "BYTES", "shape": [rows, 1]}
    entry |= {"parameters": parameters} if parameters else {"data": ["a"] * rows}
    return json.dumps({"inputs": [entry]}).encode()


def test_a_key_opens_its_pipelines_over_grpc_and_http(guarded: Guarded) -> None:
    key = guarded.new_key("shop", pipelines=[NAME])
    assert guarded.code(key, infer_request(), "ModelInfer") == "OK"
    assert guarded.post(PATH, key, infer_body())[0] == 200
    with guarded.client(key) as client:
        assert len(client.embed(["a", "b"])) == 2
    for wrong in (None, "", "none", key[:-1], key + "a", "x" * 5000):
        assert guarded.code(wrong, infer_request(), "ModelInfer") == "UNAUTHENTICATED", wrong
        status, text, headers = guarded.post(PATH, wrong, infer_body())
        assert (status, headers["www-authenticate"]) == (401, "Bearer"), wrong
        assert json.loads(text)["error"].endswith("Ask its operator for one."), wrong
    for name in (OTHER, "unknown", STEP):
        assert guarded.code(key, infer_request(name), "ModelInfer") == "PERMISSION_DENIED", name
        ready = pb.ModelReadyRequest(name=name)
        assert guarded.code(key, ready, "ModelReady") == "PERMISSION_DENIED"
        assert guarded.post(f"/v2/models/{name}/infer", key, infer_body())[0] == 403, name
    with (
        guarded.client(key, OTHER) as client,
        pytest.raises(AccessDeniedError, match="may not use"),
    ):
        client.embed(["a"])
    denied = guarded.stream(key, infer_request(), infer_request(OTHER))
    assert ["may not use" in text for text in denied] == [False, True]
    every = guarded.new_key("every")
    assert guarded.code(every, infer_request(OTHER), "ModelInfer") == "OK"
    assert guarded.code(every, infer_request(STEP), "ModelInfer") == "NOT_FOUND"


def test_infer_sends_a_key_and_encrypts(guarded: Guarded, tmp_path: Path) -> None:
    key, file = guarded.new_key("terminal"), tmp_path / "key"
    file.write_text(f"{key}\n")
    own = guarded.folder
    words = ["infer", NAME, "--text", "a", "--url", guarded.proxy.grpc_url, "--json"]
    certificate = ["--certificate", str(own / "client.pem")]
    tls = ["--ca", str(own / "ca.pem"), *certificate, "--certificate-key", str(own / "client.key")]
    variable = {"TRIPTYCH_API_KEY": key}
    for more, environment in ((["--api-key-file", str(file)], {}), ([], variable)):
        done = CliRunner().invoke(app, [*words, *tls, *more], env=environment)
        assert done.exit_code == 0, done.output
        assert len(json.loads(done.stdout)) == 1
    refused = {
        "UNAUTHENTICATED|must be Bearer": tls,
        "only supported with --ca": certificate,
        "must be a file with an API key": [*tls, "--api-key-file", str(own / "none")],
    }
    for message, more in refused.items():
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code != 0, message
        assert re.search(message, f"{done.output} {done.exception}"), (message, done.output)
        assert key not in f"{done.output} {done.exception}"
    with Client(NAME, guarded.proxy.gateway_url) as client:  # without what the verb used
        assert len(client.embed(["a"])) == 1


def test_health_and_the_gateway_of_this_machine_need_no_key(guarded: Guarded) -> None:
    assert guarded.post("/v2/health/ready", body=b"")[0] == 200
    with guarded.channel() as channel:
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
    assert (guarded.folder / "grpc.sock").stat().st_mode & 0o777 == 0o600
    with Client(NAME, guarded.proxy.gateway_url) as client:
        assert len(client.embed(["a"])) == 1


def test_limits_are_those_of_the_key_and_tell_when_to_retry(guarded: Guarded) -> None:
    slow = guarded.new_key("slow", requests_per_s=0.001)
    other = guarded.new_key("other")
    # The listeners may read the limits later than the key.
    assert eventually(lambda: guarded.code(slow) == "RESOURCE_EXHAUSTED")
    _, text, headers = guarded.call(slow)
    again_s = headers["retry-after"]
    assert text.startswith(f"[overloaded retry_after_ms={again_s}000] The limit of requests"), text
    assert 500 < int(again_s) <= 1000
    assert guarded.code(other) == "OK"
    assert eventually(lambda: guarded.post(PATH, slow, infer_body())[0] == 429)
    _, text, headers = guarded.post(PATH, slow, infer_body())
    assert "limit of the key" in text
    assert 500 < int(headers["retry-after"]) <= 1000
    assert guarded.post(PATH, other, infer_body())[0] == 200
    with guarded.client(slow, retry=None) as client, pytest.raises(OverloadedError) as caught:
        client.embed(["a"])
    assert 500 < caught.value.again_s <= 1000


def test_items_are_counted_over_grpc_http_and_streams(guarded: Guarded) -> None:
    key = guarded.new_key("items", items_per_s=8)
    # Several at once, because a request later than the one before by a second is within the limit.
    eight = infer_request(rows=8)

    def at_once(ask: Callable[[], Any]) -> list[Any]:
        with ThreadPoolExecutor(8) as pool:
            return [call.result() for call in [pool.submit(ask) for _ in range(8)]]

    over_grpc = partial(guarded.code, key, eight, "ModelInfer")
    assert eventually(lambda: set(at_once(over_grpc)) == {"OK", "RESOURCE_EXHAUSTED"})
    assert guarded.code(key) == "OK"  # has no items
    code, text, _ = guarded.call(key, infer_request(rows=9), "ModelInfer")
    assert (code, "9 rows" in text) == ("INVALID_ARGUMENT", True)
    assert guarded.post(f"/v2/models/{NAME}/config", key, b"")[0] == 200
    over_http = partial(guarded.post, PATH, key, infer_body(8))
    assert eventually(lambda: {status for status, *_ in at_once(over_http)} == {200, 429})
    assert guarded.post(PATH, key, infer_body(9))[0] == 400
    head, raw = infer_body(9, binary_data_size=5 * 9), b"\1\0\0\0a" * 9
    size = {"inference_header_content_length": str(len(head))}
    status, text, _ = guarded.post(PATH, key, head + raw, **size)
    assert (status, "9 rows" in text) == (400, True)
    assert guarded.post(PATH, guarded.new_key("many"), head + raw, **size)[0] == 200
    assert eventually(lambda: "" in guarded.stream(key, eight))
    said = "limit of items per second of the key is reached"
    assert eventually(lambda: said in "".join(guarded.stream(key, *[eight] * 4)))


def test_a_key_is_revoked_without_a_restart_and_a_mistake_changes_nothing(
    guarded: Guarded,
) -> None:
    key, other = guarded.new_key("brief"), guarded.new_key("stays")
    pid = guarded.proxy.pid
    with guarded.channel() as channel:
        ready = channel.unary_unary(f"{SERVICE}/ServerReady")
        metadata = [("authorization", f"Bearer {key}")]
        ready(b"", metadata=metadata, timeout=60)
        del guarded.entries.keys["brief"]
        guarded.write_keys()
        assert eventually(lambda: guarded.code(key) == "UNAUTHENTICATED")
        with pytest.raises(grpc.RpcError):  # also on a connection that is open
            ready(b"", metadata=metadata, timeout=60)
    (guarded.folder / "keys.yaml").write_text("keys: [")
    with pytest.raises(UserError, match="file of keys"):
        guarded.proxy.renew_access()
    assert guarded.code(other) == "OK"
    assert guarded.proxy.pid == pid


def test_envoy_refuses_a_key_with_a_limit_of_tokens(guarded: Guarded, tmp_path: Path) -> None:
    counted = guarded.new_key("tokens", tokens_per_s=5)
    assert guarded.code(counted, infer_request(), "ModelInfer") == "PERMISSION_DENIED"
    assert "only the HTTP gateway counts" in guarded.call(counted)[1]
    words = ("--keys", str(guarded.folder / "keys.yaml"), "--envoy-folder", str(tmp_path / "envoy"))
    done = CliRunner().invoke(app, ["key", "new", "later", *words])
    assert "Envoy cannot count tokens: it refuses tokens, which" in done.stderr


def test_keys_are_in_no_log_and_open_nothing_that_controls_a_server(guarded: Guarded) -> None:
    key = guarded.new_key("secret")
    assert guarded.code(key, infer_request(), "ModelInfer") == "OK"
    assert guarded.code(key + "x", infer_request(), "ModelInfer") == "UNAUTHENTICATED"
    port = int(guarded.proxy.metrics_url.removesuffix("/metrics").rpartition(":")[2])
    metrics = page(port, "/metrics")[1]
    admin = guarded.proxy._read_admin("/config_dump?include_eds").decode()
    for text in ((guarded.folder / "envoy.log").read_text(), metrics, admin):
        assert key not in text
        assert key.removeprefix("triptych-") not in text
    # test_fleet_requests has all that is closed.
    code, text, _ = guarded.call(key, pb.RepositoryIndexRequest(), "RepositoryIndex")
    assert code in ("NOT_FOUND", "UNIMPLEMENTED")
    assert "does not forward" in text
    assert guarded.post(f"/v2/repository/models/{NAME}/unload", key)[0] == 404
    with guarded.client(key) as client:
        assert len(client.embed(["a"])) == 1


def test_a_client_needs_a_certificate_of_the_authority(guarded: Guarded, tmp_path: Path) -> None:
    write_certificate(tmp_path, "client", "client")  # of another authority
    trusted = guarded.folder / "ca.pem"
    strangers = [Tls(trusted), Tls(trusted, tmp_path / "client.pem", tmp_path / "client.key")]
    for tls in strangers:
        with grpc.secure_channel(guarded.proxy.grpc_url, tls.credentials()) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    with grpc.insecure_channel(guarded.proxy.grpc_url) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
    assert guarded.code(None) == "UNAUTHENTICATED"


def test_certificates_are_replaced_under_load_without_a_lost_request(guarded: Guarded) -> None:
    key = guarded.new_key("busy")

    @contextmanager
    def connect() -> Iterator[Callable[[], object]]:
        message, metadata = infer_request(), [("authorization", f"Bearer {key}")]
        with guarded.channel() as channel:
            send = channel.unary_unary(f"{SERVICE}/ModelInfer")
            yield lambda: send(message.SerializeToString(), metadata=metadata, timeout=60)

    seen = {guarded.presented()}
    with under_load(connect) as load:
        for _ in range(3):
            write_certificate(guarded.folder, "server", "server")
            guarded.proxy.renew_access()
            wanted = (guarded.folder / "server.pem").read_text()
            assert eventually(partial(guarded.presents, wanted))
            seen.add(wanted)
            load.goes_on()
        # A pair that does not fit is not taken over.
        (guarded.folder / "server.key").write_bytes((guarded.folder / "client.key").read_bytes())
        with pytest.raises(UserError, match="belong together"):
            guarded.proxy.renew_access()
        load.goes_on()
    assert load.lost == []
    write_certificate(guarded.folder, "server", "server")
    guarded.write_keys()
    assert len(seen) == 4
