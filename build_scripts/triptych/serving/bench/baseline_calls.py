"""A baseline as the calls that are timed: requests in, results of the model out.

A call tokenizes its requests (or decodes and resizes its images) with the pipeline's own row maker,
which is faster than transformers' tokenizers in Python, and runs the model. It leaves out what
comes before, the pipeline's ``hooks.before``, and what comes after, decoding: both favor the
baseline. It runs on the CPU, with as many threads as the library takes by itself.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.base.tensors import Tensor, TokenRow
from triptych.core.feeds import Sample
from triptych.core.gate.runs import tokens_of
from triptych.core.inputs import PipelineInputs
from triptych.runtime.hooking import call_before, find_hook
from triptych.runtime.row_types import RowInputs, find_class
from triptych.spec.model_facts import ModelFacts
from triptych.spec.tasks.task import Core

ROWS_A_CALL = {"torch eager": 1, "torch batched": 32, "torch.compile": 1, "onnxruntime": 1}
"""Baseline to the requests of a call.

``torch eager`` takes one at a time; ``torch batched`` the same in padded batches of requests of
like length; ``torch.compile`` is as ``torch eager``, compiled; ``onnxruntime`` runs the pipeline's
own fp32 core.
"""

MAX_BATCH = 32
"""Rows of a padded batch: a request may come to several, as windows of a long text do."""

Request = Mapping[str, str | bytes]
Call = Callable[[Sequence[Request]], object]


@dataclass(frozen=True)
class BaselineWork:
    model_folder: Path  # the model as `save_pretrained` wrote it
    tokenizer_folder: Path
    facts: ModelFacts
    core: Core
    core_file: Path  # the core's model.onnx, in fp32 and in the plan's layout
    core_inputs: tuple[Tensor, ...]
    rows: str  # module of `triptych.runtime` with the task's row maker
    settings: Mapping[str, object]  # of the row maker
    parameters: Mapping[str, object]  # of every request: the pipeline's defaults
    requests: tuple[Request, ...]  # the traffic, after the pipeline's own `hooks.before`


def work_of(inputs: PipelineInputs, core_file: Path) -> BaselineWork:
    """What the baselines of a pipeline work on.

    Args:
        inputs: the pipeline.
        core_file: its ``model.onnx``, in fp32 and in the plan's layout.
    """
    plan = inputs.plan
    names = [tensor.name for tensor in plan.task.inputs]
    images = [tensor.name for tensor in plan.task.inputs if tensor.content == "image"]
    requests = [dict(request) for request in inputs.traffic]
    before = find_hook(plan.spec.folder, "before")
    if before is not None:
        requests = call_before(before, requests, names, encoded=images)
    return BaselineWork(
        model_folder=inputs.model_folder.resolve(),
        tokenizer_folder=inputs.tokenizer_folder.resolve(),
        facts=plan.facts,
        core=plan.core,
        core_file=core_file.resolve(),
        core_inputs=plan.core_inputs,
        rows=plan.task.rows,
        # Long texts are cut, as sentence-transformers and the pipelines of transformers do.
        settings={**plan.row_settings, "bucket_edges": [], "overflow": "truncate"},
        parameters=dict(plan.parameters),
        requests=tuple({name: request[name] for name in names} for request in requests),
    )


def write_work(work: BaselineWork, path: Path) -> None:
    """Write `work` for a process of this same program: a pickle, so to a folder of one's own."""
    path.write_bytes(pickle.dumps(work))


def read_work(path: Path) -> BaselineWork:
    work: BaselineWork = pickle.loads(path.read_bytes())
    return work


def open_call(name: str, work: BaselineWork) -> Call:
    """The function that `name` times.

    Raises:
        UserError: the model cannot be loaded.
    """
    make, run = open_rows(work), open_model(name, work)

    def call(requests: Sequence[Request]) -> object:
        samples = sorted(make(requests), key=tokens_of)
        starts = range(0, len(samples), MAX_BATCH)
        return [run(samples[start : start + MAX_BATCH]) for start in starts]

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


def open_rows(work: BaselineWork) -> Callable[[Sequence[Request]], list[Sample]]:
    """A function from requests to the rows of the model, request by request."""
    maker: Any = find_class(work.rows)(work.settings, work.tokenizer_folder)

    def make(requests: Sequence[Request]) -> list[Sample]:
        inputs = [
            RowInputs({name: [value] for name, value in request.items()}, work.parameters)
            for request in requests
        ]
        is_image = work.facts.image is not None
        results = maker.make(inputs) if is_image else maker.token_rows(inputs)
        for result in results:
            if isinstance(result, Exception):
                raise result
        if is_image:
            return [pixels for result in results for pixels in result.tensors["pixels"]]
        return [TokenRow(tuple(row.ids), row.first_segment) for result in results for row in result]

    return make


def open_model(name: str, work: BaselineWork) -> Callable[[Sequence[Sample]], object]:
    """The function that runs a batch of rows.

    Raises:
        UserError: the model cannot be loaded.
    """
    if name == "onnxruntime":
        from triptych.core.gate.runs import open_onnx

        pad = work.facts.pad_token_id
        return open_onnx(work.core_file, work.core, work.core_inputs, pad_token_id=pad)
    from triptych.serving.bench.torch_model import TorchModel

    return TorchModel(work.model_folder, work.facts, work.core, compiled=name == "torch.compile")
