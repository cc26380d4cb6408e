"""What a look proposes, built from its rows and put in place; or all stays as it was.

Sampled requests as the pipeline's traffic: without doubles, and what that changes of a build.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triptych.base.cache import sha256_of
from triptych.base.errors import Progress, UserError
from triptych.base.files import scratch_folder, told_to_user, write_files
from triptych.building.build import Built, build
from triptych.core.gate_rows import CALIBRATION_ROWS, split_traffic
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.samples import FEW_ROWS, hash_inputs
from triptych.operate.tune.drift import Drift, check_drift
from triptych.operate.tune.new_traffic import tokenize_sample
from triptych.operate.tune.proposal import Proposal, expected_of
from triptych.operate.watch.findings import Look, edits_since
from triptych.operate.watch.sample import Sample, SampledRow
from triptych.repository.history import rollback
from triptych.repository.lock import build_id, read_lock
from triptych.repository.records import plain_data
from triptych.spec.spec import SPEC_FILE, load_spec
from triptych.spec.traffic import PARAMETERS, TRAFFIC_FILE, read_traffic
from triptych.spec.tuned import TUNED_FILE, Tuned, read_tuned, tuned_text

Line = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """What became of the traffic.

    Attributes:
        file: that was written.
        before: rows that it had.
        kept: of those.
        added: rows of the sample.
        doubles: of the sample's rows, those that were there already or came before.
        gate: rows that the gate has now, and before.
        calibration: rows for calibration, likewise.
        drift: of the lengths, and what a build or `tune` would do.
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
        """For ``--json``."""
        fields = asdict(self) | {"drift": self.drift.as_dict() if self.drift else None}
        plain: dict[str, Any] = plain_data(fields)
        return plain


@dataclass(frozen=True)
class NewRows:
    """Lines of the traffic: those that were there, those of them that stay, and those added."""

    old: list[Line]
    kept: list[Line]
    added: list[Line]
    doubles: int

    @property
    def text(self) -> str:
        """Of the file."""
        rows = (*self.kept, *self.added)
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def choose_rows(
    inputs: PipelineInputs, sampled: Sequence[SampledRow], *, replace: bool, most: int
) -> NewRows:
    """The sample's rows behind those of ``traffic.jsonl``, or in their place; each once.

    Which rows are the gate's and which calibrate is decided by a hash of each row: those that were
    there before stay on their side. Of more than `most` new ones, those with the lowest hashes are
    taken, which is as good as chance.

    Raises:
        UserError: there is no row to take, or the inputs are images.
    """
    plan = inputs.plan
    names = [tensor.name for tensor in plan.task.inputs]
    if plan.lengths is None:
        raise UserError(
            plan.spec.name, "must have texts: traffic names files of images", given="images"
        )
    old = [
        row.inputs | ({PARAMETERS: row.parameters} if row.parameters else {})
        for row in read_traffic(plan.spec.folder, names)
    ]
    if not sampled:
        raise UserError(plan.spec.name, "must have sampled rows", given="none")
    first = {} if replace else {_key(row, names): row for row in old}
    new: dict[str, Line] = {}
    for each in sampled:
        row: Line = {name: each.inputs[name] for name in names}
        if each.parameters:
            row[PARAMETERS] = dict(each.parameters)
        key = _key(row, names)
        if key not in first:
            new.setdefault(key, row)
    stay = set(sorted(new)[:most])
    added = [row for key, row in new.items() if key in stay]
    return NewRows(old, [] if replace else old, added, len(sampled) - len(new))


def take_rows(inputs: PipelineInputs, sample: Sample, *, replace: bool, most: int) -> Change:
    """Write the sample's rows into ``traffic.jsonl``; see `choose_rows`.

    Raises:
        UserError: as `choose_rows`, or the file cannot be written.
    """
    folder, names = inputs.plan.spec.folder, [tensor.name for tensor in inputs.plan.task.inputs]
    chosen = choose_rows(inputs, sample.rows, replace=replace, most=most)
    with told_to_user(folder):
        write_files(folder, {TRAFFIC_FILE: chosen.text})
    new_lengths = tokenize_sample(inputs, folder / TRAFFIC_FILE)
    gate, rest = _split(chosen.old, names), _split([*chosen.kept, *chosen.added], names)
    return Change(
        file=str(folder / TRAFFIC_FILE),
        before=len(chosen.old),
        kept=len(chosen.kept),
        added=len(chosen.added),
        doubles=chosen.doubles,
        gate=(rest[0], gate[0]),
        calibration=(rest[1], gate[1]),
        drift=dataclasses.replace(check_drift(inputs, new_lengths), first=""),  # just done
    )


def _key(row: Mapping[str, Any], names: list[str]) -> str:
    return hash_inputs({name: row[name] for name in names})


def _split(rows: list[Line], names: list[str]) -> tuple[int, int]:
    """Rows of gate and calibration, before what `hooks.before` makes of them."""
    gate, rest = split_traffic([{name: row[name] for name in names} for row in rows])
    return len(gate), min(len(rest), CALIBRATION_ROWS)


