"""Model rows of text pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from .request_errors import RequestError
from .row_types import Row, RowInputs

if TYPE_CHECKING:
    from .rows_text import TokenRowMaker


def check_filled(request: RowInputs, fields: Sequence[str]) -> None:
    """Raise `RequestError` if a text in one of `fields` is empty or blank."""
    for field in fields:
        for number, text in enumerate(request.columns[field]):
            if not text.strip():
                raise RequestError(
                    field, "must not be empty", repr(text)[:40], "Send a text", number
                )


class PairForm:
    """Special tokens that a tokenizer puts around the halves of a pair.

    The tokenizer's own truncation of a pair makes every combination of the parts that it cuts off.
    With two long halves that is quadratic in time and memory, so pairs are joined here.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Find the special tokens from a pair that the tokenizer encodes."""
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        sample = self._tokenizer.encode("a", "b")
        first = [i for i, half in enumerate(sample.sequence_ids) if half == 0]
        second = [i for i, half in enumerate(sample.sequence_ids) if half == 1]
        self._before = sample.ids[: first[0]]
        self._between = sample.ids[first[-1] + 1 : second[0]]
        self._after = sample.ids[second[-1] + 1 :]
        self.ahead = len(sample.ids) - sum(sample.type_ids) - len(first)
        """Number of special tokens in the first segment."""
        self.added = len(sample.ids) - len(first) - len(second)
        """Number of special tokens of a pair."""

    def halves(self, texts: Sequence[str]) -> dict[str, list[int]]:
        """Return the token ids of each text, without special tokens; tokenize equal texts once."""
        unique = list(dict.fromkeys(texts))
        encodings: list[Any] = self._tokenizer.encode_batch_fast(unique, add_special_tokens=False)
        return {text: encoding.ids for text, encoding in zip(unique, encodings, strict=True)}

    def join(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], int]:
        """Return the ids of the row and the number of tokens in its first segment."""
        ids = [*self._before, *first, *self._between, *second, *self._after]
        return ids, len(first) + self.ahead


def truncated_sizes(
    first: int, second: int, max_tokens: int, strategy: str
) -> tuple[int, int] | None:
    """Return how many tokens of each half remain after truncation; None if that is impossible.

    Args:
        first: Number of tokens in the first half.
        second: Number of tokens in the second half.
        max_tokens: Maximum number of tokens without special tokens.
        strategy: ``longest_first`` or ``only_first``, with the meaning of the tokenizers library.
    """
    if first + second <= max_tokens:
        return first, second
    if strategy == "only_first":
        return (max_tokens - second, second) if max_tokens > second else None
    shorter, longer = sorted((first, second))
    longer = shorter if shorter > max_tokens else max(shorter, max_tokens - shorter)
    if shorter + longer > max_tokens:
        shorter = max_tokens // 2
        longer = shorter + max_tokens % 2
    return (shorter, longer) if first <= second else (longer, shorter)


class PairEncoder:
    """Encoder of pairs for a row maker."""

    def __init__(self, maker: TokenRowMaker) -> None:
        self._maker = maker
        self._form = PairForm(maker.tokenizer)

    def inputs(self, request: RowInputs, texts: Sequence[str]) -> list[tuple[str, str]]:
        """Return the pairs of a request, whose first texts are `texts`.

        Raises:
            RequestError: A text is empty or blank.
        """
        check_filled(request, self._maker.fields)
        return list(zip(texts, request.columns["text_pair"], strict=True))

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[Row | RequestError]:
        """Return the model row of each pair, or its error."""
        halves = self._form.halves([half for pair in pairs for half in pair])
        return [self._row(halves[a], halves[b]) for a, b in pairs]

    def _row(self, first: list[int], second: list[int]) -> Row | RequestError:
        maker = self._maker
        sizes: tuple[int, int] | None = (len(first), len(second))
        if maker.truncates:
            max_tokens = maker.max_length - self._form.added
            sizes = truncated_sizes(len(first), len(second), max_tokens, maker.strategy)
        if sizes is None:
            return RequestError(
                " and ".join(maker.fields),
                f"must leave space for the text within {maker.max_length} tokens",
                f"{len(second)} tokens in addition to the text",
                "Shorten the second text",
            )
        if maker.cut == "left":
            first, second = first[len(first) - sizes[0] :], second[len(second) - sizes[1] :]
        else:
            first, second = first[: sizes[0]], second[: sizes[1]]
        ids, first_segment = self._form.join(first, second)
        return Row(ids, first_segment if maker.segments else len(ids))
