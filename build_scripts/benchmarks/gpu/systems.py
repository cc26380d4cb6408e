"""Systems that are timed in process, and the timing.

All but sentence-transformers begin with token ids in host memory. All end with vectors in host
memory, so that copies to the GPU and back count for all of them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.pipelines import GpuPipeline
from benchmarks.model import open_session
from triptych.base.tensors import TokenRow
from triptych.core.engine.runner import EngineRunner
from triptych.core.requests import Feed, core_feed
from triptych.models.loading import load_model
from triptych.repository.manifest import PLAN_FILE, CompiledManifest, read_manifest
from triptych.spec.padded_lengths import bucket_of
from triptych.spec.plan import Plan

Vectors = NDArray[np.float32]
Call = Callable[[], Vectors]
Prepare = Callable[[Sequence[int]], Call]
"""Prepares a batch of rows, given by their numbers in the traffic, untimed; returns the call."""
CALLS, SINGLE_CALLS, MIN_CALLS = 16, 64, 10
"""Numbers of different batches, with one row in a batch, and minimum number of calls."""


def open_torch(pipeline: GpuPipeline, device: str, precision: str, *, compiled: bool) -> Prepare:
    """Return the model in PyTorch on padded batches, with the pooling of the pipeline.

    Args:
        pipeline: Any pipeline of the model.
        device: Device of PyTorch.
        precision: ``fp32`` or ``fp16``.
        compiled: Whether to use `torch.compile` with dynamic shapes.
    """
    torch: Any = importlib.import_module("torch")
    from triptych.tasks import heads  # imports torch

    inputs, every = pipeline.inputs, pipeline.rows
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

    def prepare(numbers: Sequence[int]) -> Call:
        arrays = pad([every[number] for number in numbers], info.pad_token_id)

        def call() -> Vectors:
            with torch.inference_mode():
                tensors = (torch.from_numpy(array).to(device) for array in arrays)
                vectors: Vectors = run(*tensors).cpu().numpy()  # the copy waits for the GPU
            return vectors

        return call

    return prepare


def open_sentence_transformers(pipeline: GpuPipeline, device: str, precision: str) -> Prepare:
    """Return sentence-transformers from texts, with their tokenization, in the given batches."""
    from sentence_transformers import SentenceTransformer

    texts = pipeline.texts
    model = SentenceTransformer(str(pipeline.model_folder), device=device)
    model.max_seq_length = pipeline.inputs.plan.max_length
    model = model.half() if precision == "fp16" else model

    def prepare(numbers: Sequence[int]) -> Call:
        batch, size = [texts[number] for number in numbers], len(numbers)
        return lambda: np.asarray(
            model.encode(batch, batch_size=size, show_progress_bar=False), np.float32
        )

    return prepare


def open_onnxruntime(pipeline: GpuPipeline, provider: str) -> Prepare:
    """Return the graph of a pipeline in ONNX Runtime, padded to the longest row if bucketed."""
    session, every, plan = (
        open_session(pipeline.graph, provider),
        pipeline.rows,
        pipeline.inputs.plan,
    )

    def prepare(numbers: Sequence[int]) -> Call:
        rows = [every[number] for number in numbers]
        feed = core_feed(rows, plan.core_inputs, pad_token_id=plan.info.pad_token_id)
        return lambda: np.asarray(session.run(None, feed)[0], np.float32)

    return prepare


def open_engine(pipeline: GpuPipeline) -> Prepare:
    """Return the engine of a pipeline, which runs as often for a batch as its layout requires.

    Raises:
        EngineError: The GPU refuses the engine.
    """
    built = read_manifest(pipeline.repository, pipeline.name, CompiledManifest).plan.engine
    assert built is not None, f"{pipeline.name} has a core without an engine"
    plan, every = pipeline.inputs.plan, pipeline.rows
    runner = EngineRunner(
        (pipeline.core / PLAN_FILE).read_bytes(),
        graphs=built.graph_specs,
        packed=plan.packed,
        host_code=bool(built.options["version_compatible"]),
    ).__enter__()  # until this process ends
    output = plan.core.outputs[0].name

    def prepare(numbers: Sequence[int]) -> Call:
        feeds = make_feeds([every[number] for number in numbers], plan)

        def call() -> Vectors:
            parts = [(indices, runner.run(feed)[output]) for indices, feed in feeds]
            vectors = np.empty((len(numbers), parts[0][1].shape[-1]), np.float32)
            for indices, part in parts:
                vectors[indices] = part
            return vectors

        return call

    return prepare


def make_feeds(rows: Sequence[TokenRow], plan: Plan) -> list[tuple[list[int], Feed]]:
    """Return the runs that an engine makes of a batch, each with the indices of its rows.

    A packed engine takes as many rows as a batch may have. A bucketed engine takes the rows of one
    padded length at a time, as the server's queue passes them.
    """
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        length = 0 if plan.packed else bucket_of(len(row.ids), plan.bucket_edges)
        groups.setdefault(length, []).append(index)
    size, feeds = plan.max_batch_size, []
    for length, indices in sorted(groups.items()):
        for start in range(0, len(indices), size):
            chunk = indices[start : start + size]
            feed = core_feed(
                [rows[index] for index in chunk],
                plan.core_inputs,
                pad_token_id=plan.info.pad_token_id,
                width=None if plan.packed else length,
            )
            feeds.append((chunk, feed))
    return feeds


def pad(rows: Sequence[TokenRow], pad_token_id: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ids and mask, INT64 ``[rows, longest]``, as models of PyTorch take them."""
    shape = (len(rows), max(len(row.ids) for row in rows))
    ids, mask = np.full(shape, pad_token_id, np.int64), np.zeros(shape, np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = row.ids
        mask[index, : len(row.ids)] = 1
    return ids, mask


def make_batches(rows: int, size: int) -> list[list[int]]:
    """Return different batches of `size` rows, in the order of the traffic."""
    endless = cycle(range(rows))
    return [list(islice(endless, size)) for _ in range(SINGLE_CALLS if size == 1 else CALLS)]


def embed_all(prepare: Prepare, rows: int, size: int = 32) -> Vectors:
    """Return the vectors of all rows, ``[rows, dim]``."""
    numbers = range(rows)
    return np.concatenate([prepare(numbers[at : at + size])() for at in range(0, rows, size)])


def time_calls(
    calls: Sequence[Callable[[], object]],
    size: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Call all batches in turn for `seconds`, each of them equally often; return the metrics.

    Each is called twice before, so that all compilation is done.
    """
    for call in [*calls, *calls]:
        call()
    took: list[float] = []
    start = end = clock()
    for number, call in enumerate(cycle(calls)):
        is_pass = number % len(calls) == 0  # long and short batches have their true shares
        if is_pass and end - start >= seconds and number >= MIN_CALLS:
            break
        began = end
        call()
        end = clock()
        took.append(end - began)
    p50, p99 = np.percentile(took, [50, 99]) * 1e3
    rate = size * len(took) / (end - start)
    return {"rate_per_s": rate, "p50_ms": float(p50), "p99_ms": float(p99)}
