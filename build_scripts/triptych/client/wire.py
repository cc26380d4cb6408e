"""Conversion between rows, arrays and Triton's gRPC messages."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import model_config_pb2, service_pb2

from triptych.client.errors import InvalidRequestError, PipelineFailedError
from triptych.runtime.hooking import cast_numbers
from triptych.runtime.own_model import ROW_TYPES

Parameter = bool | int | float | str
Rows = Mapping[str, Sequence[object] | NDArray[np.generic]]
"""One value per row for each input: text or bytes, or numbers, lists or arrays if it is typed."""
InputType = tuple[str, tuple[int, ...]]
"""Datatype of an input and the sizes of its axes in a row, 0 for a variable size."""
TEXT_INPUT: InputType = ("BYTES", (1,))

_LENGTH = struct.Struct("<I")
_DTYPES: dict[str, type[np.generic]] = {
    **{name.upper(): np.dtype(name).type for name in ("bool", "int8", "int16", "int32", "int64")},
    **{name.upper(): np.dtype(name).type for name in ("uint8", "uint16", "uint32", "uint64")},
    **{"FP16": np.float16, "FP32": np.float32, "FP64": np.float64, "BYTES": np.object_},
}


@dataclass(frozen=True)
class EncodedRows:
    """Encoded rows of a call.

    Attributes:
        columns: One element per row by input name; empty for a rejected row.
        count: Number of rows.
        refused: Error of each row that cannot be sent.
        types: Datatype of each typed input, whose elements are complete tensors.
        shapes: Shape of each row of a typed input.
    """

    columns: dict[str, list[bytes]]
    count: int
    refused: dict[int, InvalidRequestError]
    types: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)

    def by_shape(self, rows: Iterable[int]) -> list[list[int]]:
        """Return rows in groups that can be in one request, because their shapes are equal."""
        groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for row in rows:
            key = tuple(shapes[row] for shapes in self.shapes.values())
            groups.setdefault(key, []).append(row)
        return list(groups.values())


SPACE = "space"
"""Parameter of an ensemble with a pair; see `PipelineConfig.space`."""

_PROMPT = "text_input"


@dataclass(frozen=True)
class VectorSpace:
    """Vector space that a pipeline has with its pair, and the scores in it."""

    id: str  # Name that both pipelines have
    size: int  # Number of elements of a vector
    pair_with: str  # Name of the other pipeline
    scale: float  # Factor of a cosine in the model's logits
    # Summand of the logits of a model whose scores are their sigmoid; None for a softmax.
    bias: float | None


@dataclass(frozen=True)
class PipelineConfig:
    """Interface of a pipeline, from its ``config.pbtxt``.

    Attributes:
        max_batch_size: Maximum number of rows in a request.
        inputs: Names of the inputs that a request must have; all inputs if it generates text.
        options: Datatype of each optional input by name.
        caches: Whether the server answers repeated requests from its response cache.
        outputs: dtype and shape of one row by output name; 0 for a variable size.
        steps: Models of the ensemble in order; the model itself if it is not an ensemble.
        input_types: Datatype and sizes of each input by name.
        row_types: Declared type of each input of a pipeline around an own model, also of those that
            a request may leave out: text, bytes, int, float or bool.
        space: Vector space of a side of a model of texts and images; None without a pair.
    """

    max_batch_size: int
    inputs: tuple[str, ...]
    outputs: dict[str, tuple[type[np.generic], tuple[int, ...]]]
    steps: tuple[str, ...]
    options: Mapping[str, str] = field(default_factory=dict)
    caches: bool = False
    input_types: Mapping[str, InputType] = field(default_factory=dict)
    row_types: Mapping[str, str] = field(default_factory=dict)
    space: VectorSpace | None = None

    @property
    def generates(self) -> bool:
        """Whether the pipeline generates text, for one prompt per request."""
        return _PROMPT in self.inputs

    @property
    def free_outputs(self) -> tuple[str, ...]:
        """Outputs of a pipeline around an own model whose rows may differ in size."""
        if not self.row_types:
            return ()
        return tuple(name for name, (_, dims) in self.outputs.items() if 0 in dims)

    def check_takes_rows(self, pipeline: str) -> None:
        """Raise `InvalidRequestError` if the pipeline generates text."""
        if self.generates:
            raise InvalidRequestError(
                f"`{pipeline}` generates text, for one prompt or conversation per call. Given: "
                "rows. Call `generate` or `chat`; on the command line give --prompt, --chat, or "
                "--file with --out."
            )

    def no_rows(self) -> dict[str, NDArray[np.generic]]:
        return {name: np.empty((0, *row), dtype) for name, (dtype, row) in self.outputs.items()}


def check_inputs(inputs: object) -> None:
    """Raise `InvalidRequestError` if the inputs of a call are not one list of rows each."""
    if not isinstance(inputs, Mapping):
        raise InvalidRequestError(
            "`inputs` must be a mapping with a list of rows for each input. "
            f"Given: {type(inputs).__name__}. Write for example {{'text': ['hello']}}."
        )
    for name, column in inputs.items():
        check_rows(name, column)


def has_typed_rows(inputs: Rows) -> bool:
    """Return whether a row is neither text nor bytes, so that its encoding depends on the input."""
    # By iteration, because a Series of pandas is indexed by its labels.
    values = [next(iter(column)) for column in inputs.values() if len(column)]
    return not all(isinstance(value, str | bytes) for value in values)


def encode_rows(inputs: Rows, config: PipelineConfig | None = None) -> EncodedRows:
    """Check and encode the rows of every input.

    Without `config`, every input has one text per row.

    Raises:
        InvalidRequestError: An input is no list, or the inputs differ in length. A row that cannot
            be sent does not raise; it is reported in `refused`.
    """
    if config is not None and any(config.input_types[n] != TEXT_INPUT for n in config.inputs):
        _check_names(inputs, config)
    refused: dict[int, InvalidRequestError] = {}
    columns: dict[str, list[bytes]] = {}
    types: dict[str, str] = {}
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for name, values in inputs.items():
        check_rows(name, values)
        column = columns[name] = []
        kind = TEXT_INPUT if config is None else config.input_types.get(name, TEXT_INPUT)
        if kind != TEXT_INPUT:
            types[name], shapes[name] = kind[0], []
            for row, value in enumerate(values):
                shape: tuple[int, ...] = ()
                data = b""
                try:
                    shape, data = _encode_value(value, *kind)
                except (UnicodeEncodeError, TypeError, ValueError) as error:
                    text = f"`{name}` {error}. Given: {value!r:.80}. Convert it."
                    refused.setdefault(row, InvalidRequestError(text, row))
                column.append(data)
                shapes[name].append(shape)
            continue
        for row, value in enumerate(values):
            try:
                column.append(value.encode() if isinstance(value, str) else _check_bytes(value))
            except (UnicodeEncodeError, TypeError) as error:
                column.append(b"")
                refused.setdefault(row, InvalidRequestError(_encoding_error(name, error), row))
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        given = ", ".join(f"`{name}` {length}" for name, length in lengths.items()) or "no input"
        raise InvalidRequestError(f"The inputs must have the same number of rows. Given: {given}.")
    return EncodedRows(columns, next(iter(lengths.values())), refused, types, shapes)


def check_rows(name: str, values: object) -> None:
    """Raise `InvalidRequestError` if the rows of an input are one value instead of several."""
    if isinstance(values, str | bytes) or not isinstance(values, Sized):
        raise InvalidRequestError(
            f"`{name}` must be a list with one element per row. "
            f"Given: {'None' if values is None else f'one {type(values).__name__}'}. "
            "Put it into a list."
        )


def _check_names(inputs: Rows, config: PipelineConfig) -> None:
    """Raise `InvalidRequestError` if an input is missing or unknown."""
    known = ", ".join(config.input_types)
    for name in config.inputs:
        if name not in inputs:
            given = ", ".join(inputs) or "none"
            raise InvalidRequestError(f"`{name}` is required. Given: {given}. Send it, too.")
    for name in inputs:
        if name not in config.input_types:
            raise InvalidRequestError(
                f"`{name}` is not an input of the pipeline. Given: {name}. Inputs: {known}."
            )


def _encode_value(
    value: object, datatype: str, dims: tuple[int, ...]
) -> tuple[tuple[int, ...], bytes]:
    """Return the shape and the bytes of one row of a typed input."""
    dtype = _DTYPES[datatype]
    array = np.asarray(value, dtype=dtype if dtype is np.object_ else None)
    if not array.ndim and dims == (1,):
        array = array.reshape(1)
    if len(dims) != array.ndim or any(d and d != n for d, n in zip(dims, array.shape, strict=True)):
        wanted = [size or "any" for size in dims]
        raise ValueError(f"must have the shape {wanted} in each row, not {list(array.shape)}")
    if dtype is not np.object_:
        return array.shape, cast_numbers(array, dtype).tobytes()
    parts: list[bytes] = []
    for each in array.ravel():
        data = each.encode() if isinstance(each, str) else each
        if not isinstance(data, bytes):
            raise TypeError("must have elements of str or bytes")
        parts += (_LENGTH.pack(len(data)), data)
    return array.shape, b"".join(parts)


def _check_bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(value if isinstance(value, Exception) else type(value).__name__)
    return value


def _encoding_error(name: str, error: UnicodeEncodeError | TypeError) -> str:
    if isinstance(error, UnicodeEncodeError):
        # The code point by number: a message with the surrogate itself could not be printed.
        return (
            f"`{name}` must be text that UTF-8 supports. Given: the lone surrogate "
            f"U+{ord(error.object[error.start]):04X} at character {error.start}. Replace it."
        )
    return f"`{name}` must be str or bytes. Given: {error}. Convert it."


def infer_request(
    pipeline: str,
    columns: Mapping[str, Sequence[bytes]],
    rows: Sequence[int],
    parameters: Mapping[str, Parameter],
    options: Mapping[str, str],
    encoded: EncodedRows | None = None,
    requested: Sequence[str] = (),
) -> service_pb2.ModelInferRequest:
    """Return the ``ModelInferRequest`` with these rows of `columns`, each input of shape [rows, 1].

    Those `parameters` that are `options` (name to datatype) are sent as inputs, too. Typed inputs
    have the datatype and the shape of the first row in `encoded`. The response has the `requested`
    outputs; all if none is given.
    """
    request = service_pb2.ModelInferRequest(model_name=pipeline)
    for name in requested:
        request.outputs.add(name=name)
    for name, value in parameters.items():
        if name not in options:
            _set_parameter(request.parameters[name], name, value)
    for name, column in columns.items():
        if encoded is not None and name in encoded.types:
            shape = (len(rows), *encoded.shapes[name][rows[0]])
            request.inputs.add(name=name, datatype=encoded.types[name], shape=shape)
            request.raw_input_contents.append(b"".join(column[row] for row in rows))
            continue
        tensor = request.inputs.add(name=name, datatype="BYTES")
        tensor.shape.extend((len(rows), 1))
        parts: list[bytes] = []
        for row in rows:
            element = column[row]
            parts += (_LENGTH.pack(len(element)), element)
        request.raw_input_contents.append(b"".join(parts))
    for name in parameters.keys() & options.keys():
        request.inputs.add(name=name, datatype=options[name], shape=(len(rows), 1))
        data = _option_bytes(name, options[name], parameters[name])
        request.raw_input_contents.append(data * len(rows))
    return request


_OPTION_FORMATS: dict[str, tuple[str, type]] = {
    "BOOL": ("<?", bool),
    "INT32": ("<i", int),
    "FP32": ("<f", float),
}


def _option_bytes(name: str, datatype: str, value: object) -> bytes:
    """Return one element of an option's tensor."""
    value = value.item() if isinstance(value, np.generic) else value
    try:
        if datatype == "BYTES" and isinstance(value, str):
            text = value.encode()
            return _LENGTH.pack(len(text)) + text
        layout, kind = _OPTION_FORMATS[datatype]
        if type(value) is kind or (kind is float and type(value) is int):
            return struct.pack(layout, value)
    except UnicodeEncodeError as error:
        raise InvalidRequestError(_encoding_error(f"parameter {name}", error)) from None
    except (KeyError, struct.error):
        pass
    raise InvalidRequestError(
        f"The parameter `{name}` must be {_OPTION_WORDS.get(datatype, datatype)}. "
        f"Given: {value!r:.80}. Convert it."
    )


