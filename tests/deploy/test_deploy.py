"""`triptych deploy`: what it writes is what clusters take, from what was measured, with reasons."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import ROOT
from deploy_cases import (
    ENGINE,
    document,
    options,
    write_bench,
    write_built,
    write_generation,
    write_text2text,
)
from load_samples import point, rate_search, subject
from mistakes import check_refused
from triptych.base.errors import UserError
from triptych.container.flags import ServerFlags as ServerOptions
from triptych.deploy.assumptions import (
    SERVER_MIB,
    STEP_MIB,
    assume_cores,
    assume_memory,
    core_files_mib,
)
from triptych.deploy.context import Manifests
from triptych.deploy.folder import write_manifests
from triptych.deploy.options import TARGETS, parse_mebibytes
from triptych.deploy.targets import make_manifests
from triptych.deploy.variables import ALLOWED, REFUSED
from triptych.interface.cli import app
from triptych.spec.model_fields import load_model_spec
from triptych.spec.scaffold import scaffold
from triptych.spec.slo import Slo

TENSORRT: dict[str, Any] = {"core": {"backend": "tensorrt"}}
BY_HAND: dict[str, Any] = {"rps_per_replica": 9.0, "cpu_cores": 1.0, "memory_mib": 2048}
HTTP_API: dict[str, Any] = {"http_api_image": "triptych-build:26.11"}
SAMPLING: dict[str, Any] = {"serving": {"slo": {"p99_ms": 80.0}, "sample": {"rate": 0.01}}}


def manifests(folder: Path, **fields: Any) -> Manifests:
    """Of a pipeline of these fields with a usual bench."""
    repository = write_built(folder, **fields)
    return make_manifests(repository, "minilm", options(), write_bench(folder / "reports"))


def test_probes_are_those_of_the_image_and_a_pod_has_time_to_stop(tmp_path: Path) -> None:
    pod = document(manifests(tmp_path), "deployment.yaml")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    image = (ROOT / "docker/serve.Dockerfile").read_text()
    (line,) = re.findall(r"HEALTHCHECK (.*) \\\n +CMD (\[.*\])", image)
    ready = container["readinessProbe"]
    assert ready["exec"]["command"] == json.loads(line[1])
    period, timeout = ready["periodSeconds"], ready["timeoutSeconds"]
    assert f"--interval={period}s --timeout={timeout}s --retries=2" in line[0]
    environment = {each["name"]: each["value"] for each in container["env"]}
    sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    exit_timeout = int(environment["TRIPTYCH_EXIT_TIMEOUT_S"])
    assert exit_timeout == ServerOptions.exit_timeout_s
    assert pod["terminationGracePeriodSeconds"] >= sleep + exit_timeout + 5


def test_every_number_says_why(tmp_path: Path) -> None:
    repository = write_built(tmp_path)
    write_bench(tmp_path / "reports/minilm")
    words = [
        *("deploy", "minilm", "--image", "triptych-serve:26.08", "--repository", str(repository)),
        *("--reports", str(tmp_path / "reports"), "--out", str(tmp_path / "out"), "--json"),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    by_field = {number["field"]: number for number in told["numbers"]}
    reason = by_field["spec.triggers[0].metadata.threshold"]["reason"]
    assert "150/s met p99 <= 80 ms, 165/s missed it" in reason
    assert "2026-01-02T03:04:05Z on 2 cores of Some Xeon" in reason
    assert CliRunner().invoke(app, [*words, "--target", "nomad"]).exception is not None


def test_every_variable_of_the_guide_can_be_set_or_is_refused_with_a_reason() -> None:
    guide = (ROOT / "docker/server.md").read_text().split("## Variables")[1].split("\n## ")[0]
    names = set(re.findall(r"(?m)^\| `(TRIPTYCH_[A-Z_]+)` \|", guide))
    assert names == {*ALLOWED, *REFUSED}


def test_what_cannot_work_is_refused_with_its_reason(tmp_path: Path) -> None:
    repository = write_built(tmp_path / "usual")
    reports = write_bench(tmp_path / "reports")
    none = tmp_path / "none"
    slow = write_bench(tmp_path / "slow", points=(point(1, p99_us=90e3),))
    never = replace(rate_search(Slo(p99_ms=80.0)), highest_per_s=0.0, lowest_broken_per_s=5.0)
    unheld = write_bench(tmp_path / "unheld", rate=never)
    other = write_bench(tmp_path / "other", slo=Slo(p99_ms=70.0))
    old = write_bench(tmp_path / "old", subject=subject(measured_at="2025-01-02T03:04:05Z"))
    argo = {"gateway": "public", "rollout": "argo"}
    built = {
        "shared": write_built(tmp_path / "shared", core={"shared_from": "other"}),
        "no engine": write_built(tmp_path / "unbuilt", **TENSORRT),
        "engine": write_built(tmp_path / "engine", engine=ENGINE, **TENSORRT),
        "sampling": write_built(tmp_path / "sampling", **SAMPLING),
    }
    baseline = write_built(tmp_path / "baseline", mean_tokens=10, **SAMPLING)
    watched = {"monitor_image": "watch:1", "baseline": baseline}
    cases: list[tuple[Path, dict[str, Any], Path, str]] = [
        (tmp_path, {}, reports, "triptych build minilm"),
        (repository, {"name": "ticket_routing"}, reports, "--name ticket-routing"),
        (repository, {"name": "a" * 55}, reports, "at most 54"),
        (repository, {"namespace": "Prod"}, reports, "--namespace prod"),
        (repository, {"image": "triptych-serve"}, reports, "tag that does not move"),
        (repository, {"image": "Serve it"}, reports, "in your registry"),
        (repository, {"repository_image": "models:1"}, reports, "Leave the tag out"),
        (repository, {"max_growth": 11.0}, reports, "--max-growth"),
        (repository, {"prometheus": "prometheus:9090"}, reports, "http://"),
        (repository, {"rps_per_replica": float("nan")}, reports, "above 0"),
        (built["shared"], {}, reports, "core.shared_from"),
        (built["no engine"], {}, reports, "triptych engine minilm"),
        (built["engine"], {"gpu_product": "NVIDIA-L4"}, reports, "the engine is of NVIDIA-H200"),
        (repository, {"gpu_product": "NVIDIA-L4"}, reports, "built for the CPU"),
        (repository, {}, slow, "one client alone was measured"),
        (repository, {}, unheld, "must be met at some rate"),
        (repository, {}, other, "measured for p99 <= 70 ms; the SLO is p99 <= 80 ms"),
        (repository, {}, old, "built at 2026-01-01"),
        (repository, {"rps_per_replica": 170.0}, reports, "165/s missed"),
        (repository, {"memory_mib": 600}, reports, "it used 701 MiB"),
        (repository, {**BY_HAND, "memory_mib": 256}, none, "256 MiB may be shared"),
        (repository, {"max_grace_seconds": 40}, reports, "15 + 30 + 5 s are 50 s"),
        # Options that a target does not know.
        (repository, {"target": "compose", "gateway": "public"}, reports, "--target kubernetes"),
        (repository, {"target": "kserve", "replicas": 3}, reports, "--target compose"),
        (repository, {"canary_percent": 5}, reports, "only supported with --target kserve"),
        (repository, {"target": "kserve", "canary_percent": 101}, reports, "a percentage"),
        (repository, {"rollout": "argo"}, reports, "needs --gateway"),
        (repository, {"rollout": "flagger", "gateway": "public"}, reports, "one of argo"),
        (repository, {"gateway": "a/b/c"}, reports, "NAMESPACE/NAME"),
        (repository, {"envoy_image": "envoyproxy/envoy"}, reports, "a tag that does not move"),
        (repository, {"target": "compose", "replicas": 0}, reports, "above 0"),
        (repository, {"target": "compose", "max_grace_seconds": 30}, reports, "s are 35 s"),
        # Variables of the server.
        *(
            (repository, {"variables": [variable]}, reports, said)
            for variable, said in (
                ("TRIPTYCH_CORE_THREADS=none", "must be a whole number"),
                ("TRIPTYCH_CORE_THREAD=8", "Did you mean"),
                ("TRIPTYCH_HTTP_PORT=80", "the manifests decide it"),
                ("TRIPTYCH_RESTRICTED_KEY=abc", "no place for a secret"),
                ("TRIPTYCH_GRPC_TLS_KEY_FILE=/key", "end TLS there"),
                ("HOME=/tmp", "no such variable"),
            )
        ),
        # The HTTP APIs.
        (repository, {"http_api_image": "gateway"}, reports, "tag that does not move"),
        (repository, {**HTTP_API, "gateway": "public"}, reports, "not supported with --gateway"),
        (repository, {**HTTP_API, "target": "kserve", "canary_percent": 5}, reports, "percent 5"),
        (repository, {"envoy_client_ca": "ca"}, reports, "needs --envoy-tls"),
        (repository, {"envoy_keys": "a/b"}, reports, "must be the name of a Secret"),
        (repository, {"envoy_tls": "a", "target": "kserve"}, reports, "an Envoy of its own"),
        (repository, {"envoy_tls": "a", "gateway": "infra/web"}, reports, "an Envoy of its own"),
        (repository, {"http_api_tls": "minilm-tls"}, reports, "needs --http-api-image"),
        (repository, {**HTTP_API, "http_api_tls": "./tls"}, reports, "name of a Secret"),
        # The monitor.
        (repository, {"monitor_image": "watch:1"}, reports, "a build that samples"),
        (repository, {"monitor_image": "watch"}, reports, "tag that does not move"),
        (built["sampling"], {**watched, "gateway": "public"}, reports, "--rollout"),
        (built["sampling"], {**argo, "baseline": baseline}, reports, "needs --monitor-image"),
        (baseline, {**watched, **argo}, reports, "another build"),
    ]
    for folder, changes, measured, said in cases:
        check_refused(said, make_manifests, folder, "minilm", options(**changes), measured)
    check_refused("1500Mi or 2Gi", parse_mebibytes, "2 GB")
    # A result of another build is no matter where nothing of it is used; enough grace is enough.
    assert make_manifests(repository, "minilm", options(**BY_HAND), old)
    assert make_manifests(repository, "minilm", options(max_grace_seconds=50), reports)


def test_what_is_missing_is_assumed_marked_and_can_be_replaced(tmp_path: Path) -> None:
    repository = write_built(tmp_path, serving={})
    write_built(tmp_path / "more", "other")
    (tmp_path / "more/repository/other").rename(repository / "other")
    none = tmp_path / "none"
    abouts = ["latency limit", "capacity", "processor cores", "memory", "content of the volume"]
    for target in TARGETS:
        made = make_manifests(repository, "minilm", options(target=target), none)
        for assumption, about in zip(made.assumptions, abouts, strict=True):
            assert assumption.about.startswith(about)
            assert re.search(r"`triptych (bench|build) minilm", assumption.remedy), about
    words = ["deploy", "minilm", "--repository", str(repository), "--reports", str(none)]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert " ".join(done.stdout.split()).count("ASSUMED ") == len(abouts)
    files = [path.read_text() for path in (tmp_path / "out").rglob("*.yaml")]
    text = " ".join(word for word in " ".join(files).split() if word != "#")
    for marked in ("capacity of a replica: 10/s", "processor cores of a replica: 3", "memory of"):
        assert f"ASSUMED {marked}" in text, marked
    assert "p99 <= 500 ms (assumed)" in text
    given = ["--rps-per-replica=50", "--cpu=2", "--memory=2Gi", "--json"]
    done = CliRunner().invoke(app, [*words, *given, "--out", str(tmp_path / "given")])
    assert len(json.loads(done.stdout)["assumptions"]) == 2
    # A bench without a search has the rate of one client; with a search nothing is assumed.
    repository = write_built(tmp_path / "usual")
    for name, rate, assumed in (
        ("bare", {"rate": None}, [("capacity of a replica", "of one client alone, measured")]),
        ("whole", {}, []),
    ):
        reports = write_bench(tmp_path / name, **rate)
        made = make_manifests(repository, "minilm", options(), reports)
        assert [(one.about, one.reason) for one in made.assumptions] == assumed


def test_processor_and_memory_are_assumed_for_all_models(tmp_path: Path) -> None:
    for name, mib in (("x_core", 1), ("x.second_core", 2), ("x_preprocess", 4), ("xx_core", 8)):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1/model.onnx").write_bytes(bytes(mib << 20))
    assert core_files_mib(tmp_path, "x") == 3
    changes = ["models.detector.instances=2", "models.classifier.core.threads=3"]
    made = scaffold("parts", task="chain", model=None, with_hooks=False, pipelines=tmp_path)
    build: Any = SimpleNamespace(spec=load_model_spec(Path(made.folder), changes))
    # preprocess, crop and postprocess; two instances of one thread, and one of three threads
    assert assume_cores(build)[0] == 3 + 2 + 3
    assert assume_memory(build, tmp_path)[0] == SERVER_MIB + 3 * STEP_MIB


def test_what_cannot_work_for_generated_text_is_refused(tmp_path: Path) -> None:
    repository = write_generation(tmp_path, "core.tensor_parallel_size=2")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"gpu_product": "NVIDIA-H100-MIG-1g.10gb"}, "must be whole GPUs"),
        ({"gateway": "infra/web", "affinity_header": "x-user"}, "cannot hash a header"),
        ({"target": "kserve", "affinity_header": "x-user"}, "cannot hash a header"),
        ({"monitor_image": "watch:1"}, "its answers are not sampled"),
        ({"max_grace_seconds": 20}, "the longest answer"),
        ({"rps_per_replica": 5.0}, "scales by requests in flight"),
    ]
    for changes, said in cases:
        chosen = options(name="talk", **changes)
        check_refused(said, make_manifests, repository, "talk", chosen, repository)
    words = ["deploy", "talk", "--image", "triton-vllm:26.08", "--repository", str(repository)]
    words += ["--out", str(tmp_path / "out"), "--affinity-header", "x-user"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "x-user" in (tmp_path / "out/base/envoy.yaml").read_text()
    assert "kubectl apply -k" in done.stdout
    repository = write_text2text(tmp_path / "translating")
    wrong = options(name="talk", gpu_product="NVIDIA-L4")
    said = "only supported for an engine on a GPU"
    check_refused(said, make_manifests, repository, "talk", wrong, repository)


def test_files_of_others_and_changed_ones_are_left_alone(tmp_path: Path) -> None:
    made = manifests(tmp_path)
    out = tmp_path / "out"
    write_manifests(out, made.files)
    first = {file: file.read_bytes() for file in out.rglob("*.yaml")}
    write_manifests(out, made.files)
    assert {file: file.read_bytes() for file in out.rglob("*.yaml")} == first
    deployment = out / "base/deployment.yaml"
    deployment.write_text(deployment.read_text().replace("maxSurge: 1", "maxSurge: 2"))
    with pytest.raises(UserError, match="was changed"):
        write_manifests(out, made.files)
    assert "maxSurge: 2" in deployment.read_text()
    deployment.write_bytes(first[deployment])
    (out / "mine.yaml").write_text("kind: Secret\n")
    with pytest.raises(UserError, match=r"mine\.yaml, which is another file"):
        write_manifests(out, made.files)
    assert {file.name for file in tmp_path.iterdir()} >= {"out"}
    assert not list(tmp_path.glob(".out-*"))
