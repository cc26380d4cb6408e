"""The settings and flags of the image, its start-up check, and that its few files are enough."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.container_cases import (
    H100,
    H200,
    L4,
    PACKAGE,
    T4,
    copy_of_the_images_files,
    machine,
    write_pipeline,
)
from tests.support.mistakes import check_refused, refusal
from tests.support.project import lock_data, write_lock
from triptych.base.releases import TRITON_VERSIONS, Release
from triptych.container import health, lock_check
from triptych.container.entrypoint import (
    describe_loader,
    find_release,
    flags_for,
    main,
    server_variables,
)
from triptych.container.flags import (
    GrpcTls,
    ServerFlags,
    Trace,
    absolute_paths,
    production_flags,
)
from triptych.container.health import PROMPT_FILE, QUESTION_FILE, HealthCheck
from triptych.container.lock_check import check_repository, has_version_compatible_plans
from triptych.container.machine import Machine, VisibleGpu, find_driver, find_gpus, find_tensorrt
from triptych.container.manifests import (
    MAX_MIB,
    TEXTS_A_REQUEST,
    core_variables,
    find_pipelines,
    largest_request_mib,
    remove_byte_code,
)
from triptych.container.processor import (
    FP32_LIMIT,
    find_instruction_sets,
    find_processor,
    node_label,
    sets_for,
)
from triptych.container.settings import read_settings
from triptych.serving.embedded import find_installation
from triptych.serving.embedded import find_release as find_server_release
from triptych.serving.server import check_and_make_flags

OLD, NEW = Release(24, 10), Release(26, 8)
KEY = "a-key-of-the-operators"
TWO_L4 = Machine("11.2.1", (VisibleGpu("NVIDIA L4", (8, 9)),) * 2, "615.61")
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
    # No flag but those with several values is given twice.
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


def test_paths_of_the_operator_are_relative_to_its_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has another one, from which nothing can be imported."""
    monkeypatch.chdir(tmp_path)
    here = str(Path.cwd())
    for given, wanted in {
        "--log-file=a.log": f"--log-file={here}/a.log",
        "--backend-directory b": f"--backend-directory {here}/b",
        "--trace-config=triton,file=c": f"--trace-config=triton,file={here}/c",
        "--grpc-server-key=/k --log-verbose=1": "--grpc-server-key=/k --log-verbose=1",
        "--model-store s3://models --http-port 1": "--model-store s3://models --http-port 1",
        "--cache-config=local,size=1": "--cache-config=local,size=1",
    }.items():
        assert absolute_paths(given.split()) == wanted.split()
    assert read_settings({}, repository="models").repository == Path(here, "models")
    assert server_variables({"TRIPTYCH_SAMPLES": "rows"})["TRIPTYCH_SAMPLES"] == f"{here}/rows"


def test_libraries_that_a_server_loads_are_named() -> None:
    named = describe_loader({"LD_PRELOAD": "/a.so", "LD_LIBRARY_PATH": "", "PATH": "/bin"})
    assert named == "note: the server and its steps load libraries of LD_PRELOAD=/a.so\n"


def test_the_repository_switches_on_what_it_asks_for(tmp_path: Path) -> None:
    options = ServerFlags(restricted_key=KEY, cuda_pool_mib=1)

    def given(options: ServerFlags = options) -> list[str]:
        return flags_for(tmp_path, options, TWO_L4, NEW)

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
        assert flag in flags_for(tmp_path, options, TWO_L4, NEW)
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
        assert error.remedy
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
    """Then a pipeline that cannot answer in time need not compute them."""
    sent: dict[str, bytes] = {}

    def note(name: str, _url: str, body: bytes = b"", headers: Any = None) -> None:
        sent[name] = body
        assert headers is None or int(headers.popitem()[1]) == body.index(b"\n") + 1

    monkeypatch.setattr(health, "_fault", note)
    for name, file in (("plain", QUESTION_FILE), ("chat", PROMPT_FILE)):
        (tmp_path / name).mkdir()
        step = 'platform: "ensemble"\nstep { model_name: "plain_core" }'
        (tmp_path / name / "config.pbtxt").write_text(step)
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


HERE = machine(H200)
ONNX: dict[str, Any] = {"backend": "onnxruntime", "built": False, "plan": None}


def check(repository: Path, here: Machine | None = HERE, **options: bool) -> str:
    """The lines of all verdicts; empty where all is well."""
    return "\n".join(map(str, check_repository(repository, here, **options)))


