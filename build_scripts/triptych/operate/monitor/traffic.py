"""Write sampled rows into a pipeline's traffic."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from triptych.base.errors import UserError
from triptych.base.files import os_errors_as_user_errors, write_files
from triptych.core.gate_rows import CALIBRATION_ROWS, split_traffic
from triptych.core.inputs import PipelineInputs
from triptych.core.own_reader import OwnReader
from triptych.core.requests import hash_inputs
from triptych.operate.monitor.sample import TrafficSample, make_reader
from triptych.spec.model_fields import is_own
from triptych.spec.plan import Plan
from triptych.spec.traffic import PARAMETERS, TRAFFIC_FILE, read_lines, read_traffic

Line = dict[str, Any]


@dataclass(frozen=True)
class TrafficChange:
    """Change of a traffic file."""

    file: str  # Path of the file
    before: int  # Number of rows before the change
    kept: int  # Number of retained rows
    added: int  # Number of added rows
    doubles: int  # Number of sampled rows that repeat a row of the file or of the sample
    refused: int  # Number of sampled rows that the pipeline refuses as it is now
    gate: tuple[int, int]  # Number of rows for the gate, after and before the change
    calibration: tuple[int, int]  # Number of rows for calibration, after and before the change

    def as_dict(self) -> dict[str, object]:
        """Return the data for ``--json``."""
        return asdict(self)


def take_rows(
    inputs: PipelineInputs, sample: TrafficSample, *, replace: bool, max_rows: int
) -> TrafficChange:
    """Add the rows of a sample to ``traffic.jsonl``, or replace its rows by them.

    Each row occurs once. A hash of each row decides whether the gate or calibration uses it, so old
    rows keep their use. Of more than `max_rows` new rows, those with the lowest hashes are taken,
    which amounts to a random choice.

    Raises:
        UserError: The sample is empty, the pipeline refuses all of its rows, the inputs are files,
            or the file cannot be written.
    """
    plan, folder = inputs.plan, inputs.plan.spec.folder
    names = [tensor.name for tensor in plan.task.inputs]
    if any(tensor.content in ("image", "bytes") for tensor in plan.task.inputs):
        raise UserError(
            plan.spec.name,
            "is only supported for texts and numbers, because a file in the traffic is a path",
            given="files",
            remedy="Add files to the traffic by hand",
        )
    if not sample.rows:
        raise UserError(
            plan.spec.name,
            "has no sampled rows",
            given="an empty sample",
            remedy="Serve with serving.sample set, or name the folder with --samples",
        )
    reader = make_reader(inputs)

    def key_of(row: Line) -> str:
        if isinstance(reader, OwnReader):
            return reader.key(row)
        return hash_inputs({name: row[name] for name in names})

    old = _read_lines(plan, names)
    kept = [] if replace else old
    known = {key_of(row) for row in kept}
    new: dict[str, Line] = {}
    refused = 0
    for sampled in sample.rows:
        row: Line = {name: sampled.inputs[name] for name in names if name in sampled.inputs}
        if reader.read_sent(row, sampled.parameters, sampled.location) is None:
            refused += 1
            continue
        if sampled.parameters:
            row[PARAMETERS] = dict(sampled.parameters)
        key = key_of(row)
        if key not in known:
            new.setdefault(key, row)
    if refused == len(sample.rows):
        raise UserError(
            plan.spec.name,
            "must have sampled rows that it accepts",
            given=f"{refused} rows, all refused",
            remedy="Build and serve the pipeline as it is now, and wait for requests of users",
        )
    chosen = set(sorted(new)[:max_rows])
    added = [row for key, row in new.items() if key in chosen]
    rows = [*kept, *added]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with os_errors_as_user_errors(folder):
        write_files(folder, {TRAFFIC_FILE: text}, is_private=True)
    before, now = _count_rows(old, names), _count_rows(rows, names)
    return TrafficChange(
        file=str(folder / TRAFFIC_FILE),
        before=len(old),
        kept=len(kept),
        added=len(added),
        doubles=len(sample.rows) - refused - len(new),
        refused=refused,
        gate=(now[0], before[0]),
        calibration=(now[1], before[1]),
    )


def _read_lines(plan: Plan, names: Sequence[str]) -> list[Line]:
    """Return the lines of the traffic."""
    if is_own(plan.spec):
        lines = read_lines(plan.spec.folder / TRAFFIC_FILE)
        return [row for _, _, row in lines if row is not None]
    return [
        row.inputs | ({PARAMETERS: row.parameters} if row.parameters else {})
        for row in read_traffic(plan.spec.folder, list(names))
    ]


def _count_rows(rows: list[Line], names: list[str]) -> tuple[int, int]:
    """Return the number of rows for the gate and for calibration, before hooks run."""
    sent = [{name: row[name] for name in names if name in row} for row in rows]
    gate, rest = split_traffic(sent)
    return len(gate), min(len(rest), CALIBRATION_ROWS)


def format_change(change: TrafficChange) -> Iterator[str]:
    """Yield the lines of a change."""
    yield (
        f"{change.file}: {change.kept} of {change.before} rows kept, {change.added} added,"
        f" {change.doubles} sampled rows are duplicates"
    )
    if change.refused:
        yield f"  {change.refused} sampled rows are refused by the pipeline as it is now"
    for use, (now, before) in (("gate", change.gate), ("calibration", change.calibration)):
        yield f"  rows for the {use}: {now}, before {before}"
