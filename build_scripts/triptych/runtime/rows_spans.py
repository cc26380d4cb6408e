"""Batch encoders of tasks whose answers are spans of the text: rows with character offsets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .request_errors import RequestError
from .row_metadata import (
    OUTSIDE,
    WORD_INSIDE,
    WORD_START,
    RowMetadata,
    pack_metadata,
)
from .row_types import Row, RowInputs
from .rows_pairs import PairForm, check_filled
from .rows_text import Input, TokenRowMaker


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
    """Return the kind of each token; words are those of transformers' token-classification.

    The first four arguments are fields of a `tokenizers.Encoding`. They stay lists because
    converting them to arrays costs more than the comparisons.

    Args:
        tokens: Tokens as in the vocabulary.
        offsets: Start and end character of each token.
        special: 1 for tokens outside the text.
        ids: Token ids.
        text: Text of the offsets.
        subword_prefix: ``continuing_subword_prefix`` of the tokenizer's model. With a prefix, a
            token that is longer than its characters continues a word. Without one (None or
            empty), a token without a space before it continues a word.
        unk_id: Id of the unknown token, which always begins a word; None if there is none.

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
    """Return the start and end character of each token's whole word.

    Question answering uses these offsets so that answers end at word boundaries. Must be called for
    each window, because only tokens in the window belong to a word at its edge.

    Args:
        offsets: Offsets of one window's tokens.
        word_ids: `tokenizers.Encoding.word_ids` of the same tokens; a token without a word keeps
            its own offsets.

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


class OffsetRowMaker(TokenRowMaker):
    """Row maker of texts; the metadata of a row is its text, offsets and token kinds."""

    offsets = True

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        super().__init__(settings, folder)
        model = self.tokenizer.model
        self._prefix: str | None = getattr(model, "continuing_subword_prefix", None)
        self._unk_id: int | None = settings.get("unk_token_id")

    def inputs(self, request: RowInputs) -> list[Input]:
        return list(request.columns["text"])

    def finish(self, inputs: Sequence[Input], encodings: Sequence[Any]) -> list[Row]:
        rows = []
        for number, (text, encoding) in enumerate(zip(inputs, encodings, strict=True)):
            offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
            kinds = make_kinds(
                encoding.tokens,
                encoding.offsets,
                encoding.special_tokens_mask,
                encoding.ids,
                str(text),
                subword_prefix=self._prefix,
                unk_id=self._unk_id,
            )
            rows.append(
                self.row(encoding, pack_metadata(RowMetadata(number, str(text), offsets, kinds)))
            )
        return rows


MAX_STRIDE = 128


class WindowRowMaker(TokenRowMaker):
    """Row maker of questions and contexts; metadata of a window is the position of its words."""

    offsets = True
    strategy = "only_second"

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self.stride = min(settings["max_length"] // 2, MAX_STRIDE)
        super().__init__(settings, folder)

    def configure(self) -> None:
        """Enable windows for all settings of truncation; see `finish`."""
        self.tokenizer.enable_truncation(
            self.max_length, stride=self.stride, strategy=self.strategy
        )
        self._form = PairForm(self.tokenizer)
        # Encodes texts alone; `post_process` adds special tokens and truncates.
        bare = dict.fromkeys(("post_processor", "truncation", "padding"))
        self._bare = Tokenizer.from_str(json.dumps(json.loads(self.tokenizer.to_str()) | bare))
        added = self._form.added
        self._longest_question = self.max_length - added - self.stride - 1
        if self._longest_question < 1:
            raise RequestError(
                "tokenizer.max_length",
                f"must be more than {added + self.stride + 1}, to fit a question and a window",
                self.max_length,
                "Raise the limit",
            )

    def inputs(self, request: RowInputs) -> list[Input]:
        check_filled(request, self.fields)
        return list(zip(request.columns["text"], request.columns["text_pair"], strict=True))

    def _encode_all(self, inputs: Sequence[Any]) -> list[Any]:
        """Encode questions and contexts separately; equal texts are tokenized once."""
        if isinstance(inputs[0], str):
            return super()._encode_all(inputs)
        texts = list(dict.fromkeys(text for pair in inputs for text in pair))
        encodings = dict(zip(texts, self._bare.encode_batch(texts), strict=True))
        return [(encodings[question], encodings[context]) for question, context in inputs]

    def finish(self, inputs: Sequence[Input], encodings: Sequence[Any]) -> list[Row]:
        """Return one model row for each window of each pair."""
        self._check_sizes([(len(question.ids), len(text.ids)) for question, text in encodings])
        rows = []
        for number, (pair, (question, context)) in enumerate(zip(inputs, encodings, strict=True)):
            window = self.tokenizer.post_process(question, context)
            windows = [window, *window.overflowing]
            if len(windows) > 1 and not self.truncates:
                raise RequestError(
                    " and ".join(self.fields),
                    f"must have at most {self.max_length} tokens",
                    f"enough for {len(windows)} windows",
                    "Shorten the context, or set tokenizer.truncation to truncate in the pipeline",
                    number,
                )
            first = len(question.ids) + self._form.ahead
            for index, window in enumerate(windows):
                row_metadata = _row_metadata(number, pair[1] if index == 0 else "", window)
                ids = window.ids
                rows.append(Row(ids, first if self.segments else len(ids), row_metadata))
        return rows

    def _check_sizes(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Raise `RequestError` for pairs that would need too many windows.

        A long question may cause thousands of windows, so they are counted before they are made.
        """
        windows = 0
        for number, (question, context) in enumerate(sizes):
            # With a longer question, no token of the context fits, and the tokenizer would panic.
            if question > self._longest_question:
                raise RequestError(
                    "text",
                    f"must be a question of at most {self._longest_question} tokens",
                    f"{question} tokens",
                    "Shorten it, or raise tokenizer.max_length in the pipeline",
                    number,
                )
            room = self._longest_question + self.stride + 1 - question
            windows += 1 + max(0, -(-(context - room) // (room - self.stride)))
        self.check_count(windows)


def _row_metadata(number: int, context: str, window: Any) -> bytes:
    inside = np.array([sequence == 1 for sequence in window.sequence_ids])
    kinds = np.where(inside, WORD_START, OUTSIDE).astype(np.uint8)
    offsets = np.array(window.offsets, dtype=np.int32).reshape(-1, 2)
    return pack_metadata(
        RowMetadata(number, context, word_offsets(offsets, window.word_ids), kinds)
    )
