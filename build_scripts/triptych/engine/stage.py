"""`triptych engine`: the engine of a built pipeline, from what lies in the repository alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triptych.cache import cached_stage, code_hash, key_of, sha256_of
from triptych.engine.api import Api
from triptych.engine.engine_file import open_engine
from triptych.engine.engine_runner import EngineError, EngineRunner
from triptych.engine.gpu import Gpu, read_gpu
from triptych.engine.inspection import inspect
from triptych.engine.make import make_engine
from triptych.engine.messages import cannot_write
from triptych.engine.request import Request, make_request
from triptych.engine.timing import timing_file
from triptych.errors import Progress, UserError
from triptych.graph.files import MODEL_FILE
from triptych.plan.engine_spec import EnginePlan
from triptych.repository.lock import LOCK_FILE, PLAN_FILE, SAMPLES_FILE, print_lock, read_lock
from triptych.repository.render import Content
from triptych.repository.store import write_models
from triptych.tasks.task import Core
from triptych.tensors import ROW_STRIDE, Tensor

CODE = ("engine/*.py", "gate/*.py")
INSPECTION_FILE = "inspection.json"


class EngineFailure(Exception):
    """The engine computes something else than its graph: nothing was written."""

    def __init__(self, name: str, gate: Mapping[str, Any]) -> None:
        self.name = name
        self.gate = gate
        failures = "; ".join(gate["failures"])
        super().__init__(f"the engine of {name} does not compute what its graph does: {failures}")


@dataclass(frozen=True)
class BuiltEngine:
    """What became of the engine of a pipeline.

    Attributes:
        pipeline: as named.
        owner: whose core it is: another pipeline where the core is shared.
        changed: models written; empty when everything was up to date.
        record: as the lock has it.
    """

    pipeline: str
    owner: str
    changed: tuple[str, ...]
    record: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


def missing_for_engines() -> str:
    """What this machine lacks to build engines; empty where it can."""
    try:
        Api()
        read_gpu()
    except UserError as error:
        return f"{error.field} {error.rule}"
    return ""


def build_engine(repository: Path, name: str, progress: Progress) -> BuiltEngine:
    """Build, inspect and check the engine of a pipeline, and write it beside its ONNX graph.

    Nothing is written unless every check passed; nothing is done where nothing has changed.

    Args:
        repository: folder of the models.
        name: of the pipeline; where it shares a core, its owner's engine is built.
        progress: told what becomes of each stage.

    Raises:
        EngineFailure: the engine computes something else than the graph.
        UserError: there is nothing to build, or nothing to build with, or TensorRT refuses.
    """
    lock = _lock_of(repository, name)
    owner = lock["spec"]["core"].get("share") or name
    if owner != name:
        progress("engine", f"{name} uses the core of {owner}: its engine counts")
        lock = _lock_of(repository, owner)
    return _Stage(repository, name, owner, lock, progress).run()


def build_engine_here(repository: Path, name: str, progress: Progress) -> tuple[str, ...]:
    """`build_engine` if this machine can; else what to do is told.

    Returns:
        Models that changed.
    """
    missing = missing_for_engines()
    if missing:
        progress("engine", f"not here ({missing}): `triptych engine {name}` where it will serve")
        return ()
    return build_engine(repository, name, progress).changed


class _Stage:
    """The engine stage of one core."""

    def __init__(
        self, repository: Path, name: str, owner: str, lock: dict[str, Any], progress: Progress
    ) -> None:
        self._repository = repository
        self._name = name
        self._owner = owner
        self._lock = lock
        self._progress = progress
        self._plan, self._core = _what_to_build(owner, lock)
        self._model = f"{owner}_core"
        self._onnx = repository / self._model / "1" / MODEL_FILE
        self._samples = repository / owner / SAMPLES_FILE

    def run(self) -> BuiltEngine:
        files = self._check_files()
        api, gpu = Api(), read_gpu()
        plan_path = f"{self._model}/1/{PLAN_FILE}"
        key = self._key(files, plan_path, api, gpu)
        there = self._lock.get("engine") or {}
        plan_file = self._repository / plan_path
        if there.get("key") == key and _is(plan_file, there["plan_sha256"]):
            self._progress("engine", f"{plan_path}: up to date")
            return BuiltEngine(self._name, self._owner, (), there)
        request = make_request(self._onnx, self._plan, api)
        built, inspection = self._built(request, api, gpu, key)
        check = self._check(request, built.read_bytes())
        record = {
            "key": key,
            "onnx_sha256": files[f"{self._model}/1/{MODEL_FILE}"],
            "plan_sha256": sha256_of(built),
            "tensorrt": api.version,
            "cuda": gpu.cuda,
            "driver": gpu.driver,
            "gpu": gpu.name,
            "compute_capability": gpu.compute_capability,
            "version_compatible": self._plan.options["version_compatible"],
            "hardware": self._plan.options["hardware"],
            "precision": self._plan.precision,
            **inspection,
            "check": check,
        }
        changed = self._write(built, plan_path, record)
        return BuiltEngine(self._name, self._owner, changed, record)

    def _check_files(self) -> dict[str, str]:
        """Hashes of the files of core and ensemble, as the lock has them and the disk, too.

        Raises:
            UserError: the disk has something else, or nothing.
        """
        hashes: dict[str, str] = self._lock["files"]
        own = {
            path: digest
            for path, digest in hashes.items()
            if path.partition("/")[0] in (self._model, self._owner)
            and not path.endswith(f"/{PLAN_FILE}")
        }
        for path, digest in own.items():
            if not _is(self._repository / path, digest):
                raise UserError(
                    path,
                    f"must be the file that {self._owner}/{LOCK_FILE} tells of",
                    given="another one, or none",
                    remedy=f"Run `triptych build {self._owner}` again",
                )
        return own

    def _key(self, files: Mapping[str, str], plan_path: str, api: Api, gpu: Gpu) -> str:
        """Hash of all that decides the engine and its check."""
        folder = plan_path.rpartition("/")[0]
        return key_of(
            "engine",
            {
                "files": {path: files[path] for path in files if path.startswith(folder)},
                "samples": files.get(f"{self._owner}/{SAMPLES_FILE}"),
                "plan": self._plan.as_dict(),
                "tensorrt": api.version,
                "gpu": [gpu.name, gpu.compute_capability],
                "code": code_hash(*CODE),
            },
        )

    def _built(self, request: Request, api: Api, gpu: Gpu, key: str) -> tuple[Path, dict[str, Any]]:
        """The plan, inspected, and what the inspection found."""

        def tell(line: str) -> None:
            self._progress("engine", line)

        def work(target: Path) -> None:
            times = timing_file(api.version, gpu)
            plan = make_engine(api, request, timing_file=times, tell=tell)
            opened = open_engine(plan, host_code=request.options["version_compatible"])
            found = inspect(opened, request, len(plan))
            (target / PLAN_FILE).write_bytes(plan)
            (target / INSPECTION_FILE).write_text(json.dumps(asdict(found)), encoding="utf-8")

        try:
            folder, cached = cached_stage("engine", {"key": key}, work)
        except EngineError as error:
            raise UserError(
                PLAN_FILE,
                "must be loaded by the TensorRT that built it",
                given=error,
                remedy="Try another release of TensorRT",
            ) from error
        except OSError as error:
            raise cannot_write(error, Path("the cache")) from error
        found = json.loads((folder / INSPECTION_FILE).read_text(encoding="utf-8"))
        size = (folder / PLAN_FILE).stat().st_size / 1e6
        tell(f"{PLAN_FILE}, {size:.1f} MB, {_counts(found)}{' (cached)' if cached else ''}")
        return folder / PLAN_FILE, found

    def _check(self, request: Request, plan: bytes) -> dict[str, Any]:
        """The engine against the graph, on the rows that the build left.

        Raises:
            EngineFailure: they differ.
        """
        from triptych.gate.parity import check_engine
        from triptych.requests.samples_file import read_samples

        rows = read_samples(self._samples)
        self._progress("check", f"{len(rows)} rows against ONNX Runtime ...")
        inputs = tuple(request.graph.inputs)
        try:
            with EngineRunner(
                plan,
                packed=ROW_STRIDE.name in inputs,
                host_code=request.options["version_compatible"],
            ) as engine:
                result = check_engine(
                    engine.run,
                    self._onnx,
                    rows,
                    self._core,
                    inputs=inputs,
                    profiles=self._plan.profiles,
                    precision=self._plan.precision,
                    tf32=request.options["tf32"],
                )
        except EngineError as error:
            raise UserError(
                PLAN_FILE, "must run on this GPU", given=error, remedy="End what else runs on it"
            ) from error
        gate = result.as_dict()
        values = [v for v in gate["verdicts"] if v["value"] is not None]
        figures = ", ".join(f"{v['metric']} {v['value']:.3g}" for v in values)
        self._progress("check", f"{'FAILED' if gate['failures'] else 'passed'}: {figures}")
        if gate["failures"]:
            raise EngineFailure(self._owner, gate)
        return {name: gate[name] for name in ("precision", "rows", "verdicts", "notes")}

    def _write(self, built: Path, plan_path: str, record: dict[str, Any]) -> tuple[str, ...]:
        """Swap plan and lock into the repository, if it is still the one that was read."""
        if read_lock(self._repository, self._owner) != self._lock:
            raise UserError(
                f"{self._owner}/{LOCK_FILE}",
                "must stay as it is while the engine is built",
                given="a build that ended meanwhile",
                remedy=f"Run `triptych engine {self._name}` again",
            )
        files: dict[str, Content] = {
            file.relative_to(self._repository).as_posix(): file
            for model in (self._model, self._owner)
            for file in sorted((self._repository / model).rglob("*"))
            if file.is_file() and file.parent.name != "__pycache__"
        }
        hashes = {**self._lock["files"], plan_path: record["plan_sha256"]}
        lock = {**self._lock, "engine": record, "files": dict(sorted(hashes.items()))}
        files[plan_path] = built
        files[f"{self._owner}/{LOCK_FILE}"] = print_lock(lock)
        try:
            changed = write_models(self._repository, files)
        except OSError as error:
            raise cannot_write(error, self._repository) from error
        self._progress("write", f"{self._repository}: {', '.join(changed)}")
        return tuple(changed)


def _lock_of(repository: Path, name: str) -> dict[str, Any]:
    lock = read_lock(repository, name)
    if lock is None:
        raise UserError(
            name,
            f"must be a pipeline built into {repository}",
            given="no lock there",
            remedy=f"Run `triptych build {name}` first",
        )
    return lock


def _what_to_build(name: str, lock: Mapping[str, Any]) -> tuple[EnginePlan, Core]:
    """What the engine is built from, and what the core returns.

    Raises:
        UserError: the core needs no engine, or the lock does not say.
    """
    backend = lock["spec"]["core"].get("backend")
    if backend != "tensorrt":
        raise UserError(
            "core.backend",
            "must be tensorrt for an engine",
            given=f"{backend} in {name}",
            remedy=f"Set it in pipeline.yaml and run `triptych build {name}`",
        )
    try:
        core = lock["plan"]["core"]
        outputs = [Tensor(**{**one, "dims": tuple(one["dims"])}) for one in core["outputs"]]
        plan = EnginePlan.from_dict(lock["plan"]["engine"])
        return plan, Core(**{**core, "outputs": tuple(outputs)})
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{name}/{LOCK_FILE}",
            "must say what the engine is built from",
            given="a lock of another release of triptych",
            remedy=f"Run `triptych build {name}` again",
        ) from error


def _is(file: Path, digest: str) -> bool:
    return file.is_file() and sha256_of(file) == digest


def _counts(found: Mapping[str, Any]) -> str:
    counts = [f"{count} {kind}" for kind, count in found["matmuls"].items() if count]
    return f"products: {', '.join(counts) or 'none'}"