_OPTION_WORDS = {"BOOL": "a bool", "INT32": "a 32-bit int", "FP32": "a float", "BYTES": "a str"}


def generation_request(
    pipeline: str, texts: Mapping[str, bytes], *, stream: bool, name: str
) -> service_pb2.ModelInferRequest:
    """Return the ``ModelInferRequest`` of a generation: texts of shape [1], and `stream`.

    `cancelling_request` with the same `name` cancels it.
    """
    request = _texts_request(pipeline, texts, name)
    request.inputs.add(name="stream", datatype="BOOL", shape=(1,))
    request.raw_input_contents.append(bytes([stream]))
    return request


def cancelling_request(pipeline: str, name: str) -> service_pb2.ModelInferRequest:
    """Return the request that cancels the generation of this name, on the same stream."""
    return _texts_request(pipeline, {"cancel": name.encode()}, "")


def _texts_request(
    pipeline: str, texts: Mapping[str, bytes], name: str
) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=pipeline, id=name)
    for field_name, text in texts.items():
        request.inputs.add(name=field_name, datatype="BYTES", shape=(1,))
        request.raw_input_contents.append(_LENGTH.pack(len(text)) + text)
    return request


def _set_parameter(target: service_pb2.InferParameter, name: str, value: object) -> None:
    # bool before int: every bool is an int. numpy's scalars are Python's by way of `item`.
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        target.bool_param = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        target.int64_param = value
    elif isinstance(value, float):
        target.double_param = value
    elif isinstance(value, str):
        try:
            target.string_param = value
        except UnicodeEncodeError as error:
            raise InvalidRequestError(_encoding_error(f"parameter {name}", error)) from None
    else:
        raise InvalidRequestError(
            f"The parameter `{name}` must be a bool, a 64-bit int, a float or a str. "
            f"Given: {value!r:.80}. Convert it."
        )


