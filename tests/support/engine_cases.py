"""Built repositories of TensorRT cores, and a machine with a fake GPU to build their engines on."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import fake_cuda, fake_tensorrt
from tests.support.container_cases import H200
from tests.support.project import build_into, lock_data, write_lock, write_pipeline
from triptych.container.machine import VisibleGpu
from triptych.core.engine import cuda as own_gpu


def build_repository(
    model: Path, base: Path, *names: str, engine_dry_runs: Sequence[str] = ()
) -> Path:
    """Return a repository with one pipeline per name, such as ``packed_fp16``; no engines yet.

    A dry run of the engine's build takes seconds: only the pipelines `engine_dry_runs` have one.
    """
    for name in names:
        layout, precision = name.split("_")
        core = {"layout": layout, "precision": precision, "max_batch_size": 8}
        core["backend"] = "tensorrt"
        folder = base / "pipelines" / name
        write_pipeline(folder, model={"source": str(model)}, core=core)
        build_into(folder, base / "repository", engine_dry_run=name in engine_dry_runs)
    return base / "repository"


def machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, major: str, *, gpu: VisibleGpu | None = H200
) -> Any:
    """Make this the machine of a fake GPU with one release of TensorRT, and an empty cache.

    Returns:
        The fake module ``tensorrt``.
    """
    monkeypatch.setattr(own_gpu, "find_gpus", lambda: () if gpu is None else (gpu,))
    monkeypatch.setattr(own_gpu, "find_driver", lambda: "590.48.01")
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_cuda.install(monkeypatch)
    return fake_tensorrt.install(monkeypatch, major)


def copied(repository: Path, target: Path, name: str) -> Path:
    """Copy core and ensemble of one pipeline into `target`, and return it."""
    for model in (name, f"{name}_core"):
        shutil.copytree(repository / model, target / model)
    return target


def change_plan(repository: Path, name: str, **options: Any) -> None:
    """Change `core.engine` in a pipeline's lock, as a build with another spec would."""
    lock = lock_data(repository, name)
    lock["plan"]["engine"]["options"].update(options)
    write_lock(repository, name, lock)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by relative path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def header_of(plan: Path) -> dict[str, Any]:
    """Return the header of a fake plan."""
    found: dict[str, Any] = json.loads(plan.read_bytes().split(b"\n", 2)[1])
    return found
