"""Form of a demo page, its request, and the view of the answer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from triptych.base.files import parse_yaml
from triptych.base.tensors import Tensor
from triptych.client.rows import request_parameter
from triptych.client.wire import Parameter
from triptych.spec.traffic import TrafficRow
from triptych.tasks.task import Task, View, ViewKind

SECOND = "second"
"""Name of the field with a second text, on pages that compare vectors."""

_PARAMETER = "parameter."
_KINDS: Mapping[str, ControlKind] = {"int": "number", "float": "number"}
_BOOL = ("true", "false")
_TYPES = {"BOOL": "bool", "INT32": "int", "FP32": "float", "BYTES": "str"}
"""Type of a parameter by the datatype of its optional input."""

ControlKind = Literal["text", "image", "choice", "number", "line"]
Given = Mapping[str, str | bytes]
"""Content of each field of a submitted form; bytes for files."""


@dataclass(frozen=True)
class Field:
    """A field of the form.

    Attributes:
        label: Visible name.
        choices: Values of a selection list.
        hint: Default of the pipeline, or "".
    """

    name: str
    label: str
    kind: ControlKind
    choices: tuple[str, ...] = ()
    hint: str = ""

    @property
    def is_parameter(self) -> bool:
        return self.name.startswith(_PARAMETER)


@dataclass(frozen=True)
class FormRequest:
    """Request of a submitted form: rows of inputs by name, and parameters."""

    rows: tuple[Mapping[str, Any], ...]
    parameters: Mapping[str, Parameter]


@dataclass(frozen=True)
class Form:
    """Form of a pipeline.

    Attributes:
        rules: Rule of each request parameter.
        defaults: Default of each request parameter that is known.
    """

    inputs: tuple[Tensor, ...]
    view: View
    rules: Mapping[str, Mapping[str, Any]]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, task: Task, options: Mapping[str, str], settings: Mapping[str, Any]) -> Form:
        """Return the form of a task.

        Args:
            task: Task of the pipeline.
            options: Datatype of each optional input of the served pipeline.
            settings: Settings of the first step; empty if the pipeline is not built here.
        """
        rules = settings.get("request_parameters", {})
        known = {name: rules.get(name, {"type": _TYPES[type_]}) for name, type_ in options.items()}
        return cls(task.inputs, task.view, known, settings.get("parameters", {}))

    @property
    def compares(self) -> bool:
        return self.view.kind == "vectors"

    @property
    def fields(self) -> list[Field]:
        found = [Field(tensor.name, tensor.name, _control(tensor)) for tensor in self.inputs]
        if self.compares:
            label = f"another {self.inputs[0].name} to compare with"
            found.append(Field(SECOND, label, "text"))
        return found + [self._parameter(name, rule) for name, rule in self.rules.items()]

    def first_values(self, example: TrafficRow | None) -> dict[str, str]:
        """Return initial values of the fields: the example, and parameters that the view needs."""
        values = {
            _PARAMETER + name: str(min(count, self.rules[name]["max"]))
            for name, count in self.view.asks.items()
            if "max" in self.rules.get(name, {})
        }
        if example is not None:
            values |= example.inputs
            for name, value in example.parameters.items():
                values[_PARAMETER + name] = _as_text(request_parameter(value))
        return values

    def read(self, given: Given) -> FormRequest:
        """Return the request of a submitted form.

        Invalid parameters are passed on as text, because the pipeline's error explains them.
        """
        row = {
            tensor.name: _typed_input(tensor, given.get(tensor.name, ""))
            for tensor in self.inputs
            if given.get(tensor.name) or not tensor.optional
        }
        rows = [row]
        if self.compares and (second := given.get(SECOND)):
            rows.append({**row, self.inputs[0].name: second})
        parameters = {
            name: _typed(text, rule["type"])
            for name, rule in self.rules.items()
            if (text := str(given.get(_PARAMETER + name, "")))
        }
        return FormRequest(tuple(rows), parameters)

    def _parameter(self, name: str, rule: Mapping[str, Any]) -> Field:
        choices: Sequence[str] = _BOOL if rule["type"] == "bool" else rule.get("choices") or ()
        kind = "choice" if choices else _KINDS.get(rule["type"], "line")
        hint = _as_text(request_parameter(self.defaults.get(name)))
        return Field(_PARAMETER + name, name, kind, tuple(choices), hint)


def is_file(tensor: Tensor) -> bool:
    """Return whether the value of an input is the content of a file."""
    return tensor.content in ("image", "bytes")


def _control(tensor: Tensor) -> ControlKind:
    if is_file(tensor):
        return "image"
    is_number = tensor.dims == (1,) and tensor.dtype not in ("BYTES", "BOOL")
    return "number" if is_number else "text"


def _typed_input(tensor: Tensor, value: str | bytes) -> Any:
    """Return the value of an input; a wrong number stays text, because the error explains it."""
    if isinstance(value, bytes) or (tensor.dtype == "BYTES" and tensor.dims == (1,)):
        return value
    try:
        return parse_yaml(value)
    except ValueError:
        return value


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


MAX_VECTOR_VALUES = 8
"""Number of vector elements shown on the page."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class ScoreBar:
    """A label with its score; `share` is the length of the bar, from 0 to 1."""

    label: str
    score: float
    share: float


