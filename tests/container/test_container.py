"""The production flags and the settings behind them, and that the image's few files are enough."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from container_cases import PACKAGE, copy_of_the_images_files, write_pipeline
from triptych.base.errors import UserError
from triptych.base.releases import TRITON_VERSIONS, Release
from triptych.container import health
from triptych.container.entrypoint import find_release, flags_for, main
from triptych.container.flags import GrpcTls, ServerFlags, Trace, production_flags
from triptych.container.health import PROMPT_FILE, QUESTION_FILE, HealthCheck
from triptych.container.machine import Machine, VisibleGpu
from triptych.container.manifests import (
    MAX_MIB,
    TEXTS_A_REQUEST,
    find_pipelines,
    largest_request_mib,
)
from triptych.container.settings import read_settings
from triptych.serving.embedded import find_installation
from triptych.serving.embedded import find_release as find_server_release

OLD, NEW = Release(24, 10), Release(26, 8)
KEY = "a-key-of-the-operators"
HERE = Machine("11.2.1", (VisibleGpu("NVIDIA L4", (8, 9)),) * 2, "615.61")
ALL_OPTIONS: dict[str, Any] = {
    "gpus": (0, 1),
    "pinned_pool_mib": 512,
    "cuda_pool_mib": 256,
    "client_shm": True,
    "rate_limit": True,
    "version_compatible": True,
    "max_request_mib": 9,
    "load_threads": 3,
    "step_shm_mib": 2,
    "step_shm_growth_mib": 3,
    "core_threads": 4,
    "grpc_tls": GrpcTls("cert.pem", "key.pem", "ca.pem"),
    "forward_headers": "x-.*",
}


def flags(release: Release = NEW, **options: Any) -> list[str]:
    return production_flags(release, ServerFlags(restricted_key=KEY, **options))


def names(given: list[str]) -> set[str]:
    return {flag.partition("=")[0] for flag in given}


@pytest.fixture(scope="module")
def known_flags(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The flags in the help of the server of the tests."""
    server = find_installation(tmp_path_factory.mktemp("server"))
    done = subprocess.run(
        [server.executable, "--help"],
        env={**os.environ, **server.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return {line.split()[0] for line in done.stderr.splitlines() if line.startswith("  --")}


@pytest.mark.parametrize(
    "trace", [None, Trace("/tmp/trace.json", 10), Trace("http://127.0.0.1:4318/v1/traces", 10)]
)
def test_the_server_knows_every_flag_of_its_release(
    trace: Trace | None, known_flags: set[str]
) -> None:
    assert names(flags(find_server_release(), trace=trace, **ALL_OPTIONS)) <= known_flags


def test_newer_flags_come_with_the_release_that_has_them(known_flags: set[str]) -> None:
    newer = names(flags(NEW, **ALL_OPTIONS)) - names(flags(OLD, **ALL_OPTIONS))
    assert newer == {
        "--allow-client-shm",
        "--grpc-infer-thread-count",
        "--grpc-max-response-pool-size",
        "--http-max-input-size",
    }
    assert newer & known_flags == newer & names(flags(find_server_release(), **ALL_OPTIONS))
    histograms = "--metrics-config=histogram_latencies=true"
    assert histograms in flags(NEW)
    # 25.12 has them for decoupled models alone.
    assert histograms not in flags(OLD) + flags(Release(25, 12))


@pytest.mark.parametrize("release", TRITON_VERSIONS, ids=str)
def test_no_flag_but_those_with_several_values_is_given_twice(release: Release) -> None:
    given = flags(release, trace=Trace("/tmp/trace.json", 10), **ALL_OPTIONS)
    several = {"--metrics-config", "--trace-config", "--cuda-memory-pool-byte-size"}
    several |= {"--backend-config"}
    single = [flag for flag in given if flag.partition("=")[0] not in several]
    assert len(names(single)) == len(single)
    assert len(set(given)) == len(given)


@pytest.mark.parametrize("flag", ["--grpc-restricted-protocol", "--http-restricted-api"])
def test_what_clients_and_probes_need_stays_open(flag: str) -> None:
    (rule,) = [given for given in flags() if given.startswith(flag)]
    services, _, header = rule.partition("=")[2].partition(":")
    assert header == f"triptych-key={KEY}"
    assert set(services.split(",")) == {
        *("shared-memory", "model-repository", "statistics", "trace", "logging")
    }


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"client_shm": True}, "--allow-client-shm=true"),
        ({"rate_limit": True}, "--rate-limit=execution_count"),
        ({"version_compatible": True}, "--backend-config=tensorrt,version-compatible=true"),
        ({"pinned_pool_mib": 1}, "--pinned-memory-pool-byte-size=1048576"),
        ({"cuda_pool_mib": 1, "gpus": (0, 1)}, "--cuda-memory-pool-byte-size=1:1048576"),
        ({"trace": Trace("http://c/v1", 9)}, "--trace-config=opentelemetry,url=http://c/v1"),
        ({"trace": Trace("/tmp/t", 9)}, "--trace-config=triton,file=/tmp/t"),
    ],
)
def test_an_option_adds_its_flag_and_nothing_has_it_otherwise(
    options: dict[str, Any], flag: str
) -> None:
    assert flag in flags(**options)
    assert flag not in flags()


