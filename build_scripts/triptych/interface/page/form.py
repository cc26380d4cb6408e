"""The form of a pipeline's page: its fields, and a submitted form as rows of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from triptych.base.tensors import Tensor
from triptych.client.infer import Parameter, request_parameter
from triptych.spec.tasks import Task, View
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
