"""Repositories with locks, and machines, as the start-up check meets them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from conftest import ROOT
from triptych.container.machine import Machine, VisibleGpu

PACKAGE = ROOT / "build_scripts/triptych"
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
    gpus: tuple[int, ...] = (0,),
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
        "spec": {"core": {"backend": backend}, "serving": {"gpus": list(gpus)}},
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
    """What serve.Dockerfile copies of triptych, and nothing else; for PYTHONPATH."""
    package = folder / "triptych"
    package.mkdir(parents=True)
    for name in ("__init__.py", "errors.py", "releases.py"):
        shutil.copy(PACKAGE / name, package)
    shutil.copytree(
        PACKAGE / "container", package / "container", ignore=shutil.ignore_patterns("__pycache__")
    )
    (package / "runtime").mkdir()
    for name in ("__init__.py", "faults.py", "in_flight.py"):
        shutil.copy(PACKAGE / "runtime" / name, package / "runtime")
    return folder
