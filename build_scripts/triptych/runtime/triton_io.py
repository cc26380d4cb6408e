"""Inputs, parameters, responses, settings and shared memory of the Python steps."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from .request_errors import InternalError, RequestError, StepError

try:
    import triton_python_backend_utils as pb_utils
except ImportError:  # a build reads parameters without a server
    pb_utils = None  # type: ignore[assignment]

Inputs = Mapping[str, "pb_utils.Tensor"]
MAX_MESSAGE = 4000
TEXTS_A_REQUEST = 8
"""Maximum total size of a request's texts, as a multiple of the limit of one text."""


SETTINGS_FILE = "settings.json"
SETTINGS_PARAMETER = "settings"
"""Parameter of a config with JSON of the settings that differ where this config is used."""


def read_settings(folder: Path, model_config: str = "{}") -> dict[str, Any]:
    """Return the settings of the step whose ``model.py`` is in `folder`.

    Args:
        folder: Folder of the step's version.
        model_config: Config of the step as JSON, whose parameter replaces settings of the file.
    """
    settings: dict[str, Any] = json.loads((folder / SETTINGS_FILE).read_bytes())
    changed = json.loads(model_config).get("parameters", {}).get(SETTINGS_PARAMETER, {})
    return {**settings, **json.loads(changed.get("string_value", "{}"))}


def error_response(error: Exception) -> pb_utils.InferenceResponse:
    """Return a response that fails its own request, with the status of the error's kind."""
    known = error if isinstance(error, StepError) else InternalError(error)
    # A hook's message may have a lone surrogate or megabytes, which would fail a whole batch.
    message = known.message[:MAX_MESSAGE].encode("utf-8", "replace").decode("utf-8")
    failure = pb_utils.TritonError(message, getattr(pb_utils.TritonError, known.status))
    return pb_utils.InferenceResponse(output_tensors=[], error=failure)


def send(sender: pb_utils.InferenceResponseSender, response: pb_utils.InferenceResponse) -> None:
    """Send the response of a request immediately, before the other responses of its batch."""
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def read_texts(
    inputs: Inputs, field: str, max_bytes: int, limit: str = "tokenizer.max_text_bytes"
) -> list[str]:
    """Return the rows of a BYTES input ``[n, 1]`` as text; `limit` names the field of `max_bytes`.

    Raises:
        RequestError: A row is not UTF-8, or the texts exceed a limit.
    """
    rows = read_bytes(inputs, field)
    if sum(map(len, rows)) <= max_bytes:
        with suppress(UnicodeDecodeError):
            return [data.decode("utf-8") for data in rows]
    texts = []
    total = 0
    for row, data in enumerate(rows):
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


def read_inputs(request: pb_utils.InferenceRequest) -> Inputs:
    """Return a request's tensors by name. Call it once per request, as Triton copies them all."""
    return {tensor.name(): tensor for tensor in request.inputs()}


TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "list": (str,),
}
OF_CARRIERS = frozenset(
    ("accept", "authorization", "baggage", "content_type", "headers", "traceparent", "tracestate")
)
"""Parameters that describe the transport of a request, not its answer. MLServer's clients, gateways
and tracing libraries add them to every request."""
WORDS = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "list": "a string with a JSON list of strings, or names with commas between them",
}


def check_parameters(
    text: str, rules: Mapping[str, Mapping[str, object]], defaults: Mapping[str, object]
) -> Mapping[str, object]:
    """Return the parameters of a request (JSON text) with defaults, checked by `rules`.

    A rule has ``type`` (bool, int, float, str or list) and may have ``min``, ``max``, ``choices``.

    Raises:
        RequestError: A name is unknown, a type is wrong, or a value is out of range.
    """
    if len(text) < 3:  # fast path for "{}", the most frequent value
        return defaults
    parameters = dict(defaults)
    for name, value in own_parameters(text, rules).items():
        rule = rules.get(name)
        if rule is None:
            known = ", ".join(sorted(rules)) or "none"
            raise RequestError(
                f"parameter {name}", "is not known", name, f"Known parameters: {known}"
            )
        parameters[name] = _checked(f"parameter {name}", value, rule)
    return parameters


