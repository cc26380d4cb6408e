"""`triptych deploy` and its reasons; `triptych lint` finds the mistakes of manifests."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.support.deploy_cases import (
    ENGINE,
    RAY,
    document,
    kustomized,
    options,
    write_bench,
    write_built,
    write_generation,
    write_text2text,
)  # fmt: skip
from tests.support.load_samples import measurement, point, rate_search, step, subject
from tests.support.mistakes import check_refused
from tests.support.project import ROOT
from triptych.base.errors import Finding, UserError
from triptych.base.explained import plain
from triptych.base.releases import TRITON_VERSIONS
from triptych.container.manifests import STEP_SHM_MIB
from triptych.container.serving_machine import parse_machine
from triptych.deploy import numbers
from triptych.deploy.assumptions import (
    SERVER_MIB,
    STEP_MIB,
    assume_cores,
    assume_memory,
    core_files_mib,
    is_on_gpu,
)
from triptych.deploy.checks import CHECKS, check_manifests, objects
from triptych.deploy.checks.pods import BuildInfo
from triptych.deploy.context import Manifests, read_context
from triptych.deploy.folder import write_manifests
from triptych.deploy.options import TARGETS, parse_mebibytes
from triptych.deploy.targets import make_manifests, read_build_info
from triptych.deploy.variables import ALLOWED, REFUSED
from triptych.interface.cli import app
from triptych.serving.bench.results import LoadPoint, OfferedLoad
from triptych.spec.model_fields import load_model_spec
from triptych.spec.scaffold import scaffold
from triptych.spec.slo import Slo

BY_HAND: dict[str, Any] = {"rps_per_replica": 9.0, "cpu_cores": 1.0, "memory_mib": 2048}
HTTP_API: dict[str, Any] = {"http_api_image": "triptych-build:26.11"}
SAMPLING: dict[str, Any] = {"serving": {"slo": {"p99_ms": 80.0}, "sample": {"rate": 0.01}}}


def manifests(folder: Path, **fields: Any) -> Manifests:
    """Of a pipeline of these fields with a usual bench."""
    repository = write_built(folder, **fields)
    return make_manifests(repository, "minilm", options(), write_bench(folder / "reports"))


def test_probes_are_those_of_the_image(tmp_path: Path) -> None:
    deployment = document(manifests(tmp_path), "deployment.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    image = (ROOT / "docker/serve.Dockerfile").read_text()
    (line,) = re.findall(r"HEALTHCHECK (.*) \\\n +CMD (\[.*\])", image)
    ready = container["readinessProbe"]
    assert ready["exec"]["command"] == json.loads(line[1])
    period, timeout = ready["periodSeconds"], ready["timeoutSeconds"]
    assert f"--interval={period}s --timeout={timeout}s --retries=2" in line[0]


def test_every_variable_of_the_image_is_in_the_guide_and_can_be_set_or_is_refused() -> None:
    guide = (ROOT / "docker/server.md").read_text().split("## Variables")[1].split("\n## ")[0]
    names = set(re.findall(r"(?m)^\| `(TRIPTYCH_[A-Z_]+)` \|", guide))
    assert names == {*ALLOWED, *REFUSED}
    for file in (ROOT / "build_scripts/triptych/container").glob("*.py"):
        assert set(re.findall('"(TRIPTYCH_[A-Z_]+)"', file.read_text())) <= names, file


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
        "no engine": write_built(tmp_path / "unbuilt", core={"backend": "tensorrt"}),
        "engine": write_built(tmp_path / "engine", engine=ENGINE, core={"backend": "tensorrt"}),
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
        (repository, {"run_as_user": "1001"}, reports, "1001, --target kubernetes. Leave it out"),
        (repository, {"run_as_user": "none", "target": "compose"}, reports, "kserve or ray"),
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
        (repository, {"target": "kserve", "replicas": 3}, reports, "--target compose or ray"),
        (repository, {"corpus": "s3://texts/*"}, reports, "only supported with --target ray"),
        (repository, {**RAY, "corpus": None}, reports, "`--corpus` must be an address"),
        (repository, {**RAY, "results": "s3://KEY:hidden@b/a"}, reports, "without credentials"),
        (repository, {**RAY, "monitor_image": "a:1"}, reports, "kubernetes or kserve or compose"),
        (repository, {**RAY, "name": "a" * 48}, reports, "at most 47 characters"),
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
        (repository, {"envoy_tls": "a/b"}, reports, "must be the name of a Secret"),
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


def test_the_largest_batch_as_measured_ends_before_its_server(tmp_path: Path) -> None:
    """A row of the fullest batches took 0.1 s: 32 rows that are four times as long take 12.8 s."""
    repository = write_built(tmp_path, mean_tokens=64.0)
    full = replace(step("core", 0.0, 3_199_930.0, 32, 4), executions=4, rows=128)
    alone = replace(step("core", 0.0, 500_000.0, 1, 4), executions=4, rows=4)
    rounds = [replace(measurement(8), steps=(use,)) for use in (alone, full)]
    points = tuple(LoadPoint(OfferedLoad("concurrency", 8), (one,)) for one in rounds)
    reports = write_bench(tmp_path / "reports", points=points)
    sizes = read_context(repository, "minilm", options(), reports).sizes
    assert "the largest batch takes 12.8 s as measured" in sizes.exit_timeout_s.reason
    none = read_context(repository, "minilm", options(**BY_HAND), tmp_path / "none").sizes
    assert "the largest batch is not measured" in none.exit_timeout_s.reason


def test_what_is_missing_is_assumed_marked_and_can_be_replaced(tmp_path: Path) -> None:
    repository = write_built(tmp_path, serving={})
    write_built(tmp_path / "more", "other")
    (tmp_path / "more/repository/other").rename(repository / "other")
    none = tmp_path / "none"
    abouts = ["latency limit", "capacity", "processor cores", "memory", "content of the volume"]
    for target in TARGETS:
        made = make_manifests(
            repository, "minilm", options(**(RAY if target == "ray" else {"target": target})), none
        )
        for assumption, about in zip(made.assumptions, abouts, strict=True):
            assert assumption.about.startswith(about)
            assert re.search(r"`triptych (bench|build) minilm", assumption.remedy), about
    words = ["deploy", "minilm", "--repository", str(repository), "--reports", str(none)]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert " ".join(done.stdout.split()).count("ASSUMED ") == len(abouts)
    files = [path.read_text() for path in (tmp_path / "out").rglob("*.yaml")]
    text = " ".join(word for word in " ".join(files).split() if word != "#")
    for marked in ("capacity of a replica: 2/s", "processor cores of a replica: 3", "memory of"):
        assert f"ASSUMED {marked}" in text, marked
    assert "p99 <= 500 ms (assumed)" in text
    given = ["--rps-per-replica=50", "--cpu=2", "--memory=2Gi", "--json"]
    done = CliRunner().invoke(app, [*words, *given, "--out", str(tmp_path / "given")])
    told = json.loads(done.stdout)
    assert len(told["assumptions"]) == 2
    assert all(number["field"] and number["reason"] for number in told["numbers"])
    assert CliRunner().invoke(app, [*words, "--target", "nomad"]).exception is not None
    # A bench without a search has the rate of one client; with a search nothing is assumed.
    repository = write_built(tmp_path / "usual")
    for name, rate, assumed in (
        ("bare", {"rate": None}, [("capacity of a replica", "of one client alone, measured")]),
        ("whole", {}, []),
    ):
        reports = write_bench(tmp_path / name, **rate)
        made = make_manifests(repository, "minilm", options(), reports)
        assert [(one.about, one.reason) for one in made.assumptions] == assumed


def test_processor_and_memory_are_assumed_for_all_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert not is_on_gpu(build.spec)
    assert is_on_gpu(load_model_spec(Path(made.folder), ["models.classifier.core.device=gpu"]))
    monkeypatch.setattr(numbers, "largest_request_mib", lambda *_: 1)
    assert numbers.shm_mib(build, tmp_path) == 3 * (STEP_SHM_MIB + 1)


def test_what_cannot_work_for_generated_text_is_refused(tmp_path: Path) -> None:
    repository = write_generation(tmp_path, "core.tensor_parallel_size=2")
    none = tmp_path / "none"
    translating = write_text2text(tmp_path / "translating")
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (repository, {"gpu_product": "NVIDIA-H100-MIG-1g.10gb"}, "must be whole GPUs"),
        (repository, {"gateway": "infra/web", "affinity_header": "x-user"}, "cannot hash a header"),
        (repository, {"target": "kserve", "affinity_header": "x-user"}, "cannot hash a header"),
        (repository, {"monitor_image": "watch:1"}, "its answers are not sampled"),
        (repository, {"max_grace_seconds": 20}, "the longest answer"),
        (repository, {"memory_mib": 512}, "MiB may be shared"),
        (repository, {"rps_per_replica": 5.0}, "scales by requests in flight"),
        (translating, {"gpu_product": "NVIDIA-L4"}, "only supported for an engine on a GPU"),
    ]
    for folder, changes, said in cases:
        check_refused(said, make_manifests, folder, "talk", options(name="talk", **changes), none)
    words = ["deploy", "talk", "--image", "triton-vllm:26.08", "--repository", str(repository)]
    words += ["--out", str(tmp_path / "out"), "--affinity-header", "x-user"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "x-user" in (tmp_path / "out/base/envoy.yaml").read_text()
    assert "kubectl apply -k" in done.stdout


def test_the_release_is_the_newest_that_can_load_the_build_or_that_of_the_image(
    tmp_path: Path,
) -> None:
    newest, of_11_2 = str(max(TRITON_VERSIONS)), replace(ENGINE, tensorrt="11.2.1.2")
    unknown = replace(ENGINE, tensorrt="11.2.1.99")
    for number, (engine, image, triton, used) in enumerate(
        (
            (None, "", "", newest),
            (None, "", "26.05", "26.05"),
            (None, "registry.example.com/serve:26.08-py3", "", "26.08"),
            (None, "registry.example.com/serve:v3", "", "25.01"),  # it may be the oldest
            (None, "registry.example.com/serve:01.02", "", "25.01"),
            (of_11_2, "", "", "26.08"),
            (unknown, "", "", "25.01"),
        )
    ):
        folder = tmp_path / str(number)
        fields: dict[str, Any] = {"serving": {"slo": {"p99_ms": 80.0}, "triton": "25.01"}}
        fields |= {"core": {"backend": "tensorrt", "device": "gpu"}} if engine else {}
        repository = write_built(folder, engine=engine, **fields)
        wanted = options(image=image, triton=triton, **BY_HAND)
        made = make_manifests(repository, "minilm", wanted, folder / "none")
        assert made.triton == used, (image, triton)
        (container,) = document(made, "deployment.yaml")["spec"]["template"]["spec"]["containers"]
        assert container["image"] == (image or f"triptych-serve:{used}")


def test_deploy_reads_the_deployed_pipeline_and_counts_the_defects_that_it_meets(
    tmp_path: Path,
) -> None:
    repository = write_built(tmp_path)
    wanted = options(triton="24.10", **BY_HAND)
    alone = make_manifests(repository, "minilm", wanted, tmp_path / "none")
    other = repository / "other_core"
    other.mkdir()
    (other / "config.pbtxt").write_text("response_cache { enable: true }")
    (repository / "broken").mkdir()
    (repository / "broken/config.pbtxt").write_text('platform: "ensemble" nonsense {')
    beside = make_manifests(repository, "minilm", wanted, tmp_path / "none")
    assert beside.known_defects == alone.known_defects
    assert plain(beside.files) == plain(alone.files)
    words = ["deploy", "minilm", "--repository", str(repository), "--out", str(tmp_path / "out")]
    words += ["--triton", "24.10"]
    short, long = (CliRunner().invoke(app, [*words, *more]) for more in ((), ("--verbose",)))
    count = len(alone.known_defects)
    assert f"Triton 24.10 has {count} known defects" in " ".join(short.output.split())
    assert "known-defect" not in short.output
    assert long.output.count("known-defect") == count > 3
    for said in (
        short.output,
        long.output,
    ):  # the assumptions are the last thing before the command
        assert said.index("ASSUMED") > said.rindex("defect")


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
    assert not list(tmp_path.glob(".out-*"))


DATA = ROOT / "tests/data/lint"
CASES = yaml.safe_load((DATA / "manifests.yaml").read_text())


def spoiled(mistake: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the manifests of manifests.yaml with a mistake; without one, all is fine."""
    objects: list[dict[str, Any]] = copy.deepcopy(CASES[mistake.get("of", "manifests")])

    def parent_of(path: str) -> tuple[Any, Any]:
        place, *names = path.split(".")
        keys: list[Any] = CASES["places"][place] + names
        parent: Any = objects
        for key in keys[:-1]:
            parent = parent[key]
        return parent, keys[-1]

    for path, value in mistake.get("set", {}).items():
        parent, last = parent_of(path)
        parent[last] = value
    for path, value in mistake.get("append", {}).items():
        parent, last = parent_of(path)
        parent[last].append(value)
    for path in mistake.get("remove", []):
        parent, last = parent_of(path)
        del parent[last]
    objects += mistake.get("add", [])
    return objects


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildInfo:
    """Of a pipeline with an engine of an H200 that used 701 MiB, planned for 16 cores."""
    folder = tmp_path_factory.mktemp("built")
    repository = write_built(folder, engine=ENGINE, core={"backend": "tensorrt"})
    info = read_build_info(repository, "minilm", write_bench(folder / "reports"))
    return replace(info, machine=parse_machine("h200x16"), plans=("h200x4",))


