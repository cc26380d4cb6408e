"""Rows, parameters and results of the command line: options to requests, results to plain data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import yaml

from triptych.base.errors import UserError
from triptych.base.files import parse_yaml
from triptych.client import (
    Chunk,
    Client,
    InferenceError,
    InvalidRequestError,
    PipelineConfig,
    Sampling,
)
from triptych.client.plain import plain_outputs, request_parameter
from triptych.client.server_info import request_failure
from triptych.client.wire import Parameter
from triptych.interface.bulk.files import UTF_8, JsonLines, PlainText, open_rows
from triptych.spec.traffic import PARAMETERS

Value = TypeVar("Value")
PlainOutputs = Mapping[str, object]
"""Outputs of one row by name, as JSON values."""

TIMEOUT_S = 30.0
"""Default deadline of a command in seconds."""
_IMAGE = "image"
_MAX_NUMBERS = 6


@dataclass(frozen=True)
class InputRow:
    """A row to send: text, the bytes of a file, or a number or list of a typed input."""

    inputs: dict[str, object]
    shown: str
    """Inputs as the user gave them; an image by its path."""
    source: str = ""
    """``file:line`` of the row; empty for rows from options."""
    parameters: dict[str, Parameter] = field(default_factory=dict)
    """Request parameters of this row."""


def read_input_rows(
    texts: Sequence[str],
    pairs: Sequence[str],
    images: Sequence[Path],
    file: Path | None,
    *,
    values: Sequence[str] = (),
    types: Mapping[str, str] = {},
    encoding: str = UTF_8,
    suffix: str | None = None,
) -> list[InputRow]:
    """Return the rows of ``--text``, ``--text-pair``, ``--image`` and ``--file``, in this order.

    A ``.jsonl`` file has a JSON object of inputs per line, with image paths relative to the file,
    and may have `parameters` as traffic does. A file of plain text has a text per line. An option
    that is given once applies to every row. `values` are the ``INPUT=VALUE`` of one row,
    and `types` the declared types of the inputs of a pipeline around an own model.

    Raises:
        UserError: Nothing is given, inputs differ in number, or a file cannot be read.
    """
    columns = _columns(texts, pairs, images)
    if values:
        if file is not None or any(columns.values()):
            raise UserError(
                "--input",
                "cannot be combined with other inputs",
                given="several inputs",
                remedy="Give every input of the row with --input, or write the rows into --file",
            )
        row = parse_pairs("--input", values, str, "INPUT=VALUE", "image=street.jpg")
        return [_input_row(_typed_values(row, types, "--input"), Path(), "", types)]
    if file is not None:
        table = open_rows(file, encoding, suffix)
        if not isinstance(table, JsonLines):
            raise UserError(
                "--out",
                f"is required for a {table.suffix} file",
                remedy=f"Write for example --out {file.stem}.answers{table.suffix}",
            )
        if not isinstance(table, PlainText):
            return _read_objects(table, _single_values(columns), types)
        columns["text"] += [_read_text(table, number, line) for number, line in table.lines()]
    columns = {name: values for name, values in columns.items() if values}
    if not columns:
        raise UserError(
            "--text",
            "is required, or one of --text-pair, --image, --file, --chat and --prompt",
            given="" if file is None else f"{file} without lines",
            remedy='Write for example --text "hello"',
        )
    count = max(map(len, columns.values()))
    if any(len(values) not in (1, count) for values in columns.values()):
        raise UserError(
            ", ".join(map(_option, columns)),
            "must be given equally often, or once",
            given=", ".join(f"{_option(name)} {len(v)}" for name, v in columns.items()),
            remedy="Give each option once per row, or once for all rows",
        )
    rows = zip(*(v if len(v) == count else v * count for v in columns.values()), strict=True)
    return [_input_row(dict(zip(columns, row, strict=True)), Path()) for row in rows]


def _read_text(table: PlainText, number: int, line: str) -> str:
    try:
        return str(table.parse(line)["text"])
    except ValueError as error:
        remedy = "Name the encoding of the file with --encoding"
        raise UserError(f"{table.path}:{number}", str(error), remedy=remedy) from error


def read_constants(
    texts: Sequence[str], pairs: Sequence[str], images: Sequence[Path]
) -> dict[str, str | bytes]:
    """Return the values of ``--text``, ``--text-pair`` and ``--image`` for every row of a file.

    Raises:
        UserError: An option is given twice, or an image cannot be read.
    """
    inputs = _input_row(_single_values(_columns(texts, pairs, images)), Path()).inputs
    return {name: value for name, value in inputs.items() if isinstance(value, str | bytes)}


def _columns(
    texts: Sequence[str], pairs: Sequence[str], images: Sequence[Path]
) -> dict[str, list[str]]:
    paths = [str(path) for path in images]
    return {"text": list(texts), "text_pair": list(pairs), _IMAGE: paths}


def _single_values(columns: Mapping[str, Sequence[str]]) -> dict[str, str]:
    for name, values in columns.items():
        if len(values) > 1:
            raise UserError(
                _option(name),
                "must be given at most once beside a file of rows",
                given=len(values),
                remedy="Write the rows into the file",
            )
    return {name: values[0] for name, values in columns.items() if values}


def parse_parameters(pairs: Sequence[str]) -> dict[str, Parameter]:
    """Return ``KEY=VALUE`` pairs as request parameters.

    Values are read as YAML; a list is sent as JSON with its elements as written.

    Raises:
        UserError: The text is not a pair, or its value is neither a scalar nor a list of scalars.
    """
    form = "KEY=VALUE, with a plain value or a list of plain values"
    return parse_pairs("--parameter", pairs, parse_parameter, form, "dimensions=128")


def parse_parameter(text: str) -> Parameter | None:
    """Return the value of a request parameter, read as YAML; None if it is none.

    Raises:
        ValueError: The text is not YAML.
    """
    value = parse_yaml(text)
    # A list is read without YAML's types: `[yes, 1.50]` names two labels.
    return request_parameter(yaml.load(text, yaml.BaseLoader) if isinstance(value, list) else value)


def parse_sampling(pairs: Sequence[str]) -> Sampling:
    """Return ``KEY=VALUE`` pairs as sampling parameters, with values read as YAML.

    The server checks them.

    Raises:
        UserError: The text is not a pair, or not YAML.
    """
    found = parse_pairs("--parameter", pairs, parse_yaml, "KEY=VALUE", "max_tokens=64")
    return cast(Sampling, found)


def parse_pairs(
    option: str,
    pairs: Sequence[str],
    convert: Callable[[str], Value | None],
    form: str,
    example: str,
) -> dict[str, Value]:
    """Return the values of an option that is given as ``KEY=VALUE``, by their keys.

    Args:
        option: Option, for errors.
        pairs: Texts of the option.
        convert: Returns a value of a text; None, or a `ValueError`, for a wrong one.
        form: Form of a text, for errors.
        example: Example of a text, for errors.

    Raises:
        UserError: A text has no key, or a wrong value.
    """
    parsed = dict[str, Value]()
    for pair in pairs:
        key, equals, text = pair.partition("=")
        try:
            value = convert(text) if key and equals else None
        except ValueError:
            value = None
        if value is None:
            remedy = f"Write for example {option} {example}"
            raise UserError(option, f"must be {form}", given=pair, remedy=remedy)
        parsed[key] = value
    return parsed


def send_rows(
    pipeline: str,
    rows: Sequence[InputRow],
    *,
    url: str,
    parameters: Mapping[str, Parameter],
    timeout_s: float,
) -> list[PlainOutputs]:
    """Send rows and return every output of each as plain data.

    An output of one element is that element, any other a list; JSON is parsed.

    Raises:
        UserError: The inputs are not the pipeline's, or the server rejected them or was not
            reached.
    """
    try:
        with Client(pipeline, url, timeout_s=timeout_s) as client:
            config = client.interface()
            config.check_takes_rows(pipeline)
            _check_inputs(pipeline, config, rows)
            return _send(client, config, rows, parameters)
    except InferenceError as error:
        raise request_failure(pipeline, url, error) from error


def stream_answer(
    pipeline: str,
    url: str,
    chat: str | None,
    prompt: str | None,
    sampling: Sampling,
    timeout_s: float,
) -> Iterator[Chunk]:
    """Yield the chunks of the response to a user's message `chat`, or to a `prompt`.

    Raises:
        UserError: The server rejected the request, or was not reached.
    """
    try:
        with Client(pipeline, url, timeout_s=timeout_s) as client:
            if prompt is not None:
                yield from client.generate(prompt, **sampling)
            else:
                yield from client.chat([{"role": "user", "content": str(chat)}], **sampling)
    except InferenceError as error:
        raise request_failure(pipeline, url, error) from error


def describe_answer(answer: PlainOutputs) -> list[str]:
    """Return lines with the outputs of one row.

    Lists of equal length that contain names, such as labels and scores, are shown side by side.
    """
    scalars = {name: value for name, value in answer.items() if not isinstance(value, list)}
    lists = {name: value for name, value in answer.items() if isinstance(value, list) and value}
    lines = [_side_by_side(scalars)] if scalars else []
    named = [len(value) for value in lists.values() if isinstance(value[0], str)]
    beside = {name: value for name, value in lists.items() if named and len(value) == named[0]}
    for entry in zip(*beside.values(), strict=True):
        lines.append(_side_by_side(dict(zip(beside, entry, strict=True))))
    for name, value in answer.items():
        if isinstance(value, list) and name not in beside:
            lines += _describe_list(name, value)
    # Empty outputs are shown only if nothing else is, such as a text without entities.
    return lines or [f"{name}: none" for name in answer]


def _send(
    client: Client,
    config: PipelineConfig,
    rows: Sequence[InputRow],
    parameters: Mapping[str, Parameter],
) -> list[PlainOutputs]:
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        own = {**parameters, **row.parameters}
        key = json.dumps([own, sorted(row.inputs)], sort_keys=True)
        if config.row_types:  # rows of one request would have outputs of one size
            key = json.dumps([own, index], sort_keys=True)
        groups.setdefault(key, []).append(index)
    answers: list[PlainOutputs] = [{}] * len(rows)
    for key, indexes in groups.items():
        names = rows[indexes[0]].inputs
        inputs = {name: [rows[index].inputs[name] for index in indexes] for name in names}
        try:
            outputs = client.infer(inputs, parameters=json.loads(key)[0])
        except InvalidRequestError as error:
            faulty = None if error.row is None else indexes[error.row]
            raise InvalidRequestError(error.message, faulty) from error
        columns = plain_outputs(config, outputs)
        for position, index in enumerate(indexes):
            answers[index] = {name: column[position] for name, column in columns.items()}
    return answers


def _check_inputs(pipeline: str, config: PipelineConfig, rows: Sequence[InputRow]) -> None:
    inputs = config.inputs
    for row in rows:
        missing = [name for name in inputs if name not in row.inputs]
        extra = [name for name in row.inputs if name not in (*inputs, *config.row_types)]
        if not missing and not extra:
            continue
        name = (missing or extra)[0]
        if row.source:
            rule = f"must {'' if missing else 'not '}have the input `{name}`"
        else:
            rule = "is required" if missing else f"is not an input of `{pipeline}`"
        raise UserError(
            row.source or _option(name),
            rule,
            given=", ".join(row.inputs),
            remedy=f"Give the inputs of `{pipeline}` for each row: {', '.join(inputs)}",
        )


def _typed_values(
    row: Mapping[str, str], types: Mapping[str, str], source: str
) -> dict[str, object]:
    """Return the values of options or of cells, with numbers and lists of typed inputs as YAML.

    Raises:
        UserError: A value is not YAML.
    """
    typed = {}
    for name, text in row.items():
        try:
            typed[name] = parse_value(text, types.get(name, "text"))
        except ValueError as error:
            raise UserError(
                f"{source} {name}", "must have a YAML value", given=error, remedy="Quote the value"
            ) from error
    return typed


def parse_value(text: str, kind: str) -> object:
    """Return the value of an option or of a cell for an input of a declared type.

    Raises:
        ValueError: A number or list is not YAML.
    """
    is_plain = kind == "bytes" or (kind == "text" and not text.startswith("["))
    return text if is_plain else parse_yaml(text)


def find_row_types(pipeline: str, url: str, timeout_s: float) -> Mapping[str, str]:
    """Return `PipelineConfig.row_types`; empty if the server is not reached."""
    with suppress(InferenceError), Client(pipeline, url, timeout_s=timeout_s) as client:
        return client.interface().row_types
    return {}


def _read_objects(
    table: JsonLines, constants: Mapping[str, str], types: Mapping[str, str]
) -> list[InputRow]:
    # The path of an image on the command line is relative to the current folder.
    common = _input_row(constants, Path())
    rows = []
    for number, line in table.lines():
        source = f"{table.path}:{number}"
        values, parameters = _parse_object(table, line, source, types)
        if twice := sorted(constants.keys() & values.keys()):
            raise UserError(
                _option(twice[0]),
                "cannot be combined with lines that have this input",
                given=source,
                remedy="Remove the option, or the input from the lines",
            )
        own = _input_row(values, table.path.parent, source, types)
        shown = " | ".join(part for part in (common.shown, own.shown) if part)
        rows.append(InputRow({**common.inputs, **own.inputs}, shown, source, parameters))
    if not rows:
        raise UserError(
            str(table.path),
            "must have rows",
            given="none",
            remedy='Write for example {"text": "hello"}',
        )
    return rows


def _parse_object(
    table: JsonLines, line: str, source: str, types: Mapping[str, str]
) -> tuple[dict[str, object], dict[str, Parameter]]:
    try:
        row = table.parse(line)
    except ValueError as error:
        raise UserError(
            source,
            "must be a JSON object with a string for each input",
            given=line[:80],
            remedy='Write for example {"text": "hello"}',
        ) from error
    own = row.pop(PARAMETERS, {})
    for name, value in {**row, PARAMETERS: own}.items():
        is_typed = types.get(name, "bytes") != "bytes"
        if not is_typed and not isinstance(value, dict if name == PARAMETERS else str):
            raise UserError(
                f"{source}: {name}",
                f"must be {'an object' if name == PARAMETERS else 'a string'}",
                given=f"{value!r:.80}",
                remedy='Write for example {"text": "hello"}, or keep other columns with --out',
            )
    parameters = {}
    for name, value in own.items() if isinstance(own, dict) else ():
        if (parameter := request_parameter(value)) is None:
            raise UserError(
                f"{source}: {PARAMETERS}.{name}",
                "must be a plain value, or a list of strings",
                given=f"{value!r:.80}",
                remedy='Write for example {"top_k": 3}',
            )
        parameters[name] = parameter
    return row, parameters


def _input_row(
    row: Mapping[str, object],
    folder: Path,
    source: str = "",
    types: Mapping[str, str] | None = None,
) -> InputRow:
    inputs = dict(row)
    for name in row:
        if (types or {_IMAGE: "bytes"}).get(name) != "bytes":
            continue
        try:
            inputs[name] = (folder / str(row[name])).read_bytes()
        except (OSError, ValueError) as error:
            raise UserError(
                source or _option(name),
                "must be a readable file",
                given=f"{row[name]} ({getattr(error, 'strerror', None) or error})",
                remedy="Check the path and its permissions",
            ) from error
    return InputRow(inputs, " | ".join(map(str, row.values())), source)


def _describe_list(name: str, values: Sequence[object]) -> list[str]:
    if not values:
        return []
    objects = [value for value in values if isinstance(value, dict)]
    if len(objects) == len(values):
        return [f"{name}:", *(f"  {_side_by_side(value)}" for value in objects)]
    if isinstance(values[0], list) and len(values[0]) > _MAX_NUMBERS:
        (first,) = _describe_list(name, values[0])
        return [f"{first}, the first of {len(values)}"]
    start = ", ".join(map(_show, values[:_MAX_NUMBERS]))
    if len(values) <= _MAX_NUMBERS:
        return [f"{name}: [{start}]"]
    return [f"{name}: [{start}, …] ({len(values)} elements)"]


def _side_by_side(values: Mapping[str, object]) -> str:
    return "  ".join(f"{name}: {_show(value)}" for name, value in values.items())


def _show(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
