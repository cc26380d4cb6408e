"""Repositories with locks, and machines, as the start-up check meets them."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.project import ROOT
from triptych.container.machine import Machine, VisibleGpu

PACKAGE = ROOT / "build_scripts/triptych"
IMAGE_PACKAGE = "/opt/triptych/triptych"
GRAPH, PLAN = b"a graph", b"a plan"
ENSEMBLE = """
name: "{name}"
platform: "ensemble"
ensemble_scheduling {{
  step {{ model_name: "{name}_preprocess" }}
  step {{ model_name: "{name}_core" }}
}}
"""
H200 = VisibleGpu("NVIDIA H200", (9, 0))
H100 = VisibleGpu("NVIDIA H100 80GB HBM3", (9, 0))
L4 = VisibleGpu("NVIDIA L4", (8, 9))
T4 = VisibleGpu("Tesla T4", (7, 5))


def machine(
    *gpus: VisibleGpu, tensorrt: str | None = "10.16.1", driver: str | None = "590.48.01"
) -> Machine:
    """A machine with these GPUs and otherwise what the engine of `write_pipeline` was built on."""
    return Machine(tensorrt, gpus, driver)


def write_pipeline(
    repository: Path,
    name: str = "minilm",
    *,
    backend: str = "tensorrt",
    built: bool = True,
    gpus: tuple[int, ...] | str = (0,),
    plan: bytes | None = PLAN,
    **engine: Any,
) -> Path:
    """An ensemble with a lock and a plan; `engine` overrides fields of its record."""
    files = {
        f"{name}/config.pbtxt": ENSEMBLE.format(name=name).encode(),
        f"{name}_core/1/model.onnx": GRAPH,
    }
    hashes = {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
    record = {
        "onnx_sha256": hashes[f"{name}_core/1/model.onnx"],
        "plan_sha256": hashlib.sha256(PLAN).hexdigest(),
        "tensorrt": "10.16.1.11",
        "cuda": "13.2",
        "driver": "590.48.01",
        "gpu": H200.name,
        "compute_capability": "9.0",
        "version_compatible": False,
        "hardware": "none",
        **engine,
    }
    lock = {
        "spec": {"core": {"backend": backend}, "serving": {"gpus": gpus}},
        "engine": record if built else None,
        "files": hashes,
    }
    if built:
        hashes[f"{name}_core/1/model.plan"] = record["plan_sha256"]
    if plan is not None:
        files[f"{name}_core/1/model.plan"] = plan
    files[f"{name}/triptych.lock.json"] = json.dumps(lock).encode()
    for path, content in files.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_bytes(content)
    return repository


def copy_of_the_images_files(folder: Path) -> Path:
    """Copy what serve.Dockerfile copies of triptych into a folder for PYTHONPATH."""
    text = (ROOT / "docker/serve.Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        words = line.split()
        if words[:1] != ["COPY"] or not words[-1].startswith(IMAGE_PACKAGE):
            continue
        target = folder / "triptych" / words[-1].removeprefix(IMAGE_PACKAGE).strip("/")
        for source in (ROOT / word for word in words[1:-1]):
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
    return folder


def copy_packed(repository: Path, folder: Path) -> Path:
    """Copy the packed pipeline of a repository."""
    for part in repository.glob("minilm_packed*"):
        shutil.copytree(part, folder / part.name)
    return folder
