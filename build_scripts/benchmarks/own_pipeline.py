"""transformers' own pipeline of a task: loaded, timed in batches, compared with what is served."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.reader import Reader
from benchmarks.zoo import CANDIDATES, Exhibit

Own = Callable[[Sequence[Mapping[str, Any]]], list[Any]]


def load(exhibit: Exhibit, model: Path, *, batch_size: int) -> Own:
    """A function from requests to the pipeline's results, in batches of `batch_size`."""
    import transformers

    if exhibit.task == "question-answering":  # transformers 5 has no such pipeline any more
        return Reader(model, batch_size=batch_size)
    task = exhibit.task.replace("reranking", "text-classification")
    options: dict[str, Any] = {"batch_size": batch_size}
    if exhibit.task == "text-classification":
        options["truncation"] = True
    if exhibit.task == "token-classification":
        options["aggregation_strategy"] = "simple"
    if exhibit.task == "zero-shot-classification":
        options["candidate_labels"] = CANDIDATES
    own = transformers.pipeline(task, str(model), device="cpu")

    def run(requests: Sequence[Mapping[str, Any]]) -> list[Any]:
        results = own(_inputs(exhibit, requests), **options)
        return list(results)

    return run


def _inputs(exhibit: Exhibit, requests: Sequence[Mapping[str, Any]]) -> list[Any]:
    if exhibit.task == "image-classification":
        from PIL import Image

        return [Image.open(io.BytesIO(request["image"])) for request in requests]
    if exhibit.task == "reranking":
        return [dict(request) for request in requests]
    return [request["text"] for request in requests]


def rate(own: Own, requests: Sequence[Mapping[str, Any]], *, seconds: float) -> float:
    """Requests a second over about `seconds`, a list of 64 after the other."""
    endless = cycle(requests)
    own(list(islice(endless, 16)))
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        own(list(islice(endless, 64)))
        done += 64
    return done / (time.perf_counter() - started)


def compare(
    exhibit: Exhibit, outputs: Mapping[str, Any], expected: Sequence[Any]
) -> tuple[float, float]:
    """Share of rows with the same first answer, and the largest difference of its score."""
    same, difference = 0, 0.0
    for row, want in enumerate(expected):
        mine = _first(outputs, row)
        theirs = _theirs(exhibit, want)
        equal = [m[0] for m in mine] == [t[0] for t in theirs]
        same += equal
        if equal:
            pairs = zip(mine, theirs, strict=True)
            difference = max([difference, *(abs(m[1] - t[1]) for m, t in pairs)])
    return same / len(expected), difference


def _first(outputs: Mapping[str, Any], row: int) -> list[tuple[Any, float]]:
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


def _theirs(exhibit: Exhibit, want: Any) -> list[tuple[Any, float]]:
    if exhibit.task == "token-classification":
        return [((e["entity_group"], e["start"], e["end"]), float(e["score"])) for e in want]
    if exhibit.task == "question-answering":
        return [((want["start"], want["end"]), want["score"])]
    if exhibit.task == "zero-shot-classification":
        return [(want["labels"][0], want["scores"][0])]
    if exhibit.task == "reranking":
        return [(None, want["score"])]
    first = want[0] if isinstance(want, list) else want
    return [(first.get("label", first.get("token_str")), first["score"])]
