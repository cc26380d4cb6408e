"""Write sampled rows into a pipeline's traffic, and build and activate a proposal of monitoring."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from triptych.base.cache import sha256_of
from triptych.base.errors import Progress, UserError
from triptych.base.files import os_errors_as_user_errors, scratch_folder, write_files
from triptych.building.build import BuildOutcome, build
from triptych.building.compiled import CompiledStages, read_compiled
from triptych.building.stages import BuildOptions
from triptych.core.gate_rows import CALIBRATION_ROWS, split_traffic
from triptych.core.inputs import PipelineInputs
from triptych.core.own_reader import OwnReader
from triptych.core.requests import MIN_RECOMMENDED_ROWS, hash_inputs
from triptych.operate.monitor.findings import list_edits
from triptych.operate.monitor.results import MonitorRun
from triptych.operate.monitor.sample import SampledRow, TrafficSample
from triptych.operate.tune.drift import Drift, check_drift
from triptych.operate.tune.new_traffic import tokenize_sample
from triptych.operate.tune.proposal import TunedProposal, estimate_effect
from triptych.repository.history import rollback
from triptych.repository.manifest import EncoderManifest, build_id, read_manifest
from triptych.repository.records import plain_data
from triptych.spec.any_spec import load_compiled
from triptych.spec.model_fields import is_own
from triptych.spec.plan import Plan
from triptych.spec.spec import SPEC_FILE
from triptych.spec.traffic import PARAMETERS, TRAFFIC_FILE, read_lines, read_traffic
from triptych.spec.tuned import TUNED_FILE, Tuned, read_tuned, tuned_text

Line = dict[str, Any]


@dataclass(frozen=True)
class TrafficChange:
    """Change of a traffic file.

    Attributes:
        file: Path of the file.
        before: Number of rows before the change.
        kept: Number of retained rows.
        added: Number of added rows.
        doubles: Number of sampled rows that repeat a row of the file or of the sample.
        gate: Number of rows for the gate, after and before the change.
        calibration: Number of rows for calibration, after and before the change.
        drift: Drift of the lengths, and the action it needs.
    """

    file: str
    before: int
    kept: int
    added: int
    doubles: int
    gate: tuple[int, int]
    calibration: tuple[int, int]
    drift: Drift | None

    def as_dict(self) -> dict[str, Any]:
        """Return the data for ``--json``."""
        fields = asdict(self) | {"drift": self.drift.as_dict() if self.drift else None}
        plain: dict[str, Any] = plain_data(fields)
        return plain


@dataclass(frozen=True)
class NewRows:
    """Lines of the traffic: all old lines, the retained ones, and the added ones."""

    old: list[Line]
    kept: list[Line]
    added: list[Line]
    doubles: int

    @property
    def text(self) -> str:
        """Text of the new traffic file."""
        rows = (*self.kept, *self.added)
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def choose_rows(
    inputs: PipelineInputs, sampled: Sequence[SampledRow], *, replace: bool, max_rows: int
) -> NewRows:
    """Return the rows of ``traffic.jsonl`` with the sample's rows added, or replaced by them.

    Each row occurs once. A hash of each row decides whether the gate or calibration uses it, so old
    rows keep their use. Of more than `max_rows` new rows, those with the lowest hashes are taken,
    which amounts to a random choice.

    Raises:
        UserError: The sample is empty, or the inputs are images.
    """
    plan = inputs.plan
    names = [tensor.name for tensor in plan.task.inputs]
    if any(tensor.content in ("image", "bytes") for tensor in plan.task.inputs):
        raise UserError(
            plan.spec.name,
            "is only supported for texts and numbers, because a file in the traffic is a path",
            given="files",
            remedy="Add files to the traffic by hand",
        )
    old = _read_lines(plan, names)
    if not sampled:
        raise UserError(
            plan.spec.name,
            "has no sampled rows",
            given="an empty sample",
            remedy="Serve with serving.sample set, or name the folder with --samples",
        )
    key_of: Callable[[Line], str] = partial(_key, names=names)
    if is_own(plan.spec):
        key_of = OwnReader(plan.spec, plan.task).key
    known = {} if replace else {key_of(row): row for row in old}
    new: dict[str, Line] = {}
    for sampled_row in sampled:
        row: Line = {name: sampled_row.inputs[name] for name in names}
        if sampled_row.parameters:
            row[PARAMETERS] = dict(sampled_row.parameters)
        key = key_of(row)
        if key not in known:
            new.setdefault(key, row)
    chosen = set(sorted(new)[:max_rows])
    added = [row for key, row in new.items() if key in chosen]
    return NewRows(old, [] if replace else old, added, len(sampled) - len(new))


def _read_lines(plan: Plan, names: Sequence[str]) -> list[Line]:
    """Return the lines of the traffic."""
    if is_own(plan.spec):
        lines = read_lines(plan.spec.folder / TRAFFIC_FILE)
        return [row for _, _, row in lines if row is not None]
    return [
        row.inputs | ({PARAMETERS: row.parameters} if row.parameters else {})
        for row in read_traffic(plan.spec.folder, list(names))
    ]


def take_rows(
    inputs: PipelineInputs, sample: TrafficSample, *, replace: bool, max_rows: int
) -> TrafficChange:
    """Write the sample's rows into ``traffic.jsonl``; see `choose_rows`.

    Raises:
        UserError: `choose_rows` fails, or the file cannot be written.
    """
    folder, names = inputs.plan.spec.folder, [tensor.name for tensor in inputs.plan.task.inputs]
    chosen = choose_rows(inputs, sample.rows, replace=replace, max_rows=max_rows)
    with os_errors_as_user_errors(folder):
        write_files(folder, {TRAFFIC_FILE: chosen.text}, is_private=True)
    drift = None
    if inputs.plan.lengths is not None:
        drift = check_drift(inputs, tokenize_sample(inputs, folder / TRAFFIC_FILE))
        drift = dataclasses.replace(drift, first="")  # already done here
    gate, rest = _count_rows(chosen.old, names), _count_rows([*chosen.kept, *chosen.added], names)
    return TrafficChange(
        file=str(folder / TRAFFIC_FILE),
        before=len(chosen.old),
        kept=len(chosen.kept),
        added=len(chosen.added),
        doubles=chosen.doubles,
        gate=(rest[0], gate[0]),
        calibration=(rest[1], gate[1]),
        drift=drift,
    )


def _key(row: Mapping[str, Any], names: list[str]) -> str:
    return hash_inputs({name: row[name] for name in names})


def _count_rows(rows: list[Line], names: list[str]) -> tuple[int, int]:
    """Return the number of rows for the gate and for calibration, before hooks run."""
    sent = [{name: row[name] for name in names if name in row} for row in rows]
    gate, rest = split_traffic(sent)
    return len(gate), min(len(rest), CALIBRATION_ROWS)


def format_change(change: TrafficChange) -> Iterator[str]:
    """Yield the lines of a change, without those of its drift."""
    yield (
        f"{change.file}: {change.kept} of {change.before} rows kept, {change.added} added,"
        f" {change.doubles} sampled rows are duplicates"
    )
    for use, (now, before) in (("gate", change.gate), ("calibration", change.calibration)):
        yield f"  rows for the {use}: {now}, before {before}"


BEFORE = ".before"
"""Suffix of the previous versions of files in the pipeline's folder."""