def found_in(folder: Path, text: str, build: BuildInfo | None = None) -> list[Finding]:
    folder.mkdir(exist_ok=True)
    (folder / "all.yaml").write_text(text)
    return check_manifests(folder, build=build)


def test_each_check_finds_its_mistake_and_no_other_one(tmp_path: Path, built: BuildInfo) -> None:
    assert found_in(tmp_path, yaml.safe_dump_all(spoiled({})), built) == []
    mistakes = [(check, one) for check, several in CASES["mistakes"].items() for one in several]
    for check, mistake in mistakes:
        said = mistake["says"]
        found = found_in(tmp_path, yaml.safe_dump_all(spoiled(mistake)), built)
        assert [one.id for one in found].count(check) == 1, (check, said, found)
        (first,) = (one for one in found if one.id == check)
        assert said in f"{first.given} {first.remedy}", (check, first)
        assert first.remedy, check
        assert first.file.startswith("all.yaml") or check == "serves-triton", first
        others = {one.id for one in found} - {check}
        also = {"canary-percent": {"grpc-port"}}  # a predictor without ports has none for gRPC
        assert others <= also.get(check, set()), (check, said, others)
    assert CASES["mistakes"].keys() | {"manifest-readable"} == {one.id for one in CHECKS}


def test_the_mistakes_of_public_charts_are_found(tmp_path: Path) -> None:
    for chart, case in yaml.safe_load((DATA / "charts.yaml").read_text()).items():
        found = {finding.id for finding in found_in(tmp_path, case["text"])}
        assert found == {*case["finds"]}, chart


