"""Reading `eval.jsonl`: requests with what is right, of each task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from triptych.errors import UserError
from triptych.pipeline.traffic import PARAMETERS, read_lines
from triptych.tasks.metrics.compare import group
from triptych.tasks.metrics.spans import Span

EVAL_FILE = "eval.jsonl"

_LARGEST = 1e9


@dataclass(frozen=True)
class LabelledRow:
    """One line of `eval.jsonl`.

    Attributes:
        line: its number, from 1.
        requests: inputs of each request it makes, a string by name (of an image the path of its
            file): two for text-embedding, `text` and then `text_pair`; one for all other tasks.
        parameters: request parameters of this row alone.
        truth: what is right: a label or token (str), spans (a Counter of entity, start and end),
            answers (a tuple of str), whether the passage is relevant (bool), how similar the texts
            are (float).
    """

    line: int
    requests: tuple[dict[str, str], ...]
    parameters: dict[str, Any]
    truth: Any


class _Truth(NamedTuple):
    """What a row of a task says is right.

    Attributes:
        key: of the JSON object.
        example: of its value, as JSON.
        rule: what the value must be.
        read: makes `LabelledRow.truth` of it and the row's text; ValueError where it is not that.
        second: key of a second text that makes a request of its own; empty for none.
        fault: why rows cannot be judged with, as a rule; empty where they can.
    """

    key: str
    example: str
    rule: str
    read: Callable[[Any, str], Any]
    second: str = ""
    fault: Callable[[Sequence[LabelledRow]], str] = lambda rows: ""


def read_labels(path: Path, task_name: str, fields: Sequence[str]) -> list[LabelledRow]:
    """Read labelled rows: one JSON object a line with the task's inputs and the truth.

    Args:
        path: of the file.
        task_name: of the task.
        fields: the task's inputs, a string each; ``parameters`` may be there, too.

    Raises:
        UserError: a missing or empty file, a line that is no such object, rows that cannot tell
            a good model from a bad one, or a task without a metric for labelled rows.
    """
    truth = _truth_of(path, task_name)
    form = _form(truth, fields)
    if not path.is_file():
        raise UserError(
            str(path), "must exist", given="no such file", remedy=f"Write labelled rows: {form}"
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


def first_rows(rows: Sequence[LabelledRow], task_name: str, most: int) -> list[LabelledRow]:
    """The first `most` rows; where passages are ranked, those of whole queries, one at least.

    Args:
        rows: as `read_labels` returns them.
        task_name: of the task.
        most: rows.
    """
    if task_name != "reranking":
        return list(rows[:most])
    taken: list[int] = []
    for places in group([_query(row) for row in rows]):
        if taken and len(taken) + len(places) > most:
            break
        taken += places
    return [rows[place] for place in sorted(taken)]


def telling_queries(rows: Sequence[LabelledRow]) -> Iterator[list[int]]:
    """Places of the rows of each query that has both relevant and other passages."""
    for places in group([_query(row) for row in rows]):
        if len({rows[place].truth for place in places}) == 2:
            yield places


def _query(row: LabelledRow) -> str:
    return row.requests[0]["text"]


def _truth_of(path: Path, task_name: str) -> _Truth:
    if task_name not in _TRUTHS:
        raise UserError(
            str(path),
            f"must not be there for task {task_name}, whose outputs only the pipeline can judge",
            remedy="Remove it; test the pipeline's own measure in its tests",
        )
    return _TRUTHS[task_name]


def _inputs(truth: _Truth, fields: Sequence[str]) -> list[str]:
    return [*fields, truth.second] if truth.second else [*fields]


def _form(truth: _Truth, fields: Sequence[str]) -> str:
    inputs = "".join(f'"{name}": "…", ' for name in _inputs(truth, fields))
    return "{" + inputs + f'"{truth.key}": {truth.example}' + "}"


def _read_row(
    place: str, number: int, row: Mapping[str, Any], truth: _Truth, fields: Sequence[str]
) -> LabelledRow:
    def refuse(rule: str, given: object) -> UserError:
        remedy = f"Write {_form(truth, fields)}"
        return UserError(place, rule, given=repr(given)[:80], remedy=remedy)

    inputs = _inputs(truth, fields)
    for name in inputs:
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
    return LabelledRow(number, (request, *second), parameters, right)


def _read_name(value: Any, text: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value.strip()


def _read_spans(value: Any, text: str) -> Counter[Span]:
    if not isinstance(value, list):
        raise ValueError
    spans: Counter[Span] = Counter()
    for entity in value:
        if not isinstance(entity, dict) or not isinstance(entity.get("entity"), str):
            raise ValueError
        start, end = entity.get("start"), entity.get("end")
        if type(start) is not int or type(end) is not int:
            raise ValueError
        if not 0 <= start < end <= len(text):
            raise ValueError(f"places within the text's {len(text)} characters")
        spans[entity["entity"], start, end] += 1
    return spans


def _read_answers(value: Any, text: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(answer, str) for answer in value):
        raise ValueError
    return tuple(value) or ("",)


def _read_relevance(value: Any, text: str) -> bool:
    if value not in (0, 1):
        raise ValueError
    return bool(value)


def _read_score(value: Any, text: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise ValueError
    return float(value)


def _no_query(rows: Sequence[LabelledRow]) -> str:
    if any(telling_queries(rows)):
        return ""
    return "must have a query (`text`) with a relevant passage and one that is not"


def _no_entity(rows: Sequence[LabelledRow]) -> str:
    return "" if any(row.truth for row in rows) else "must have a row with an entity"


def _one_score(rows: Sequence[LabelledRow]) -> str:
    if len({row.truth for row in rows}) > 1:
        return ""
    return "must have pairs with different scores"


_LABEL = _Truth("label", '"…"', "a label", _read_name)
_TRUTHS: Mapping[str, _Truth] = {
    "text-classification": _LABEL,
    "zero-shot-classification": _LABEL,
    "image-classification": _LABEL,
    "fill-mask": _Truth("token", '"…"', "a token", _read_name),
    "token-classification": _Truth(
        "entities",
        '[{"entity": "…", "start": 0, "end": 1}]',
        "a list of entities with start and end in characters",
        _read_spans,
        fault=_no_entity,
    ),
    "question-answering": _Truth(
        "answers",
        '["…"]',
        "a list of right answers (an empty one where there is none)",
        _read_answers,
    ),
    "reranking": _Truth("relevant", "1", "1 or 0", _read_relevance, fault=_no_query),
    "text-embedding": _Truth(
        "score",
        "0.8",
        f"a number from {-_LARGEST:g} to {_LARGEST:g}",
        _read_score,
        second="text_pair",
        fault=_one_score,
    ),
}