@dataclass(frozen=True)
class Applied:
    """An activated proposal.

    Attributes:
        build: Id of the active build.
        replaced: Id of the previous build, which is retained.
        built: Result of the build.
        rows: Number of rows of the new traffic.
        set: Changed fields of ``tuned.yaml``.
    """

    pipeline: str
    build: str
    replaced: str
    built: BuildOutcome
    rows: int
    set: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the data for ``--json``."""
        plain: dict[str, Any] = plain_data(
            {
                "build": self.build,
                "replaced": self.replaced,
                "rows": self.rows,
                "set": self.set,
                **self.built.as_dict(),
            }
        )
        return plain


def apply_blocker(
    inputs: PipelineInputs, run: MonitorRun, rows: Sequence[SampledRow], repository: Path
) -> str:
    """Return why a run's proposal must not be applied; empty if it may be."""
    if run.alarms:
        return "the run raised alarms: fix wrong answers before changing settings"
    manifest = read_manifest(repository, run.pipeline, EncoderManifest)
    if build_id(repository, run.pipeline) != run.build:
        return "another build was activated since the run"
    if edits := [*list_edits(inputs, manifest)]:
        return f"{edits[0]} since the build, and would be built too: run `triptych build` yourself"
    if len({hash_inputs(row.inputs) for row in rows}) < MIN_RECOMMENDED_ROWS:
        return f"{len(rows)} rows are too few: a build needs {MIN_RECOMMENDED_ROWS} different rows"
    return ""


