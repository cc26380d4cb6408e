"""Log-probabilities of new tokens, from an engine's form to that of `generation_wire.Chunk`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def plain_logprobs(
    ids: Sequence[int], found: Any, count: int | None
) -> Sequence[Sequence[Any]] | None:
    """For each token its own and those of the `count` likeliest.

    Args:
        ids: of the new tokens.
        found: for each of them, token to an object with `logprob` and `rank`; None for none.
        count: as the request has it; None where it asks for none.
    """
    if not found or count is None:
        return None
    plain = []
    for token, one in zip(ids, found, strict=True):
        ranked = sorted(one.items(), key=lambda item: item[1].rank or 0)
        likeliest = [[other, value.logprob] for other, value in ranked[:count]]
        plain.append([token, one[token].logprob, likeliest])
    return plain
