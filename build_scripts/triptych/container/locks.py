"""The pipelines of a repository and what their locks say of their engines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

LOCK_FILE = "triptych.lock.json"
_PLAN = Path("1", "model.plan")
# Of one ensemble's config: enough to find its steps without a parser of protobuf text.
_IS_ENSEMBLE = re.compile(r'^\s*platform:\s*"ensemble"', re.MULTILINE)
_STEP = re.compile(r'model_name:\s*"([^"]+)"')


class LockError(Exception):
    """A lock that is there and cannot be used; says why."""


class EngineRecord(NamedTuple):
    """What the engine of one pipeline was built for, and from which graph.

    `version_compatible` plans also run on newer releases of TensorRT; `hardware` is ``none``,
    ``ampere_plus`` or ``same_compute_capability``.
    """

    tensorrt: str
    gpu: str
    compute_capability: tuple[int, int]
    driver: str
    version_compatible: bool
    hardware: str
    plan_sha256: str
    onnx_sha256: str


class Lock(NamedTuple):
    """What matters of a lock at start-up: of a pipeline whose own core runs on TensorRT.

    Attributes:
        engine: None where it has not been built.
        gpus: ids of the GPUs that the core runs on.
        onnx_sha256: of the graph that the repository holds now; empty where the lock lists none.
    """

    engine: EngineRecord | None = None
    gpus: tuple[int, ...] = ()
    onnx_sha256: str = ""
    needs_engine: bool = True


class Pipeline(NamedTuple):
    """One ensemble of the repository, and the models that it calls."""

    name: str
    steps: tuple[str, ...]
    repository: Path

    @property
    def core(self) -> str:
        return f"{self.name}_core"

    @property
    def plan_file(self) -> Path:
        """Where its engine is; need not exist."""
        return self.repository / self.core / _PLAN

    def read_lock(self) -> Lock | None:
        """Its lock; None where there is none.

        Raises:
            LockError: it cannot be read, or misses what this check needs.
        """
        try:
            text = (self.repository / self.name / LOCK_FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise LockError(str(error)) from error
        try:
            return _parse(json.loads(text), f"{self.core}/1/model.onnx")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LockError(f"{type(error).__name__}: {error}") from error


def find_pipelines(repository: Path) -> list[Pipeline]:
    """The ensembles of the repository, by name.

    Raises:
        OSError: the repository cannot be read.
    """
    found = []
    for config in sorted(repository.glob("*/config.pbtxt")):
        text = config.read_text(encoding="utf-8", errors="replace")
        if _IS_ENSEMBLE.search(text):
            found.append(Pipeline(config.parent.name, tuple(_STEP.findall(text)), repository))
    return found


def _parse(lock: Mapping[str, Any], onnx_file: str) -> Lock:
    core = lock["spec"]["core"]
    # A shared core is checked with the pipeline that owns it.
    if core["backend"] != "tensorrt" or core.get("share"):
        return Lock(needs_engine=False)
    record = None
    if (engine := lock["engine"]) is not None:
        major, minor = map(int, engine["compute_capability"].split("."))
        record = EngineRecord(
            *(str(engine["tensorrt"]), str(engine["gpu"]), (major, minor), str(engine["driver"])),
            version_compatible=bool(engine["version_compatible"]),
            hardware=str(engine["hardware"]),
            plan_sha256=str(engine["plan_sha256"]),
            onnx_sha256=str(engine["onnx_sha256"]),
        )
    gpus = tuple(map(int, lock["spec"]["serving"]["gpus"]))
    return Lock(record, gpus, str(lock["files"].get(onnx_file, "")))
