"""The build manifest (``triptych.lock.json``): inputs, results and gate of a build."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    with_config,
)

from triptych.base.errors import UserError
from triptych.container.manifests import MANIFEST_FILE as MANIFEST_FILE
from triptych.container.manifests import ManifestError, read_manifest_file
from triptych.repository.records import DryRun, EngineRecord, GateResult, plain_data
from triptych.runtime.triton_io import read_settings
from triptych.spec.any_spec import AnySpec
from triptych.spec.backends import Precision
from triptych.spec.engine_plan import EnginePlan
from triptych.spec.generation_fields import GenerationSpec, Text2TextSpec
from triptych.spec.kind import MODEL, Kind, kind_of_task
from triptych.spec.model_fields import ModelSpec
from triptych.spec.plan import Layout, Plan
from triptych.spec.spec import EncoderSpec, not_known_here
from triptych.spec.traffic import Lengths
from triptych.tasks.task import Core

PLAN_FILE = "model.plan"
"""Engine of a TensorRT core, beside the ONNX file it was built from."""

SAMPLES_FILE = "engine_samples.npz"
"""Core rows to check an engine with, beside the build manifest."""

FIGURES_FILE = "BENCH.md"
"""Measurements of `bench` for a build, beside the build manifest but not listed in it. They are
removed with the build."""

SCHEMA = 5

NOT_A_MANIFEST = "is not a build manifest of this release of triptych"


@dataclass(frozen=True)
class PlanRecord:
    """The part of the plan that later stages need; see `Plan`."""

    layout: Layout
    not_packed_reason: str  # Reason why the layout is not packed as the spec requests; else empty
    max_length: int
    bucket_edges: tuple[int, ...]
    max_batch_size: int
    core: Core
    engine: EnginePlan | None  # Plan of the engine; None if no engine is built
    # Estimated MiB of the largest batch in addition to the weights; None for images.
    batch_mib: float | None = None


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, kw_only=True)
class BuildManifest:
    """The record of one build. Only `built_at` differs between two builds of the same inputs."""

    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    """Fields that the file omits if they have no value."""

    schema: int = SCHEMA  # Version of the file format
    built_at: str = field(default_factory=_now)  # Time of the build, UTC, ISO 8601
    spec: AnySpec
    model_sha256: str
    architecture: str
    versions: Mapping[str, str]  # Versions of the libraries that made the artifact, by name
    # Statistics of the traffic. Text rows: rows, mean and p99 of their tokens, share of truncated
    # rows, diversity. Prompts: prompts, mean of their tokens.
    traffic: Mapping[str, int | float]
    gate: GateResult
    files: Mapping[str, str]  # SHA-256 in hex of each file, by path relative to the repository

    def as_bytes(self) -> bytes:
        """Return the content of the manifest file."""
        plain: dict[str, object] = plain_data(
            {
                each.name: _plain(getattr(self, each.name))
                for each in fields(self)
                if each.name not in ("spec", "gate", "files")
            }
        )
        plain = {name: plain[name] for name in plain if plain[name] or name not in self.OPTIONAL}
        plain["spec"] = self.spec.model_dump(mode="json", exclude={"folder"})
        plain["gate"] = self.gate.without_texts().as_dict()
        plain["files"] = dict(sorted(self.files.items()))
        return print_manifest(plain)


def print_manifest(plain: Mapping[str, object]) -> bytes:
    """Return the content of a manifest file."""
    return (json.dumps(plain, indent=2, ensure_ascii=False) + "\n").encode()


def _kind_name(spec: Any) -> str:
    task = spec.get("task") if isinstance(spec, dict) else spec.task
    return (Kind.MODEL if task == MODEL else Kind.ENCODER).name


@dataclass(frozen=True)
class CoreRecord:
    """Record of one of several cores; see `CompiledManifest`."""

    core_key: str
    source_key: str
    precision: Precision


@dataclass(frozen=True, kw_only=True)
class CompiledManifest(BuildManifest):
    """The record of one build with a compiled graph as its core."""

    OPTIONAL = ("cores", "instruction_sets", "attention", "space")

    spec: Annotated[
        Annotated[EncoderSpec, Tag(Kind.ENCODER.name)] | Annotated[ModelSpec, Tag(Kind.MODEL.name)],
        Discriminator(_kind_name),
    ]
    core_key: str  # Hash of everything that decided the core
    source_key: str  # Hash of everything that decided the fp32 graph it was made of
    plan: PlanRecord
    engine: EngineRecord | None  # The engine in the repository, if it was built of this core
    dry_run: DryRun | None = None  # Result of the dry-run engine build; None if there was none
    # Record of each core by the name of its model, if there are several models.
    cores: Mapping[str, CoreRecord] = field(default_factory=dict)
    # Instruction sets of this processor that made the precision faster, where it was chosen or
    # checked for a CPU; see `container.processor`.
    instruction_sets: tuple[str, ...] = ()
    # Operators that compute attention for a GPU, with the reason; empty for a CPU.
    attention: str = ""
    space: str = ""  # Vector space that the pipeline has with its pair; empty without a pair


@dataclass(frozen=True)
class TextPlanRecord:
    """The part of the plan of a pipeline that generates text."""

    max_length: int  # Maximum number of tokens of a prompt, as `building.generation.inputs`


@dataclass(frozen=True, kw_only=True)
class TextManifest(BuildManifest):
    """The record of one build of a pipeline that generates text."""

    OPTIONAL = ("adapters", "quantization")

    spec: Annotated[GenerationSpec | Text2TextSpec, Field(discriminator="task")]
    plan: TextPlanRecord
    # Hash of each LoRA adapter by its name.
    adapters: Mapping[str, str] = field(default_factory=dict)
    # Name and description of the quantization of the model's weights, if any.
    quantization: Mapping[str, str] | None = None


Manifest = TypeVar("Manifest", bound=BuildManifest)


def with_time_of(manifest: Manifest, previous: BuildManifest | None) -> Manifest:
    """Return the manifest with the time of the previous build if all else is equal."""
    if previous is not None:
        dated = replace(manifest, built_at=previous.built_at)
        if dated.as_bytes() == previous.as_bytes():
            return dated
    return manifest


def record_plan(plan: Plan, gate: GateResult, not_packed_reason: str) -> PlanRecord:
    """Return the record of a plan; see `PlanRecord`."""
    return PlanRecord(
        layout=plan.layout,
        not_packed_reason=not_packed_reason,
        max_length=plan.max_length,
        bucket_edges=plan.bucket_edges,
        max_batch_size=plan.max_batch_size,
        core=plan.core,
        engine=planned_engine(plan, gate),
        batch_mib=None if plan.batch_mib is None else round(plan.batch_mib, 1),
    )


def record_traffic(
    lengths: Lengths | None, variety: Mapping[str, int | float]
) -> dict[str, int | float]:
    """Return the statistics of a manifest; `variety` describes the gate's texts."""
    if lengths is None:
        return dict(variety)
    return {
        **variety,
        "rows": lengths.rows,
        "mean_tokens": round(lengths.mean, 2),
        "p99_tokens": lengths.quantile(0.99),
        "truncated_share": round(lengths.truncated_share, 4),
    }