@dataclass(frozen=True)
class TextPiece:
    """A part of a text, highlighted if it has a label."""

    text: str
    label: str = ""
    score: float | None = None


@dataclass(frozen=True)
class VectorView:
    """First elements of a vector, and its size."""

    name: str
    head: tuple[float, ...]
    size: int


@dataclass(frozen=True)
class OutputView:
    """View of an output of a row.

    Attributes:
        name: Name of the output.
        texts: Its values; one for a single value.
        head: Columns of a table; empty unless the output is a list of objects, or an object.
        rows: Rows of the table.
    """

    name: str
    texts: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class AnswerView:
    """View of an answer; parts that a task does not have are empty.

    Attributes:
        lines: Answer as text.
        outputs: Outputs of each row, for tasks whose outputs only the pipeline knows.
        bars: Labels with their scores, highest first.
        pieces: Complete text in pieces, with highlights.
        vectors: Vector of each row.
        raw: All outputs, as JSON.
    """

    lines: tuple[str, ...] = ()
    outputs: tuple[tuple[OutputView, ...], ...] = ()
    bars: tuple[ScoreBar, ...] = ()
    pieces: tuple[TextPiece, ...] = ()
    vectors: tuple[VectorView, ...] = ()
    raw: str = ""


def view_answer(
    kind: ViewKind, inputs: Sequence[Mapping[str, str | bytes]], rows: Sequence[Row]
) -> AnswerView:
    """Return the view of an answer, from the inputs and the outputs (plain data) of each row."""
    try:
        view = _VIEWS[kind](inputs, rows)
    except (KeyError, TypeError, ValueError):  # A hook `after` may return another form.
        view = _outputs(inputs, rows)
    raw = json.dumps(rows if len(rows) > 1 else rows[0], indent=1, ensure_ascii=False)
    return AnswerView(**{**vars(view), "raw": raw})


def mark_spans(text: str, spans: Sequence[Row]) -> tuple[TextPiece, ...]:
    """Return `text` in pieces, with the spans highlighted.

    A span has the characters from `start` up to `end` (exclusive), their `text`, a `label` and a
    `score`. If spans overlap, the first is highlighted. A span whose text differs is skipped,
    because a hook may have changed the text that the model read.
    """
    pieces, done = [], 0
    for span in sorted(spans, key=lambda span: (span["start"], -span["end"])):
        start, end = span["start"], span["end"]
        if done <= start < end and text[start:end] == span["text"]:
            pieces.append(TextPiece(text[done:start]))
            pieces.append(TextPiece(text[start:end], span["label"], span["score"]))
            done = end
    return tuple(piece for piece in (*pieces, TextPiece(text[done:])) if piece.text)


def _choices(_: object, rows: Sequence[Row]) -> AnswerView:
    (row,) = rows
    labels = next(value for name, value in row.items() if name != "score")
    pairs = zip(labels, row["score"], strict=True)
    return AnswerView(bars=tuple(ScoreBar(label, score, _share(score)) for label, score in pairs))


