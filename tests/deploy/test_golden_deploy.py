"""The manifests of many option sets: clusters take them, and `data/deploy` holds each file.

After an intended change, ``pytest tests/deploy/test_golden_deploy.py --rewrite`` rewrites
`data/deploy`. The diff shows which manifests changed.
``same.json`` lists files that an earlier option set has with the same bytes. Placeholders stand for
versions of builds and folders of the machine, which differ from run to run.
"""

import functools
import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml
from kubernetes_validate import utils
from typer.testing import CliRunner

from benchmarks.local_envoy import envoy_command
from tests.support.deploy_cases import (
    ENGINE,
    KUBERNETES,
    RAY,
    kustomized,
    options,
    write_bench,
    write_built,
    write_generation,
    write_text2text,
)
from tests.support.load_samples import rate_search
from tests.support.project import ROOT
from triptych.base.explained import plain, reasons_of, yaml_of
from triptych.deploy.checks import check_manifests
from triptych.deploy.context import Manifests
from triptych.deploy.envoy import (
    EndpointNames,
    Listen,
    Mirror,
    MirrorOption,
    bootstrap,
    proxy_settings,
)
from triptych.deploy.folder import write_manifests
from triptych.deploy.targets import make_manifests, read_build_info
from triptych.interface.cli import app
from triptych.repository.manifest import build_id
from triptych.spec.slo import Slo

