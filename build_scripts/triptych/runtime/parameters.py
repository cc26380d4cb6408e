"""Check request parameters (names, types and ranges) and add defaults."""

from __future__ import annotations

import json
import warnings
from collections.abc import Container, Mapping
from typing import Any

from .request_errors import RequestError

TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "list": (str,),
}
FORMER_NAMES = {
    "aggregation": "aggregation_strategy",
    "impossible_answer": "handle_impossible_answer",
    "labels": "candidate_labels",
    "max_answer_tokens": "max_answer_len",
}
"""Former name of a parameter, still accepted, to its name in the pipelines of transformers."""
WORDS = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "list": "a string with a JSON list of strings, or names with commas between them",
}


def check_parameters(
    text: str, rules: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the parameters of a request (JSON text) with defaults, checked by `rules`.

    A former name is accepted, with a warning on standard error the first time.

    A rule has ``type`` (bool, int, float, str or list) and may have ``min``, ``max``, ``choices``.

    Raises:
        RequestError: A name is unknown, a type is wrong, or a value is out of range.
    """
    if len(text) < 3:  # fast path for "{}", the most frequent value
        return defaults
    parameters = dict(defaults)
    for name, value in own_parameters(text, rules).items():
        if FORMER_NAMES.get(name) in rules:
            former, name = name, FORMER_NAMES[name]
            # Python prints a warning with the same text only once.
            text = f"The request parameter `{former}` is now called `{name}`."
            warnings.warn(text, FutureWarning, stacklevel=1)
        rule = rules.get(name)
        if rule is None:
            known = ", ".join(sorted(rules)) or "none"
            raise RequestError(
                f"parameter {name}", "is not known", name, f"Known parameters: {known}"
            )
        parameters[name] = _checked(name, value, rule)
    return parameters


def own_parameters(text: str, known: Container[str] = ()) -> dict[str, Any]:
    """Return the parameters of a request without those of Triton and forwarded headers.

    Names that begin with ``triton_`` are excluded. Names with ``-`` are excluded unless they are
    `known` when spelled with ``_``.
    """
    return {
        name: value
        for name, value in json.loads(text).items()
        if not name.startswith("triton_") and ("-" not in name or name.replace("-", "_") in known)
    }


def _checked(name: str, value: Any, rule: Mapping[str, Any]) -> Any:
    kind, choices = rule["type"], rule.get("choices")
    fits = isinstance(value, TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))
    low, high = rule.get("min"), rule.get("max")
    fits = fits and (low is None or value >= low) and (high is None or value <= high)
    if not fits or (choices and value not in choices):
        if choices:
            words = "one of " + ", ".join(choices)
        elif low is not None and high is not None:
            words = f"{WORDS[kind]} from {low} to {high}"
        else:
            words = WORDS[kind]
        raise RequestError(
            f"parameter {name}",
            f"must be {words}",
            repr(value)[:80],
            "Correct or leave out the parameter",
        )
    return _names(name, value) if kind == "list" else value


def _names(name: str, text: str) -> list[str]:
    """Return the list in `text`: JSON if it begins with ``[``, otherwise split at commas."""
    if not text.lstrip().startswith("["):
        names = [part.strip() for part in text.split(",") if part.strip()]
    else:
        try:
            names = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"parameter {name}", f"must be {WORDS['list']}", str(error), "Correct the JSON"
            ) from error
        if not all(isinstance(part, str) and part.strip() for part in names):
            raise RequestError(
                f"parameter {name}", f"must be {WORDS['list']}", repr(text)[:80], "Name each"
            )
    if not names:
        raise RequestError(
            f"parameter {name}", "must name something", "nothing", "Name at least one"
        )
    return names
