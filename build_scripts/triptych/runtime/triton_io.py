"""Inputs, responses, settings and shared memory of the Python steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .request_errors import InternalError, RequestError, StepError

try:
    import triton_python_backend_utils as pb_utils
except ImportError:  # a build reads parameters where there is no server
    pb_utils = None


import os
from contextlib import suppress
from pathlib import Path

Inputs = Mapping[str, Any]
MAX_MESSAGE = 4000
TEXTS_A_REQUEST = 8
"""All texts of a request together may have so many times the bytes that one may have."""


def settings_of(args: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of the step's ``config.pbtxt``, each JSON text, as plain data."""
    parameters = json.loads(args["model_config"])["parameters"]
    return {name: json.loads(value["string_value"]) for name, value in parameters.items()}


def error_response(fault: Exception) -> Any:
    """Return a response that fails its own request, with the status of the error's kind."""
    known = fault if isinstance(fault, StepError) else InternalError(fault)
    # A hook's own words may be anything: a lone surrogate, or megabytes, would fail a whole batch.
    message = known.message[:MAX_MESSAGE].encode("utf-8", "replace").decode("utf-8")
    error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, known.status))
    return pb_utils.InferenceResponse(output_tensors=[], error=error)


def send(sender: Any, response: Any) -> None:
    """Answer a request through its sender, now, and not with the others of its batch."""
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def read_texts(
    inputs: Inputs, field: str, max_bytes: int, limit: str = "tokenizer.max_text_bytes"
) -> list[str]:
    """The rows of a BYTES input ``[n, 1]`` as a list of n str; `limit` is the field of `max_bytes`.

    Raises:
        RequestError: a row that is not UTF-8 or is longer than `max_bytes`.
    """
    texts = []
    total = 0
    for row, data in enumerate(read_bytes(inputs, field)):
        if len(data) > max_bytes:
            raise RequestError(
                field,
                f"must have at most {max_bytes} bytes",
                f"{len(data)} bytes",
                f"Split the text, or raise {limit} in the pipeline",
                row,
            )
        total += len(data)
        if total > TEXTS_A_REQUEST * max_bytes:
            raise RequestError(
                field,
                f"must have at most {TEXTS_A_REQUEST * max_bytes} bytes in all rows of a request",
                f"{total} bytes up to here",
                f"Send fewer texts in one request, or raise {limit}",
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


def read_bytes(inputs: Inputs, field: str) -> list[bytes]:
    """The rows of a BYTES input ``[n, 1]`` as a list of n bytes."""
    values: list[bytes] = inputs[field].as_numpy().ravel().tolist()
    return values


def inputs_of(request: Any) -> Inputs:
    """A request's tensors by name, asked for once: each time Triton makes them all anew."""
    return {tensor.name(): tensor for tensor in request.inputs()}


FOLDER = "/dev/shm/"


def make_private() -> None:
    """Leaves what this process has mapped to its own user; no request has come so far.

    A umask is not enough: the Python backend sets the mode of its regions itself.
    """
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines():
        path = line.partition(FOLDER)[2]
        if path:
            with suppress(OSError):  # removed meanwhile, or of another user
                Path(FOLDER + path).chmod(0o600)
