"""`triptych engine`: the engine of a built pipeline, from what lies in the repository alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triptych.base.cache import cached_stage, code_hash, key_of, sha256_of
from triptych.base.errors import Progress, UserError
from triptych.base.onnx_files import MODEL_FILE, hashes_of_graph
from triptych.base.tensors import ROW_STRIDE
from triptych.core.engine.api import Api
from triptych.core.engine.engine_file import open_engine
from triptych.core.engine.engine_runner import EngineError, EngineRunner
from triptych.core.engine.gpu import BuildGpu, read_gpu
from triptych.core.engine.inspection import Inspection, inspect
from triptych.core.engine.make import make_engine
from triptych.core.engine.rehearsal import GET_IT, rehearse
from triptych.core.engine.request import Request, make_request
from triptych.core.engine.timing import timing_file
from triptych.repository.lock import (
    FIGURES_FILE,
    LOCK_FILE,
    PLAN_FILE,
    SAMPLES_FILE,
    Lock,
    find_lock,
    read_lock,
)
from triptych.repository.records import (
    EngineCheck,
    EngineRecord,
    GateResult,
    Rehearsal,
    plain_record,
    read_record,
)
from triptych.repository.render import Content
from triptych.repository.store import write_models
from triptych.spec.engine_spec import EnginePlan

CODE = ("core/engine/*.py", "core/gate/*.py")
INSPECTION_FILE = "inspection.json"


class EngineFailure(Exception):
    """The engine computes something else than its graph: nothing was written."""

    def __init__(self, name: str, gate: GateResult) -> None:
        self.name = name
        self.gate = gate
        failures = "; ".join(gate.failures)
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
    record: EngineRecord

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return plain_record(self)


@dataclass(frozen=True)
class RehearsedEngine:
    """What became of the rehearsal of a pipeline's engine; see `BuiltEngine`."""

    pipeline: str
    owner: str
    changed: tuple[str, ...]
    record: Rehearsal

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return plain_record(self)


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
    return _Stage(repository, name, progress).run()


