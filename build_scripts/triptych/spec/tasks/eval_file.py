"""Reading `eval.jsonl`: requests with what is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError
from triptych.spec.tasks.compare import group
from triptych.spec.tasks.metrics_labels import LabeledRow, Truth
from triptych.spec.tasks.task import Task
from triptych.spec.traffic import PARAMETERS, read_lines

EVAL_FILE = "eval.jsonl"


def read_labels(path: Path, task: Task) -> list[LabeledRow]:
    """Read labeled rows: one JSON object a line with the task's inputs and the truth.

    Raises:
        UserError: a missing or empty file, a line that is no such object, rows that cannot tell
            a good model from a bad one, or a task without a metric for labeled rows.
    """
    if task.labeled is None:
        raise UserError(
            str(path),
            f"must not be there for task {task.name}, whose outputs only the pipeline can judge",
            remedy="Remove it; test the pipeline's own measure in its tests",
        )
    truth, fields = task.labeled.truth, [tensor.name for tensor in task.inputs]
    form = _form(truth, fields)
    if not path.is_file():
        raise UserError(
            str(path), "must exist", given="no such file", remedy=f"Write labeled rows: {form}"
        )
    rows = []
    for number, line, row in read_lines(path):
        if row is None:
            raise UserError(
                f"{path}:{number}",
                "must be a JSON object",
                given=repr(line)[:80],
                remedy=f"Write {form}",
            )
        rows.append(_read_row(f"{path}:{number}", number, row, truth, fields))
    if not rows:
        raise UserError(str(path), "must have rows", given="none", remedy=f"Add rows: {form}")
    fault = truth.fault(rows)
    if fault:
        raise UserError(str(path), fault, remedy="Add such rows")
    return rows


def first_rows(rows: Sequence[LabeledRow], task: Task, most: int) -> list[LabeledRow]:
    """The first `most` rows; where passages are ranked, those of whole queries, one at least."""
    if task.labeled is None or not task.labeled.truth.by_query:
        return list(rows[:most])
    taken: list[int] = []
    for places in group([row.query for row in rows]):
        if taken and len(taken) + len(places) > most:
            break
        taken += places
    return [rows[place] for place in sorted(taken)]


def _inputs(truth: Truth, fields: Sequence[str]) -> list[str]:
    return [*fields, truth.second] if truth.second else [*fields]


def _form(truth: Truth, fields: Sequence[str]) -> str:
    inputs = "".join(f'"{name}": "…", ' for name in _inputs(truth, fields))
    return "{" + inputs + f'"{truth.key}": {truth.example}' + "}"


def _read_row(
    place: str, number: int, row: Mapping[str, Any], truth: Truth, fields: Sequence[str]
) -> LabeledRow:
    def refuse(rule: str, given: object) -> UserError:
        remedy = f"Write {_form(truth, fields)}"
        return UserError(place, rule, given=repr(given)[:80], remedy=remedy)

    for name in _inputs(truth, fields):
        if not isinstance(row.get(name), str):
            raise refuse(f"must have a string as `{name}`", row.get(name))
    parameters = row.get(PARAMETERS, {})
    if not isinstance(parameters, dict):
        raise refuse("must have an object as `parameters`", parameters)
    value = row.get(truth.key)
    try:
        right = truth.read(value, row[fields[0]])
    except ValueError as error:
        raise refuse(f"must have {str(error) or truth.rule} as `{truth.key}`", value) from error
    request = {name: row[name] for name in fields}
    second = ({**request, fields[0]: row[truth.second]},) if truth.second else ()
    return LabeledRow(number, (request, *second), parameters, right)
