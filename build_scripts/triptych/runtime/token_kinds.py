"""Which tokens begin a word, and where the words of a text are: for the rows that carry them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .carry import OUTSIDE, WORD_INSIDE, WORD_START


def make_kinds(
    tokens: Sequence[str],
    offsets: Sequence[tuple[int, int]],
    special: Sequence[int],
    ids: Sequence[int],
    text: str,
    *,
    subword_prefix: str | None,
    unk_id: int | None,
) -> NDArray[np.uint8]:
    """The kind of each token of a text, as transformers' token-classification tells words apart.

    The first four arguments are fields of a `tokenizers.Encoding`: plain lists, looked at one by
    one, because making arrays of them costs more than the comparisons.

    Args:
        tokens: as the vocabulary writes them.
        offsets: first character of each token and the one after its last.
        special: 1 for tokens that are not of the text.
        ids: of the tokens.
        text: what the offsets count in.
        subword_prefix: ``continuing_subword_prefix`` of the tokenizer's model: with one, a token
            whose length is not that of its characters goes on with a word; without (None or
            empty), one that has no space before it does.
        unk_id: id of the unknown token, which always begins a word; None where there is none.

    Returns:
        UINT8 ``[tokens]``: OUTSIDE, WORD_START or WORD_INSIDE.
    """
    if subword_prefix:
        pairs = zip(tokens, offsets, strict=True)
        inside = [len(token) != end - start for token, (start, end) in pairs]
    else:
        inside = [start > 0 and " " not in text[start - 1 : start + 1] for start, _ in offsets]
    return np.array(
        [
            OUTSIDE if outside else WORD_INSIDE if goes_on and token_id != unk_id else WORD_START
            for outside, goes_on, token_id in zip(special, inside, ids, strict=True)
        ],
        dtype=np.uint8,
    )


def word_offsets(
    offsets: Sequence[tuple[int, int]] | NDArray[np.int32], word_ids: Sequence[int | None]
) -> NDArray[np.int32]:
    """The characters of each token's whole word, for answers that end where words do.

    For question-answering, whose carries hold these instead of the tokens' own offsets. To be
    made window by window: of a word that a window cuts, only the tokens in the window count.

    Args:
        offsets: of one window's tokens.
        word_ids: of the same tokens, as `tokenizers.Encoding.word_ids` has them; a token without
            a word keeps its own offsets.

    Returns:
        INT32 ``[tokens, 2]``.
    """
    spans = np.array(offsets, dtype=np.int32).reshape(-1, 2)
    if not len(spans):
        return spans
    words = np.array([-1 if word is None else word for word in word_ids])
    starts_run = np.empty(len(words), dtype=bool)
    starts_run[0] = True
    starts_run[1:] = (words[1:] != words[:-1]) | (words[1:] < 0)
    first = np.flatnonzero(starts_run)
    length = np.diff(first, append=len(words))
    runs = np.stack((spans[first, 0], spans[first + length - 1, 1]), axis=1)
    return np.repeat(runs, length, axis=0)
