"""Systems that are timed in process on the same GPU.

All begin with token ids in host memory and end with vectors in host memory, so that copies to the
GPU and back count for all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.feeds import make_feeds, pad
from benchmarks.model import open_session
from triptych.base.tensors import TokenRow
from triptych.core.engine.runner import EngineRunner
from triptych.core.export.to_onnx import load_model
from triptych.core.inputs import PipelineInputs
from triptych.core.requests import core_feed
from triptych.spec.plan import Plan

Call = Callable[[], object]
TorchType = Literal["fp32", "fp16"]
COMPILE_S = 90.0
"""Maximum duration of torch.compile for all shapes, for which time must be left."""


@dataclass(frozen=True)
class EngineSystem:
    """A system under test.

    Attributes:
        prepare: Prepares a batch, untimed, and returns the call that is timed.
        warm_up_s: Expected duration of its first calls.
    """

    name: str
    prepare: Callable[[Sequence[TokenRow]], Call]
    warm_up_s: float = 0.0


def open_engine(name: str, runner: EngineRunner, plan: Plan) -> EngineSystem:
    """Return a built engine, which runs as often for a batch as its layout requires."""

    def prepare(rows: Sequence[TokenRow]) -> Call:
        feeds = [feed for _, feed in make_feeds(rows, plan)]
        return lambda: [runner.run(feed) for feed in feeds]

    return EngineSystem(name, prepare)


def open_torch(
    name: str, inputs: PipelineInputs, *, device: str, precision: TorchType, compiled: bool
) -> EngineSystem:
    """Return the model in PyTorch on padded batches, with the pooling of the pipeline.

    Args:
        compiled: Whether to use `torch.compile` with dynamic shapes.

    Raises:
        UserError: transformers cannot load the model.
    """
    torch: Any = importlib.import_module("torch")
    from triptych.core.export import heads  # imports torch

    info, folder = inputs.plan.info, inputs.model_folder
    kind = torch.float32 if precision == "fp32" else torch.float16
    encoder = load_model(folder, inputs.plan.core.auto_class).to(device, kind)
    head = heads.SentenceHead(info, folder).eval().to(device, kind)

    def forward(ids: Any, mask: Any) -> Any:
        hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        position = torch.arange(ids.shape[1], device=ids.device)[None]
        length = mask.sum(dim=1, keepdim=True)
        return head(hidden, heads.RowMembership(ids, position, mask.bool(), length)).float()

    run = torch.compile(forward, dynamic=True) if compiled else forward

    def prepare(rows: Sequence[TokenRow]) -> Call:
        arrays = pad(rows, info.pad_token_id)

        def call() -> object:
            with torch.inference_mode():
                tensors = (torch.from_numpy(array).to(device) for array in arrays)
                return run(*tensors).cpu().numpy()  # the copy waits for the GPU

        return call

    return EngineSystem(name, prepare, COMPILE_S if compiled else 0.0)


def open_onnxruntime(name: str, graph: Path, plan: Plan, *, provider: str) -> EngineSystem:
    """Return the bucketed graph in ONNX Runtime, padded to the longest row of a batch.

    Raises:
        RuntimeError: The provider refuses the graph.
    """
    session = open_session(graph, provider)

    def prepare(rows: Sequence[TokenRow]) -> Call:
        feed = core_feed(rows, plan.core_inputs, pad_token_id=plan.info.pad_token_id)
        return lambda: session.run(None, feed)

    return EngineSystem(name, prepare)