def planned_engine(plan: Plan, gate: GateResult) -> EnginePlan | None:
    """Return the plan of the engine to build; None if no engine is built."""
    if plan.engine is None or not plan.builds_engine or plan.spec.core.shared_from is not None:
        return None
    # The spec may leave the precision open; use the one that was built.
    return replace(plan.engine, precision=gate.precision)


def read_manifest(repository: Path, pipeline: str, expected: type[Manifest]) -> Manifest:
    """Return the manifest of a built pipeline.

    Args:
        repository: Folder of the models.
        pipeline: Name of the pipeline.
        expected: Manifest of one kind of pipeline; `BuildManifest` accepts every kind.

    Raises:
        UserError: There is no manifest, it is damaged or of another release of triptych, or the
            pipeline is of another kind.
        PermissionError: This user may not read it.
    """
    path = repository / pipeline / MANIFEST_FILE
    named = f"{pipeline}/{MANIFEST_FILE}"
    rebuild = f"Run `triptych build {pipeline}` again"
    try:
        content = read_manifest_file(path)
    except ManifestError as error:
        if isinstance(error.__cause__, PermissionError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, OSError):
            raise UserError(
                pipeline,
                f"is not built into {repository}",
                given="no build manifest",
                remedy=f"Run `triptych build {pipeline}` first",
            ) from error
        raise UserError(named, NOT_A_MANIFEST, given=error, remedy=rebuild) from error
    task = _task_in(content)
    try:
        # JSON has lists where the fields are tuples, which a strict model refuses.
        manifest = _adapter(kind_of_task(task)).validate_python(content, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        given = f"{where}: {first['msg']}"
        raise UserError(named, NOT_A_MANIFEST, given=given, remedy=rebuild) from error
    if manifest.schema != SCHEMA:
        raise UserError(
            named, f"has another schema than {SCHEMA}", given=manifest.schema, remedy=rebuild
        )
    if not isinstance(manifest, expected):
        raise not_known_here(f"{named}: task", task)
    return manifest


@cache
def _adapter(kind: Kind) -> TypeAdapter[BuildManifest]:
    return TypeAdapter(CompiledManifest if kind.is_compiled else TextManifest)


def find_manifest(repository: Path, pipeline: str, expected: type[Manifest]) -> Manifest | None:
    """Return the result of `read_manifest`, or None if there is no such manifest."""
    try:
        return read_manifest(repository, pipeline, expected)
    except UserError:
        return None


def kind_of_build(repository: Path, pipeline: str) -> Kind:
    """Return the kind of a built pipeline; `Kind.ENCODER` if there is no readable manifest."""
    return kind_of_task(_task_in(read_manifest_data(repository, pipeline)))


def read_manifest_data(repository: Path, pipeline: str) -> dict[str, Any]:
    """Return the manifest of a build of any kind as plain data; empty if it is unreadable."""
    try:
        return read_manifest_file(repository / pipeline / MANIFEST_FILE)
    except ManifestError:
        return {}


def find_settings(repository: Path, pipeline: str) -> dict[str, Any]:
    """Return the settings of the first step of a built pipeline; empty if there are none."""
    try:
        return read_settings(repository / f"{pipeline}_preprocess" / "1")
    except (OSError, ValueError):
        return {}


def build_id(repository: Path, pipeline: str) -> str:
    """Return the unique ID of a build: the SHA-256 of its manifest; empty if there is none."""
    path = repository / pipeline / MANIFEST_FILE
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _task_in(content: Mapping[str, object]) -> str:
    """Return the task in a manifest of any kind; empty if there is none."""
    spec = content.get("spec")
    return str(spec.get("task", "")) if isinstance(spec, dict) else ""


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
