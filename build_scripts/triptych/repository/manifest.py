"""The build manifest (``triptych.lock.json``): inputs, results and gate of a build."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, ConfigDict, Field, TypeAdapter, ValidationError, with_config

from triptych.base.errors import UserError
from triptych.container.manifests import MANIFEST_FILE as MANIFEST_FILE
from triptych.container.manifests import ManifestError, read_manifest_file
from triptych.repository.records import DryRun, EngineRecord, GateResult, plain_data
from triptych.spec.any_spec import READERS, AnySpec
from triptych.spec.engine_plan import EnginePlan
from triptych.spec.kind import GENERATING, Kind, kind_of_task
from triptych.spec.plan import Layout, Plan
from triptych.spec.spec import PipelineSpec, not_known_here
from triptych.spec.tasks.task import Core

PLAN_FILE = "model.plan"
"""Engine of a TensorRT core, beside the ONNX file it was built from."""

SAMPLES_FILE = "engine_samples.npz"
"""Core rows to check an engine with, beside the build manifest."""

FIGURES_FILE = "BENCH.md"
"""Measurements of `bench` for a build, beside the build manifest but not listed in it. They are
removed with the build."""

SCHEMA = 5


@dataclass(frozen=True)
class PlanRecord:
    """The part of the plan that later stages need; see `Plan`.

    Attributes:
        not_packed_reason: Reason why the layout is not packed as the spec requests; else empty.
        engine: Plan of the engine; None if no engine is built.
        batch_mib: Estimated MiB of the largest batch in addition to the weights; None for images.
    """

    layout: Layout
    not_packed_reason: str
    max_length: int
    bucket_edges: tuple[int, ...]
    max_batch_size: int
    core: Core
    engine: EnginePlan | None
    batch_mib: float | None = None


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class BuildManifest:
    """The record of one build. Only `built_at` differs between two builds of the same inputs.

    Attributes:
        schema: Version of the file format.
        built_at: Time of the build, UTC, ISO 8601.
        versions: Versions of the libraries that made the artifact, by name.
        core_key: Hash of everything that decided the core.
        source_key: Hash of everything that decided the fp32 graph it was made of.
        engine: The engine in the repository, if it was built of this core.
        traffic: Statistics of text traffic: rows, mean and p99 of their tokens, share of truncated
            rows, diversity.
        dry_run: Result of the dry-run engine build; None if there was none. Older manifests call it
            ``rehearsal``.
        files: SHA-256 in hex of each file, by path relative to the repository.
    """

    schema: int
    built_at: str
    spec: PipelineSpec
    model_sha256: str
    architecture: str
    versions: Mapping[str, str]
    core_key: str
    source_key: str
    plan: PlanRecord
    engine: EngineRecord | None
    traffic: Mapping[str, int | float]
    gate: GateResult
    dry_run: Annotated[
        DryRun | None, Field(validation_alias=AliasChoices("dry_run", "rehearsal"))
    ] = None
    files: Mapping[str, str] = field(default_factory=dict)

    def as_bytes(self) -> bytes:
        """Return the content of the manifest file."""
        plain: dict[str, Any] = plain_data({**_fields(self), "spec": None, "gate": None})
        for name in ("plan", "engine", "dry_run"):
            record = getattr(self, name)
            plain[name] = None if record is None else plain_data(asdict(record))
        plain["spec"] = self.spec.model_dump(mode="json", exclude={"folder"})
        plain["gate"] = self.gate.as_dict()
        return (json.dumps(plain, indent=2, ensure_ascii=False) + "\n").encode()


def make_manifest(
    plan: Plan,
    files: Mapping[str, str],
    *,
    core_key: str,
    source_key: str,
    not_packed_reason: str,
    versions: Mapping[str, str],
    gate: GateResult,
    engine: EngineRecord | None,
    dry_run: DryRun | None,
    variety: Mapping[str, int | float],
    previous: BuildManifest | None,
) -> BuildManifest:
    """Return the manifest of a build; it keeps the time of `previous` if all else is equal.

    See `BuildManifest` and `PlanRecord` for the arguments; `variety` describes the gate's texts.
    """
    traffic: dict[str, int | float] = {**variety}
    if (lengths := plan.lengths) is not None:
        traffic |= {
            "rows": lengths.rows,
            "mean_tokens": round(lengths.mean, 2),
            "p99_tokens": lengths.quantile(0.99),
            "truncated_share": round(lengths.truncated_share, 4),
        }
    lock = BuildManifest(
        schema=SCHEMA,
        built_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        spec=plan.spec,
        model_sha256=plan.facts.sha256,
        architecture=plan.facts.architecture,
        versions=dict(versions),
        core_key=core_key,
        source_key=source_key,
        plan=PlanRecord(
            layout=plan.layout,
            not_packed_reason=not_packed_reason,
            max_length=plan.max_length,
            bucket_edges=plan.bucket_edges,
            max_batch_size=plan.max_batch_size,
            core=plan.core,
            engine=planned_engine(plan, gate),
            batch_mib=None if plan.batch_mib is None else round(plan.batch_mib, 1),
        ),
        engine=engine,
        dry_run=dry_run,
        traffic=traffic,
        gate=gate,
        files=dict(sorted(files.items())),
    )
    if previous is not None:
        dated = replace(lock, built_at=previous.built_at)
        if dated.as_bytes() == previous.as_bytes():
            return dated
    return lock


def planned_engine(plan: Plan, gate: GateResult) -> EnginePlan | None:
    """Return the plan of the engine to build; None if no engine is built."""
    if plan.engine is None or not plan.builds_engine or plan.spec.core.shared_from is not None:
        return None
    # The spec may leave the precision open; use the one that was built.
    return replace(plan.engine, precision=gate.precision)


def read_manifest(repository: Path, pipeline: str) -> BuildManifest:
    """Return the manifest of a built pipeline.

    Raises:
        UserError: There is no manifest, or it is damaged or of another release of triptych.
    """
    path = repository / pipeline / MANIFEST_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            pipeline,
            f"is not built into {repository}",
            given="no build manifest",
            remedy=f"Run `triptych build {pipeline}` first",
        ) from error
    try:
        lock = TypeAdapter(BuildManifest).validate_json(content)
    except ValidationError as error:
        task = _task_in(read_manifest_data(repository, pipeline))
        if task in GENERATING:
            raise not_known_here(f"{pipeline}/{MANIFEST_FILE}: task", task) from error
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(
            f"{pipeline}/{MANIFEST_FILE}",
            "is not a build manifest of this release of triptych",
            given=f"{where}: {first['msg']}",
            remedy=f"Run `triptych build {pipeline}` again",
        ) from error
    if lock.schema != SCHEMA:
        raise UserError(
            f"{pipeline}/{MANIFEST_FILE}",
            f"has another schema than {SCHEMA}",
            given=lock.schema,
            remedy=f"Run `triptych build {pipeline}` again",
        )
    return lock


def find_manifest(repository: Path, pipeline: str) -> BuildManifest | None:
    """Return the result of `read_manifest`, or None if there is no readable manifest."""
    try:
        return read_manifest(repository, pipeline)
    except UserError:
        return None


def kind_of_build(repository: Path, pipeline: str) -> Kind:
    """Return the kind of a built pipeline; `Kind.ENCODER` if there is no readable manifest."""
    return kind_of_task(_task_in(read_manifest_data(repository, pipeline)))


def read_built_spec(repository: Path, pipeline: str) -> AnySpec:
    """Return the spec of a built pipeline of any kind.

    Raises:
        UserError: Nothing is built, or its manifest is damaged or of another release of triptych.
    """
    content = read_manifest_data(repository, pipeline)
    kind = kind_of_task(_task_in(content))
    if kind is Kind.ENCODER:
        return read_manifest(repository, pipeline).spec
    try:
        return READERS[kind].model.model_validate_json(json.dumps(content["spec"]))
    except ValidationError as error:
        raise UserError(
            f"{pipeline}/{MANIFEST_FILE}",
            "is not a build manifest of this release of triptych",
            given=error.errors(include_url=False)[0]["msg"],
            remedy=f"Run `triptych build {pipeline}` again",
        ) from error


def find_built_spec(repository: Path, pipeline: str) -> AnySpec | None:
    """Return the result of `read_built_spec`, or None if there is no readable manifest."""
    try:
        return read_built_spec(repository, pipeline)
    except UserError:
        return None


def read_manifest_data(repository: Path, pipeline: str) -> dict[str, Any]:
    """Return the manifest of a build of any kind as plain data; empty if it is unreadable."""
    try:
        return read_manifest_file(repository / pipeline / MANIFEST_FILE)
    except ManifestError:
        return {}


def build_id(repository: Path, pipeline: str) -> str:
    """Return the unique ID of a build: the SHA-256 of its manifest; empty if there is none."""
    path = repository / pipeline / MANIFEST_FILE
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _task_in(content: Mapping[str, Any]) -> str:
    """Return the task in a manifest of any kind; empty if there is none."""
    spec = content.get("spec")
    return str(spec.get("task", "")) if isinstance(spec, dict) else ""


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}