def test_other_gpus_and_names_of_metrics_are_found_in_manifests_of_generation(
    tmp_path: Path,
) -> None:
    repository = write_generation(tmp_path, "core.tensor_parallel_size=2")
    made = make_manifests(repository, "talk", options(name="talk"), repository)
    text = yaml.safe_dump_all(kustomized(tmp_path / "out", made))
    for old, new in (
        ("nvidia.com/gpu: 2", "nvidia.com/gpu: 1"),
        ("triptych_generation_waiting", "triptych_generation_wait"),
    ):
        assert old in text
        text = text.replace(old, new)
    found = found_in(tmp_path / "spoilt", text, read_build_info(repository, "talk", tmp_path))
    told = {one.id: f"{one.given} {one.remedy}" for one in found}
    assert told.keys() == {"engine-gpu", "metric-known"}
    assert "nvidia.com/gpu: 1; it has 2" in told["engine-gpu"]
    assert "Did you mean `triptych_generation_waiting`?" in told["metric-known"]


def test_what_cannot_be_read_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (helm,) = found_in(tmp_path, "kind: {{ .Values.kind }}\n  x: [")
    (broken,) = found_in(tmp_path, "kind: [")
    (tmp_path / "kustomization.yaml").write_text("resources: [none.yaml]\n")
    (tmp_path / "folder.yaml").mkdir()
    (missing,) = check_manifests(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(objects, "_KUBECTL_S", 0.0)
        (late,) = check_manifests(tmp_path)
    assert {one.id for one in (helm, broken, missing, late)} == {"manifest-readable"}
    assert "takes longer than" in late.given
    assert "helm template" in helm.remedy
    assert "Fix the YAML" in broken.remedy
    with pytest.raises(UserError, match="a folder of manifests"):
        check_manifests(tmp_path / "none")
    # Broken in every place: findings, no traceback.
    for value in (None, 3, "text", [], [3]):
        made = [{**one, "spec": value} for one in spoiled({})]
        found_in(tmp_path / "odd", yaml.safe_dump_all(made))
        made = spoiled({})
        (container,) = made[0]["spec"]["template"]["spec"]["containers"]
        container |= dict.fromkeys(container.keys() - {"image"}, value)
        found_in(tmp_path / "odd", yaml.safe_dump_all(made))


def test_the_command_line_tells_findings_and_ends_as_lint_does(tmp_path: Path) -> None:
    found_in(tmp_path / "fine", yaml.safe_dump_all(spoiled({})))
    done = CliRunner().invoke(app, ["lint", str(tmp_path / "fine")])
    assert (done.exit_code, done.stdout) == (0, "0 errors, 0 other findings\n")
    objects = spoiled({})
    objects[0]["spec"]["replicas"] = 3
    found_in(tmp_path / "broken", yaml.safe_dump_all(objects))
    words = ["lint", str(tmp_path / "broken"), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert [finding["id"] for finding in json.loads(done.stdout)] == ["replicas-autoscaled"]
    done = CliRunner().invoke(app, [*words[:2], "--triton", "26.11", "--upgrade-from", "26.05"])
    assert "--upgrade-from` is only supported for a model repository" in str(done.exception)
    # With a pipeline: what was measured of it counts.
    repository = write_built(tmp_path)
    write_bench(tmp_path / "reports/minilm")
    places = ["--repository", str(repository), "--reports", str(tmp_path / "reports")]
    words = ["lint", str(tmp_path / "fine"), "minilm", *places]
    assert CliRunner().invoke(app, words).exit_code == 0