def rehearse_engine(repository: Path, name: str, progress: Progress) -> RehearsedEngine:
    """Rehearse the engine of a built pipeline, and put the result into its lock.

    For the arguments see `build_engine`, for a rehearsal `engine.rehearsal`.

    Raises:
        UserError: there is no engine to build, TensorRT for RTX is not installed, or it refuses
            the graph: the lock stays as it is.
    """
    return _Stage(repository, name, progress).rehearse()


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

    def __init__(self, repository: Path, name: str, progress: Progress) -> None:
        lock = read_lock(repository, name)
        owner = lock.spec.core.share or name
        if owner != name:
            progress("engine", f"{name} uses the core of {owner}: its engine counts")
            lock = read_lock(repository, owner)
        self._repository = repository
        self._name = name
        self._owner = owner
        self._lock = lock
        self._progress = progress
        self._plan, self._core = _planned(owner, lock), lock.plan.core
        self._model = f"{owner}_core"
        self._onnx = repository / self._model / "1" / MODEL_FILE
        self._samples = repository / owner / SAMPLES_FILE

    def run(self) -> BuiltEngine:
        files = self._check_files()
        api, gpu = Api(), read_gpu()
        plan_path = f"{self._model}/1/{PLAN_FILE}"
        key = self._key(files, plan_path, api, gpu)
        there = self._lock.engine
        plan_file = self._repository / plan_path
        if there is not None and there.key == key and _is(plan_file, there.plan_sha256):
            self._progress("engine", f"{plan_path}: up to date")
            return BuiltEngine(self._name, self._owner, (), there)
        request = make_request(self._onnx, self._plan, api)
        built, inspection = self._built(request, api, gpu, key)
        check = self._check(request, built.read_bytes())
        options = self._plan.options
        record = EngineRecord(
            key=key,
            onnx_sha256=files[f"{self._model}/1/{MODEL_FILE}"],
            plan_sha256=sha256_of(built),
            tensorrt=api.version,
            cuda=gpu.cuda,
            driver=gpu.driver,
            gpu=gpu.name,
            compute_capability=gpu.compute_capability,
            version_compatible=options["version_compatible"],
            hardware=options["hardware"],
            precision=self._plan.precision,
            matmuls=inspection.matmuls,
            witness=inspection.witness,
            profiles=tuple(inspection.profiles),
            check=check,
        )
        hashes = dict(sorted({**self._lock.files, plan_path: record.plan_sha256}.items()))
        lock = replace(self._lock, engine=record, files=hashes)
        changed = self._write(lock, {plan_path: built})
        return BuiltEngine(self._name, self._owner, changed, record)

    def rehearse(self) -> RehearsedEngine:
        files = self._check_files()
        there, conversion = self._lock.engine, self._lock.gate.conversion
        folder = f"{self._model}/1/"
        record = rehearse(
            self._onnx,
            hashes_of_graph({path.removeprefix(folder): files[path] for path in files}),
            self._plan,
            self._progress,
            fp32_products=() if conversion is None else conversion.fp32_products,
            gpu="" if there is None else there.compute_capability,
        )
        if record is None:
            raise UserError("TensorRT for RTX", "must be installed for a rehearsal", remedy=GET_IT)
        changed = self._write(replace(self._lock, rehearsal=record), {})
        return RehearsedEngine(self._name, self._owner, changed, record)

    def _check_files(self) -> dict[str, str]:
        """Hashes of the files of core and ensemble, as the lock has them and the disk, too.

        Raises:
            UserError: the disk has something else, or nothing.
        """
        hashes = self._lock.files
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

    def _key(self, files: Mapping[str, str], plan_path: str, api: Api, gpu: BuildGpu) -> str:
        """Hash of all that decides the engine and its check."""
        folder = plan_path.rpartition("/")[0]
        return key_of(
            "engine",
            {
                "files": {path: files[path] for path in files if path.startswith(folder)},
                "samples": files.get(f"{self._owner}/{SAMPLES_FILE}"),
                "plan": plain_record(self._plan),
                "tensorrt": api.version,
                "gpu": [gpu.name, gpu.compute_capability],
                "code": code_hash(*CODE),
            },
        )

    def _built(
        self, request: Request, api: Api, gpu: BuildGpu, key: str
    ) -> tuple[Path, Inspection]:
        """The plan, inspected, and what the inspection found."""

        def tell(line: str) -> None:
            self._progress("engine", line)

        def work(target: Path) -> None:
            times = timing_file(api.version, gpu)
            plan = make_engine(api, request, timing_file=times, tell=tell)
            opened = open_engine(plan, host_code=request.options["version_compatible"])
            found = inspect(opened, request, len(plan))
            (target / PLAN_FILE).write_bytes(plan)
            (target / INSPECTION_FILE).write_text(json.dumps(plain_record(found)), encoding="utf-8")

        try:
            folder, cached, _ = cached_stage("engine", {"key": key}, work, self._progress)
        except EngineError as error:
            raise UserError(
                PLAN_FILE,
                "must be loaded by the TensorRT that built it",
                given=error,
                remedy="Try another release of TensorRT",
            ) from error
        text = (folder / INSPECTION_FILE).read_text(encoding="utf-8")
        found = read_record(Inspection, json.loads(text))
        size = (folder / PLAN_FILE).stat().st_size / 1e6
        tell(f"{PLAN_FILE}, {size:.1f} MB, {_counts(found)}{' (cached)' if cached else ''}")
        return folder / PLAN_FILE, found

    def _check(self, request: Request, plan: bytes) -> EngineCheck:
        """The engine against the graph, on the rows that the build left.

        Raises:
            EngineFailure: they differ.
        """
        from triptych.core.engine.parity import check_engine
        from triptych.core.samples_file import read_samples

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
        values = [verdict for verdict in result.verdicts if math.isfinite(verdict.value)]
        figures = ", ".join(f"{verdict.metric} {verdict.value:.3g}" for verdict in values)
        self._progress("check", f"{'passed' if result.passed else 'FAILED'}: {figures}")
        if not result.passed:
            raise EngineFailure(self._owner, result)
        return EngineCheck(result.precision, result.rows, result.verdicts, result.notes)

    def _write(self, lock: Lock, made: Mapping[str, Path]) -> tuple[str, ...]:
        """Swap the lock and what was made into the repository, if it is still as it was read."""
        if find_lock(self._repository, self._owner) != self._lock:
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
            if file.is_file() and file.parent.name != "__pycache__" and file.name != FIGURES_FILE
        }
        files |= {**made, f"{self._owner}/{LOCK_FILE}": lock.as_bytes()}
        changed = write_models(self._repository, files)
        self._progress("write", f"{self._repository}: {', '.join(changed) or 'up to date'}")
        return tuple(changed)


def _planned(name: str, lock: Lock) -> EnginePlan:
    """What the engine is built from.

    Raises:
        UserError: the core needs no engine.
    """
    if lock.plan.engine is None or lock.spec.core.backend != "tensorrt":
        raise UserError(
            "core.backend",
            "must be tensorrt for an engine",
            given=f"{lock.spec.core.backend} in {name}",
            remedy=f"Set it in pipeline.yaml and run `triptych build {name}`",
        )
    return lock.plan.engine


def _is(file: Path, digest: str) -> bool:
    return file.is_file() and sha256_of(file) == digest


def _counts(found: Inspection) -> str:
    counts = [f"{count} {kind}" for kind, count in found.matmuls.items() if count]
    return f"products: {', '.join(counts) or 'none'}"
