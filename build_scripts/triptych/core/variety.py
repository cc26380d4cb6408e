"""How varied the texts of the gate's traffic are: narrow traffic shows little of a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.core.samples import GateRequest

NEAR = 0.8
"""Of all trigrams that two texts have, this share in both makes them near duplicates."""

LONGEST = 400
"""Characters of a text that are looked at."""


@dataclass(frozen=True)
class Variety:
    """Figures of texts, numbers in them aside.

    Attributes:
        words: different ones; in scripts that write no blanks, whole phrases.
        vocabulary_share: different words, as a share of all words.
        near_duplicates: share of the texts that are nearly the same as an earlier one.
    """

    words: int
    vocabulary_share: float
    near_duplicates: float


def variety_of(requests: Sequence[GateRequest]) -> Variety | None:
    """How varied the traffic among the gate's `requests` is; None where it has no words."""
    texts = [
        _plain(" ".join(value for value in request.inputs.values() if isinstance(value, str)))
        for request in requests
        if not request.edge
    ]
    words = [word for text in texts for word in re.findall(r"\w+", text)]
    if not words:
        return None
    vocabulary = set(words)
    return Variety(
        words=len(vocabulary),
        vocabulary_share=round(len(vocabulary) / len(words), 4),
        near_duplicates=round(_near_duplicates(texts), 4),
    )


def _plain(text: str) -> str:
    return re.sub(r"\d+", "0", text[:LONGEST].casefold())


def _near_duplicates(texts: Sequence[str]) -> float:
    """Share of the texts whose trigrams are nearly those of an earlier text."""
    every = [{f"  {text} "[place : place + 3] for place in range(len(text) + 1)} for text in texts]
    near = [
        any(_is_near(trigrams, earlier) for earlier in every[:place])
        for place, trigrams in enumerate(every)
    ]
    return sum(near) / len(near)


def _is_near(some: set[str], others: set[str]) -> bool:
    least, most = sorted((len(some), len(others)))
    if least < NEAR * most:  # spares the comparison of texts of other lengths
        return False
    shared = len(some & others)
    return shared >= NEAR * (least + most - shared)
