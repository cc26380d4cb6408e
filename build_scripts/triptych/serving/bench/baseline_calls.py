"""Timed calls of the baselines, from requests to model outputs.

A call tokenizes its requests (or decodes and resizes its images) with the pipeline's row maker,
which is faster than the tokenizers of transformers in Python. Then it runs the model on the CPU,
with the library's default number of threads. It leaves out ``hooks.before`` and decoding, which
favors the baseline.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from triptych.base.tensors import Tensor, TokenRow
from triptych.core.gate.runs import tokens_of
from triptych.core.inputs import PipelineInputs
from triptych.core.own_chain import rows_of_model
from triptych.core.requests import Sample
from triptych.models.info import ModelInfo, ModelNames
from triptych.runtime.hooking import call_before
from triptych.runtime.own_model import OwnInputs, make_array
from triptych.runtime.row_types import RowInputs, find_class
from triptych.tasks.task import Core

ROWS_A_CALL = {"torch eager": 1, "torch batched": 32, "torch.compile": 1, "onnxruntime": 1}
"""Number of requests per call, by baseline.

``torch batched`` pads batches of requests of similar length; ``torch.compile`` compiles the model
of ``torch eager``; ``onnxruntime`` runs the pipeline's fp32 core.
"""

OWN = ("onnxruntime",)
"""Baselines of a pipeline around one model of the user, whose factory is not called here."""

MAX_BATCH = 32
"""Maximum number of rows in a padded batch; a request can have several, such as text windows."""

Request = Mapping[str, Any]
Call = Callable[[Sequence[Request]], object]


@dataclass(frozen=True)
class BaselineWork:
    model_folder: Path  # the model as `save_pretrained` wrote it
    tokenizer_folder: Path
    info: ModelInfo
    core: Core
    core_file: Path  # the core's model.onnx, in fp32 and in the plan's layout
    core_inputs: tuple[Tensor, ...]
    rows: str  # module of `triptych.runtime` with the task's row maker
    settings: Mapping[str, object]  # settings of the row maker
    parameters: Mapping[str, object]  # the pipeline's default request parameters
    requests: tuple[Request, ...]  # the traffic, after the pipeline's own `hooks.before`


def work_of(inputs: PipelineInputs, core_file: Path) -> BaselineWork:
    """Return the data that the baselines of a pipeline need.

    Args:
        inputs: Inputs of the pipeline.
        core_file: The pipeline's ``model.onnx``, in fp32 and in the plan's layout.
    """
    plan = inputs.plan
    names = [tensor.name for tensor in plan.task.inputs]
    images = [tensor.name for tensor in plan.task.inputs if tensor.content == "image"]
    requests = [dict(request) for request in inputs.traffic]
    before = inputs.find_hook("before")
    if before is not None:
        requests = call_before(before, requests, names, encoded=images)
    return BaselineWork(
        model_folder=inputs.model_folder.resolve(),
        tokenizer_folder=inputs.tokenizer_folder.resolve(),
        info=plan.info,
        core=plan.core,
        core_file=core_file.resolve(),
        core_inputs=plan.core_inputs,
        rows=plan.task.rows,
        # sentence-transformers and the pipelines of transformers also truncate long texts.
        settings={**plan.row_settings, "bucket_edges": [], "overflow": "truncate"},
        parameters=dict(plan.parameters),
        requests=tuple(
            {name: request[name] for name in names if name in request} for request in requests
        ),
    )


def write_work(work: BaselineWork, path: Path) -> None:
    """Write `work` as a pickle, for `read_work` in a worker; the folder must be private."""
    path.write_bytes(pickle.dumps(work))


def read_work(path: Path) -> BaselineWork:
    work: BaselineWork = pickle.loads(path.read_bytes())
    return work


def open_call(name: str, work: BaselineWork) -> Call:
    """Return the function that the baseline `name` times.

    Raises:
        UserError: The model cannot be loaded.
    """
    make, run = open_rows(work), open_model(name, work)

    def call(requests: Sequence[Request]) -> object:
        samples = sorted(make(requests), key=tokens_of)
        starts = range(0, len(samples), MAX_BATCH)
        return [run(samples[start : start + MAX_BATCH]) for start in starts]

    return call


def plan_calls(name: str, requests: Sequence[Request]) -> list[list[Request]]:
    """Return the requests of each call, in the order of the calls; each request occurs once.

    Requests of a batch have similar lengths, as in sentence-transformers. The order of the batches
    is random with a fixed seed, so that a measurement that ends early sees all lengths.
    """
    size = ROWS_A_CALL[name]
    if size == 1:
        return [[request] for request in requests]
    ranked = sorted(requests, key=lambda request: sum(map(len, request.values())))
    batches = [list(ranked[start : start + size]) for start in range(0, len(ranked), size)]
    random.Random(0).shuffle(batches)
    return batches


def open_rows(work: BaselineWork) -> Callable[[Sequence[Request]], list[Sample]]:
    """Return a function that converts requests to rows of the model, in the same order."""
    maker: Any = find_class(work.rows)(work.settings, work.tokenizer_folder)

    is_image, is_own = work.info.image is not None, work.info.own is not None
    columns = _own_columns(work) if is_own else _columns

    def make(requests: Sequence[Request]) -> list[Sample]:
        inputs = [RowInputs(columns(request), work.parameters) for request in requests]
        results = maker.make(inputs) if is_image or is_own else maker.token_rows(inputs)
        for result in results:
            if isinstance(result, Exception):
                raise result
        if is_own:
            names = ModelNames("", {name: name for name in maker.core_inputs}, {})
            return [row for result in results for row in rows_of_model(result.tensors, names)]
        if is_image:
            return [pixels for result in results for pixels in result.tensors["pixels"]]
        return [
            TokenRow(tuple(row.ids), row.first_segment, row.prompt)
            for result in results
            for row in result
        ]

    return make


def _columns(request: Request) -> dict[str, Any]:
    """Return a request of one row as the columns of its inputs."""
    return {name: [value] for name, value in request.items()}


def _own_columns(work: BaselineWork) -> Callable[[Request], dict[str, Any]]:
    """Return the `_columns` of the inputs that the pipeline declares, with their defaults."""
    reader, fields = OwnInputs(work.settings), cast(Any, work.settings["own_inputs"])
    return lambda request: reader.columns(
        {name: make_array(fields[name], [value]) for name, value in request.items()}
    )


def open_model(name: str, work: BaselineWork) -> Callable[[Sequence[Sample]], object]:
    """Return the function that runs a batch of rows.

    Raises:
        UserError: The model cannot be loaded.
    """
    if name == "onnxruntime":
        from triptych.core.gate.runs import open_onnx

        pad = work.info.pad_token_id
        return open_onnx(work.core_file, work.core, work.core_inputs, pad_token_id=pad)
    from triptych.serving.bench.torch_model import TorchModel

    return TorchModel(work.model_folder, work.info, work.core, compiled=name == "torch.compile")
