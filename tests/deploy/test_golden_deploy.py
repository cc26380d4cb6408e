"""The manifests of many option sets do not change by accident: `data/deploy` holds each file.

After an intended change, ``pytest tests/deploy/test_golden_deploy.py --rewrite`` rewrites
`data/deploy`. The diff shows which manifests changed.
``same.json`` lists files that an earlier option set has with the same bytes. Placeholders stand for
versions of builds and folders of the machine, which differ from run to run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conftest import ROOT
from deploy_cases import (
    ENGINE,
    options,
    write_bench,
    write_built,
    write_generation,
    write_talk_manifest,
)
from load_samples import rate_search
from triptych.base.explained import yaml_of
from triptych.deploy.targets import make_manifests
from triptych.repository.manifest import TextManifest, build_id, read_manifest
from triptych.serving.fleet.envoy import (
    EndpointFiles,
    EndpointNames,
    Listen,
    Mirror,
    bootstrap,
    proxy_settings,
)
from triptych.serving.fleet.mirror import MirrorOption
from triptych.spec.generation_fields import Text2TextSpec
from triptych.spec.slo import Slo

GOLDEN = ROOT / "tests/data/deploy"
SAMPLING: dict[str, Any] = {"serving": {"slo": {"p99_ms": 80.0}, "sample": {"rate": 0.01}}}
ON_GPU: dict[str, Any] = {"core": {"device": "gpu"}}
TENSORRT: dict[str, Any] = {"core": {"backend": "tensorrt"}, "engine": ENGINE}
TALK: dict[str, Any] = {"name": "talk"}
WATCH: dict[str, Any] = {"monitor_image": "watch:1"}
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
    "kubernetes_gpu": (TENSORRT, {}),
    "kubernetes_mig": (ON_GPU, {"gpu_product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"}),
    "kserve": (SAMPLING, {**WATCH, "repository_image": "registry.example.com/minilm"}),
    "kserve_canary": ({**TENSORRT, **SAMPLING}, {"canary_percent": 10, "baseline": True, **WATCH}),
    "compose": ({}, {"target": "compose"}),
    "compose_one": ({}, {"target": "compose", "replicas": 1}),
    "compose_gpu": (
        {**TENSORRT, **SAMPLING},
        {"target": "compose", "repository_image": "registry.example.com/minilm", "replicas": 3,
         **WATCH},
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
    "generation_compose": (
        {"overrides": []}, {"target": "compose", "affinity_header": "x-session"},
    ),
    "text2text": ({"text2text": True}, {}),
}  # fmt: skip
FILES = EndpointFiles(Path("grpc.json"), Path("http.json"))
NAMES = EndpointNames("triton.default.svc", 8001, 8000)
MIRROR = Mirror(0.05, EndpointNames("candidate.default.svc", 8001, 8000))
FLEETS: Mapping[str, tuple[Any, Mirror | None, dict[str, Any]]] = {
    "files": (FILES, None, {"limits_ms": (37.5, 50.0)}),
    "files_mirror": (FILES, MIRROR, {"affinity": "x-session", "replicas": 8}),
    "files_affinity": (FILES, None, {"affinity": "x-session"}),
    "names": (NAMES, None, {}),
    "names_mirror": (NAMES, MIRROR, {"limits_ms": (0.5,), "replicas": 1}),
    "names_affinity": (NAMES, None, {"affinity": "x-session", "limits_ms": (80.0,)}),
}


def write_text2text(folder: Path) -> Path:
    """A repository with the pipeline `talk`, which translates, as `build` leaves it."""
    repository = write_generation(folder)
    model = read_manifest(repository, "talk", TextManifest).spec.model
    write_talk_manifest(
        repository, Text2TextSpec(task="text2text-generation", name="talk", model=model)
    )
    return repository


def manifests(case: str, folder: Path) -> dict[str, str]:
    """Return the text of each file of an option set by its path."""
    fields, chosen = CASES[case]
    target = case.partition("_")[0] if case.startswith(("kserve", "compose")) else "kubernetes"
    chosen = {"target": target, **chosen}
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
    texts = {}
    for path, document in make_manifests(
        repository, name, options(**chosen), reports
    ).files.items():
        text = yaml_of(document)
        for found, word in words.items():
            text = text.replace(found, word)
        texts[path] = text
    return texts


def fleets() -> dict[str, str]:
    """Return the bootstraps of `serve --replicas` and of manifests by file name."""
    listen = Listen("127.0.0.1", 8001, 8000, 8002, 9901)
    texts = {}
    for case, (endpoints, mirror, fields) in FLEETS.items():
        settings = proxy_settings(**{"replicas": 3, "max_request_mib": 5, **fields})
        texts[f"{case}.yaml"] = yaml_of(bootstrap(settings, listen, endpoints, mirror))
    return texts


def all_texts(folder: Path) -> dict[str, str]:
    """Return every file by its path in `data/deploy`."""
    trees = {case: manifests(case, folder / case) for case in CASES}
    trees["fleet"] = fleets()
    return {f"{case}/{path}": text for case, tree in trees.items() for path, text in tree.items()}


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


def test_manifests_are_as_on_record(tmp_path: Path, rewrite: bool) -> None:
    found = all_texts(tmp_path)
    if rewrite:
        write_golden(found)
    golden = read_golden()
    changed = {path for path in {*golden, *found} if golden.get(path) != found.get(path)}
    assert not changed
