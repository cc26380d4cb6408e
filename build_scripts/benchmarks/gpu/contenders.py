"""What is timed on the same GPU: each makes a batch of token rows into vectors on the host.

All start from token ids in host memory and end with vectors there, so copies to the GPU and back
count for all alike, and every call is over when its result is there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.feeds import feeds_of, padded
from triptych.base.tensors import TokenRow
from triptych.core.engine.runner import EngineRunner
from triptych.core.export.to_onnx import load_model
from triptych.core.feeds import core_feed
from triptych.core.inputs import PipelineInputs
from triptych.spec.plan import Plan

Call = Callable[[], object]
TorchType = Literal["fp32", "fp16"]
COMPILE_S = 90.0
"""What torch.compile may take until it has compiled for all shapes."""


@dataclass(frozen=True)
class Contender:
    """Something that is timed.

    Attributes:
        name: in tables.
        prepare: makes a batch ready, untimed; the call it returns is what is timed.
        warm_s: what its first calls may take, where they take long.
    """

    name: str
    prepare: Callable[[Sequence[TokenRow]], Call]
    warm_s: float = 0.0


def engine(name: str, runner: EngineRunner, plan: Plan) -> Contender:
    """A built engine; as many runs a batch as its layout needs."""

    def prepare(rows: Sequence[TokenRow]) -> Call:
        feeds = [feed for _, feed in feeds_of(rows, plan)]
        return lambda: [runner.run(feed) for feed in feeds]

    return Contender(name, prepare)


def torch_model(
    name: str, inputs: PipelineInputs, *, device: str, precision: TorchType, compiled: bool
) -> Contender:
    """The model in PyTorch on padded batches, with the pooling of the pipeline.

    Args:
        name: in tables.
        inputs: the pipeline.
        device: of PyTorch.
        precision: of weights and activations.
        compiled: by `torch.compile`, for all shapes.

    Raises:
        UserError: transformers cannot load the model.
    """
    torch: Any = importlib.import_module("torch")
    heads: Any = importlib.import_module("triptych.core.export.heads")
    facts, folder = inputs.plan.facts, inputs.model_folder
    kind = torch.float32 if precision == "fp32" else torch.float16
    encoder = load_model(folder, inputs.plan.core.auto_class).to(device, kind)
    head = heads.SentenceHead(facts, folder).eval().to(device, kind)

    def forward(ids: Any, mask: Any) -> Any:
        hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        position = torch.arange(ids.shape[1], device=ids.device)[None]
        length = mask.sum(dim=1, keepdim=True)
        return head(hidden, heads.Rows(ids, position, mask.bool(), length)).float()

    run = torch.compile(forward, dynamic=True) if compiled else forward

    def prepare(rows: Sequence[TokenRow]) -> Call:
        ids, mask = padded(rows, facts.pad_token_id)

        def call() -> object:
            with torch.inference_mode():
                inputs = (torch.from_numpy(array).to(device) for array in (ids, mask))
                return run(*inputs).cpu().numpy()  # the copy waits until the GPU is done

        return call

    return Contender(name, prepare, COMPILE_S if compiled else 0.0)


def onnxruntime(name: str, graph: Path, plan: Plan, *, provider: str) -> Contender:
    """The pipeline's own bucketed graph in ONNX Runtime, padded to the longest row of a batch.

    Args:
        name: in tables.
        graph: ``model.onnx`` of the bucketed layout.
        plan: of its pipeline.
        provider: that must take the graph.

    Raises:
        RuntimeError: the provider refuses it.
    """
    library: Any = importlib.import_module("onnxruntime")
    options = library.SessionOptions()
    options.log_severity_level = 3
    providers = list(dict.fromkeys([provider, "CPUExecutionProvider"]))
    session = library.InferenceSession(str(graph), options, providers=providers)
    if session.get_providers()[0] != provider:
        raise RuntimeError(f"{provider} refused the session")

    def prepare(rows: Sequence[TokenRow]) -> Call:
        feed = core_feed(rows, plan.core_inputs, pad_token_id=plan.facts.pad_token_id)
        return lambda: session.run(None, feed)

    return Contender(name, prepare)
