"""Built pipelines to deploy, without a build: locks, and results of bench."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tests.support.container_cases import ENSEMBLE
from tests.support.generation_cases import write_pipeline as write_generating
from tests.support.load_samples import bench as bench_result
from tests.support.load_samples import rate_search
from tests.support.project import write_pipeline
from triptych.base.explained import plain
from triptych.deploy.context import Manifests
from triptych.deploy.folder import write_manifests
from triptych.deploy.options import DeployOptions
from triptych.repository.manifest import (
    CompiledManifest,
    PlanRecord,
    TextManifest,
    TextPlanRecord,
    read_manifest,
)
from triptych.repository.records import EngineCheck, EngineRecord, GateResult, json_text
from triptych.serving.bench.results import to_json
from triptych.spec.generation_fields import GenerationSpec, Text2TextSpec, load_generation_spec
from triptych.spec.slo import Slo
from triptych.spec.spec import load_spec
from triptych.tasks.task import Core

KUBERNETES = ("1.37", "1.36", "1.35")
"""The newest two, and the oldest that is supported (November 2026)."""
PROMISE = {"p99_ms": 80.0}
RAY: dict[str, Any] = {
    "target": "ray", "image": "triptych-ray:26.08", "corpus": "s3://texts/part-*.parquet",
    "results": "s3://vectors/minilm",
}  # fmt: skip
WEIGHTS_MIB = 2
ENGINE = EngineRecord(
    key="key",
    onnx_sha256="0" * 64,
    plan_sha256="1" * 64,
    tensorrt="11.2.1",
    cuda="13.2",
    driver="590.48.01",
    gpu="NVIDIA H200",
    compute_capability="9.0",
    version_compatible=False,
    hardware="none",
    precision="fp32",
    matmuls={},
    witness="graph",
    profiles=(),
    check=EngineCheck("fp32", 1, (), ()),
)


def write_built(
    folder: Path,
    name: str = "minilm",
    engine: EngineRecord | None = None,
    mean_tokens: float | None = None,
    instruction_sets: tuple[str, ...] = (),
    **fields: Any,
) -> Path:
    """A repository with one pipeline as `build` leaves it, as far as `deploy` reads it.

    `fields` are of its spec; without `serving` it promises `PROMISE`.
    """
    fields.setdefault("serving", {"slo": PROMISE})
    spec = load_spec(write_pipeline(folder / "pipelines" / name, **fields))
    plan = PlanRecord("packed", "", 256, (), 32, Core("AutoModel", "row", "vector", ()), None)
    lock = CompiledManifest(
        built_at="2026-01-01T00:00:00+00:00",
        spec=spec,
        model_sha256="2" * 64,
        architecture="BertModel",
        versions={},
        core_key="core",
        source_key="source",
        plan=plan,
        engine=engine,
        traffic={} if mean_tokens is None else {"mean_tokens": mean_tokens},
        gate=GateResult("fp32", 1, 0, True, (), ()),
        files={},
        instruction_sets=instruction_sets,
    )
    repository = folder / "repository"
    (repository / name).mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(ENSEMBLE.format(name=name))
    (repository / name / "triptych.lock.json").write_bytes(lock.as_bytes())
    return repository


def write_bench(folder: Path, **changes: Any) -> Path:
    """A pipeline's folder of reports with the result of `bench`, but for `changes`."""
    values: dict[str, Any] = {"load_s": 4.2, "cost": None, "slo": Slo(**PROMISE)}
    values |= {"rate": rate_search(Slo(**PROMISE))}
    result = bench_result(**{**values, **changes})
    (folder / "bench").mkdir(parents=True)
    (folder / "bench/bench.json").write_text(json_text(to_json(result)))
    return folder


def write_generation(folder: Path, *overrides: str) -> Path:
    """A repository with the pipeline `talk` as `build` leaves it, as far as `deploy` reads it."""
    pipeline = write_generating(folder / "talk", folder / "model", backend="vllm")
    spec = load_generation_spec(pipeline, ["core.max_num_seqs=10", *overrides])
    repository = folder / "repository"
    (repository / "talk").mkdir(parents=True)
    (repository / "talk/config.pbtxt").write_text(ENSEMBLE.format(name="talk"))
    _write_talk_manifest(repository, spec)
    weights = repository / "talk_core/1/weights"
    weights.mkdir(parents=True)
    (weights / "model.safetensors").write_bytes(bytes(WEIGHTS_MIB << 20))
    return repository


def write_text2text(folder: Path) -> Path:
    """A repository with the pipeline `talk`, which translates."""
    repository = write_generation(folder)
    model = read_manifest(repository, "talk", TextManifest).spec.model
    spec = Text2TextSpec(task="text2text-generation", name="talk", model=model)
    _write_talk_manifest(repository, spec)
    return repository


def _write_talk_manifest(repository: Path, spec: GenerationSpec | Text2TextSpec) -> None:
    manifest = TextManifest(
        built_at="2026-01-01T00:00:00+00:00",
        spec=spec,
        model_sha256="2" * 64,
        architecture="LlamaForCausalLM",
        versions={},
        traffic={},
        gate=GateResult("bf16", 1, 0, True, (), ()),
        files={},
        plan=TextPlanRecord(512),
    )
    (repository / "talk/triptych.lock.json").write_bytes(manifest.as_bytes())


def options(**changes: Any) -> DeployOptions:
    """Of a deployment on Triton 26.08, but for `changes`."""
    usual = DeployOptions(image="triptych-serve:26.08", name="minilm", triton="26.08")
    return replace(usual, **changes)


def document(made: Manifests, name: str) -> Any:
    """One of the documents as plain data."""
    (file,) = (file for file in made.files if Path(file).name == name)
    return plain(made.files[file])


def kustomized(folder: Path, made: Manifests) -> list[dict[str, Any]]:
    """What the real kubectl makes of the overlay."""
    write_manifests(folder, made.files)
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run(
        [kubectl, "kustomize", folder / made.start], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.load_all(done.stdout, Loader=yaml.CSafeLoader))
