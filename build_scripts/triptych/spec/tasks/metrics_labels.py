"""Labeled rows: what is right of a request, as a task's rows of `eval.jsonl` say it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from triptych.spec.tasks.compare import Span, group

_LARGEST = 1e9


@dataclass(frozen=True)
class LabeledRow:
    """One line of `eval.jsonl`.

    Attributes:
        line: its number, from 1.
        requests: inputs of each request it makes, a string by name (of an image the path of its
            file): two where `Truth.second` names a text, the first input and then that; else one.
        parameters: request parameters of this row alone.
        truth: what is right, as `Truth.read` makes it.
    """

    line: int
    requests: tuple[dict[str, str], ...]
    parameters: dict[str, Any]
    truth: Any

    @property
    def query(self) -> str:
        return self.requests[0]["text"]


class Truth(NamedTuple):
    """What a row of a task says is right.

    Attributes:
        key: of the JSON object.
        example: of its value, as JSON.
        rule: what the value must be.
        read: makes `LabeledRow.truth` of it and the row's text; ValueError where it is not that.
        second: key of a second text that makes a request of its own; empty for none.
        by_query: whether only all rows of a query together tell something.
        fault: why rows cannot be judged with, as a rule; empty where they can.
    """

    key: str
    example: str
    rule: str
    read: Callable[[Any, str], Any]
    second: str = ""
    by_query: bool = False
    fault: Callable[[Sequence[LabeledRow]], str] = lambda rows: ""


def telling_queries(rows: Sequence[LabeledRow]) -> Iterator[list[int]]:
    """Places of the rows of each query that has both relevant and other passages."""
    for places in group([row.query for row in rows]):
        if len({rows[place].truth for place in places}) == 2:
            yield places


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


def _no_query(rows: Sequence[LabeledRow]) -> str:
    if any(telling_queries(rows)):
        return ""
    return "must have a query (`text`) with a relevant passage and one that is not"


def _no_entity(rows: Sequence[LabeledRow]) -> str:
    return "" if any(row.truth for row in rows) else "must have a row with an entity"


def _one_score(rows: Sequence[LabeledRow]) -> str:
    if len({row.truth for row in rows}) > 1:
        return ""
    return "must have pairs with different scores"


LABEL = Truth("label", '"…"', "a label", _read_name)
TOKEN = Truth("token", '"…"', "a token", _read_name)
ENTITIES = Truth(
    "entities",
    '[{"entity": "…", "start": 0, "end": 1}]',
    "a list of entities with start and end in characters",
    _read_spans,
    fault=_no_entity,
)
ANSWERS = Truth(
    "answers", '["…"]', "a list of right answers (an empty one where there is none)", _read_answers
)
RELEVANCE = Truth("relevant", "1", "1 or 0", _read_relevance, by_query=True, fault=_no_query)
SIMILARITY = Truth(
    "score",
    "0.8",
    f"a number from {-_LARGEST:g} to {_LARGEST:g}",
    _read_score,
    second="text_pair",
    fault=_one_score,
)