# A file of schemas has 2 MB, and is read for each object otherwise.
utils.schema_contents = functools.cache(utils.schema_contents)
GOLDEN = ROOT / "tests/data/deploy"
SAMPLING: dict[str, Any] = {"serving": {"slo": {"p99_ms": 80.0}, "sample": {"rate": 0.01}}}
ON_GPU: dict[str, Any] = {"core": {"device": "gpu"}}
TENSORRT: dict[str, Any] = {"core": {"backend": "tensorrt"}, "engine": ENGINE}
TALK: dict[str, Any] = {"name": "talk"}
WATCH: dict[str, Any] = {"monitor_image": "watch:1"}
HTTP_API: dict[str, Any] = {"http_api_image": "triptych-build:26.11", "http_api_tls": "minilm-tls"}
SECRETS: dict[str, Any] = {"envoy_tls": "minilm-tls", "envoy_client_ca": "clients"}
TWO_GPUS: dict[str, Any] = {
    "overrides": ["core.tensor_parallel_size=2", "serving.slo.ttft_p99=500ms"]
}
VARIABLES: dict[str, Any] = {
    "variables": [
        "TRIPTYCH_CORE_THREADS=8", "TRIPTYCH_FORWARD_HEADERS=tenant|x-.*$",
        "TRIPTYCH_STEP_SHM_MIB=128", "TRIPTYCH_TRACE=http://otel:4318/v1/traces",
        "TRIPTYCH_TRACE_RATE=10", "TRIPTYCH_LOAD_THREADS=2",
    ]
}  # fmt: skip
CACHING: dict[str, Any] = {"serving": {"slo": {"p99_ms": 80.0}, "response_cache": True}}
BUSY = Slo(p50_ms=20.0, p99_9_ms=150.0, throughput=2000.0)
# Fields of the pipeline, and options; "mirror" and "baseline" name builds made beside it.
CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kubernetes": ({"mean_tokens": 20.5}, {"repository_image": "registry.example.com/minilm"}),
    "kubernetes_busy": (
        {"serving": {"slo": {"p50_ms": 20.0, "p99_9_ms": 150.0, "throughput": 2000}},
         "core": {"threads": 4}},
        {"peak_rps": 9000.0, "rps_per_replica": 90.0, "cpu_cores": 1.5, "memory_mib": 2048,
         "startup_seconds": 90.0, "max_growth": 0.2, "max_grace_seconds": 600,
         "namespace": "shop", "name": "search",
         "prometheus": "https://prometheus.example.com"},
    ),
    "kubernetes_watch": (SAMPLING, WATCH),
    "kubernetes_mirror": (SAMPLING, {"mirror": 0.05}),
    "kubernetes_gateway": ({}, {"gateway": "infra/public", "triton": "24.10"}),
    "kubernetes_gateway_mirror": (SAMPLING, {"gateway": "public", "mirror": 0.25}),
    "kubernetes_rollout": (
        SAMPLING, {"gateway": "public", "rollout": "argo", "baseline": True, **WATCH}
    ),
    "kubernetes_rollout_wide": (
        {"serving": {"slo": {"p90_ms": 100.0}}},
        {"gateway": "public", "rollout": "argo", "rps_per_replica": 9.0, "cpu_cores": 1.0,
         "memory_mib": 2048},
    ),
    "kubernetes_gpu": (TENSORRT, {}),
    "kubernetes_mig": (ON_GPU, {"gpu_product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"}),
    "kserve": (SAMPLING, {**WATCH, "repository_image": "registry.example.com/minilm"}),
    "kserve_gpu": (TENSORRT, {"repository_image": "registry.example.com/minilm"}),
    "kserve_canary": ({**TENSORRT, **SAMPLING}, {"canary_percent": 10, "baseline": True, **WATCH}),
    "compose": ({}, {"target": "compose"}),
    "compose_one": ({}, {"target": "compose", "replicas": 1}),
    "compose_gpu": (
        {**TENSORRT, **SAMPLING},
        {"target": "compose", "repository_image": "registry.example.com/minilm", "replicas": 3,
         **WATCH},
    ),
    "compose_two_gpus": (
        {**TENSORRT, "serving": {"slo": {"p99_ms": 80.0}, "gpus": [0, 1]}}, {"target": "compose"},
    ),
    "generation": (
        {"overrides": ["core.tensor_parallel_size=2", "serving.slo.ttft_p95=500ms"]},
        {"affinity_header": "x-session", "gpu_product": "NVIDIA-H200"},
    ),
    "generation_gateway": (
        {"overrides": []}, {"gateway": "public", "rollout": "argo", "memory_mib": 9000},
    ),
    "generation_kserve": (
        {"overrides": ["serving.slo.e2e_p99=9s", "serving.slo.itl_p50=50ms"]},
        {"target": "kserve"},
    ),
    "generation_parts": (
        {"overrides": ["core.tensor_parallel_size=2", "core.pipeline_parallel_size=2"]}, {},
    ),
    "generation_rollout": (TWO_GPUS, {"gateway": "infra/web", "rollout": "argo"}),
    "generation_kserve_canary": (TWO_GPUS, {"target": "kserve", "canary_percent": 20}),
    "generation_compose": (TWO_GPUS, {"target": "compose", "affinity_header": "x-session"}),
    "text2text": ({"text2text": True}, {}),
    "text2text_gateway": ({"text2text": True}, {"gateway": "infra/web"}),
    "text2text_kserve": ({"text2text": True}, {"target": "kserve"}),
    "kubernetes_http_api": (
        {**CACHING, "instruction_sets": ("avx512_bf16", "amx_bf16")},
        {**HTTP_API, **SECRETS,
         "variables": [*VARIABLES["variables"], "TRIPTYCH_RESPONSE_CACHE_MIB=512"]},
    ),
    "kserve_http_api": ({}, {"http_api_image": "triptych-build:26.11", **VARIABLES}),
    "compose_http_api": (
        CACHING,
        {**HTTP_API, "http_api_tls": "/etc/gateway$1", "envoy_tls": "/etc/envoy$1", **VARIABLES},
    ),
    "ray": (
        {"mean_tokens": 20.5},
        {**RAY, "replicas": 4, "repository_image": "registry.example.com/minilm"},
    ),
    "ray_gpu": (TENSORRT, RAY),
    "compose_tls": ({}, {"target": "compose", "envoy_tls": "/etc/tls"}),
}  # fmt: skip
NAMES = EndpointNames("triton.default.svc", 8001, 8000)
MIRROR = Mirror(0.05, EndpointNames("candidate.default.svc", 8001, 8000))
PROXIES: Mapping[str, tuple[Mirror | None, dict[str, Any]]] = {
    "names": (None, {}),
    "names_mirror": (MIRROR, {"limits_ms": (0.5,), "replicas": 1}),
    "names_affinity": (None, {"affinity": "x-session", "limits_ms": (80.0,)}),
}


class Made(NamedTuple):
    """Manifests, their folder, and words that stand in recorded files for texts of this run."""

    folder: Path
    name: str
    manifests: Manifests
    placeholders: Mapping[str, str]

    @property
    def documents(self) -> dict[str, Any]:
        return {path: plain(node) for path, node in self.manifests.files.items()}

    @property
    def texts(self) -> dict[str, str]:
        """The text of each file by its path, with placeholders."""
        texts = {}
        for path, node in self.manifests.files.items():
            texts[path] = yaml_of(node)
            for found, word in self.placeholders.items():
                # Quotes are around the version of a build that YAML 1.1 reads as a number.
                texts[path] = texts[path].replace(f"'{found}'", word).replace(found, word)
        return texts


