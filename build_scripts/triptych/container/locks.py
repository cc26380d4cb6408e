"""The pipelines of a repository and what their locks say of their files and engines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST_FILE = "triptych.lock.json"
# Of one ensemble's config: enough to find its steps without a parser of protobuf text.
_IS_ENSEMBLE = re.compile(r'^\s*platform:\s*"ensemble"', re.MULTILINE)
_STEP = re.compile(r'model_name:\s*"([^"]+)"')


class ManifestError(Exception):
    """A lock that is there and cannot be used; says why."""


class EngineTarget(NamedTuple):
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


class StartupManifest(NamedTuple):
    """What matters of a lock at start-up.

    Attributes:
        files: path relative to the repository -> SHA-256 in hex.
        needs_engine: whether the pipeline's own core runs on TensorRT.
        engine: None where it has not been built.
        gpus: ids of the GPUs that the core runs on.
    """

    files: Mapping[str, str]
    needs_engine: bool = False
    engine: EngineTarget | None = None
    gpus: tuple[int, ...] = ()


class ServedPipeline(NamedTuple):
    """One ensemble of the repository, and the models that it calls; or what has a lock of one."""

    name: str
    steps: tuple[str, ...]
    repository: Path

    @property
    def core(self) -> str:
        return f"{self.name}_core"

    @property
    def lock_file(self) -> Path:
        return self.repository / self.name / MANIFEST_FILE

    @property
    def plan_file(self) -> str:
        """Where its engine is, relative to the repository; need not exist."""
        return f"{self.core}/1/model.plan"

    @property
    def graph_file(self) -> str:
        """What the engine is built from, as `plan_file`."""
        return f"{self.core}/1/model.onnx"

    def read_manifest(self) -> StartupManifest | None:
        """Its lock; None where there is none.

        Raises:
            ManifestError: it cannot be read, or misses what this check needs.
        """
        try:
            text = self.lock_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ManifestError(str(error)) from error
        try:
            return _parse(json.loads(text), self.name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ManifestError(f"{type(error).__name__}: {error}") from error


def find_pipelines(repository: Path) -> list[ServedPipeline]:
    """The ensembles of the repository, and what has a lock although it is none; by name.

    Raises:
        OSError: the repository cannot be read.
    """
    steps: dict[str, tuple[str, ...]] = {
        lock.parent.name: () for lock in repository.glob(f"*/{MANIFEST_FILE}")
    }
    for config in repository.glob("*/config.pbtxt"):
        text = config.read_text(encoding="utf-8", errors="replace")
        if _IS_ENSEMBLE.search(text):
            steps[config.parent.name] = tuple(_STEP.findall(text))
    return [ServedPipeline(name, steps[name], repository) for name in sorted(steps)]


def _parse(lock: Mapping[str, Any], pipeline: str) -> StartupManifest:
    core = lock["spec"]["core"]
    files = {str(path): str(digest) for path, digest in lock["files"].items()}
    if f"{pipeline}/config.pbtxt" not in files:
        raise ValueError("it does not list the files of this pipeline")
    # A shared core is checked with the pipeline that owns it.
    if core["backend"] != "tensorrt" or core.get("shared_from") or core.get("share"):
        return StartupManifest(files)
    record = None
    if (engine := lock["engine"]) is not None:
        major, minor = map(int, engine["compute_capability"].split("."))
        record = EngineTarget(
            *(str(engine["tensorrt"]), str(engine["gpu"]), (major, minor), str(engine["driver"])),
            version_compatible=bool(engine["version_compatible"]),
            hardware=str(engine["hardware"]),
            plan_sha256=str(engine["plan_sha256"]),
            onnx_sha256=str(engine["onnx_sha256"]),
        )
    gpus = tuple(map(int, lock["spec"]["serving"]["gpus"]))
    return StartupManifest(files, True, record, gpus)