def test_a_plan_runs_only_on_releases_and_gpus_that_it_was_built_for(tmp_path: Path) -> None:
    of_releases = (  # version compatible, TensorRT of the engine and of the machine, fits
        (False, "10.16.1.11", "10.16.1", True),
        (False, "10.16.1.11", "10.16.1.12", False),
        (False, "10.16.1.11", "10.16.2", False),
        (True, "10.16.1.11", "10.16.2", True),
        (True, "10.16.1.11", "11.2.1", True),
        (True, "8.6.1.6", "10.16.1", True),
        (True, "10.16.1.11", "10.15.1", False),
        (True, "11.2.1.2", "10.16.1", False),
        (True, "8.6.1.6", "11.2.1", False),
    )
    for number, (compatible, built, here, fits) in enumerate(of_releases):
        folder = tmp_path / str(number)
        write_pipeline(folder, tensorrt=built, version_compatible=compatible)
        said = check(folder, machine(H200, tensorrt=here))
        assert (said == "") == fits, (built, here, said)
        assert has_version_compatible_plans(folder) == compatible, built
    for hardware, gpu, fits in (
        ("none", H100, False),
        ("same_compute_capability", H100, True),
        ("same_compute_capability", L4, False),
        ("ampere_plus", L4, True),
        ("ampere_plus", T4, False),
    ):
        folder = write_pipeline(tmp_path / f"{hardware}-{gpu.name}", hardware=hardware)
        said = check(folder, machine(gpu))
        assert (said == "") == fits, (hardware, said)
        assert fits or f"and {gpu}: rebuild" in said, said
    assert check(write_pipeline(tmp_path / "both"), machine(L4, tensorrt="11.2.1")) == (
        "error: minilm: the engine was built for TensorRT 10.16.1.11 on NVIDIA H200 (9.0), here "
        "are TensorRT 11.2.1 and NVIDIA L4 (8.9): rebuild it with `triptych engine minilm` in "
        "this image"
    )


def test_what_cannot_be_served_is_refused_and_what_may_go_wrong_is_a_warning(
    tmp_path: Path,
) -> None:
    older = "built with NVIDIA driver 590, here is the older 570"
    cases: tuple[tuple[str, dict[str, Any], Machine, str], ...] = (
        ("error", {"built": False}, HERE, "has not been built: build it with `triptych engine"),
        ("error", {"plan": None}, HERE, "minilm_core/1/model.plan is missing"),
        ("error", {"plan": b""}, HERE, "minilm_core/1/model.plan is empty"),
        ("error", {"plan": b"another"}, HERE, "is not the file that the build manifest describes"),
        ("error", {"onnx_sha256": "old"}, HERE, "built from another graph"),
        ("error", {}, machine(), "needs a GPU, here is none: start the container with `--gpus"),
        ("error", {"gpus": (0, 1)}, HERE, "runs on GPU 1, here are 1"),
        ("error", {"gpus": (0, 1)}, machine(H200, L4), "and NVIDIA L4 (8.9)"),
        ("error", {"gpus": "all"}, machine(H200, L4), "and NVIDIA L4 (8.9)"),
        ("warning", {}, machine(H200, tensorrt=None), "no TensorRT was found here"),
        ("warning", {}, machine(H200, driver="570.1"), older),
    )
    for number, (severity, pipeline, here, wrong) in enumerate(cases):
        said = check(write_pipeline(tmp_path / str(number), **pipeline), here)
        assert wrong in said, said
        assert said.startswith(f"{severity}: minilm: "), said
        assert "\n" not in said
    # Each pipeline has its own line; those on ONNX Runtime need no GPU.
    several = tmp_path / "several"
    for name, pipeline in (("one", {"built": False}), ("two", {"plan": None}), ("well", {})):
        write_pipeline(several, name, **pipeline)
    assert [verdict.pipeline for verdict in check_repository(several, HERE)] == ["one", "two"]
    bare = machine(tensorrt=None, driver=None)
    assert check(write_pipeline(tmp_path / "onnx", **ONNX), bare) == ""


CONFIG, MODEL = "minilm/config.pbtxt", "minilm_core/1/model.onnx"
OTHER = "is not the file that the build manifest describes"


def damage(repository: Path) -> int:
    path = repository / MODEL
    return path.write_bytes(path.read_bytes()[:-1] + bytes(1))


