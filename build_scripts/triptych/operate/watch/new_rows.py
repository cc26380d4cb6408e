"""Sampled requests as the pipeline's traffic: without doubles, and what that changes of a build."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from triptych.base.errors import UserError
from triptych.base.files import told_to_user, write_files
from triptych.core.gate_rows import CALIBRATION_ROWS, split_traffic
from triptych.core.inputs import PipelineInputs
from triptych.core.samples import hash_inputs
from triptych.operate.tune.drift import Drift, check_drift
from triptych.operate.tune.new_traffic import tokenize_sample
from triptych.operate.watch.sample import Sample, SampledRow
from triptych.repository.plain import plain_data
from triptych.spec.traffic import PARAMETERS, TRAFFIC_FILE, read_traffic

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
