"""The production flags and the settings behind them, and that the image's few files are enough."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from container_cases import PACKAGE, copy_of_the_images_files, write_pipeline
from mistakes import check_refused, refusal
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
TO_FILE, TO_COLLECTOR = Trace("/tmp/t", 9), Trace("http://c/v1", 9)
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


def test_the_server_knows_every_flag_of_its_release(tmp_path: Path) -> None:
    server = find_installation(tmp_path)
    done = subprocess.run(
        [server.executable, "--help"],
        env={**os.environ, **server.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    known = {line.split()[0] for line in done.stderr.splitlines() if line.startswith("  --")}
    release = find_server_release()
    for trace in (None, TO_FILE, TO_COLLECTOR):
        assert names(flags(release, trace=trace, **ALL_OPTIONS)) <= known
    newer = names(flags(NEW, **ALL_OPTIONS)) - names(flags(OLD, **ALL_OPTIONS))
    assert newer == {
        "--allow-client-shm",
        "--grpc-infer-thread-count",
        "--grpc-max-response-pool-size",
        "--http-max-input-size",
    }
    assert newer & known == newer & names(flags(release, **ALL_OPTIONS))
    histograms = "--metrics-config=histogram_latencies=true"
    assert histograms in flags(NEW)
    # 25.12 has them for decoupled models alone.
    assert histograms not in flags(OLD) + flags(Release(25, 12))


def test_no_flag_but_those_with_several_values_is_given_twice() -> None:
    several = {"--metrics-config", "--trace-config", "--cuda-memory-pool-byte-size"}
    for release in TRITON_VERSIONS:
        given = flags(release, trace=TO_FILE, **ALL_OPTIONS)
        single = [flag for flag in given if not flag.startswith((*several, "--backend-config"))]
        assert len(names(single)) == len(single), release
        assert len(set(given)) == len(given), release


def test_an_option_adds_its_flag_and_nothing_has_it_otherwise() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"client_shm": True}, "--allow-client-shm=true"),
        ({"rate_limit": True}, "--rate-limit=execution_count"),
        ({"version_compatible": True}, "--backend-config=tensorrt,version-compatible=true"),
        ({"pinned_pool_mib": 1}, "--pinned-memory-pool-byte-size=1048576"),
        ({"cuda_pool_mib": 1, "gpus": (0, 1)}, "--cuda-memory-pool-byte-size=1:1048576"),
        ({"trace": TO_COLLECTOR}, "--trace-config=opentelemetry,url=http://c/v1"),
        ({"trace": TO_FILE}, "--trace-config=triton,file=/tmp/t"),
    ]
    for options, flag in cases:
        assert flag in flags(**options)
        assert flag not in flags()
    off = "--trace-config=level=OFF"
    assert [flag for flag in flags() if "trace-config" in flag] == [off]
    assert off not in flags(trace=TO_FILE)
    # What clients and probes need stays open.
    closed = {"shared-memory", "model-repository", "statistics", "trace", "logging"}
    for option in ("--grpc-restricted-protocol", "--http-restricted-api"):
        (rule,) = (flag.partition("=")[2] for flag in flags() if flag.startswith(option))
        services, _, header = rule.partition(":")
        assert (header, set(services.split(","))) == (f"triptych-key={KEY}", closed)


def test_the_repository_switches_on_what_it_asks_for(tmp_path: Path) -> None:
    options = ServerFlags(restricted_key=KEY, cuda_pool_mib=1)

    def given(options: ServerFlags = options) -> list[str]:
        return flags_for(tmp_path, options, HERE, NEW)

    write_pipeline(tmp_path)
    assert not names(given()) & {"--rate-limit", "--backend-config"}
    assert [flag for flag in given() if "cuda-memory" in flag] == [
        "--cuda-memory-pool-byte-size=0:1048576",
        "--cuda-memory-pool-byte-size=1:1048576",
    ]
    write_pipeline(tmp_path, "portable", version_compatible=True)
    config = tmp_path / "portable_core/config.pbtxt"
    config.write_text("instance_group { rate_limiter { priority: 1 } }")
    assert names(given()) >= {"--rate-limit", "--backend-config"}
    assert "--cache-config" not in names(given())
    config.write_text("response_cache { enable: true }")
    assert "--cache-config=local,size=268435456" in given()
    assert "--cache-config=local,size=1048576" in given(replace(options, cache_mib=1))
    redis = read_settings({"TRIPTYCH_RESPONSE_CACHE": "redis,host=cache,port=6379"}).options
    assert [flag for flag in given(redis) if "cache-config" in flag] == [
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
    largest(1)
    for given, used in ((5, 5), (None, 2)):
        options = ServerFlags(restricted_key=KEY, max_request_mib=given)
        flag = f"--http-max-input-size={used * 2**20}"
        assert flag in flags_for(tmp_path, options, HERE, NEW)
    runtime = (PACKAGE / "runtime/triton_io.py").read_text(encoding="utf-8")
    assert f"\nTEXTS_A_REQUEST = {TEXTS_A_REQUEST}\n" in runtime


def test_settings_have_defaults_and_empty_counts_as_not_set(tmp_path: Path) -> None:
    settings = read_settings({"TRIPTYCH_HTTP_PORT": "", "TRIPTYCH_CUDA_POOL_MIB": ""})
    assert settings.repository == Path("/models")
    assert settings.health_url == "http://127.0.0.1:8000"
    assert settings.options.cuda_pool_mib is None
    assert (settings.lock_check, settings.lock_hashes) == ("enforce", True)
    key = settings.options.restricted_key
    assert len(key) >= 32
    assert key != read_settings({}).options.restricted_key  # nobody has it
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    given = {"TRIPTYCH_RESTRICTED_KEY_FILE": str(file), "TRIPTYCH_RESTRICTED_KEY": "x" * 16}
    assert read_settings(given).options.restricted_key == KEY


def test_a_setting_that_makes_no_sense_is_named(tmp_path: Path) -> None:
    for name, value in (
        ("TRIPTYCH_HTTP_PORT", "70000"),
        ("TRIPTYCH_GRPC_PORT", "one"),
        ("TRIPTYCH_GRPC_THREADS", "0"),
        ("TRIPTYCH_CUDA_POOL_MIB", "-1"),
        ("TRIPTYCH_CLIENT_SHM", "yes"),
        ("TRIPTYCH_LOCK_CHECK", "maybe"),
        ("TRIPTYCH_TRACE", "on"),
        ("TRIPTYCH_STEP_SHM_GROWTH_MIB", "1GB"),
        ("TRIPTYCH_FORWARD_HEADERS", "x-("),
        ("TRIPTYCH_FORWARD_HEADERS", "x-(?!secret).*"),
        ("TRIPTYCH_FORWARD_HEADERS", r"(a|b)-\1"),
        ("TRIPTYCH_RESPONSE_CACHE", "redis"),
        ("TRIPTYCH_RESPONSE_CACHE", "redis,host"),
        ("TRIPTYCH_GRPC_TLS_CERTIFICATE_FILE", "/nowhere/cert.pem"),
        ("TRIPTYCH_GRPC_TLS_KEY_FILE", __file__),
        ("TRIPTYCH_RESTRICTED_KEY", "short"),
        ("TRIPTYCH_RESTRICTED_KEY", "sixteen letters, with=signs"),
        ("TRIPTYCH_RESTRICTED_KEY_FILE", "/nowhere/key"),
    ):
        error = refusal(read_settings, {name: value})
        assert error.field == name
        assert name != "TRIPTYCH_RESTRICTED_KEY" or value not in error.message
    file = str(tmp_path / "a.pem")
    Path(file).write_text("-----BEGIN CERTIFICATE-----")
    both = {f"TRIPTYCH_GRPC_TLS_{part}_FILE": file for part in ("CERTIFICATE", "KEY")}
    assert read_settings(both).options.grpc_tls == GrpcTls(file, file)
    for part in ("CERTIFICATE", "KEY", "CLIENT_CA"):
        lone = {f"TRIPTYCH_GRPC_TLS_{part}_FILE": file}
        check_refused("must be set with both", read_settings, lone)
    caches = {"TRIPTYCH_RESPONSE_CACHE": "redis,host=a", "TRIPTYCH_RESPONSE_CACHE_MIB": "5"}
    check_refused("Remove one of the two", read_settings, caches)


def test_the_release_is_the_images_own(tmp_path: Path) -> None:
    file, none = tmp_path / "TRITON_VERSION", tmp_path / "none"
    file.write_text("2.51.0\n")
    given = {"TRIPTYCH_TRITON": "26.08"}
    nvidia = {"NVIDIA_TRITON_SERVER_VERSION": "24.10"}
    for variables, path, release in (
        (given | nvidia, none, OLD),
        (given, file, OLD),
        (given, none, NEW),
    ):
        assert find_release(variables, path) == release
    check_refused("TRIPTYCH_TRITON", find_release, {}, none)


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
print(entrypoint.main([]), lock_check.main([]), health.main())
"""


def test_the_images_few_files_run_on_a_bare_python(tmp_path: Path) -> None:
    files = copy_of_the_images_files(tmp_path / "opt")
    repository = write_pipeline(tmp_path / "repository", built=False)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", BARE, str(files)],
        env={"TRIPTYCH_REPOSITORY": str(repository), "TRIPTYCH_HTTP_PORT": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["1 1 1"], done.stderr
    assert done.stderr.count("error: minilm: the engine has not been built") == 2
    assert "unhealthy: the server does not answer" in done.stdout
    assert "Traceback" not in done.stderr
