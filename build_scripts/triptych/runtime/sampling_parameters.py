"""Sampling parameters of a request: known names, right types, values in range."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from .request_errors import RequestError
from .triton_io import own_parameters

FIELD = "sampling_parameters"
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
SCHEMA = "json_schema"
MAX_SCHEMA_CHARACTERS = 32_768
MAX_SCHEMA_LEVELS = 200
"""Maximum levels of a schema: three times the levels of JSON that xgrammar accepts. A schema has
about two levels for each level of the JSON."""
ADAPTER = "adapter"
PRIORITY = "priority"
MAX_NAME_CHARACTERS = 64


class Number(NamedTuple):
    """Range of a number; `above` if `minimum` itself is not allowed."""

    minimum: int
    maximum: int
    whole: bool = False
    above: bool = False

    @property
    def words(self) -> str:
        kind = "an integer" if self.whole else "a number"
        start = "above" if self.above else "from"
        return f"{kind} {start} {self.minimum} to {self.maximum}"

    def accepts(self, value: object) -> bool:
        """Whether `value` is such a number."""
        kinds = (int,) if self.whole else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool):
            return False
        return self.minimum <= value <= self.maximum and not (self.above and value == self.minimum)


FLAGS = ("ignore_eos",)
NUMBERS = {
    "max_tokens": Number(1, 1_000_000, whole=True),
    "min_tokens": Number(0, 1_000_000, whole=True),
    "temperature": Number(0, 2),
    "top_p": Number(0, 1, above=True),
    "top_k": Number(0, 1_000_000, whole=True),
    "min_p": Number(0, 1),
    "seed": Number(0, 2**63 - 1, whole=True),
    "repetition_penalty": Number(0, 10, above=True),
    "presence_penalty": Number(-2, 2),
    "frequency_penalty": Number(-2, 2),
    "logprobs": Number(0, 20, whole=True),
    "n": Number(1, 1, whole=True),
    PRIORITY: Number(1, 1000, whole=True),
}
DEFAULTS: Mapping[str, Any] = {
    "max_tokens": 256,
    "min_tokens": 0,
    "ignore_eos": False,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": [],
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logprobs": None,
    SCHEMA: None,
    ADAPTER: "",
    PRIORITY: None,
    "n": 1,
}
"""Default of each parameter. `logprobs` None: none are returned. `json_schema` None: any text.
`adapter` empty: the model itself. `priority` None: no level. `top_k` 0: all tokens. `temperature`
0: greedy. Triton's OpenAI frontend always sends `n`, the number of answers, and `ignore_eos`, which
continues after the tokens that end an answer."""


def check_sampling(
    text: str,
    defaults: Mapping[str, object],
    *,
    room: int,
    adapters: Collection[str] = (),
    levels: int = 0,
    parameters: str = "{}",
) -> dict[str, Any]:
    """Return all sampling parameters of a request, with defaults.

    Args:
        text: JSON object, or an empty text.
        defaults: Value of each parameter, such as `DEFAULTS`.
        room: Maximum number of tokens of the answer.
        adapters: Names of the pipeline's adapters.
        levels: Number of the pipeline's priority levels; 0 if it has none.
        parameters: JSON parameters of Triton's request, as for Triton's vLLM backend (over HTTP,
            fields next to the inputs). Values in `text` take precedence.

    Raises:
        RequestError: The text is not a JSON object, a name is unknown, or a value is invalid.
    """
    sent = {**own_parameters(parameters), **_read(text)}
    given = {name: _plain(name, value) for name, value in sent.items()}
    for name, value in given.items():
        fault = find_fault(name, value)
        if fault:
            raise RequestError(
                f"{FIELD}: {name}",
                fault,
                json.dumps(value)[:80],
                "Correct or leave out the parameter",
            )
    if given.get("max_tokens", 0) > room:
        raise RequestError(
            f"{FIELD}: max_tokens",
            f"must be at most {room}, the number of tokens that fit",
            given["max_tokens"],
            "Lower it, shorten the prompt, or raise the limit in the pipeline",
        )
    sampling = {**defaults, **given}
    if sampling[ADAPTER] and sampling[ADAPTER] not in adapters:
        known = (
            f"one of the pipeline's: {', '.join(adapters)}"
            if adapters
            else "left out, because the pipeline has no adapters"
        )
        raise RequestError(
            f"{FIELD}: {ADAPTER}",
            f"must be {known}",
            json.dumps(sampling[ADAPTER]),
            "Correct the name, or leave it out to use the model itself",
        )
    if PRIORITY in given and given[PRIORITY] > levels:
        raise RequestError(
            f"{FIELD}: {PRIORITY}",
            f"must be at most {levels}"
            if levels
            else "must be left out, because the pipeline has no priority levels",
            given[PRIORITY],
            "Correct it, or raise serving.priority.levels in the pipeline",
        )
    sampling["max_tokens"] = min(sampling["max_tokens"], room)
    if isinstance(sampling["stop"], str):
        sampling["stop"] = [sampling["stop"]]
    return sampling


def find_fault(name: str, value: object) -> str:
    """Return the rule that `value` breaks; empty if it is valid."""
    if name == "stop":
        stops = [value] if isinstance(value, str) else value
        if (
            isinstance(stops, list)
            and len(stops) <= MAX_STOPS
            and all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARACTERS for s in stops)
        ):
            return ""
        return (
            f"must be a string or a list of at most {MAX_STOPS}, of 1 to "
            f"{MAX_STOP_CHARACTERS} characters each"
        )
    if name == ADAPTER:
        valid = isinstance(value, str) and len(value) <= MAX_NAME_CHARACTERS
        return "" if valid else f"must be a name of at most {MAX_NAME_CHARACTERS} characters"
    if name in FLAGS:
        return "" if isinstance(value, bool) else "must be true or false"
    if name == SCHEMA:
        if (
            isinstance(value, dict)
            and not _is_deeper(value, MAX_SCHEMA_LEVELS)
            and len(json.dumps(value)) <= MAX_SCHEMA_CHARACTERS
        ):
            return ""
        return (
            f"must be a JSON schema, an object of at most {MAX_SCHEMA_CHARACTERS} characters and "
            f"{MAX_SCHEMA_LEVELS} levels"
        )
    rule = NUMBERS.get(name)
    if rule is None:
        return f"is not known; known parameters: {', '.join(sorted(DEFAULTS))}"
    return "" if rule.accepts(value) else f"must be {rule.words}"


def _plain(name: str, value: object) -> Any:
    """Return a number or flag that is sent as text, as Triton's vLLM backend takes it."""
    if isinstance(value, str) and (name in NUMBERS or name in FLAGS):
        with suppress(ValueError, RecursionError):
            return json.loads(value.lower())
    return value


def _is_deeper(value: object, levels: int) -> bool:
    """Whether objects and lists are nested in more than this number of levels."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inner)


def _read(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise RequestError(FIELD, "must be JSON", str(error), 'Send {"max_tokens": 64}') from error
    if not isinstance(given, dict):
        raise RequestError(
            FIELD, "must be a JSON object", repr(text)[:80], 'Send {"max_tokens": 64}'
        )
    return {name: value for name, value in given.items() if value is not None}