def test_tracing_is_off_unless_asked_for() -> None:
    assert [flag for flag in flags() if "trace-config" in flag] == ["--trace-config=level=OFF"]
    assert "--trace-config=level=OFF" not in flags(trace=Trace("/tmp/t", 1))


def test_the_repository_switches_on_what_it_asks_for(tmp_path: Path) -> None:
    options = ServerFlags(restricted_key=KEY, cuda_pool_mib=1)
    write_pipeline(tmp_path)
    plain = flags_for(tmp_path, options, HERE, NEW)
    assert not names(plain) & {"--rate-limit", "--backend-config"}
    assert [flag for flag in plain if "cuda-memory" in flag] == [
        "--cuda-memory-pool-byte-size=0:1048576",
        "--cuda-memory-pool-byte-size=1:1048576",
    ]
    write_pipeline(tmp_path, "portable", version_compatible=True)
    config = tmp_path / "portable_core/config.pbtxt"
    config.write_text("instance_group { rate_limiter { priority: 1 } }")
    assert names(flags_for(tmp_path, options, HERE, NEW)) >= {"--rate-limit", "--backend-config"}
    assert "--cache-config" not in names(flags_for(tmp_path, options, HERE, NEW))
    config.write_text("response_cache { enable: true }")
    assert "--cache-config=local,size=268435456" in flags_for(tmp_path, options, HERE, NEW)
    smaller = replace(options, cache_mib=1)
    assert "--cache-config=local,size=1048576" in flags_for(tmp_path, smaller, HERE, NEW)
    redis = read_settings({"TRIPTYCH_RESPONSE_CACHE": "redis,host=cache,port=6379"}).options
    assert [flag for flag in flags_for(tmp_path, redis, HERE, NEW) if "cache-config" in flag] == [
        "--cache-config=redis,host=cache",
        "--cache-config=redis,port=6379",
    ]


