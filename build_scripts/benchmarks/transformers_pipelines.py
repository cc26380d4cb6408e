"""transformers' own pipeline of a task: loaded, timed in batches, compared with responses."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.test_models import CANDIDATE_LABELS, TaskModel
from triptych.runtime.decode_answers import AnswerDecoder
from triptych.runtime.row_types import OUTSIDE, WORD_START, RowMetadata
from triptych.runtime.rows_spans import word_offsets

RequestRows = Sequence[Mapping[str, Any]]
Run = Callable[[RequestRows], list[Any]]
WINDOW_TOKENS, STRIDE_TOKENS = 384, 128
_QA_PARAMETERS = {"max_answer_len": 15, "handle_impossible_answer": False}
_CALL_REQUESTS = 64


def load(model: TaskModel, folder: Path, *, batch_size: int) -> Run:
    """Return a function from requests to the results of transformers' pipeline."""
    import transformers

    if model.task == "question-answering":  # transformers 5 has no such pipeline
        return QuestionAnswering(folder, batch_size=batch_size)
    options: dict[str, Any] = {"batch_size": batch_size}
    if model.task == "text-classification":
        options["truncation"] = True
    if model.task == "token-classification":
        options["aggregation_strategy"] = "simple"
    if model.task == "zero-shot-classification":
        options["candidate_labels"] = CANDIDATE_LABELS
    task = model.task.replace("reranking", "text-classification")
    pipeline = transformers.pipeline(task, str(folder), device="cpu")
    return lambda requests: list(pipeline(_make_inputs(model, requests), **options))


def _make_inputs(model: TaskModel, requests: RequestRows) -> list[Any]:
    if model.task == "image-classification":
        from PIL import Image

        return [Image.open(io.BytesIO(request["image"])) for request in requests]
    if model.task == "reranking":
        return [dict(request) for request in requests]
    return [request["text"] for request in requests]


def measure_rate(run: Run, requests: RequestRows, *, seconds: float) -> float:
    """Return the requests per second over about `seconds`."""
    endless = cycle(requests)
    run(list(islice(endless, 16)))
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        run(list(islice(endless, _CALL_REQUESTS)))
        done += _CALL_REQUESTS
    return done / (time.perf_counter() - started)


def compare(
    model: TaskModel, outputs: Mapping[str, Any], expected: Sequence[Any]
) -> tuple[float, float]:
    """Return the ratio of rows with the same first result, and the maximum score difference."""
    same, difference = 0, 0.0
    for row, result in enumerate(expected):
        served, own = _read_served(outputs, row), _read_own(model, result)
        if [key for key, _ in served] == [key for key, _ in own]:
            same += 1
            scores = [abs(a - b) for (_, a), (_, b) in zip(served, own, strict=True)]
            difference = max([difference, *scores])
    return same / len(expected), difference


def _read_served(outputs: Mapping[str, Any], row: int) -> list[tuple[Any, float]]:
    if "entities" in outputs:
        entities = json.loads(outputs["entities"][row, 0])
        return [((e["entity"], e["start"], e["end"]), e["score"]) for e in entities]
    score = float(outputs["score"][row, 0])
    if "answer" in outputs:
        return [((int(outputs["start"][row, 0]), int(outputs["end"][row, 0])), score)]
    for name in ("label", "token"):
        if name in outputs:
            return [(outputs[name][row, 0].decode(), score)]
    return [(None, score)]


def _read_own(model: TaskModel, result: Any) -> list[tuple[Any, float]]:
    if model.task == "token-classification":
        return [((e["entity_group"], e["start"], e["end"]), float(e["score"])) for e in result]
    if model.task == "question-answering":
        return [((result["start"], result["end"]), result["score"])]
    if model.task == "zero-shot-classification":
        return [(result["labels"][0], result["scores"][0])]
    if model.task == "reranking":
        return [(None, result["score"])]
    first = result[0] if isinstance(result, list) else result
    return [(first.get("label", first.get("token_str")), first["score"])]


class QuestionAnswering:
    """Question answering in plain transformers, batched as its pipeline did before version 5.

    Contexts are split into windows and padded in batches. The served decoder chooses the spans,
    too, so that the comparison is one of everything else.
    """

    def __init__(self, folder: Path, *, batch_size: int) -> None:
        """Load model and tokenizer."""
        from transformers import AutoModelForQuestionAnswering, AutoTokenizer

        self._model = AutoModelForQuestionAnswering.from_pretrained(folder).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._batch_size = batch_size
        self._decoder = AnswerDecoder({}, folder)

    def __call__(self, requests: RequestRows) -> list[Any]:
        """Return start, end and score for each request."""
        encoded = self._tokenizer(
            [request["text"] for request in requests],
            [request["text_pair"] for request in requests],
            truncation="only_second",
            max_length=WINDOW_TOKENS,
            stride=STRIDE_TOKENS,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        owners = encoded["overflow_to_sample_mapping"]
        batches = [self._run(encoded, first) for first in range(0, len(owners), self._batch_size)]
        starts, ends = (_join(parts, len(owners)) for parts in zip(*batches, strict=True))
        rows = []
        for window, owner in enumerate(owners):
            is_first = window == 0 or owners[window - 1] != owner
            context = requests[owner]["text_pair"] if is_first else ""
            words = np.array(encoded["offset_mapping"][window], dtype=np.int32)
            in_context = [sequence == 1 for sequence in encoded.sequence_ids(window)]
            kinds = np.where(in_context, WORD_START, OUTSIDE).astype(np.uint8)
            offsets = word_offsets(words, encoded.word_ids(window))
            rows.append(RowMetadata(owner, context, offsets, kinds))
        logits = {"start_logit": starts, "end_logit": ends}
        decoded = self._decoder.decode(logits, rows, _QA_PARAMETERS)
        return [
            {name: decoded[name][row, 0].item() for name in ("score", "start", "end")}
            for row in range(len(requests))
        ]

    def _run(self, encoded: Any, first: int) -> tuple[Any, Any]:
        import torch

        names = ("input_ids", "token_type_ids", "attention_mask")
        rows = {name: encoded[name][first : first + self._batch_size] for name in names}
        batch = self._tokenizer.pad(rows, return_tensors="pt")
        with torch.inference_mode():
            out = self._model(**batch)
        return out.start_logits.numpy(), out.end_logits.numpy()


def _join(parts: Sequence[Any], rows: int) -> Any:
    joined = np.zeros((rows, max(part.shape[1] for part in parts)), dtype=np.float32)
    row = 0
    for part in parts:
        joined[row : row + len(part), : part.shape[1]] = part
        row += len(part)
    return joined