def make(case: str, folder: Path, **more: str) -> Made:
    """Write what a build and a bench leave, and make the manifests of an option set and `more`."""
    fields, chosen = CASES[case]
    target = case.partition("_")[0] if case.startswith(("kserve", "compose")) else "kubernetes"
    chosen = {"target": target, **chosen, **more}
    words: dict[str, str] = {}
    if "overrides" in fields or "text2text" in fields:
        name = "talk"
        chosen = {**TALK, **chosen}
        repository = (
            write_text2text(folder)
            if "text2text" in fields
            else write_generation(folder, *fields["overrides"])
        )
    else:
        name = "minilm"
        repository = write_built(folder, **fields)
        candidate = write_built(folder / "candidate", **{**fields, "mean_tokens": 30})
        in_place = write_built(folder / "in_place", **{**fields, "mean_tokens": 10})
        words = {
            build_id(candidate, name)[:12]: "CANDIDATE",
            build_id(in_place, name)[:12]: "PLACE",
        }
        if "mirror" in chosen:
            chosen["mirrored"] = MirrorOption(candidate, chosen.pop("mirror"))
        if "baseline" in chosen:
            chosen["baseline"] = in_place
    slo = BUSY if case == "kubernetes_busy" else Slo(p99_ms=80.0)
    reports = write_bench(folder / "reports", slo=slo, rate=rate_search(slo))
    words |= {build_id(repository, name)[:12]: "VERSION", str(repository.resolve()): "/REPOSITORY"}
    return Made(folder, name, make_manifests(repository, name, options(**chosen), reports), words)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    base = tmp_path_factory.mktemp("deploy")
    return {case: make(case, base / case) for case in CASES}


def proxies() -> dict[str, str]:
    """Return configurations of Envoy by file name."""
    listen = Listen("127.0.0.1", 8001, 8000, 8002)
    texts = {}
    for case, (mirror, fields) in PROXIES.items():
        settings = proxy_settings(**{"replicas": 3, "max_request_mib": 5, **fields})
        texts[f"{case}.yaml"] = yaml_of(bootstrap(settings, listen, NAMES, ["tickets"], mirror))
    return texts


def read_golden() -> dict[str, str]:
    """Return every file on record by its path."""
    texts = {
        path.relative_to(GOLDEN).as_posix(): path.read_text(encoding="utf-8")
        for path in GOLDEN.rglob("*.yaml")
    }
    same = json.loads((GOLDEN / "same.json").read_text(encoding="utf-8"))
    return {**texts, **{path: texts[first] for path, first in same.items()}}


def write_golden(texts: Mapping[str, str]) -> None:
    """Replace `data/deploy`."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    first: dict[str, str] = {}
    same = {}
    for path, text in texts.items():
        if first.setdefault(text, path) != path:
            same[path] = first[text]
            continue
        (GOLDEN / path).parent.mkdir(parents=True, exist_ok=True)
        (GOLDEN / path).write_text(text, encoding="utf-8")
    (GOLDEN / "same.json").write_text(json.dumps(same, indent=1) + "\n", encoding="utf-8")


def test_manifests_are_as_on_record(made: dict[str, Made], rewrite: bool, tmp_path: Path) -> None:
    trees = {**{case: one.texts for case, one in made.items()}, "proxy": proxies()}
    found = {f"{case}/{path}": text for case, tree in trees.items() for path, text in tree.items()}
    if rewrite:
        write_golden(found)
    golden = read_golden()
    assert not {path for path in {*golden, *found} if golden.get(path) != found.get(path)}
    (tmp_path / "envoy.yaml").write_text("no_such_field: 1")
    assert "no_such_field" in validate(tmp_path / "envoy.yaml")


def validate(config: Path) -> str:
    """Return Envoy's error about a configuration; empty if it is valid."""
    command = [*envoy_command(config), "--mode", "validate"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else done.stderr.strip()


def values(node: Any, *names: str) -> Iterator[Any]:
    """Yield the values of these keys at any depth of a document."""
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key in names)
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from values(each, *names)


@functools.cache
def parses(*words: str) -> bool:
    """Whether the command line takes these words; with --help it does nothing else."""
    arguments = words[3:] if words[0] == "python3" else words[1:]
    return CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0


@functools.cache
def schema_of(kind: str) -> jsonschema.Draft202012Validator:
    """Return the schema of a custom resource, which is not checked: its patterns are Go's."""
    (file,) = (ROOT / "tests/data/crds").glob(f"{kind.lower()}_*.json")
    return jsonschema.Draft202012Validator(json.loads(file.read_text()))


@functools.cache
def check_resource(text: str, versions: Sequence[str] = KUBERNETES[:1]) -> None:
    """Raise a `ValidationError` where an object is not as its definition wants it."""
    resource = json.loads(text)
    group = resource["apiVersion"].partition("/")[0]
    if ("." not in group or group.endswith("k8s.io")) and "gateway" not in group:
        for version in versions:
            kubernetes_validate.validate(resource, version, strict=True)
    else:
        schema_of(resource["kind"]).validate(resource)


