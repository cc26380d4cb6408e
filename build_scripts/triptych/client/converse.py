"""A generation for the command line: its words to parameters, and the answer's chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from triptych.base.errors import UserError
from triptych.base.yaml_text import parse_yaml
from triptych.client.infer import unanswered

if TYPE_CHECKING:
    from triptych.client import Chunk, Sampling


def parse_sampling(pairs: Sequence[str]) -> Sampling:
    """``KEY=VALUE`` pairs as parameters of a generation, each value as YAML reads it.

    Raises:
        UserError: not a pair, or no YAML.
    """
    sampling: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        try:
            value = parse_yaml(text) if separator and key else None
        except ValueError:
            value = None
        if value is None:
            raise UserError(
                "--parameter",
                "must be KEY=VALUE",
                given=pair,
                remedy="Write for example --parameter max_tokens=64",
            )
        sampling[key] = value
    return cast("Sampling", sampling)  # the server says what it does not know


def stream_answer(
    pipeline: str,
    url: str,
    chat: str | None,
    prompt: str | None,
    sampling: Sampling,
    timeout_s: float,
) -> Iterator[Chunk]:
    """The chunks of the answer to `chat`, what a user says, or of a text that goes on `prompt`.

    Raises:
        UserError: the server refused, or was not reached.
    """
    from triptych.client import Client, InferenceError

    try:
        with Client(pipeline, url, timeout_s=timeout_s) as client:
            if prompt is not None:
                yield from client.generate(prompt, **sampling)
            else:
                yield from client.chat([{"role": "user", "content": str(chat)}], **sampling)
    except InferenceError as error:
        raise unanswered(pipeline, url, error) from error
