"""Diversity of the texts in the gate's traffic.

Narrow traffic shows only some of a model's errors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.core.samples import GateRequest

NEAR = 0.8
"""Share of common trigrams above which two texts are near duplicates."""

LONGEST = 400
"""Maximum number of characters of a text that are compared."""


@dataclass(frozen=True)
class Variety:
    """Diversity of texts, ignoring numbers in them.

    Attributes:
        words: Number of different words; in scripts without blanks, of whole phrases.
        vocabulary_share: Number of different words divided by the number of all words.
        near_duplicates: Share of the texts that are near duplicates of an earlier text.
    """

    words: int
    vocabulary_share: float
    near_duplicates: float


def measure_diversity(requests: Sequence[GateRequest]) -> Variety | None:
    """Return the diversity of the traffic among the gate's `requests`; None without words."""
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
    """Return the share of texts that are near duplicates of an earlier text."""
    every = [{f"  {text} "[place : place + 3] for place in range(len(text) + 1)} for text in texts]
    near = [
        any(_is_near(trigrams, earlier) for earlier in every[:place])
        for place, trigrams in enumerate(every)
    ]
    return sum(near) / len(near)


def _is_near(some: set[str], others: set[str]) -> bool:
    least, most = sorted((len(some), len(others)))
    if least < NEAR * most:  # texts of very different lengths cannot be near duplicates
        return False
    shared = len(some & others)
    return shared >= NEAR * (least + most - shared)