def test_requests_over_http_are_as_large_as_the_pipelines_can_use(tmp_path: Path) -> None:
    def largest(text_bytes: object, *encoded: str) -> int:
        settings = {
            "inputs": ["text", "image"],
            "encoded_inputs": encoded,
            "max_image_bytes": 3_000_000,
            "max_text_bytes": text_bytes,
        }
        (newest / "settings.json").write_text(json.dumps(settings))
        return largest_request_mib(tmp_path)

    write_pipeline(tmp_path)
    assert largest_request_mib(tmp_path) == MAX_MIB  # nothing is known of its first step
    ensemble = tmp_path / "minilm/config.pbtxt"
    ensemble.write_text(f"max_batch_size: 4\n{ensemble.read_text()}")
    newest = tmp_path / "minilm_preprocess/10"
    newest.mkdir(parents=True)
    (newest.parent / "9").mkdir()
    a_byte = 2 * TEXTS_A_REQUEST * 6
    assert largest(2**20 // a_byte) == 1 + 1
    assert largest(2**20 // a_byte + 1) == 2 + 1
    assert largest(1, "image") == 12 + 1
    assert largest(2**20) == largest("?") == MAX_MIB
    plain = flags_for(tmp_path, ServerFlags(restricted_key=KEY, max_request_mib=5), HERE, NEW)
    assert f"--http-max-input-size={5 * 2**20}" in plain
    largest(1)
    plain = flags_for(tmp_path, ServerFlags(restricted_key=KEY), HERE, NEW)
    assert f"--http-max-input-size={2 * 2**20}" in plain


def test_a_request_holds_as_many_texts_as_the_runtime_says() -> None:
    runtime = (PACKAGE / "runtime/triton_io.py").read_text(encoding="utf-8")
    assert f"\nTEXTS_A_REQUEST = {TEXTS_A_REQUEST}\n" in runtime


def test_settings_have_defaults_and_empty_counts_as_not_set() -> None:
    settings = read_settings({"TRIPTYCH_HTTP_PORT": "", "TRIPTYCH_CUDA_POOL_MIB": ""})
    assert settings.repository == Path("/models")
    assert settings.http_port == 8000
    assert settings.options.cuda_pool_mib is None
    assert settings.health_url == "http://127.0.0.1:8000"
    assert settings.lock_check == "enforce"
    assert settings.lock_hashes


def test_without_a_key_nobody_has_one() -> None:
    first, second = (read_settings({}).options.restricted_key for _ in range(2))
    assert first != second
    assert len(first) >= 32


def test_the_key_comes_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    given = {"TRIPTYCH_RESTRICTED_KEY_FILE": str(file), "TRIPTYCH_RESTRICTED_KEY": "x" * 16}
    assert read_settings(given).options.restricted_key == KEY


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TRIPTYCH_HTTP_PORT", "70000"),
        ("TRIPTYCH_GRPC_PORT", "one"),
        ("TRIPTYCH_GRPC_THREADS", "0"),
        ("TRIPTYCH_CUDA_POOL_MIB", "-1"),
        ("TRIPTYCH_CLIENT_SHM", "yes"),
        ("TRIPTYCH_LOCK_CHECK", "maybe"),
        ("TRIPTYCH_LOCK_HASHES", "1"),
        ("TRIPTYCH_TRACE", "on"),
        ("TRIPTYCH_TRACE_RATE", "0"),
        ("TRIPTYCH_LOAD_THREADS", "many"),
        ("TRIPTYCH_STEP_SHM_MIB", "0"),
        ("TRIPTYCH_STEP_SHM_GROWTH_MIB", "1GB"),
        ("TRIPTYCH_CORE_THREADS", "-1"),
        ("TRIPTYCH_FORWARD_HEADERS", "x-("),
        ("TRIPTYCH_FORWARD_HEADERS", "x-(?!secret).*"),
        ("TRIPTYCH_FORWARD_HEADERS", r"(a|b)-\1"),
        ("TRIPTYCH_RESPONSE_CACHE", "redis"),
        ("TRIPTYCH_RESPONSE_CACHE", "redis,host"),
        ("TRIPTYCH_GRPC_TLS_CERTIFICATE_FILE", "/nowhere/cert.pem"),
        ("TRIPTYCH_GRPC_TLS_KEY_FILE", __file__),
        ("TRIPTYCH_GRPC_TLS_CLIENT_CA_FILE", "/proc/self/environ"),
        ("TRIPTYCH_RESTRICTED_KEY", "short"),
        ("TRIPTYCH_RESTRICTED_KEY", "sixteen letters, with=signs"),
        ("TRIPTYCH_RESTRICTED_KEY_FILE", "/nowhere/key"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(name: str, value: str) -> None:
    with pytest.raises(UserError) as raised:
        read_settings({name: value})
    assert raised.value.field == name
    if name == "TRIPTYCH_RESTRICTED_KEY":
        assert value not in raised.value.message


def test_settings_that_need_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.pem").write_text("-----BEGIN CERTIFICATE-----")
    file = str(tmp_path / "a.pem")
    both = {f"TRIPTYCH_GRPC_TLS_{part}_FILE": file for part in ("CERTIFICATE", "KEY")}
    assert read_settings(both).options.grpc_tls == GrpcTls(file, file)
    for part in ("CERTIFICATE", "KEY", "CLIENT_CA"):
        with pytest.raises(UserError, match="must be set with both"):
            read_settings({f"TRIPTYCH_GRPC_TLS_{part}_FILE": file})
    caches = {"TRIPTYCH_RESPONSE_CACHE": "redis,host=a", "TRIPTYCH_RESPONSE_CACHE_MIB": "5"}
    with pytest.raises(UserError, match="Remove one of the two"):
        read_settings(caches)


def test_every_variable_is_documented() -> None:
    described = (PACKAGE.parents[1] / "docker/server.md").read_text(encoding="utf-8")
    read = {
        node.value
        for path in (PACKAGE / "container").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("TRIPTYCH_")
    }
    assert len(read) > 15
    assert {name for name in read if f"`{name}`" not in described} == set()


@pytest.mark.parametrize(
    ("variables", "file", "release"),
    [
        ({"NVIDIA_TRITON_SERVER_VERSION": "24.10", "TRIPTYCH_TRITON": "26.08"}, "", OLD),
        ({"TRIPTYCH_TRITON": "26.08"}, "2.51.0\n", OLD),
        ({"TRIPTYCH_TRITON": "26.08"}, "", NEW),
    ],
)
def test_the_release_is_the_images_own(
    variables: dict[str, str], file: str, release: Release, tmp_path: Path
) -> None:
    version_file = tmp_path / "TRITON_VERSION"
    if file:
        version_file.write_text(file)
    assert find_release(variables, version_file) == release


def test_an_image_without_a_release_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="TRIPTYCH_TRITON"):
        find_release({}, tmp_path / "none")


def test_a_missing_server_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIPTYCH_REPOSITORY", str(tmp_path))
    monkeypatch.setenv("TRIPTYCH_TRITON", "26.08")
    monkeypatch.setenv("TRIPTYCH_SERVER", "no-such-server")
    assert main([]) == 2
    assert "`TRIPTYCH_SERVER` is not an installed program" in capsys.readouterr().err


def test_the_requests_of_the_health_check_have_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overloaded pipeline then refuses them instead of letting them wait, and is healthy."""
    sent: dict[str, bytes] = {}

    def note(name: str, _url: str, body: bytes = b"", headers: Any = None) -> str:
        sent[name] = body
        assert headers is None or int(headers.popitem()[1]) == body.index(b"\n") + 1
        return ""

    monkeypatch.setattr(health, "_fault", note)
    for name, file in (("plain", QUESTION_FILE), ("chat", PROMPT_FILE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text('platform: "ensemble"')
        (tmp_path / name / file).write_bytes(b'{"inputs": []}\nvalues')
    HealthCheck(find_pipelines(tmp_path)).ask("http://host")
    assert sent["chat"] == b'{"inputs": []}\nvalues'
    head, _, values = sent["plain"].partition(b"\n")
    assert json.loads(head) == {"inputs": [], "parameters": {"timeout": 3_000_000}}
    assert values == b"values"


BARE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from triptych.container import entrypoint, health, lock_check
sys.exit({"entrypoint": lambda: entrypoint.main([]), "health": health.main,
          "lock_check": lambda: lock_check.main([])}[sys.argv[1]]())
"""


@pytest.mark.parametrize(
    ("module", "exit_code", "told"),
    [
        ("lock_check", 1, "error: minilm: the engine has not been built"),
        ("entrypoint", 1, "error: minilm: the engine has not been built"),
        ("health", 1, "unhealthy: the server does not answer"),
    ],
)
def test_the_images_few_files_run_on_a_bare_python(
    module: str, exit_code: int, told: str, tmp_path: Path
) -> None:
    files = copy_of_the_images_files(tmp_path / "opt")
    repository = write_pipeline(tmp_path / "repository", built=False)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", BARE, str(files), module],
        env={"TRIPTYCH_REPOSITORY": str(repository), "TRIPTYCH_HTTP_PORT": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == exit_code, done.stderr
    assert told in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