def _entities(inputs: Sequence[Mapping[str, str | bytes]], rows: Sequence[Row]) -> AnswerView:
    spans = [{**entity, "label": entity["entity"]} for entity in rows[0]["entities"]]
    pieces = mark_spans(str(inputs[0]["text"]), spans)
    lines = [] if spans else ["No entities found in this text."]
    if left := len(spans) - sum(bool(piece.label) for piece in pieces):
        lines.append(f"{left} more entities are not highlighted in the text; see the raw outputs.")
    return AnswerView(pieces=pieces, lines=tuple(lines))


def _answer(inputs: Sequence[Mapping[str, str | bytes]], rows: Sequence[Row]) -> AnswerView:
    (row,) = rows
    if not row["answer"]:
        return AnswerView(lines=(f"No answer found in this text (score {row['score']:.4f}).",))
    span = {**row, "text": row["answer"], "label": "answer"}
    return AnswerView(
        lines=(row["answer"],), pieces=mark_spans(str(inputs[0]["text_pair"]), [span])
    )


def _vectors(_: object, rows: Sequence[Row]) -> AnswerView:
    vectors = [
        (name, values)
        for row in rows
        for name, values in row.items()
        if isinstance(values, list) and values
    ]
    lines: tuple[str, ...] = ()
    if len(vectors) == len(rows) > 1 and isinstance(vectors[0][1][0], float):
        cosine = _cosine(*(values for _, values in vectors))
        lines = (f"Cosine similarity of both vectors: {cosine:.4f}",)
    heads = (
        VectorView(name, tuple(values[:MAX_VECTOR_VALUES]), len(values)) for name, values in vectors
    )
    return AnswerView(lines=lines, vectors=tuple(heads))


def _outputs(_: object, rows: Sequence[Row]) -> AnswerView:
    return AnswerView(outputs=tuple(tuple(_view_outputs(row)) for row in rows))


def _view_outputs(row: Row) -> Iterator[OutputView]:
    """Yield the views of a row's outputs; lists of one length are columns of one table."""
    lists = {name: value for name, value in row.items() if _is_column(value)}
    sizes = {len(value) for value in lists.values()}
    if len(lists) > 1 and len(sizes) == 1:
        lines = tuple(map(_texts, zip(*lists.values(), strict=True)))
        yield OutputView(", ".join(lists), head=tuple(lists), rows=lines)
    else:
        lists = {}
    yield from (_view_output(name, row[name]) for name in row if name not in lists)


def _is_column(value: object) -> bool:
    """Return whether a value is a list of several texts or numbers."""
    return (
        isinstance(value, list)
        and len(value) > 1
        and not any(isinstance(entry, list | dict) for entry in value)
    )


def _view_output(name: str, value: Any) -> OutputView:
    """Return the view of an output; text that is JSON of a list or an object is read."""
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if isinstance(value, str) and value[:1] in ("[", "{"):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, dict) and value:
        return OutputView(name, head=tuple(map(str, value)), rows=(_texts(value.values()),))
    entries = value if isinstance(value, list) else [value]
    if entries and all(isinstance(entry, dict) and entry for entry in entries):
        head = dict.fromkeys(key for entry in entries for key in entry)
        rows = tuple(_texts(entry.get(key, "") for key in head) for entry in entries)
        return OutputView(name, head=tuple(map(str, head)), rows=rows)
    return OutputView(name, texts=_texts(entries))


def _texts(values: Iterable[object]) -> tuple[str, ...]:
    return tuple(
        f"{value:.4f}"
        if isinstance(value, float)
        else value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False)
        for value in values
    )


def _share(score: float) -> float:
    return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0


def _cosine(first: Sequence[float], second: Sequence[float]) -> float:
    lengths = math.hypot(*first) * math.hypot(*second)
    dot = sum(a * b for a, b in zip(first, second, strict=True))
    return dot / lengths if lengths else math.nan


_VIEWS: Mapping[
    ViewKind, Callable[[Sequence[Mapping[str, str | bytes]], Sequence[Row]], AnswerView]
] = {
    "choices": _choices,
    "entities": _entities,
    "answer": _answer,
    "vectors": _vectors,
    "outputs": _outputs,
}
