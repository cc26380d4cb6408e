"""What a baseline works on: the pipeline's model, row maker, traffic and fp32 core, as one file."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.model.facts import ModelFacts
from triptych.requests.inputs import PipelineInputs
from triptych.runtime.hooking import call_before, find_hook
from triptych.tasks.task import Core
from triptych.tensors import Tensor


@dataclass(frozen=True)
class Work:
    """All that a worker needs to know.

    Attributes:
        model_folder: the model as `save_pretrained` wrote it.
        tokenizer_folder: of ``tokenizer.json``.
        facts: of the model.
        core: what the pipeline's core computes.
        core_file: its ``model.onnx`` in fp32.
        core_inputs: of that graph.
        packed: its layout.
        rows: module of `triptych.runtime` with the task's row maker.
        settings: of the row maker.
        parameters: of every request: the pipeline's defaults.
        requests: the traffic, after the pipeline's own ``hooks.before``.
    """

    model_folder: Path
    tokenizer_folder: Path
    facts: ModelFacts
    core: Core
    core_file: Path
    core_inputs: tuple[Tensor, ...]
    packed: bool
    rows: str
    settings: Mapping[str, Any]
    parameters: Mapping[str, Any]
    requests: tuple[Mapping[str, Any], ...]


def work_of(prepared: PipelineInputs, core_file: Path) -> Work:
    """What the baselines of a pipeline work on.

    Args:
        prepared: the pipeline.
        core_file: its ``model.onnx``, in fp32 and in the plan's layout.
    """
    plan = prepared.plan
    names = [tensor.name for tensor in plan.task.inputs]
    images = [tensor.name for tensor in plan.task.inputs if tensor.content == "image"]
    requests: list[dict[str, Any]] = [dict(request) for request in prepared.traffic]
    before = find_hook(plan.spec.folder, "before")
    if before is not None:
        requests = call_before(before, requests, names, encoded=images)
    settings = dict(plan.row_settings)
    return Work(
        model_folder=prepared.model_folder.resolve(),
        tokenizer_folder=prepared.tokenizer_folder.resolve(),
        facts=plan.facts,
        core=plan.core,
        core_file=core_file.resolve(),
        core_inputs=plan.core_inputs,
        packed=plan.packed,
        rows=Path(plan.task.rows).stem,
        # Long texts are cut, as sentence-transformers and the pipelines of transformers do.
        settings={**settings, "bucket_edges": [], "overflow": "truncate"},
        parameters=dict(plan.parameters),
        requests=tuple({name: request[name] for name in names} for request in requests),
    )


def write_work(work: Work, path: Path) -> None:
    """Write `work` for a process of this same program: a pickle, so to a folder of one's own."""
    path.write_bytes(pickle.dumps(work))


def read_work(path: Path) -> Work:
    """What `write_work` wrote."""
    work: Work = pickle.loads(path.read_bytes())
    return work