def read_outputs(response: service_pb2.ModelInferResponse) -> dict[str, NDArray[np.generic]]:
    """Return the arrays of a ``ModelInferResponse``, each [rows, …].

    They are read-only views of the response. BYTES become arrays of objects, each `str`; bytes that
    are not UTF-8 are escaped with a backslash.

    Raises:
        PipelineFailedError: An output has a data type that numpy does not support.
    """
    outputs: dict[str, NDArray[np.generic]] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        dtype = _DTYPES.get(tensor.datatype)
        if dtype is None:
            raise PipelineFailedError(
                f"Output `{tensor.name}` has the datatype {tensor.datatype}, "
                f"which the client cannot read. Make the pipeline return FP32."
            )
        flat = _read_elements(raw) if dtype is np.object_ else np.frombuffer(raw, dtype)
        outputs[tensor.name] = flat.reshape(tuple(tensor.shape))
    return outputs


def _read_elements(raw: bytes) -> NDArray[np.object_]:
    elements: list[str] = []
    at = 0
    while at < len(raw):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(raw, at)[0]
        elements.append(raw[start:at].decode("utf-8", "backslashreplace"))
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


def read_config(response: service_pb2.ModelConfigResponse) -> PipelineConfig:
    """Return the interface in a ``ModelConfigResponse``.

    Raises:
        InvalidRequestError: The pipeline has no batch dimension and does not generate text.
    """
    config = response.config
    inputs = tuple(tensor.name for tensor in config.input)
    options: dict[str, str] = {}
    if _PROMPT not in inputs:
        inputs = tuple(tensor.name for tensor in config.input if not tensor.optional)
        options = {t.name: _datatype(t) for t in config.input if t.optional}
    if config.max_batch_size < 1 and _PROMPT not in inputs:
        raise InvalidRequestError(
            f"`{config.name}` must have a max_batch_size of 1 or more. "
            f"Given: {config.max_batch_size}. Its requests have no batch dimension for rows."
        )
    outputs = {}
    for output in config.output:
        dtype = _DTYPES.get(_datatype(output), np.object_)
        outputs[output.name] = (dtype, tuple(max(size, 0) for size in output.dims))
    steps = tuple(step.model_name for step in config.ensemble_scheduling.step)
    space = config.parameters[SPACE].string_value
    return PipelineConfig(
        config.max_batch_size,
        inputs,
        outputs,
        steps or (config.name,),
        options,
        config.response_cache.enable,
        {t.name: (_datatype(t), tuple(max(size, 0) for size in t.dims)) for t in config.input},
        json.loads(config.parameters[ROW_TYPES].string_value or "{}"),
        VectorSpace(**json.loads(space)) if space else None,
    )


def _datatype(tensor: model_config_pb2.ModelInput | model_config_pb2.ModelOutput) -> str:
    name: str = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name
