"""Reader of ``eval.jsonl``: requests with their ground truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError
from triptych.spec.traffic import PARAMETERS, require_lines
from triptych.tasks.compare import group
from triptych.tasks.labeled import LabeledRow, Truth
from triptych.tasks.task import Task

EVAL_FILE = "eval.jsonl"


def read_labels(path: Path, task: Task) -> list[LabeledRow]:
    """Read labeled rows: a JSON object per line with the task's inputs and the truth.

    Raises:
        UserError: The file is missing or empty, a line is not such an object, the rows cannot show
            a difference, or the task has no metric for labeled rows.
    """
    if task.labeled is None:
        raise UserError(
            str(path),
            f"is not supported for task {task.name}, whose outputs have no known measure",
            remedy="Remove the file; check your own measure in test_hooks.py",
        )
    truth, fields = task.labeled.truth, [tensor.name for tensor in task.inputs]
    form = _form(truth, fields)
    rows = []
    for number, line, row in require_lines(path, form, "labeled rows"):
        if row is None:
            raise UserError(
                f"{path}:{number}",
                "must be a JSON object",
                given=repr(line)[:80],
                remedy=f"Write {form}",
            )
        rows.append(_read_row(f"{path}:{number}", number, row, truth, fields))
    fault = truth.fault(rows)
    if fault:
        raise UserError(str(path), fault, remedy="Add such rows")
    return rows


def first_rows(rows: Sequence[LabeledRow], task: Task, most: int) -> list[LabeledRow]:
    """Return the first `most` rows; for rankings, those of whole queries, at least one query."""
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
    for unknown in sorted(row.keys() - {*_inputs(truth, fields), truth.key, PARAMETERS}):
        raise refuse(f"must not have `{unknown}`, which is no input of the task", row[unknown])
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
