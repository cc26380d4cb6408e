"""Repositories of TensorRT cores on this machine: fake plans, and stubs that import the fakes."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.fake_tensorrt.records import read_record
from tests.support.project import ROOT
from tests.support.tensorrt_cases import Ranges, plan_of
from triptych.repository.config import CONFIG_FILE, print_config, read_config
from triptych.spec.engine_plan import EnginePlan

MAJOR = "10"
VERSION = str(read_record(MAJOR)["version"])
SHIMS = {
    "tensorrt.py": "make_module as make\nmodule = make('{major}')",
    "cuda/bindings/runtime.py": "FakeCuda, make_module as make\nmodule = make(FakeCuda())",
}
SOURCES = {"tensorrt.py": "fake_tensorrt", "cuda/bindings/runtime.py": "fake_cuda"}


def write_fakes(folder: Path) -> Path:
    """Write a backend directory with fakes of TensorRT and CUDA and the emulated backend.

    Returns:
        `folder`.
    """
    backend = folder / "tensorrt"
    for file, body in SHIMS.items():
        path = backend / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
            f"from tests.support.{SOURCES[file]} import {body.format(major=MAJOR)}\n"
            "sys.modules[__name__] = module\n",
            encoding="utf-8",
        )
    return folder


def write_model(
    folder: Path, config: str, graph: str, profiles: Sequence[Ranges], **header: Any
) -> None:
    """A model with a fake plan."""
    (folder / "1").mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(f'backend: "tensorrt"\n{config}', encoding="utf-8")
    plan = plan_of(graph, profiles, **{"version": VERSION, **header})
    (folder / "1/model.plan").write_bytes(plan)


def with_fake_engines(repository: Path, copy: Path) -> None:
    """Copy a repository of TensorRT cores, an engine added to each as its lock says."""
    shutil.copytree(repository, copy)
    for lock in copy.glob("*/triptych.lock.json"):
        data = json.loads(lock.read_text(encoding="utf-8"))
        core = copy / f"{lock.parent.name}_core"
        plan = EnginePlan.from_dict(data["plan"]["engine"])
        graph = (core / "1/model.onnx").read_bytes()
        (core / "1/model.plan").write_bytes(
            plan_of(graph, [_ranges(p) for p in plan.profiles], version=VERSION)
        )
    without_gpu(copy)


def without_gpu(repository: Path) -> None:
    """Let cores load where Triton sees no GPU: it gives KIND_GPU to none there."""
    for path in repository.glob(f"*_core/{CONFIG_FILE}"):
        config = read_config(path)
        for group in config.instance_group:
            group.kind = group.KIND_MODEL
            del group.gpus[:]
        path.write_text(print_config(config), encoding="utf-8")


def engine_runs(log: Path) -> list[tuple[int, Mapping[str, list[int]]]]:
    """What the fake GPU computed: the profile of each run, and the shapes of its inputs."""
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [(numbers[0], numbers[1]) for name, numbers in events if name == "run"]


def count_events(log: Path, name: str) -> int:
    """How often something happened on the fake GPU."""
    lines = log.read_text(encoding="utf-8").splitlines()
    return sum(json.loads(line)[0] == name for line in lines)


def _ranges(profile: Mapping[str, Any]) -> Ranges:
    return {name: [s.minimum, s.optimum, s.maximum] for name, s in profile.items()}
