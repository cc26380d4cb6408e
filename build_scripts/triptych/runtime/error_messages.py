"""Read the messages of failed responses, whose form `request_errors` describes."""

from __future__ import annotations

import re
from typing import NamedTuple

TRITON_PREFIX = r"(?:in ensemble '[^']*', |\[request id: [^\]]*\] )*"
"""Pattern of what Triton puts before a model's own message."""
_HEADER = re.compile(TRITON_PREFIX + r"\[([a-z_]+)((?: [a-z_]+=\d+)*)\] ")


class ReadError(NamedTuple):
    """Parsed message of a step.

    Attributes:
        code: Error code of this module, or one of a newer server.
        numbers: Values of the code by name.
        text: The message without Triton's prefix and without the code.
    """

    code: str
    numbers: dict[str, int]
    text: str


def read_step_error(message: str) -> ReadError | None:
    """Return the parsed message of a failed response; None if no step of this project wrote it."""
    header = _HEADER.match(message)
    if header is None:
        return None
    pairs = (pair.split("=") for pair in header[2].split())
    return ReadError(
        header[1], {name: int(number) for name, number in pairs}, message[header.end() :]
    )