def describe_change(change: Change) -> Iterator[str]:
    """The lines that show it, but for those of the drift."""
    yield (
        f"{change.file}: {change.kept} of {change.before} rows kept, {change.added} added,"
        f" {change.doubles} sampled rows were there already"
    )
    for words, (now, before) in (("gate", change.gate), ("calibration", change.calibration)):
        yield f"  rows for the {words}: {now}, before {before}"


BEFORE = ".before"
"""Ends the names of the files that were replaced in the pipeline's folder."""


@dataclass(frozen=True)
class Applied:
    """What was put in place.

    Attributes:
        build: id of the build in place now.
        replaced: of the one before it, which is kept.
        built: what the build did.
        rows: of the new traffic.
        set: fields of ``tuned.yaml`` that have other values now.
    """

    pipeline: str
    build: str
    replaced: str
    built: Built
    rows: int
    set: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
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


def hindrance(
    inputs: PipelineInputs, look: Look, rows: Sequence[SampledRow], repository: Path
) -> str:
    """Why what a look proposes is not to be applied, in words; empty where it may be."""
    if look.alarms:
        return "the answers are wrong, which a change of numbers may hide: mend that first"
    lock = read_lock(repository, look.pipeline)
    if build_id(repository, look.pipeline) != look.build:
        return "another build was put in place meanwhile"
    if edits := [*edits_since(inputs, lock)]:
        return f"{edits[0]} not as built, and would be built along: run `triptych build` yourself"
    if len({tuple(row.inputs.items()) for row in rows}) < FEW_ROWS:
        return f"{len(rows)} rows are too few to build and gate with: {FEW_ROWS} different ones are"
    return ""


def apply_proposal(
    inputs: PipelineInputs,
    look: Look,
    rows: Sequence[SampledRow],
    repository: Path,
    progress: Progress,
    *,
    most: int,
) -> Applied:
    """Build with the rows and the proposed settings, through the gate, and put it in place.

    The pipeline's folder is written last: its traffic and ``tuned.yaml`` become those of the build,
    and the old ones lie beside them.

    Args:
        inputs: of the pipeline as it is.
        look: with a proposal that nothing hinders.
        rows: that the look saw.
        repository: with the build that is to be replaced.
        progress: told each stage.
        most: rows of the new traffic.

    Raises:
        EngineFailure, GateFailure, LintFailure, UserError: all is as it was.
    """
    folder, name, drift = inputs.plan.spec.folder, look.pipeline, look.drift
    if drift is None or drift.proposal is None:
        raise ValueError("nothing is proposed")
    proposal = drift.proposal
    chosen = choose_rows(inputs, rows, replace=True, most=most)
    spec = load_spec(folder, tuned=proposal.after)
    files: dict[str, str | bytes] = {TRAFFIC_FILE: chosen.text}
    if proposal.changes:
        tuned = Tuned(proposal.after, _provenance(folder, look, proposal))
        files[TUNED_FILE] = tuned_text(name, tuned, spec_file=SPEC_FILE, measured=False)
    old = {
        file + BEFORE: (folder / file).read_bytes() for file in files if (folder / file).is_file()
    }
    with scratch_folder(".triptych-apply-") as scratch:
        traffic = scratch / TRAFFIC_FILE
        traffic.write_text(chosen.text, encoding="utf-8")
        new = read_inputs(spec, progress, traffic=traffic)
        try:
            built = build(new, repository, progress)
            with told_to_user(folder):
                write_files(folder, {**old, **files})
        except BaseException:
            # A graph is in place before its engine is built, which may fail.
            if build_id(repository, name) != look.build:
                rollback(repository, name, look.build)
            raise
    return Applied(
        pipeline=name,
        build=build_id(repository, name),
        replaced=look.build,
        built=built,
        rows=len(chosen.added),
        set=dict(proposal.changes),
    )


def _provenance(folder: Path, look: Look, proposal: Proposal) -> dict[str, Any]:
    """Of a proposal: from which rows it came and what is expected; what was measured before it."""
    old = read_tuned(folder)
    rate = None if look.drift is None else look.drift.rate_per_s
    return {
        "proposed_for": "" if look.drift is None else look.drift.source,
        "expected": expected_of(proposal, rate),
        "spec_sha256": sha256_of(folder / SPEC_FILE),
        **({} if old is None else {"before": {"set": dict(old.overrides), **old.provenance}}),
    }


def describe_applied(done: Applied) -> Iterator[str]:
    """The lines that show it."""
    models = ", ".join(done.built.changed) or "no model changed"
    yield f"applied: {done.pipeline} is build {done.build[:12]} now ({models})"
    yield f"  traffic.jsonl has the {done.rows} rows of this look; the old files end in {BEFORE}"
    yield f"  nothing of it was measured: `triptych bench {done.pipeline}`, and `triptych tune`"
    yield f"  take it back: triptych rollback {done.pipeline} {done.replaced[:12]}"
