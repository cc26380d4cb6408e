"""What the typed calls return of a row, as immutable values."""

from __future__ import annotations

from typing import NamedTuple


class Choice(NamedTuple):
    """One of the labels, or tokens, that the model chose from.

    Attributes:
        label: its name; of fill-mask the token.
        score: from 0 to 1.
    """

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
    """The span of a context that answers a question.

    Attributes:
        answer: its text; empty where there is none.
        score: from 0 to 1.
        start: its first character in the context.
        end: the character behind it.
    """

    answer: str
    score: float
    start: int
    end: int


class Ranked(NamedTuple):
    """How well a passage answers a query.

    Attributes:
        index: of the passage in the caller's list.
        score: the higher the better.
    """

    index: int  # type: ignore[assignment]  # instead of the tuple's method
    score: float
