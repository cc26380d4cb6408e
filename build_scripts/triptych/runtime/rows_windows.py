"""Core rows for a question and its context: one, or several windows over a long context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .carry import OUTSIDE, WORD_START, Carry, pack
from .faults import RequestError
from .pairs import PairForm
from .row_types import Row, RowInputs
from .token_kinds import word_offsets
from .token_rows import Input, TokenRowMaker, check_filled

LARGEST_STRIDE = 128


class RowMaker(TokenRowMaker):
    """Pairs of question and context; the carry of a window is where its words stand."""

    strategy = "only_second"
    offsets = True

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self.stride = min(settings["max_length"] // 2, LARGEST_STRIDE)
        super().__init__(settings, folder)

    def configure(self) -> None:
        """Windows are made whatever becomes of long texts: see `finish`."""
        self.tokenizer.enable_truncation(
            self.max_length, stride=self.stride, strategy=self.strategy
        )
        self._form = PairForm(self.tokenizer)
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
        questions = request.columns["text"]
        contexts = request.columns["text_pair"]
        pairs: list[Input] = list(zip(questions, contexts, strict=True))
        halves = self._form.halves([*questions, *contexts])
        windows = 0
        for number, pair in enumerate(pairs):
            question, context = (len(halves[half]) for half in pair)
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
        # Counted ahead: beside a long question there may be thousands, and all would be made.
        self.check_count(windows)
        return pairs

    def finish(self, inputs: Sequence[Input], encodings: Sequence[Any]) -> list[Row]:
        """As many core rows a pair as it has windows."""
        rows = []
        for number, (pair, encoding) in enumerate(zip(inputs, encodings, strict=True)):
            windows = [encoding, *encoding.overflowing]
            if len(windows) > 1 and not self.truncates:
                raise RequestError(
                    " and ".join(self.fields),
                    f"must have at most {self.max_length} tokens",
                    f"enough for {len(windows)} windows",
                    "Shorten the context, or set tokenizer.overflow to truncate in the pipeline",
                    number,
                )
            for index, window in enumerate(windows):
                context = pair[1] if index == 0 else ""
                rows.append(self.row(window, _carry(number, context, window)))
        return rows


def _carry(number: int, context: str, window: Any) -> bytes:
    inside = np.array([sequence == 1 for sequence in window.sequence_ids])
    kinds = np.where(inside, WORD_START, OUTSIDE).astype(np.uint8)
    offsets = np.array(window.offsets, dtype=np.int32).reshape(-1, 2)
    return pack(Carry(number, context, word_offsets(offsets, window.word_ids), kinds))
