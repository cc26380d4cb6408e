"""`triptych engine`: build the engine of a built pipeline from the repository alone.

The module also stores rows for the engine's check during `triptych build`, and finds an engine that
still fits a new build.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from triptych.base.cache import cached_stage, code_hash, key_of, sha256_of
from triptych.base.errors import Progress, UserError
from triptych.base.extras import install_command
from triptych.base.onnx_graph import MODEL_FILE, hashes_of_graph
from triptych.base.tensors import ROW_STRIDE
from triptych.core.engine.api import Api
from triptych.core.engine.cuda import BuildGpu, EngineError, read_gpu
from triptych.core.engine.dry_run import EXTRA, run_dry_build
from triptych.core.engine.inspection import Inspection, inspect
from triptych.core.engine.make import Request, make_engine, make_request, timing_file
from triptych.core.engine.parity import check_engine
from triptych.core.engine.runner import EngineRunner, open_engine
from triptych.core.inputs import PipelineInputs
from triptych.core.requests import hash_rows, read_samples, rows_of, write_samples
from triptych.repository.manifest import (
    FIGURES_FILE,
    MANIFEST_FILE,
    PLAN_FILE,
    SAMPLES_FILE,
    CompiledManifest,
    find_manifest,
    read_manifest,
)
from triptych.repository.records import (
    DryRun,
    EngineCheck,
    EngineRecord,
    GateResult,
    plain_record,
    read_record,
)
from triptych.repository.render import Content
from triptych.repository.store import check_target, write_models
from triptych.spec.engine_plan import EnginePlan
from triptych.spec.plan import Plan

CHECKED_REQUESTS = 64
"""Maximum number of traffic requests to check an engine with, in addition to the edge cases."""


class ReusableEngine(NamedTuple):
    """An engine in the repository that was built of the same core."""

    path: str  # Path of the plan, relative to the repository
    file: Path  # Path of the plan
    record: EngineRecord  # Record of the engine's build


def write_engine_samples(inputs: PipelineInputs, progress: Progress) -> Path | None:
    """Return a file of core rows for the engine's check; None if no engine will be built."""
    plan = inputs.plan
    if not plan.builds_engine or plan.spec.core.shared_from is not None:
        return None
    requests = inputs.requests
    made = [request for request in requests if request.edge]
    real = [request for request in requests if not request.edge]
    rows = rows_of([*made, *real[:CHECKED_REQUESTS]])

    def work(target: Path) -> None:
        write_samples(target / SAMPLES_FILE, rows)

    stage = {"rows": hash_rows(rows), "code": code_hash("core/requests.py")}
    return cached_stage("samples", stage, work, progress).folder / SAMPLES_FILE


def find_reusable_engine(
    repository: Path,
    plan: Plan,
    previous: CompiledManifest | None,
    hashes: Mapping[str, str],
    planned: EnginePlan | None,
) -> ReusableEngine | None:
    """Return the engine in the repository if everything that it was built from is unchanged.

    Args:
        repository: Folder of the models.
        previous: Build manifest of the active build.
        hashes: Hashes of the new build's files, without an engine.
    """
    folder = f"{plan.step('core')}/1"
    path, file = f"{folder}/{PLAN_FILE}", repository / folder / PLAN_FILE
    if previous is None or previous.engine is None or not file.is_file():
        return None
    if previous.plan.engine != planned:
        return None
    core_files = [name for name in hashes if name.startswith(f"{folder}/")]
    if any(previous.files.get(name) != hashes[name] for name in core_files):
        return None
    if sha256_of(file) != previous.engine.plan_sha256:
        return None
    return ReusableEngine(path, file, previous.engine)


CODE = (
    "core/engine/*.py",
    "core/gate/check.py",
    "core/gate/differences.py",
    "core/gate/runs.py",
    "tasks/results.py",
)
INSPECTION_FILE = "inspection.json"


class EngineFailure(Exception):
    """Raised if the engine computes something else than its graph; nothing was written."""

    def __init__(self, name: str, gate: GateResult) -> None:
        self.name = name
        self.gate = gate
        failures = "; ".join(gate.failures)
        super().__init__(f"the results of {name}'s engine differ from its graph's: {failures}")


