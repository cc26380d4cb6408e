"""One question to a served pipeline, from the command line's words to plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from triptych.errors import UserError
from triptych.yaml_text import parse_yaml


def read_texts(texts: Sequence[str], file: Path | None) -> list[str]:
    """The texts of ``--text`` and of the lines of ``--file``, in this order.

    Raises:
        UserError: none at all, or a file that cannot be read as UTF-8.
    """
    lines: list[str] = []
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                "--file", "must be a readable file of UTF-8 text", given=f"{file}: {error}"
            ) from error
    if not texts and not lines:
        raise UserError(
            "--text", "or --file must be given", remedy='Write for example --text "hello"'
        )
    return [*texts, *lines]


def parse_parameters(pairs: Sequence[str]) -> dict[str, str | int | bool | float]:
    """``KEY=VALUE`` pairs as request parameters; a value is read as YAML reads a scalar.

    Raises:
        UserError: not a pair, or a value that is no scalar.
    """
    parameters: dict[str, str | int | bool | float] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        try:
            value = parse_yaml(text) if separator and key else None
        except ValueError:
            value = None
        if not isinstance(value, str | int | bool | float):
            raise UserError(
                "--parameter",
                "must be KEY=VALUE with a plain value",
                given=pair,
                remedy="Write for example --parameter dimensions=128",
            )
        parameters[key] = value
    return parameters


def ask(
    pipeline: str,
    texts: Sequence[str],
    *,
    url: str,
    parameters: Mapping[str, str | int | bool | float],
    timeout_s: float,
) -> dict[str, list[Any]]:
    """Send `texts` and return each output as plain lists, one entry a text.

    Raises:
        UserError: the server refused, or could not be reached.
    """
    from triptych.serving.client import Client, InferenceError, ServerUnreachable

    try:
        with Client(pipeline, url, timeout_s=timeout_s) as client:
            outputs = client.infer({"text": texts}, parameters=parameters)
    except InferenceError as error:
        unreachable = isinstance(error, ServerUnreachable)
        remedy = "Start one with `triptych serve`, or name it with --url" if unreachable else ""
        raise UserError(
            f"{pipeline} at {url}", "must answer the request", given=error, remedy=remedy
        ) from error
    return {name: _plain(values) for name, values in outputs.items()}


def _plain(values: Any) -> list[Any]:
    if values.dtype == object:
        return [[item.decode("utf-8") for item in row.flat] for row in values]
    plain: list[Any] = values.tolist()
    return plain
