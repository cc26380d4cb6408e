"""Pairs of texts as token rows, put together from their halves.

The tokenizer's own truncation of a pair makes every combination of what it cuts off both halves:
with two long halves that is quadratic in time and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer


class PairForm:
    """Where a tokenizer puts its special tokens around the halves of a pair."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read the form off a pair that the tokenizer encodes whole."""
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        sample = self._tokenizer.encode("a", "b")
        first = [i for i, half in enumerate(sample.sequence_ids) if half == 0]
        second = [i for i, half in enumerate(sample.sequence_ids) if half == 1]
        self._before = sample.ids[: first[0]]
        self._between = sample.ids[first[-1] + 1 : second[0]]
        self._after = sample.ids[second[-1] + 1 :]
        self.ahead = len(sample.ids) - sum(sample.type_ids) - len(first)
        """Special tokens in the first segment."""
        self.added = len(sample.ids) - len(first) - len(second)
        """Special tokens of a pair."""

    def halves(self, texts: Sequence[str]) -> dict[str, list[int]]:
        """Token ids of each of `texts`, without special tokens; equal ones are tokenized once."""
        unique = list(dict.fromkeys(texts))
        encodings: list[Any] = self._tokenizer.encode_batch_fast(unique, add_special_tokens=False)
        return {text: encoding.ids for text, encoding in zip(unique, encodings, strict=True)}

    def join(self, one: Sequence[int], two: Sequence[int]) -> tuple[list[int], int]:
        """Ids of the whole row, and how many of them are of the first segment."""
        ids = [*self._before, *one, *self._between, *two, *self._after]
        return ids, len(one) + self.ahead


def kept(one: int, two: int, room: int, strategy: str) -> tuple[int, int] | None:
    """Tokens of each half that stay where `room` are free; None where that cannot be.

    Args:
        one: tokens of the first half.
        two: tokens of the second half.
        room: places without the special tokens.
        strategy: ``longest_first`` or ``only_first``, with the tokenizers library's meaning.
    """
    if one + two <= room:
        return one, two
    if strategy == "only_first":
        return (room - two, two) if room > two else None
    shorter, longer = sorted((one, two))
    longer = shorter if shorter > room else max(shorter, room - shorter)
    if shorter + longer > room:
        shorter = room // 2
        longer = shorter + room % 2
    return (shorter, longer) if one <= two else (longer, shorter)
