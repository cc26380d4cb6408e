"""A baseline as the calls that are timed: requests in, results of the model out.

A call tokenizes its requests (or decodes and resizes its images) with the pipeline's own row maker,
which is faster than transformers' tokenizers in Python, and runs the model. It leaves out what
comes before, the pipeline's ``hooks.before``, and what comes after, decoding: both favour the
baseline. It runs on the CPU, with as many threads as the library takes by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triptych.bench.baseline_work import Work
from triptych.gate.runs import tokens_of
from triptych.requests.feeds import Sample
from triptych.runtime import module_of
from triptych.runtime.row_types import RowInputs
from triptych.tensors import TokenRow

ROWS_A_CALL = {"torch eager": 1, "torch batched": 32, "torch.compile": 1, "onnxruntime": 1}
"""Baseline to the requests of a call.

``torch eager`` takes one at a time; ``torch batched`` the same in padded batches of requests of
like length; ``torch.compile`` is as ``torch eager``, compiled; ``onnxruntime`` runs the pipeline's
own fp32 core.
"""

LARGEST_BATCH = 32
"""Rows of a padded batch: a request may come to several, as windows of a long text do."""

Request = Mapping[str, Any]
Call = Callable[[Sequence[Request]], object]


def open_call(name: str, work: Work) -> Call:
    """The function that `name` times.

    Raises:
        UserError: the model cannot be loaded.
    """
    make, run = open_rows(work), open_model(name, work)

    def call(requests: Sequence[Request]) -> object:
        samples = sorted(make(requests), key=tokens_of)
        starts = range(0, len(samples), LARGEST_BATCH)
        return [run(samples[start : start + LARGEST_BATCH]) for start in starts]

    return call


def plan_calls(name: str, requests: Sequence[Request]) -> list[list[Request]]:
    """The requests of each call, in the order of the calls: the traffic once.

    Batches are of like length, as sentence-transformers makes them; their order is random, but the
    same each time, so that a measurement that ends before the last is no worse for it.
    """
    size = ROWS_A_CALL[name]
    if size == 1:
        return [[request] for request in requests]
    ranked = sorted(requests, key=lambda request: sum(map(len, request.values())))
    batches = [list(ranked[start : start + size]) for start in range(0, len(ranked), size)]
    random.Random(0).shuffle(batches)
    return batches


def open_rows(work: Work) -> Callable[[Sequence[Request]], list[Sample]]:
    """A function from requests to the rows of the model, request by request."""
    maker: Any = module_of(work.rows).RowMaker(work.settings, work.tokenizer_folder)

    def make(requests: Sequence[Request]) -> list[Sample]:
        asks = [
            RowInputs({name: [value] for name, value in request.items()}, work.parameters)
            for request in requests
        ]
        if work.facts.image is not None:
            return [pixels for made in _made(maker.make(asks)) for pixels in made.tensors["pixels"]]
        return [
            TokenRow(tuple(row.ids), row.first_segment)
            for rows in _made(maker.token_rows(asks))
            for row in rows
        ]

    return make


def open_model(name: str, work: Work) -> Callable[[Sequence[Sample]], object]:
    """The function that runs a batch of rows.

    Raises:
        UserError: the model cannot be loaded.
    """
    if name == "onnxruntime":
        from triptych.gate.artifact import open_onnx

        pad = work.facts.pad_token_id
        return open_onnx(
            work.core_file, work.core, work.core_inputs, packed=work.packed, pad_token_id=pad
        )
    from triptych.bench.torch_model import TorchModel

    return TorchModel(work.model_folder, work.facts, work.core, compiled=name == "torch.compile")


def _made(results: Sequence[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return list(results)
