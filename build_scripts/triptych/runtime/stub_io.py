"""Requests in, responses out: what every Python step shares. One bad request fails alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray


class RequestError(Exception):
    """A request at fault: what is wrong, by row where a row is at fault."""

    def __init__(
        self, field: str, rule: str, given: object, remedy: str, row: int | None = None
    ) -> None:
        """Say `field` `rule`, what was `given`, a `remedy`, and the `row` of the request."""
        where = "" if row is None else f"row {row}: "
        super().__init__(f"{where}`{field}` {rule}. Given: {given}. {remedy}.")


def parameters_of(model_config: Mapping[str, Any]) -> dict[str, str]:
    """The string parameters of a parsed ``config.pbtxt`` as a plain dict."""
    return {key: value["string_value"] for key, value in model_config["parameters"].items()}


class Overloaded(Exception):
    """There is no room for another request."""


def error_response(error: Exception) -> Any:
    """A response that fails its own request: InvalidArgument for a fault of the request."""
    if isinstance(error, RequestError):
        code = pb_utils.TritonError.INVALID_ARG
        message = str(error)
    elif isinstance(error, Overloaded):
        code = pb_utils.TritonError.UNAVAILABLE
        message = str(error)
    else:
        code = pb_utils.TritonError.INTERNAL
        message = f"{type(error).__name__}: {error}. This is a bug of the pipeline."
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message, code))


def read_texts(request: Any, field: str, max_bytes: int) -> list[str]:
    """The rows of a BYTES input ``[n, 1]`` as a list of n str.

    Raises:
        RequestError: a row that is not UTF-8 or is longer than `max_bytes`.
    """
    texts = []
    for row, data in enumerate(pb_utils.get_input_tensor_by_name(request, field).as_numpy().flat):
        if len(data) > max_bytes:
            raise RequestError(
                field,
                f"must have at most {max_bytes} bytes",
                f"{len(data)} bytes",
                "Split the text, or raise tokenizer.max_text_bytes in the pipeline",
                row,
            )
        try:
            texts.append(data.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RequestError(
                field,
                "must be valid UTF-8",
                f"byte 0x{data[error.start]:02x} at position {error.start}",
                "Encode the text as UTF-8",
                row,
            ) from error
    return texts


def check_parameters(text: str, rules: Mapping[str, Any]) -> dict[str, Any]:
    """The request's parameters (JSON text) checked against `rules`.

    A rule has ``type`` (``int`` or ``str``) and ``min``/``max`` or ``choices``. Parameters whose
    name starts with ``triton_`` or holds a ``-`` (forwarded headers) are not for us.

    Raises:
        RequestError: an unknown name, a wrong type or a value out of range.
    """
    if len(text) < 3:  # "{}": by far the most frequent
        return {}
    parameters = {
        name: value
        for name, value in json.loads(text).items()
        if not name.startswith("triton_") and "-" not in name
    }
    for name, value in parameters.items():
        rule = rules.get(name)
        if rule is None:
            known = ", ".join(sorted(rules)) or "none"
            raise RequestError(
                f"parameter {name}", "is not known", name, f"Known parameters: {known}"
            )
        _check_value(name, value, rule)
    return parameters


def _check_value(name: str, value: object, rule: Mapping[str, Any]) -> None:
    if rule["type"] == "int":
        low, high = rule["min"], rule["max"]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(
                f"parameter {name}",
                f"must be an integer from {low} to {high}",
                repr(value)[:80],
                "Correct or leave out the parameter",
            )
    elif value not in rule["choices"]:
        raise RequestError(
            f"parameter {name}",
            "must be one of " + ", ".join(rule["choices"]),
            repr(value)[:80],
            "Correct or leave out the parameter",
        )


def pad_rows(rows: Sequence[Sequence[int]], width: int, fill: int) -> NDArray[np.int32]:
    """Lists of int as one INT32 array ``[len(rows), width]``, filled up on the right."""
    if len(rows) == 1 and len(rows[0]) == width:
        return np.array(rows, dtype=np.int32)
    padded = np.full((len(rows), width), fill, dtype=np.int32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded
