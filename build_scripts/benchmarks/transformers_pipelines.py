"""transformers' own pipeline of a task: loaded, timed in batches, compared with responses."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.test_models import CANDIDATE_LABELS, TaskModel

RequestRows = Sequence[Mapping[str, Any]]
Run = Callable[[RequestRows], list[Any]]
_CALL_REQUESTS = 64


def load(model: TaskModel, folder: Path, *, batch_size: int) -> Run:
    """Return a function from requests to the results of transformers' pipeline."""
    import transformers

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
    for name in ("label", "token"):
        if name in outputs:
            return [(outputs[name][row, 0], score)]
    return [(None, score)]


def _read_own(model: TaskModel, result: Any) -> list[tuple[Any, float]]:
    if model.task == "token-classification":
        return [((e["entity_group"], e["start"], e["end"]), float(e["score"])) for e in result]
    if model.task == "zero-shot-classification":
        return [(result["labels"][0], result["scores"][0])]
    if model.task == "reranking":
        return [(None, result["score"])]
    first = result[0] if isinstance(result, list) else result
    return [(first.get("label", first.get("token_str")), first["score"])]
