"""Question answering in plain transformers, batched as its pipeline did before version 5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from triptych.runtime.carry import OUTSIDE, WORD_START, Carry
from triptych.runtime.postprocess_question_answering import Decoder
from triptych.runtime.token_kinds import word_offsets

WINDOW, STRIDE = 384, 128
PARAMETERS = {"max_answer_tokens": 15, "impossible_answer": False}


class Reader:
    """Windows over the contexts, padded in batches, the best span of each context.

    The spans are chosen by the decoder that is served, too: what is compared is the rest.
    """

    def __init__(self, folder: Path, *, batch_size: int) -> None:
        """Load model and tokenizer."""
        from transformers import AutoModelForQuestionAnswering, AutoTokenizer

        self._model = AutoModelForQuestionAnswering.from_pretrained(folder).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._batch_size = batch_size
        self._decoder = Decoder({}, folder)

    def __call__(self, requests: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Start, end and score for each request."""
        encoded = self._tokenizer(
            [request["text"] for request in requests],
            [request["text_pair"] for request in requests],
            truncation="only_second",
            max_length=WINDOW,
            stride=STRIDE,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        owners = encoded["overflow_to_sample_mapping"]
        windows = [self._batch(encoded, first) for first in range(0, len(owners), self._batch_size)]
        starts, ends = (_joined([pair[place] for pair in windows], len(owners)) for place in (0, 1))
        carries = []
        for window, owner in enumerate(owners):
            first = window == 0 or owners[window - 1] != owner
            context = requests[owner]["text_pair"] if first else ""
            words = np.array(encoded["offset_mapping"][window], dtype=np.int32)
            inside = [sequence == 1 for sequence in encoded.sequence_ids(window)]
            kinds = np.where(inside, WORD_START, OUTSIDE).astype(np.uint8)
            offsets = word_offsets(words, encoded.word_ids(window))
            carries.append(Carry(owner, context, offsets, kinds))
        logits = {"start_logit": starts, "end_logit": ends}
        decoded = self._decoder.decode(logits, carries, PARAMETERS)
        return [
            {name: decoded[name][row, 0].item() for name in ("score", "start", "end")}
            for row in range(len(requests))
        ]

    def _batch(self, encoded: Any, first: int) -> tuple[Any, Any]:
        import torch

        names = ("input_ids", "token_type_ids", "attention_mask")
        rows = {name: encoded[name][first : first + self._batch_size] for name in names}
        batch = self._tokenizer.pad(rows, return_tensors="pt")
        with torch.inference_mode():
            out = self._model(**batch)
        return out.start_logits.numpy(), out.end_logits.numpy()


def _joined(parts: list[Any], rows: int) -> Any:
    joined = np.zeros((rows, max(part.shape[1] for part in parts)), dtype=np.float32)
    row = 0
    for part in parts:
        joined[row : row + len(part), : part.shape[1]] = part
        row += len(part)
    return joined
