"""What the typed calls return of a row, as immutable values."""

from __future__ import annotations

from typing import NamedTuple


class Choice(NamedTuple):
    """One of the labels (of fill-mask: tokens) that the model chose from; `score` from 0 to 1."""

    label: str
    score: float


class Entity(NamedTuple):
    """Something named in a text.

    Attributes:
        entity: its kind; with aggregation `none` the token's label, as ``B-PER``.
        text: as it stands in the text.
        score: from 0 to 1; NaN where the model gave no number.
        start: its first character.
        end: the character behind it.
    """

    entity: str
    text: str
    score: float
    start: int
    end: int


class Answer(NamedTuple):
    """The span of a context that answers a question; an empty text where there is none.

    `score` is from 0 to 1, `start` its first character in the context, `end` the one behind it.
    """

    answer: str
    score: float
    start: int
    end: int


class Ranked(NamedTuple):
    """How well the passage at `index` of the caller's list answers a query: the higher `score`."""

    index: int  # type: ignore[assignment]  # instead of the tuple's method
    score: float