def apply_proposal(
    inputs: PipelineInputs,
    run: MonitorRun,
    rows: Sequence[SampledRow],
    repository: Path,
    progress: Progress,
    *,
    max_rows: int,
) -> Applied:
    """Build with the sampled rows and the proposed settings, check the build, and activate it.

    The pipeline's folder is written last: traffic and ``tuned.yaml`` are replaced, and the previous
    files get the suffix `BEFORE`.

    Args:
        inputs: Inputs of the pipeline.
        run: Run with a proposal for which `apply_blocker` returns nothing.
        rows: Rows of the run.
        repository: Repository with the build to replace.
        progress: Called at each stage.
        max_rows: Maximum number of rows of the new traffic.

    Raises:
        EngineFailure, GateFailure, LintFailure, UserError: Nothing was changed.
    """
    folder, name, drift = inputs.plan.spec.folder, run.pipeline, run.drift
    if drift is None or drift.proposal is None:
        raise ValueError("the run has no proposal")
    proposal = drift.proposal
    chosen = choose_rows(inputs, rows, replace=True, max_rows=max_rows)
    spec = load_compiled(folder, tuned=proposal.after)
    files: dict[str, str | bytes] = {TRAFFIC_FILE: chosen.text}
    if proposal.changes:
        tuned = Tuned(proposal.after, _provenance(folder, run, proposal))
        files[TUNED_FILE] = tuned_text(name, tuned, spec_file=SPEC_FILE, measured=False)
    old = {
        file + BEFORE: (folder / file).read_bytes() for file in files if (folder / file).is_file()
    }
    with scratch_folder(".triptych-apply-") as scratch:
        traffic = scratch / TRAFFIC_FILE
        traffic.write_text(chosen.text, encoding="utf-8")
        new = read_compiled(spec, progress, traffic=traffic)
        try:
            options = BuildOptions(repository=repository, progress=progress)
            built = build(CompiledStages(), new, options)
            with os_errors_as_user_errors(folder):
                write_files(folder, {**old, **files}, is_private=True)
        except BaseException:
            # The graph is activated before its engine is built, which can fail.
            if build_id(repository, name) != run.build:
                rollback(repository, name, run.build)
            raise
    return Applied(
        pipeline=name,
        build=build_id(repository, name),
        replaced=run.build,
        built=built,
        rows=len(chosen.added),
        set=dict(proposal.changes),
    )


def _provenance(folder: Path, run: MonitorRun, proposal: TunedProposal) -> dict[str, Any]:
    """Return the source and expectation of a proposal, and the settings before it."""
    old = read_tuned(folder)
    rate = None if run.drift is None else run.drift.rate_per_s
    return {
        "proposed_for": "" if run.drift is None else run.drift.source,
        "expected": estimate_effect(proposal, rate),
        "spec_sha256": sha256_of(folder / SPEC_FILE),
        **({} if old is None else {"before": {"set": dict(old.overrides), **old.provenance}}),
    }


def format_applied(applied: Applied) -> Iterator[str]:
    """Yield the lines of an activated proposal."""
    models = ", ".join(applied.built.changed) or "no model changed"
    yield f"applied: {applied.pipeline} is build {applied.build[:12]} now ({models})"
    yield f"  traffic.jsonl has the {applied.rows} rows of this run; previous files end in {BEFORE}"
    yield f"  not measured yet: run `triptych bench {applied.pipeline}`, and `triptych tune`"
    yield f"  to undo: triptych rollback {applied.pipeline} {applied.replaced[:12]}"
