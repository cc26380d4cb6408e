"""Inputs, responses, settings and shared memory of the Python steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .request_errors import InternalError, RequestError, StepError

try:
    import triton_python_backend_utils as pb_utils
except ImportError:  # a build reads parameters without a server
    pb_utils = None


import os
from contextlib import suppress
from pathlib import Path

Inputs = Mapping[str, Any]
MAX_MESSAGE = 4000
TEXTS_A_REQUEST = 8
"""Maximum total size of a request's texts, as a multiple of the limit of one text."""


def settings_of(args: Mapping[str, str]) -> dict[str, Any]:
    """Return the parameters of the step's ``config.pbtxt``, parsed from JSON."""
    parameters = json.loads(args["model_config"])["parameters"]
    return {name: json.loads(value["string_value"]) for name, value in parameters.items()}


def error_response(fault: Exception) -> Any:
    """Return a response that fails its own request, with the status of the error's kind."""
    known = fault if isinstance(fault, StepError) else InternalError(fault)
    # A hook's message may have a lone surrogate or megabytes, which would fail a whole batch.
    message = known.message[:MAX_MESSAGE].encode("utf-8", "replace").decode("utf-8")
    error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, known.status))
    return pb_utils.InferenceResponse(output_tensors=[], error=error)


def send(sender: Any, response: Any) -> None:
    """Send the response of a request immediately, before the other responses of its batch."""
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def read_texts(
    inputs: Inputs, field: str, max_bytes: int, limit: str = "tokenizer.max_text_bytes"
) -> list[str]:
    """Return the rows of a BYTES input ``[n, 1]`` as text; `limit` names the field of `max_bytes`.

    Raises:
        RequestError: A row is not UTF-8, or the texts exceed a limit.
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
    """Return the rows of a BYTES input ``[n, 1]`` as a list of n bytes."""
    values: list[bytes] = inputs[field].as_numpy().ravel().tolist()
    return values


def inputs_of(request: Any) -> Inputs:
    """Return a request's tensors by name. Call it once per request, as Triton copies them all."""
    return {tensor.name(): tensor for tensor in request.inputs()}


FOLDER = "/dev/shm/"


def make_private() -> None:
    """Restrict the shared memory of this process to its user, before the first request.

    A umask is not enough, because the Python backend sets the mode of its regions itself.
    """
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines():
        path = line.partition(FOLDER)[2]
        if path:
            with suppress(OSError):  # removed meanwhile, or of another user
                Path(FOLDER + path).chmod(0o600)