Record = TypeVar("Record", EngineRecord, DryRun)


@dataclass(frozen=True)
class EngineResult(Generic[Record]):
    """Result of an engine build, or of its dry run."""

    pipeline: str  # Name of the pipeline
    owner: str  # Pipeline that owns the core; another one if the core is shared
    changed: tuple[str, ...]  # Models that were written; empty if everything was up to date
    record: Record  # Record of the build in the build manifest

    def as_dict(self) -> dict[str, object]:
        """Return the fields as plain data, for ``--json``."""
        return plain_record(self)


def missing_for_engines() -> str:
    """Return the reason why this machine cannot build engines; empty if it can."""
    try:
        Api()
        read_gpu()
    except UserError as error:
        return f"{error.field} {error.rule}"
    return ""


def build_engine(repository: Path, name: str, progress: Progress) -> EngineResult[EngineRecord]:
    """Build, inspect and check the engine of a pipeline, and write it beside its ONNX graph.

    Nothing is written unless every check passed, and nothing is done if nothing has changed.

    Args:
        repository: Folder of the models.
        name: Name of the pipeline. If it shares a core, the owner's engine is built.

    Raises:
        EngineFailure: The engine's results differ from the graph's.
        UserError: There is nothing to build, TensorRT or a GPU is missing, or TensorRT rejects the
            graph.
    """
    return _Stage(repository, name, progress).run()


def dry_run_engine(repository: Path, name: str, progress: Progress) -> EngineResult[DryRun]:
    """Try the engine build of a built pipeline, and store the result in its build manifest.

    See `build_engine` for the arguments and `engine.dry_run` for a dry run.

    Raises:
        UserError: There is no engine to build, TensorRT for RTX is not installed, or it rejects the
            graph. The build manifest is then unchanged.
    """
    return _Stage(repository, name, progress).dry_run()


def build_engine_here(repository: Path, name: str, progress: Progress) -> tuple[str, ...]:
    """Call `build_engine` if this machine can build engines; else report what to do.

    Returns:
        Names of the models that changed.
    """
    missing = missing_for_engines()
    if missing:
        progress(
            "engine", f"skipped ({missing}); run `triptych engine {name}` on the target machine"
        )
        return ()
    return build_engine(repository, name, progress).changed