def put_a_folder(repository: Path) -> None:
    path = repository / MODEL
    path.unlink()
    path.mkdir()


DAMAGES: list[tuple[str, Callable[[Path], object]]] = [
    (f"{MODEL} {OTHER}", damage),
    (f"{CONFIG} {OTHER}", lambda folder: (folder / CONFIG).write_text('platform: "ensemble"')),
    (f"{CONFIG} is missing", lambda folder: (folder / CONFIG).unlink()),
    (f"{MODEL} is missing", put_a_folder),
    (f"{MODEL} is empty", lambda folder: (folder / MODEL).write_bytes(b"")),
    (
        "minilm_core/2/model.onnx is not in the build manifest",
        lambda folder: shutil.copytree(folder / "minilm_core/1", folder / "minilm_core/2"),
    ),
    (
        f"{MODEL} {OTHER} (and 1 more)",
        lambda folder: (damage(folder), (folder / "minilm_core/1/hooks.py").write_text("")),
    ),
]
"""What is said, and the change of a built repository that it is said of."""


def test_what_is_not_as_it_was_built_is_refused(tmp_path: Path) -> None:
    remedy = "build it again with `triptych build minilm`, or copy it again"
    for number, (wrong, change) in enumerate(DAMAGES):
        folder = tmp_path / str(number)
        write_pipeline(folder, **ONNX)
        change(folder)
        for here in (HERE, None):
            assert check(folder, here) == f"error: minilm: {wrong}: {remedy}"
    # Without hashes files must only be there, and what no server loads is no difference.
    folder = write_pipeline(tmp_path / "unhashed", **ONNX)
    (folder / "minilm_core/1/.DS_Store").touch()
    (folder / "minilm_core/notes.txt").touch()
    assert check(folder) == ""
    damage(folder)
    assert check(folder, hashes=False) == ""
    (folder / MODEL).unlink()
    assert "is missing" in check(folder, hashes=False)
    assert check(write_pipeline(tmp_path / "plan", plan=b"another"), hashes=False) == ""


def test_byte_code_and_linked_folders_are_a_difference(tmp_path: Path) -> None:
    version = write_pipeline(tmp_path, **ONNX) / "minilm_core/1"
    caches = [version / "__pycache__", version / "deep/__pycache__"]
    for cache in caches:
        cache.mkdir(parents=True)
        (cache / "model.cpython-310.pyc").touch()
    path = "minilm_core/1/__pycache__"
    fault = f"{path} holds byte code, which Python runs in place of the files that are checked"
    assert check(tmp_path) == f"error: minilm: {fault} (and 1 more): remove it"
    assert remove_byte_code(tmp_path) == []
    assert not any(cache.exists() for cache in caches)
    assert check(tmp_path) == ""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    caches[0].symlink_to(elsewhere)
    assert check(tmp_path) == f"error: minilm: {fault}: remove it"
    assert remove_byte_code(tmp_path) == []
    assert elsewhere.exists()
    (version / "linked").symlink_to(elsewhere)
    assert "minilm_core/1/linked is not in the build manifest" in check(tmp_path)


def test_byte_code_of_a_server_that_starts_at_the_same_time_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = write_pipeline(tmp_path, **ONNX) / "minilm_core/1/__pycache__"
    # Called after the first removal, as the step of the other server is loaded.
    monkeypatch.setattr(lock_check, "check_readable", lambda _: cache.mkdir())
    assert lock_check.enforce(read_settings(repository=str(tmp_path)), None)
    assert not cache.exists()


def test_missing_instruction_sets_are_told_with_what_they_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pipeline(tmp_path, backend="openvino", built=False, plan=None)
    trials = [("fp32", "passed", 100.0), ("bf16", "chosen", 290.0)]
    content = lock_data(tmp_path, "minilm") | {
        "instruction_sets": ["avx512_bf16", "amx_bf16"],
        "gate": {
            "precision": "bf16",
            "candidates": [
                {"precision": precision, "status": status, "throughput_per_s": rate}
                for precision, status, rate in trials
            ],
        },
    }
    write_lock(tmp_path, "minilm", content)
    here = machine()._replace(instruction_sets=("avx512f", "avx512_bf16"))
    assert check(tmp_path, here) == (
        "warning: minilm: its precision was measured with avx512_bf16, amx_bf16, and this "
        "processor lacks amx_bf16: it is slower here, up to 2.9 times, what it gained over fp32"
    )
    assert check(tmp_path, here._replace(instruction_sets=("avx512_bf16", "amx_bf16"))) == ""
    monkeypatch.setattr(lock_check, "find_instruction_sets", lambda: ("avx2",))
    assert check_and_make_flags(tmp_path, production=False) == []
    assert "this processor lacks avx512_bf16, amx_bf16: it is" in capsys.readouterr().err
    assert core_variables(tmp_path) == {}
    write_lock(tmp_path, "minilm", content | {"gate": {"precision": "fp32"}})
    assert core_variables(tmp_path) == FP32_LIMIT


