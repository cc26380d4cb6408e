"""What transformers 5 has no pipeline for any more, written plainly; and images to classify."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from triptych.runtime.decode_answers import AnswerDecoder
from triptych.runtime.row_metadata import OUTSIDE, WORD_START, RowMetadata
from triptych.runtime.rows_spans import word_offsets

WINDOW, STRIDE = 384, 128


def answer_spans(
    folder: Path, questions: list[str], contexts: list[str], *, impossible: bool
) -> list[dict[str, Any]]:
    """Each context's best span: transformers' own windows and logits, and the tested decoder.

    The decoder is held to recorded answers of transformers 4's pipeline by its own tests.
    """
    import torch
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    model = AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    decoder = AnswerDecoder({}, folder)
    parameters = {"max_answer_len": 15, "handle_impossible_answer": impossible}
    answers = []
    for question, context in zip(questions, contexts, strict=True):
        encoded = tokenizer(
            question,
            context,
            truncation="only_second",
            max_length=WINDOW,
            stride=STRIDE,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        logits, metadata = [], []
        for window, ids in enumerate(encoded["input_ids"]):
            types = encoded["token_type_ids"][window]
            with torch.inference_mode():
                out = model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types]))
            logits.append((out.start_logits[0].numpy(), out.end_logits[0].numpy()))
            words = np.array(encoded["offset_mapping"][window], dtype=np.int32)
            offsets = word_offsets(words, encoded.word_ids(window))
            inside = [sequence == 1 for sequence in encoded.sequence_ids(window)]
            kinds = np.where(inside, WORD_START, OUTSIDE).astype(np.uint8)
            metadata.append(RowMetadata(0, context if window == 0 else "", offsets, kinds))
        width = max(len(ids) for ids in encoded["input_ids"])
        outputs = {
            name: np.stack([np.pad(pair[place], (0, width - len(pair[place]))) for pair in logits])
            for place, name in enumerate(("start_logit", "end_logit"))
        }
        decoded = decoder.decode(outputs, metadata, parameters)
        answers.append({name: decoded[name][0, 0] for name in ("score", "start", "end")})
    return answers


def image_bytes() -> list[bytes]:
    """Encoded images of several sizes, modes and formats."""
    from PIL import Image

    generator = np.random.default_rng(0)
    encoded = []
    for size, mode, form in (
        ((64, 48), "RGB", "JPEG"),
        ((31, 90), "RGB", "PNG"),
        ((200, 10), "L", "PNG"),
        ((33, 33), "RGBA", "PNG"),
        ((500, 400), "RGB", "WEBP"),
        ((8, 8), "P", "GIF"),
        ((120, 80), "RGB", "BMP"),
    ):
        base = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        image = Image.fromarray(base).resize(size).convert(mode)
        buffer = io.BytesIO()
        image.save(buffer, form)
        encoded.append(buffer.getvalue())
    return encoded