class _Stage:
    """The engine stage of one core."""

    def __init__(self, repository: Path, name: str, progress: Progress) -> None:
        check_target(repository)
        manifest = read_manifest(repository, name, CompiledManifest)
        owner = manifest.spec.core.shared_from or name
        if owner != name:
            progress("engine", f"{name} shares the core of {owner}: building its engine")
            manifest = read_manifest(repository, owner, CompiledManifest)
        self._repository = repository
        self._name = name
        self._owner = owner
        self._manifest = manifest
        self._progress = progress
        self._plan, self._core = _planned(owner, manifest), manifest.plan.core
        self._model = f"{owner}_core"
        self._onnx = repository / self._model / "1" / MODEL_FILE
        self._samples = repository / owner / SAMPLES_FILE

    def run(self) -> EngineResult[EngineRecord]:
        files = self._check_files()
        api, gpu = Api(), read_gpu()
        plan_path = f"{self._model}/1/{PLAN_FILE}"
        key = self._key(files, plan_path, api, gpu)
        there = self._manifest.engine
        plan_file = self._repository / plan_path
        if there is not None and there.key == key and _is(plan_file, there.plan_sha256):
            self._progress("engine", f"{plan_path}: up to date")
            return EngineResult(self._name, self._owner, (), there)
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
        hashes = dict(sorted({**self._manifest.files, plan_path: record.plan_sha256}.items()))
        manifest = replace(self._manifest, engine=record, files=hashes)
        changed = self._write(manifest, {plan_path: built})
        return EngineResult(self._name, self._owner, changed, record)

    def dry_run(self) -> EngineResult[DryRun]:
        files = self._check_files()
        there, conversion = self._manifest.engine, self._manifest.gate.conversion
        folder = f"{self._model}/1/"
        record = run_dry_build(
            self._onnx,
            hashes_of_graph({path.removeprefix(folder): files[path] for path in files}),
            self._plan,
            self._progress,
            fp32_products=() if conversion is None else conversion.fp32_products,
            gpu="" if there is None else there.compute_capability,
        )
        if record is None:
            raise UserError(
                "TensorRT for RTX", "is not installed", remedy=f"Run `{install_command(EXTRA)}`"
            )
        changed = self._write(replace(self._manifest, dry_run=record), {})
        return EngineResult(self._name, self._owner, changed, record)

    def _check_files(self) -> dict[str, str]:
        """Return the hashes of the core's and ensemble's files, after checking the files.

        Raises:
            UserError: A file on disk differs from the build manifest or is missing.
        """
        hashes = self._manifest.files
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
                    f"differs from the file in {self._owner}/{MANIFEST_FILE}",
                    given="another file, or no file",
                    remedy=f"Run `triptych build {self._owner}` again",
                )
        return own

    def _key(self, files: Mapping[str, str], plan_path: str, api: Api, gpu: BuildGpu) -> str:
        """Return the hash of everything that decides the engine and its check."""
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
        """Return the plan and the result of its inspection."""

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
                "cannot be loaded by the TensorRT that built it",
                given=error,
                remedy="Try another release of TensorRT",
            ) from error
        text = (folder / INSPECTION_FILE).read_text(encoding="utf-8")
        found = read_record(Inspection, json.loads(text))
        size = (folder / PLAN_FILE).stat().st_size / 1e6
        tell(f"{PLAN_FILE}, {size:.1f} MB, {_counts(found)}{' (cached)' if cached else ''}")
        return folder / PLAN_FILE, found

    def _check(self, request: Request, plan: bytes) -> EngineCheck:
        """Compare the engine with the graph, on the rows that the build stored.

        Raises:
            EngineFailure: The results differ.
        """
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
                PLAN_FILE,
                "cannot run on this GPU",
                given=error,
                remedy="Stop other programs on the GPU",
            ) from error
        values = [verdict for verdict in result.verdicts if math.isfinite(verdict.value)]
        figures = ", ".join(f"{verdict.metric} {verdict.value:.3g}" for verdict in values)
        self._progress("check", f"{'passed' if result.passed else 'FAILED'}: {figures}")
        if not result.passed:
            raise EngineFailure(self._owner, result)
        return EngineCheck(result.precision, result.rows, result.verdicts, result.notes)

    def _write(self, manifest: CompiledManifest, made: Mapping[str, Path]) -> tuple[str, ...]:
        """Write the build manifest and new files, if the repository has not changed meanwhile."""
        if find_manifest(self._repository, self._owner, CompiledManifest) != self._manifest:
            raise UserError(
                f"{self._owner}/{MANIFEST_FILE}",
                "changed while the engine was built",
                given="another build ended meanwhile",
                remedy=f"Run `triptych engine {self._name}` again",
            )
        files: dict[str, Content] = {
            file.relative_to(self._repository).as_posix(): file
            for model in (self._model, self._owner)
            for file in sorted((self._repository / model).rglob("*"))
            if file.is_file() and file.parent.name != "__pycache__" and file.name != FIGURES_FILE
        }
        files |= {**made, f"{self._owner}/{MANIFEST_FILE}": manifest.as_bytes()}
        changed = write_models(self._repository, files)
        self._progress("write", f"{self._repository}: {', '.join(changed) or 'up to date'}")
        return tuple(changed)


def _planned(name: str, manifest: CompiledManifest) -> EnginePlan:
    """Return the plan of the engine.

    Raises:
        UserError: The core needs no engine.
    """
    if manifest.plan.engine is None or manifest.spec.core.backend != "tensorrt":
        raise UserError(
            "core.backend",
            "is not tensorrt, so there is no engine to build",
            given=f"{manifest.spec.core.backend} in {name}",
            remedy=f"Set it in pipeline.yaml and run `triptych build {name}`",
        )
    return manifest.plan.engine


def _is(file: Path, digest: str) -> bool:
    return file.is_file() and sha256_of(file) == digest


def _counts(found: Inspection) -> str:
    counts = [f"{count} {kind}" for kind, count in found.matmuls.items() if count]
    return f"products: {', '.join(counts) or 'none'}"