def test_locks_that_are_shared_missing_or_unreadable(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "shared", "guest", built=False, plan=None)
    content = lock_data(tmp_path / "shared", "guest")
    content["spec"]["core"]["shared_from"] = "minilm"  # is checked with its owner only
    write_lock(tmp_path / "shared", "guest", content)
    assert check(tmp_path / "shared") == ""
    lock = write_pipeline(tmp_path / "lock") / "minilm/triptych.lock.json"
    lock.unlink()
    nothing = "warning: minilm: has no build manifest: nothing could be checked"
    assert check(tmp_path / "lock") == nothing
    tensorrt, onnxruntime = ({"core": {"backend": name}} for name in ("tensorrt", "onnxruntime"))
    of_backends = ({"spec": tensorrt}, {"spec": onnxruntime, "files": {}})
    texts = ("{", "[]", '{"spec": {}}', "\xff", "[" * 100_000, *map(json.dumps, of_backends))
    for text in texts:
        lock.write_bytes(text.encode("latin-1"))
        said = check(tmp_path / "lock")
        assert said.startswith("error: minilm: its build manifest cannot be used ("), text[:50]
        assert "\n" not in said, text[:50]


def test_the_operator_decides_what_a_refusal_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = str(write_pipeline(tmp_path, built=False))
    for mode, exit_code, is_told in (("off", 0, False), ("warn", 0, True), ("enforce", 1, True)):
        monkeypatch.setenv("TRIPTYCH_LOCK_CHECK", mode)
        assert lock_check.main([repository]) == exit_code
        assert ("error: minilm" in capsys.readouterr().err) == is_told
    assert lock_check.main([str(tmp_path / "none")]) == 2
    assert "TRIPTYCH_REPOSITORY" in capsys.readouterr().err


FAKE_DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 40; return 0; }
int cuDeviceGetName(char *name, int length, int device) {
  strncpy(name, device == 40 ? "NVIDIA H200" : "NVIDIA L4", length); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? (device == 40 ? 9 : 8) : (device == 40 ? 0 : 9); return 0; }
"""


def test_gpus_come_from_the_drivers_library(tmp_path: Path) -> None:
    assert find_gpus(str(tmp_path / "none")) == ()
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "fake.c", tmp_path / "libfake.so"
    source.write_text(FAKE_DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert find_gpus(str(library)) == (H200, L4)


def test_the_machine_is_known_by_its_files(tmp_path: Path) -> None:
    for folder, names in {
        "path": ("libnvinfer.so.11", "libnvinfer_plugin.so.11.2.1"),
        "image": ("libnvinfer.so.9.9.9", "libnvinfer.so.10.16.1", "libnvinfer.so.10"),
    }.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    folders = (str(tmp_path / "image"),)
    variables = {"LD_LIBRARY_PATH": str(tmp_path / "path")}
    assert find_tensorrt(variables, folders) == "10.16.1"
    (tmp_path / "path/libnvinfer.so.11.2.1").touch()
    assert find_tensorrt(variables, folders) == "11.2.1"
    file, none = tmp_path / "file", tmp_path / "none"
    for text, version in (
        ("590.48.01\n", "590.48.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module  615.61  Release Build", "615.61"),
        ("nothing", None),
    ):
        file.write_text(text)
        assert find_driver((str(none), str(file))) == version
    file.write_text("model name\t: A B\nflags\t\t: fpu amx_bf16 avx2 avx512f\n\nflags\t: other\n")
    assert find_instruction_sets(file) == ("avx2", "avx512f", "amx_bf16")
    assert find_processor(file) == "A B"
    assert find_instruction_sets(none) == ()
    assert sets_for("bf16", find_instruction_sets(file)) == ("amx_bf16",)
    assert sets_for("fp32", find_instruction_sets(file)) == ()
    assert node_label("avx512_vnni") == "feature.node.kubernetes.io/cpu-cpuid.AVX512VNNI"