def add_options(text: str, inputs: Inputs, rules: Mapping[str, Mapping[str, object]]) -> str:
    """Return the parameters of a request (JSON text) with those that it sends as input tensors.

    The tensor of a parameter is ``[n, 1]``, that of a list ``[n, k]``, with equal rows. A list of
    one element is read as the parameter is.

    Raises:
        RequestError: The rows differ, a value breaks its rule, or the request has a parameter of
            the same name and another value.
    """
    parameters = json.loads(text)
    for name, rule in rules.items():
        if name not in inputs:
            continue
        field = f"input {name}"
        value = _read_option(field, inputs[name].as_numpy().tolist())
        checked = _checked(field, value, rule)
        if name in parameters and _checked(f"parameter {name}", parameters[name], rule) != checked:
            raise RequestError(
                field,
                "must have the value of the request parameter of the same name",
                f"{value!r:.80}, and {parameters[name]!r:.80} as parameter",
                "Send one of the two",
            )
        parameters[name] = value
    return json.dumps(parameters)


def _read_option(field: str, rows: list[list[Any]]) -> Any:
    """Return the value in every row of an option; several elements as a JSON list."""
    if not rows:  # see `overflow`
        raise RequestError(field, "must have elements", "none", "Correct the shape of the input")
    for row, values in enumerate(rows):
        if values != rows[0]:
            raise RequestError(
                field,
                "must have the same value in all rows of a request",
                f"{values!r:.80}, and {rows[0]!r:.80} in row 0",
                "Send rows with different options in different requests",
                row,
            )
    try:
        values = [v.decode() if isinstance(v, bytes) else v for v in rows[0]]
    except UnicodeDecodeError as error:
        raise RequestError(
            field, "must be valid UTF-8", f"{error.object!r:.80}", "Encode the text as UTF-8"
        ) from error
    return values[0] if len(values) == 1 else json.dumps(values)


def own_parameters(text: str, known: Container[str] = ()) -> dict[str, object]:
    """Return the parameters of a request without those of Triton and of the transport.

    Names that begin with ``triton_`` or ``x_``, those in `OF_CARRIERS`, and names with ``-``, which
    are forwarded headers, are excluded unless they are `known` when spelled with ``_``.
    """
    return {
        name: value
        for name, value in json.loads(text).items()
        if name.replace("-", "_") in known or not _is_of_carrier(name)
    }


def _is_of_carrier(name: str) -> bool:
    return name.startswith(("triton_", "x_")) or "-" in name or name.lower() in OF_CARRIERS


def _checked(field: str, value: Any, rule: Mapping[str, Any]) -> Any:
    kind, choices = rule["type"], rule.get("choices")
    fits = isinstance(value, TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))
    low, high = rule.get("min"), rule.get("max")
    fits = fits and (low is None or value >= low) and (high is None or value <= high)
    if not fits or (choices and value not in choices):
        if choices:
            words = "one of " + ", ".join(choices)
        elif low is not None and high is not None:
            words = f"{WORDS[kind]} from {low} to {high}"
        elif low is not None:
            words = f"{WORDS[kind]} of at least {low}"
        else:
            words = WORDS[kind] + (f" of at most {high}" if high is not None else "")
        raise RequestError(
            field, f"must be {words}", repr(value)[:80], f"Correct or leave out the {field}"
        )
    if kind == "list":  # other pipelines do not have the module
        return import_module(".option_lists", __package__).read_list(field, value, WORDS[kind])
    return value


FOLDER = "/dev/shm/"


def make_private() -> None:
    """Restrict the shared memory of this process to its user, before the first request.

    A umask is not enough, because the Python backend sets the mode of its regions itself.
    """
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines():
        path = line.partition(FOLDER)[2]
        if path:
            with suppress(OSError):  # removed in the meantime, or owned by another user
                Path(FOLDER + path).chmod(0o600)
