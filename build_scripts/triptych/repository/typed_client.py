"""Python file with a typed call of a pipeline around the user's own model, for their project."""

from __future__ import annotations

import keyword
from collections.abc import Iterator

from triptych.spec.model_fields import DTYPES, InputField, ModelSpec, ParameterField

CLIENT_FILE = "client.py"
_TAKEN = ("client", "inputs", "parameters", "found")
_PYTHON = {"text": "str", "bytes": "bytes", "int": "int", "float": "float", "bool": "bool"}


def render_client(spec: ModelSpec) -> bytes:
    """Return the file: a class of the outputs, and a function that sends a request.

    The file needs the package triptych without its extras.
    """
    return ("\n".join(_lines(spec)) + "\n").encode()


def _lines(spec: ModelSpec) -> Iterator[str]:
    name = spec.name.replace("-", "_")
    answer = "".join(part.capitalize() for part in name.split("_")) + "Answer"
    yield f'"""Typed call of the pipeline `{spec.name}`. Copy this file into your project."""'
    yield ""
    yield "from __future__ import annotations"
    yield ""
    yield "from collections.abc import Sequence"
    yield "from typing import Any, NamedTuple"
    yield ""
    array = "ArrayLike, " * any(field.shape for field in spec.inputs.values())
    yield f"from numpy.typing import {array}NDArray"
    yield ""
    yield "from triptych.client import Client"
    yield ""
    yield ""
    yield f"class {answer}(NamedTuple):"
    yield '    """Outputs of a request, with one value per row.'
    yield ""
    yield "    Attributes:"
    for key, output in spec.outputs.items():
        axes = ", ".join(map(str, ["rows", *(output.shape or [1])]))
        yield f"        {_safe(key)}: {DTYPES[output.type]} ``[{axes}]``."
    yield '    """'
    yield ""
    for key in spec.outputs:
        yield f"    {_safe(key)}: NDArray[Any]"
    yield ""
    yield ""
    yield from _function(spec, f"infer_{name}", answer)


def _function(spec: ModelSpec, name: str, answer: str) -> Iterator[str]:
    required = [key for key, field in spec.inputs.items() if field.default is None]
    optional = [key for key in spec.inputs if key not in required]
    yield f"def {name}("
    yield "    client: Client,"
    for key in required:
        yield f"    {_safe(key)}: {_annotation(spec.inputs[key])},"
    if optional or spec.parameters:
        yield "    *,"
    for key in optional:
        yield f"    {_safe(key)}: {_annotation(spec.inputs[key])} | None = None,"
    for key, parameter in spec.parameters.items():
        default = _PYTHON[parameter.type]
        yield f"    {_safe(key)}: {default} = {parameter.default!r},"
    yield f") -> {answer}:"
    yield f'    """Send a request to `{spec.name}`.'
    yield ""
    yield "    Args:"
    yield f'        client: ``Client("{spec.name}")``.'
    for key, field in spec.inputs.items():
        yield f"        {_safe(key)}: {_about_input(field)}"
    for key, parameter in spec.parameters.items():
        yield f"        {_safe(key)}: {_about_parameter(parameter)}"
    yield ""
    yield "    Raises:"
    yield "        InferenceError: The server rejects the request; see `triptych.client`."
    yield '    """'
    yield f"    inputs: dict[str, Any] = {{{_pairs(required)}}}"
    for key in optional:
        yield f"    if {_safe(key)} is not None:"
        yield f'        inputs["{key}"] = {_safe(key)}'
    yield "    parameters: dict[str, Any] = {"
    for key in spec.parameters:
        yield f'        "{key}": {_safe(key)},'
    yield "    }"
    yield "    found = client.infer(inputs, parameters=parameters)"
    outputs = ", ".join(f'found["{key}"]' for key in spec.outputs)
    yield f"    return {answer}({outputs})"


def _safe(name: str) -> str:
    return f"{name}_" if keyword.iskeyword(name) or name in _TAKEN else name


def _pairs(names: list[str]) -> str:
    return ", ".join(f'"{name}": {_safe(name)}' for name in names)


def _annotation(field: InputField) -> str:
    return f"Sequence[{_PYTHON[field.type]}]" if not field.shape else "ArrayLike"


def _about_input(field: InputField) -> str:
    if field.shape:
        axes = ", ".join(map(str, ["rows", *field.shape]))
        return f"Array ``[{axes}]`` of {field.type}."
    default = "" if field.default is None else f" Default: {field.default!r}."
    kind = "the content of a file" if field.type == "bytes" else f"of type {field.type}"
    return f"One value per row, {kind}.{default}"


def _about_parameter(field: ParameterField) -> str:
    limits = [
        "" if field.min is None else f"at least {field.min:g}",
        "" if field.max is None else f"at most {field.max:g}",
    ]
    if field.choices:
        limits.append("one of " + ", ".join(map(repr, field.choices)))
    rule = ", ".join(filter(None, limits))
    return f"Parameter of all rows{': ' * bool(rule)}{rule}."