def test_clusters_take_what_is_written(made: dict[str, Made]) -> None:
    """Real kubectl and Envoy, and the schemas of all that reads a file; `lint` has no finding."""
    valid: set[str] = set()
    compose = jsonschema.Draft7Validator(
        json.loads((ROOT / "tests/data/compose_spec.json").read_text())
    )
    assert not parses("triptych", "monitor", "minilm", "--portt", "1")
    for case, one in made.items():
        out, documents = one.folder / "out", one.documents
        checked = out
        if "compose.yaml" in documents:
            write_manifests(out, one.manifests.files)
            compose.validate(yaml.safe_load((out / "compose.yaml").read_text()))
            assert one.manifests.command(Path("x")).startswith("docker compose --file x/"), case
        else:
            versions = KUBERNETES if case == "kubernetes" else KUBERNETES[:1]
            namespace = CASES[case][1].get("namespace", "default")
            resources = kustomized(out, one.manifests)
            assert resources, case
            for resource in resources:
                assert resource["metadata"]["namespace"] == namespace, case
                check_resource(json.dumps(resource), versions)
            if case != "kubernetes":  # `lint` runs kubectl itself, which takes long
                checked = one.folder / "checked"
                checked.mkdir()
                (checked / "all.yaml").write_text(yaml.dump_all(resources, Dumper=yaml.CSafeDumper))
        for job in out.glob("verdict-job.yaml"):
            check_resource(json.dumps(yaml.safe_load(job.read_text())))
        for proxy in out.rglob("envoy.yaml"):
            texts = "".join(file.read_text() for file in sorted(proxy.parent.glob("*.yaml")))
            if texts not in valid:
                assert validate(with_mounts(proxy, one.folder / "mounted")) == "", case
            valid.add(texts)
        own = read_build_info(one.folder / "repository", one.name, one.folder / "reports")
        assert check_manifests(checked, build=own) == [], case
        for query in (*values(documents, "query"), *values(documents, "expr")):
            promql_parser.parse(query)
        for words in values(documents, "command", "entrypoint"):
            words = shlex.split(words) if isinstance(words, str) else words
            is_own = words[0] == "triptych" or words[2:3] == ["triptych.interface.cli"]
            assert not is_own or parses(*words), (case, words)
        reasons = [found for node in one.manifests.files.values() for found in reasons_of(node)]
        assert all(reason for *_, reason in reasons), case


def with_mounts(proxy: Path, folder: Path) -> Path:
    """Return a copy of Envoy's configuration with files in place of Secrets."""
    folder.mkdir(parents=True)
    for file in proxy.parent.glob("*.yaml"):
        text = file.read_text().replace("/etc/envoy-config", str(folder))
        (folder / file.name).write_text(text.replace("/run/triptych", str(folder)))
    return folder / proxy.name


def test_openshift_takes_the_pods_of_every_target(made: dict[str, Made], tmp_path: Path) -> None:
    schema = yaml.safe_load((ROOT / "tests/data/openshift.yaml").read_text())
    admits = jsonschema.Draft202012Validator(schema)
    for case, one in made.items():
        if "compose.yaml" in one.documents:
            continue
        free = make(case, tmp_path / case, run_as_user="none")
        for path, document in free.documents.items():
            for pod in pods_of(document):
                admits.validate(pod)
                is_patch = path.startswith("overlays/") and "http-api" not in path
                assert is_patch or all("securityContext" in each for each in pod["containers"])
            own = [pod for pod in pods_of(one.documents[path]) if "securityContext" in pod]
            assert not any(map(admits.is_valid, own)), (case, path)
        assert '"fsGroup"' not in json.dumps(free.documents)
        if case in ("kubernetes_watch", "kserve_canary"):
            for resource in kustomized(free.folder / "out", free.manifests):
                check_resource(json.dumps(resource))


def pods_of(node: Any) -> Iterator[dict[str, Any]]:
    """Yield the specs of pods at any depth of a document: what has containers."""
    if isinstance(node, dict) and isinstance(node.get("containers"), list):
        yield node
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from pods_of(each)


def test_a_rollout_goes_by_the_rules_of_the_alerts(made: dict[str, Made]) -> None:
    for case in ("kubernetes_rollout", "kubernetes_rollout_wide", "generation_rollout"):
        documents = made[case].documents
        rules = [*values(documents["base/prometheus-rule.yaml"], "rules")]
        records = {rule.get("record") for group in rules for rule in group}
        alerts = " ".join(str(rule["expr"]) for group in rules for rule in group)
        first_percent = next(values(documents["base/rollout.yaml"], "setWeight"))
        for metric in documents["base/analysis-template.yaml"]["spec"]["metrics"]:
            query = metric["provider"]["prometheus"]["query"]
            assert query.partition("{")[0] in records, (case, query)
            threshold = metric["successCondition"].rpartition("<= ")[2]
            assert f"> {threshold}" in alerts, (case, threshold)
            assert first_percent > 100 * float(threshold), case
