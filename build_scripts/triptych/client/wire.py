"""Conversion between rows, arrays and Triton's gRPC messages."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import model_config_pb2, service_pb2

from triptych.client.errors import InvalidRequestError, PipelineFailedError

Parameter = bool | int | float | str
Rows = Mapping[str, Sequence["str | bytes"]]

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
    """

    columns: dict[str, list[bytes]]
    count: int
    refused: dict[int, InvalidRequestError]


_PROMPT = "text_input"


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
    """

    max_batch_size: int
    inputs: tuple[str, ...]
    outputs: dict[str, tuple[type[np.generic], tuple[int, ...]]]
    steps: tuple[str, ...]
    options: Mapping[str, str] = field(default_factory=dict)
    caches: bool = False

    @property
    def generates(self) -> bool:
        """Whether the pipeline generates text, for one prompt per request."""
        return _PROMPT in self.inputs

    def check_takes_rows(self, pipeline: str) -> None:
        """Raise `InvalidRequestError` if the pipeline generates text."""
        if self.generates:
            raise InvalidRequestError(
                f"`{pipeline}` generates text, for one prompt or conversation per call. Given: "
                "rows. Call `generate` or `chat`; on the command line give --prompt, --chat, or "
                "--file with --out."
            )

    def no_rows(self) -> dict[str, NDArray[Any]]:
        return {name: np.empty((0, *row), dtype) for name, (dtype, row) in self.outputs.items()}


def encode_rows(inputs: Rows) -> EncodedRows:
    """Check and encode the rows of every input.

    Raises:
        InvalidRequestError: An input is no list, or the inputs differ in length. A row that cannot
            be sent does not raise; it is reported in `refused`.
    """
    refused: dict[int, InvalidRequestError] = {}
    columns: dict[str, list[bytes]] = {}
    for name, values in inputs.items():
        if isinstance(values, str | bytes):
            raise InvalidRequestError(
                f"`{name}` must be a list with one element per row. "
                f"Given: one {type(values).__name__}. Put it into a list."
            )
        column = columns[name] = []
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
    return EncodedRows(columns, next(iter(lengths.values())), refused)


def _check_bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(type(value).__name__)
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
) -> Any:
    """Return the ``ModelInferRequest`` with these rows of `columns`, each input of shape [rows, 1].

    Those `parameters` that are `options` (name to datatype) are sent as inputs, too.
    """
    request = service_pb2.ModelInferRequest(model_name=pipeline)
    for name, value in parameters.items():
        if name not in options:
            _set_parameter(request.parameters[name], name, value)
    for name, column in columns.items():
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
) -> Any:
    """Return the ``ModelInferRequest`` of a generation: texts of shape [1], and `stream`.

    `cancelling_request` with the same `name` cancels it.
    """
    request = _texts_request(pipeline, texts, name)
    request.inputs.add(name="stream", datatype="BOOL", shape=(1,))
    request.raw_input_contents.append(bytes([stream]))
    return request


def cancelling_request(pipeline: str, name: str) -> Any:
    """Return the request that cancels the generation of this name, on the same stream."""
    return _texts_request(pipeline, {"cancel": name.encode()}, "")


def _texts_request(pipeline: str, texts: Mapping[str, bytes], name: str) -> Any:
    request = service_pb2.ModelInferRequest(model_name=pipeline, id=name)
    for field_name, text in texts.items():
        request.inputs.add(name=field_name, datatype="BYTES", shape=(1,))
        request.raw_input_contents.append(_LENGTH.pack(len(text)) + text)
    return request


def _set_parameter(target: Any, name: str, value: object) -> None:
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
            f"Given: {value!r}. Convert it."
        )


def read_outputs(response: Any) -> dict[str, NDArray[Any]]:
    """Return the arrays of a ``ModelInferResponse``, each [rows, …].

    They are read-only views of the response. BYTES become arrays of objects, each `bytes`.

    Raises:
        PipelineFailedError: An output has a data type that numpy does not support.
    """
    outputs: dict[str, NDArray[Any]] = {}
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
    elements: list[bytes] = []
    at = 0
    while at < len(raw):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(raw, at)[0]
        elements.append(raw[start:at])
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


def read_config(response: Any) -> PipelineConfig:
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
    return PipelineConfig(
        config.max_batch_size,
        inputs,
        outputs,
        steps or (config.name,),
        options,
        config.response_cache.enable,
    )


def _datatype(tensor: Any) -> str:
    name: str = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name
