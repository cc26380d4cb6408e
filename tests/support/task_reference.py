"""Answers of the client held to transformers' pipelines, and images to classify."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from triptych.client import Client
from triptych.runtime.decode_answers import AnswerDecoder
from triptych.runtime.row_metadata import OUTSIDE, WORD_START, RowMetadata

CLOSE = 1e-4
"""Largest difference of scores."""


def same_choices(
    got: Any, want: list[dict[str, Any]], key: str = "label", *, cut: bool = False
) -> None:
    """Check for equal scores in equal order, and equal labels but for ties.

    `cut` says that there are more choices, of which one may be as good as the last.
    """
    scores = np.array([row["score"] for row in want])
    assert np.abs(np.array([choice.score for choice in got]) - scores).max() <= CLOSE
    for index, choice in enumerate(got):
        ties = np.flatnonzero(np.abs(scores - scores[index]) <= CLOSE)
        if not cut or len(want) - 1 not in ties:
            assert choice[0] in {want[place][key] for place in ties}


def check_labels(client: Client, reference: Any, texts: Sequence[str], top_k: int) -> Any:
    """Check the labels of texts, all of which a request asks for; return them."""
    got = client.classify(texts, top_k=top_k)
    want = reference(texts, top_k=None, truncation=True)
    for mine, theirs in zip(got, want, strict=True):
        same_choices(mine, theirs)
    assert len({choices[0].label for choices in got}) > 1
    return got


def check_entities(client: Client, reference: Any, texts: Sequence[str], aggregation: Any) -> None:
    got = client.entities(texts, aggregation_strategy=aggregation)
    want = reference(texts, aggregation_strategy=aggregation)
    key = "entity" if aggregation == "none" else "entity_group"
    for text, mine, theirs in zip(texts, got, want, strict=True):
        spans = [(e.entity, e.start, e.end) for e in mine]
        assert spans == [(e[key], e["start"], e["end"]) for e in theirs]
        assert [e.text for e in mine] == [text[e.start : e.end] for e in mine]
        far = [abs(e.score - t["score"]) for e, t in zip(mine, theirs, strict=True)]
        assert max(far, default=0.0) <= CLOSE
    assert len({e.entity for entities in got for e in entities}) > 1


def check_hypotheses(
    client: Client, reference: Any, texts: Sequence[str], labels: Sequence[str], **options: Any
) -> None:
    got = client.classify_zero_shot(texts, labels, **options)
    want = reference(texts, labels, **options)
    for mine, theirs in zip(got, want, strict=True):
        pairs = zip(theirs["labels"], theirs["scores"], strict=True)
        same_choices(mine, [{"label": label, "score": score} for label, score in pairs])


def check_answers(
    client: Client,
    model: Path,
    questions: Sequence[str],
    contexts: Sequence[str],
    *,
    impossible: bool,
    window: int,
    stride: int,
) -> None:
    got = client.answer(questions, contexts, handle_impossible_answer=impossible)
    spans = answer_spans(model, questions, contexts, impossible, window, stride)
    for context, mine, theirs in zip(contexts, got, spans, strict=True):
        assert (mine.start, mine.end) == theirs[:2]
        assert abs(mine.score - theirs[2]) <= CLOSE
        assert mine.answer == context[mine.start : mine.end] == mine.answer.strip()
    assert any(answer.end for answer in got)


def answer_spans(
    folder: Path,
    questions: Sequence[str],
    contexts: Sequence[str],
    impossible: bool,
    window: int,
    stride: int,
) -> list[tuple[int, int, float]]:
    """Return start, end and score of each answer: transformers 5 has no pipeline for them.

    Windows, logits and characters of words are transformers' own. The decoder is held to recorded
    answers of the pipeline of transformers 4 by its own tests.
    """
    import torch
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    model = AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for question, context in zip(questions, contexts, strict=True):
        encoded = tokenizer(
            question,
            context,
            truncation="only_second",
            padding=True,
            max_length=window,
            stride=stride,
            return_overflowing_tokens=True,
            return_tensors="pt",
        )
        encoded.pop("overflow_to_sample_mapping")
        with torch.inference_mode():
            output = model(**encoded)
        metadata = []
        for number, part in enumerate(encoded.encodings):
            inside = [sequence == 1 for sequence in part.sequence_ids]
            offsets = [
                part.word_to_chars(word, 1) if own and word is not None else (0, 0)
                for own, word in zip(inside, part.word_ids, strict=True)
            ]
            kinds = np.where(inside, WORD_START, OUTSIDE).astype(np.uint8)
            text = context if number == 0 else ""
            metadata.append(RowMetadata(0, text, np.array(offsets, dtype=np.int32), kinds))
        outputs = {
            "start_logit": output.start_logits.numpy(),
            "end_logit": output.end_logits.numpy(),
        }
        parameters = {"max_answer_len": 15, "handle_impossible_answer": impossible}
        decoded = AnswerDecoder({}, folder).decode(outputs, metadata, parameters)
        start, end, score = (decoded[name][0, 0] for name in ("start", "end", "score"))
        found.append((int(start), int(end), float(score)))
    assert len(metadata) > 2  # the last context takes several windows
    return found


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
