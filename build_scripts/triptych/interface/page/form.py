"""The form of a pipeline's page: its fields, and a submitted form as rows of a request.

An answer as the page shows it: bars, marked text, vectors, or the outputs as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from triptych.base.tensors import Tensor
from triptych.client.questions import Parameter, describe_answer, request_parameter
from triptych.spec.tasks import Task, View
from triptych.spec.tasks.task import ViewKind
from triptych.spec.traffic import TrafficRow

SECOND = "second"
"""The field of a further text, where answers are compared."""

_PARAMETER = "parameter."
_KINDS: Mapping[str, Kind] = {"int": "number", "float": "number"}
_BOOL = ("true", "false")

Kind = Literal["text", "image", "choice", "number", "line"]
Given = Mapping[str, str | bytes]
"""What a form was sent with, by field; of a file its bytes."""


@dataclass(frozen=True)
class Field:
    """One field of the form.

    Attributes:
        name: in the form that is sent.
        label: what people read.
        kind: of control.
        choices: of a list to choose from.
        hint: what holds where nothing is chosen; empty where nothing does.
    """

    name: str
    label: str
    kind: Kind
    choices: tuple[str, ...] = ()
    hint: str = ""


@dataclass(frozen=True)
class Asked:
    """A request as a form asks for it: rows of inputs by name, and its parameters."""

    rows: tuple[Mapping[str, str | bytes], ...]
    parameters: Mapping[str, Parameter]


@dataclass(frozen=True)
class Form:
    """The form of one pipeline.

    Attributes:
        inputs: of the pipeline.
        view: of its task.
        rules: of the request's parameters, as the served step has them.
        defaults: of the same parameters.
    """

    inputs: tuple[Tensor, ...]
    view: View
    rules: Mapping[str, Mapping[str, Any]]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, task: Task, settings: Mapping[str, Any]) -> Form:
        """The form of `task`; `settings` are those of the served step."""
        rules = settings.get("request_parameters", {})
        return cls(task.inputs, task.view, rules, settings.get("parameters", {}))

    @property
    def compares(self) -> bool:
        return self.view.kind == "vectors"

    @property
    def fields(self) -> list[Field]:
        found = [
            Field(tensor.name, tensor.name, "image" if tensor.content == "image" else "text")
            for tensor in self.inputs
        ]
        if self.compares:
            label = f"another {self.inputs[0].name} to compare with"
            found.append(Field(SECOND, label, "text"))
        return found + [self._parameter(name, rule) for name, rule in self.rules.items()]

    def first_values(self, example: TrafficRow | None) -> dict[str, str]:
        """What the fields hold before anybody typed: the example's, and what the view asks for."""
        values = {
            _PARAMETER + name: str(min(count, self.rules[name].get("max", count)))
            for name, count in self.view.asks.items()
            if name in self.rules
        }
        if example is not None:
            values |= example.inputs
            for name, value in example.parameters.items():
                values[_PARAMETER + name] = _as_text(request_parameter(value))
        return values

    def read(self, given: Given) -> Asked:
        """The request that a submitted form asks for.

        A parameter that cannot be read is sent as it was written: the pipeline says what is wrong.
        """
        row = {tensor.name: given.get(tensor.name, "") for tensor in self.inputs}
        rows = [row]
        if self.compares and (second := given.get(SECOND)):
            rows.append({**row, self.inputs[0].name: second})
        parameters = {
            name: _typed(text, rule["type"])
            for name, rule in self.rules.items()
            if (text := str(given.get(_PARAMETER + name, "")))
        }
        return Asked(tuple(rows), parameters)

    def _parameter(self, name: str, rule: Mapping[str, Any]) -> Field:
        choices: Sequence[str] = _BOOL if rule["type"] == "bool" else rule.get("choices") or ()
        kind = "choice" if choices else _KINDS.get(rule["type"], "line")
        hint = _as_text(request_parameter(self.defaults.get(name)))
        return Field(_PARAMETER + name, name, kind, tuple(choices), hint)


def _as_text(value: Parameter | None) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed(text: str, kind: str) -> Parameter:
    if kind == "bool" and text in _BOOL:
        return text == "true"
    try:
        return int(text) if kind == "int" else float(text) if kind == "float" else text
    except ValueError:
        return text


NUMBERS = 8
"""Of a vector that are shown."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Bar:
    """A label and its score; `share` of a full bar, from 0 to 1."""

    label: str
    score: float
    share: float


@dataclass(frozen=True)
class Piece:
    """A part of a text, marked where it has a label."""

    text: str
    label: str = ""
    score: float | None = None


@dataclass(frozen=True)
class Vector:
    """The head of a row's vector, and how many numbers it has."""

    name: str
    head: tuple[float, ...]
    size: int


