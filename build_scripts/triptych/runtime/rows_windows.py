"""Core rows for a question and its context: one, or several windows over a long context."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .carry import OUTSIDE, WORD_START, Carry, pack
from .faults import RequestError
from .pairs import PairForm
from .row_types import Row, RowInputs
from .token_kinds import word_offsets
from .token_rows import Input, TokenRowMaker, check_filled

MAX_STRIDE = 128


class RowMaker(TokenRowMaker):
    """Pairs of question and context; the carry of a window is where its words stand."""

    strategy = "only_second"
    offsets = True

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self.stride = min(settings["max_length"] // 2, MAX_STRIDE)
        super().__init__(settings, folder)

    def configure(self) -> None:
        """Windows are made whatever becomes of long texts: see `finish`."""
        self.tokenizer.enable_truncation(
            self.max_length, stride=self.stride, strategy=self.strategy
        )
        self._form = PairForm(self.tokenizer)
        # Texts by themselves: what is put around them, and cut off, comes with `post_process`.
        bare = dict.fromkeys(("post_processor", "truncation", "padding"))
        self._bare = Tokenizer.from_str(json.dumps(json.loads(self.tokenizer.to_str()) | bare))
        added = self._form.added
        self._longest_question = self.max_length - added - self.stride - 1
        if self._longest_question < 1:
            raise RequestError(
                "tokenizer.max_length",
                f"must leave room for a question and a window: more than {added + self.stride + 1}",
                self.max_length,
                "Raise it",
            )

    def inputs(self, request: RowInputs) -> list[Input]:
        check_filled(request, self.fields)
        return list(zip(request.columns["text"], request.columns["text_pair"], strict=True))

    def _encode_all(self, inputs: Sequence[Any]) -> list[Any]:
        """Question and context of each pair by themselves; equal texts are tokenized once."""
        if isinstance(inputs[0], str):
            return super()._encode_all(inputs)
        texts = list(dict.fromkeys(text for pair in inputs for text in pair))
        encodings = dict(zip(texts, self._bare.encode_batch(texts), strict=True))
        return [(encodings[question], encodings[context]) for question, context in inputs]

    def finish(self, inputs: Sequence[Input], encodings: Sequence[Any]) -> list[Row]:
        """As many core rows a pair as it has windows."""
        self._check_sizes([(len(one.ids), len(two.ids)) for one, two in encodings])
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
                carry = _carry(number, pair[1] if index == 0 else "", window)
                ids = window.ids
                rows.append(Row(ids, first if self._segments else len(ids), carry))
        return rows

    def _check_sizes(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Refuse pairs, by tokens of question and context, that the windows would be too many of.

        Before they are made: beside a long question there may be thousands.
        """
        windows = 0
        for number, (question, context) in enumerate(sizes):
            # Beyond it there is no window that the tokenizer could cut: it would panic.
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


def _carry(number: int, context: str, window: Any) -> bytes:
    inside = np.array([sequence == 1 for sequence in window.sequence_ids])
    kinds = np.where(inside, WORD_START, OUTSIDE).astype(np.uint8)
    offsets = np.array(window.offsets, dtype=np.int32).reshape(-1, 2)
    return pack(Carry(number, context, word_offsets(offsets, window.word_ids), kinds))