@dataclass(frozen=True)
class Shown:
    """What the page shows of an answer; what a task does not have is empty.

    Attributes:
        lines: in words.
        bars: labels, best first.
        pieces: the whole of a text.
        vectors: of each row.
        raw: every output, as JSON.
    """

    lines: tuple[str, ...] = ()
    bars: tuple[Bar, ...] = ()
    pieces: tuple[Piece, ...] = ()
    vectors: tuple[Vector, ...] = ()
    raw: str = ""


def show(kind: ViewKind, asked: Sequence[Mapping[str, str | bytes]], rows: Sequence[Row]) -> Shown:
    """What `kind` shows of an answer.

    Args:
        kind: of the task's view.
        asked: the inputs of each row.
        rows: the outputs of each, as plain data.
    """
    try:
        shown = _SHOWS[kind](asked, rows)
    except (KeyError, TypeError, ValueError):  # the pipeline's own `after` answers in another form
        shown = _outputs(asked, rows)
    raw = json.dumps(rows if len(rows) > 1 else rows[0], indent=1, ensure_ascii=False)
    return Shown(**{**vars(shown), "raw": raw})


def mark(text: str, spans: Sequence[Row]) -> tuple[Piece, ...]:
    """`text` in pieces, those of `spans` marked; of spans that overlap, the first one.

    Each of `spans` has the first character `start`, the one behind its last `end`, the `text`
    between them, a `label` and a `score`. One whose text stands elsewhere is left out: a hook has
    changed what the model read.
    """
    pieces, done = [], 0
    for span in sorted(spans, key=lambda span: (span["start"], -span["end"])):
        start, end = span["start"], span["end"]
        if done <= start < end and text[start:end] == span["text"]:
            pieces.append(Piece(text[done:start]))
            pieces.append(Piece(text[start:end], span["label"], span["score"]))
            done = end
    return tuple(piece for piece in (*pieces, Piece(text[done:])) if piece.text)


def _choices(_: object, rows: Sequence[Row]) -> Shown:
    (row,) = rows
    labels = next(value for name, value in row.items() if name != "score")
    pairs = zip(labels, row["score"], strict=True)
    return Shown(bars=tuple(Bar(label, score, _share(score)) for label, score in pairs))


def _entities(asked: Sequence[Mapping[str, str | bytes]], rows: Sequence[Row]) -> Shown:
    spans = [{**entity, "label": entity["entity"]} for entity in rows[0]["entities"]]
    pieces = mark(str(asked[0]["text"]), spans)
    lines = [] if spans else ["There are no entities in this text."]
    if left := len(spans) - sum(bool(piece.label) for piece in pieces):
        lines.append(f"{left} more could not be marked in the text; see the raw outputs.")
    return Shown(pieces=pieces, lines=tuple(lines))


def _answer(asked: Sequence[Mapping[str, str | bytes]], rows: Sequence[Row]) -> Shown:
    (row,) = rows
    if not row["answer"]:
        return Shown(lines=(f"There is no answer in this text (score {row['score']:.4f}).",))
    span = {**row, "text": row["answer"], "label": "answer"}
    return Shown(lines=(row["answer"],), pieces=mark(str(asked[0]["text_pair"]), [span]))


def _vectors(_: object, rows: Sequence[Row]) -> Shown:
    vectors = [
        (name, values)
        for row in rows
        for name, values in row.items()
        if isinstance(values, list) and values
    ]
    lines: tuple[str, ...] = ()
    if len(vectors) == len(rows) > 1 and isinstance(vectors[0][1][0], float):
        cosine = _cosine(*(values for _, values in vectors))
        lines = (f"Cosine similarity of the two: {cosine:.4f}",)
    heads = (Vector(name, tuple(values[:NUMBERS]), len(values)) for name, values in vectors)
    return Shown(lines=lines, vectors=tuple(heads))


def _outputs(_: object, rows: Sequence[Row]) -> Shown:
    return Shown(lines=tuple(line for row in rows for line in describe_answer(row)))


def _share(score: float) -> float:
    return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    return dot / lengths if lengths else math.nan


_SHOWS: Mapping[ViewKind, Callable[[Sequence[Mapping[str, str | bytes]], Sequence[Row]], Shown]] = {
    "choices": _choices,
    "entities": _entities,
    "answer": _answer,
    "vectors": _vectors,
    "outputs": _outputs,
}
