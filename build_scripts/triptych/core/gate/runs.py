"""Run a core artifact in this process: in batches, alone, and in another order.

The module also decodes core outputs with the runtime's decoder, and writes the warm-up rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from triptych.base.arrays import Array
from triptych.base.cache import cached_stage, code_hash, versions_of
from triptych.base.errors import Progress, UserError
from triptych.base.onnx_graph import open_session
from triptych.base.tensors import ROW_OFFSET, Tensor, TokenRow
from triptych.core.export.own_graph import run_session
from triptych.core.gate.own_reference import Reference, answer_all
from triptych.core.inputs import PipelineInputs
from triptych.core.openvino import compile_model
from triptych.core.requests import (
    Feed,
    GateRequest,
    Sample,
    by_request,
    core_feed,
    cut_record,
    hash_rows,
    is_record,
    record_sizes,
    row_starts,
    rows_of,
)
from triptych.repository.config import warm_up_file
from triptych.runtime.row_metadata import unpack_metadata
from triptych.runtime.row_types import Arrays, find_class
from triptych.spec.plan import Plan
from triptych.tasks.results import Expected, RowOutputs
from triptych.tasks.task import Core, Parameters, Task

RunBatch = Callable[[Sequence[Sample]], list[RowOutputs]]
"""Function that runs one batch of rows on the artifact."""

RunFeed = Callable[[Feed], Mapping[str, Array]]
"""Function that runs one feed of the graph and returns the outputs by name."""


def open_onnx(path: Path, core: Core, inputs: tuple[Tensor, ...], *, pad_token_id: int) -> RunBatch:
    """Return a function that runs a batch of rows through a ``model.onnx`` on the CPU.

    The other arguments are those of `by_rows`.
    """
    run = run_session(open_session(path))
    return by_rows(run, core, inputs, pad_token_id=pad_token_id)


def by_rows(
    run_feed: RunFeed, core: Core, inputs: tuple[Tensor, ...], *, pad_token_id: int
) -> RunBatch:
    """Return a function that runs a batch of rows through `run_feed`.

    Args:
        run_feed: Returns the outputs for a feed, by name.
        core: Core whose outputs `run_feed` returns.
        inputs: Inputs of a feed, as `core_feed` takes them.
    """
    names = [tensor.name for tensor in core.outputs]

    def run(samples: Sequence[Sample]) -> list[RowOutputs]:
        outputs = run_feed(core_feed(samples, inputs, pad_token_id=pad_token_id))
        results = [outputs[name] for name in names]
        rows = [sample for sample in samples if isinstance(sample, TokenRow)]
        if not rows:
            every = [dict(zip(names, values, strict=True)) for values in zip(*results, strict=True)]
            return [_cut_axes(r, s, core, inputs) for r, s in zip(every, samples, strict=True)]
        starts, packed = row_starts(rows, inputs), ROW_OFFSET in inputs
        return [
            {
                tensor.name: _cut(values, index, starts[index], row, packed=packed)
                if tensor in core.token_outputs
                else values[index]
                for tensor, values in zip(core.outputs, results, strict=True)
            }
            for index, row in enumerate(rows)
        ]

    return run


def _cut_axes(
    row: RowOutputs, sample: Sample, core: Core, inputs: tuple[Tensor, ...]
) -> RowOutputs:
    """Return the outputs of a row of the user's own model without the padding of its free axis."""
    sizes = record_sizes(np.asarray(sample), inputs) if is_record(sample) else {}
    if not sizes:
        return row
    return {
        t.name: row[t.name][tuple(slice(sizes.get(str(dim))) for dim in t.dims)]
        for t in core.outputs
    }


def open_core(path: Path, plan: Plan, served_in: str = "") -> RunBatch:
    """Return a function that runs a batch of rows through the core of a plan on the CPU.

    Args:
        path: Path of the ``model.onnx``.
        served_in: Precision in which the core's backend computes the graph, to run it with the
            backend's own library if the gate does that (`CoreBackend.runs_gate`). Empty, or for
            another backend: ONNX Runtime runs the graph as it is.
    """
    own = served_in and plan.backend.runs_gate
    run = _run_openvino(path, plan.core, served_in) if own else run_session(open_session(path))
    return by_rows(run, plan.core, plan.core_inputs, pad_token_id=plan.info.pad_token_id)


def _run_openvino(path: Path, core: Core, precision: str) -> RunFeed:
    hint = {"fp32": "f32", "bf16": "bf16"}.get(precision)
    properties = {} if hint is None else {"INFERENCE_PRECISION_HINT": hint}
    request = compile_model(path, properties)[1].create_infer_request()
    names = [tensor.name for tensor in core.outputs]

    def run(feed: Feed) -> Mapping[str, Array]:
        results = request.infer(feed)
        return {name: results[name] for name in names}

    return run


def _cut(values: Array, index: int, start: int, row: TokenRow, *, packed: bool) -> Array:
    places = slice(start, start + len(row.ids)) if packed else (index, slice(len(row.ids)))
    result: Array = values[places]
    return result


BATCH_TOKENS = 4096
"""Token limit of a batch: memory of packed attention grows with tokens squared."""

IN_BATCHES = "in batches"


class Incomparable(Exception):
    """Results that cannot be compared with the reference, with the reason."""


def run_ways(
    run: RunBatch,
    samples: Sequence[Sample],
    expected: Sequence[Expected],
    core: Core,
    *,
    batch_size: int,
    alone: Sequence[int],
) -> dict[str, dict[int, RowOutputs]]:
    """Run the rows in several ways of batching; return their outputs by way and index.

    The first way is `IN_BATCHES`, with every row; the other ways are compared with it.

    Args:
        expected: Outputs of the reference for each row, which decide the shapes.
        core: Core whose outputs the artifact returns.
        batch_size: Maximum number of rows in a batch.
        alone: Indexes of the rows that also run alone.

    Raises:
        Incomparable: The artifact fails, or its outputs have wrong shapes or classes.
    """
    if not samples:
        raise Incomparable("there are no rows to compare")
    places = list(range(len(samples)))
    ways = {
        IN_BATCHES: (places, batch_size),
        "alone": (list(alone), 1),
        "reversed": (places[::-1], batch_size),
        "by length": (sorted(places, key=lambda place: tokens_of(samples[place])), batch_size),
    }
    runs = {}
    for way, (order, size) in ways.items():
        runs[way] = run_rows(run, samples, order, size)
        check_rows(runs[way], samples, expected, core, way)
    return runs


def run_rows(
    run: RunBatch, samples: Sequence[Sample], order: Sequence[int], batch_size: int
) -> dict[int, RowOutputs]:
    """Return the outputs of the rows at the indexes in `order`, batched in that order.

    Raises:
        Incomparable: The artifact fails.
    """
    rows: dict[int, RowOutputs] = {}
    for batch in _batches(samples, order, batch_size):
        rows.update(zip(batch, _run(run, [samples[place] for place in batch]), strict=True))
    return rows


def check_rows(
    rows: Mapping[int, RowOutputs],
    samples: Sequence[Sample],
    expected: Sequence[Expected],
    core: Core,
    way: str = IN_BATCHES,
) -> None:
    """Raise `Incomparable` if outputs have wrong shapes or classes."""
    for place in sorted(rows):
        fault = _fault(rows[place], samples[place], expected[place], core)
        if fault:
            raise Incomparable(f"row {place} {way}: {fault}")


def _batches(
    samples: Sequence[Sample], order: Sequence[int], batch_size: int
) -> Iterator[list[int]]:
    # Leave space for a short row beside a row that would fill a batch alone.
    room = max(BATCH_TOKENS, BATCH_TOKENS // 16 + max(map(tokens_of, samples), default=0))
    batch: list[int] = []
    tokens = 0
    for place in order:
        own = tokens_of(samples[place])
        if batch and (len(batch) == batch_size or tokens + own > room):
            yield batch
            batch, tokens = [], 0
        batch.append(place)
        tokens += own
    if batch:
        yield batch


def _run(run: RunBatch, batch: Sequence[Sample]) -> list[RowOutputs]:
    try:
        results = run(batch)
    except Exception as error:  # Any failure to run is a failed gate.
        reason = " ".join(str(error).split())[:200]
        raise Incomparable(
            f"a batch of {len(batch)} does not run: {type(error).__name__}: {reason}"
        ) from error
    if len(results) != len(batch):
        raise Incomparable(f"a batch of {len(batch)} gives {len(results)} rows")
    return results


def tokens_of(sample: Sample) -> int:
    """Return the number of tokens of a row; 0 for an image."""
    return len(sample.ids) if isinstance(sample, TokenRow) else 0


def _fault(row: RowOutputs, sample: Sample, expected: Expected, core: Core) -> str:
    for tensor in core.outputs:
        if tensor.name not in row:
            return f"{tensor.name} is missing"
        shape = tuple(tokens_of(sample) if isinstance(dim, str) else dim for dim in tensor.dims)
        if is_record(sample):
            shape = expected[core.outputs.index(tensor)].shape
        if row[tensor.name].shape != shape:
            return f"{tensor.name} has the shape {list(row[tensor.name].shape)}, not {list(shape)}"
    return core.results.fault(row, expected)


Decoded = Arrays
"""Outputs of the ensemble for one request of one row, by name, each ``[1, …]``."""


def as_floats(parameters: Parameters) -> Parameters:
    """Return the parameters with float encoding, because other encodings lose precision."""
    return {**parameters, "encoding": "float"} if "encoding" in parameters else parameters


@dataclass(frozen=True)
class Decoding:
    """Decoder of core outputs, with its settings."""

    task: Task  # Task of the decoder
    settings: Mapping[str, Any]  # Settings of the task, as the postprocess step gets them
    folder: Path  # Folder of the ``tokenizer.json``, or of the functions of a custom task
    # Answers of the user's own ``reference.py`` or of several models, in place of the decoded
    # outputs of the original model; None without them.
    reference: Reference | None = None
    decoder: Any = None  # Decoder in place of that of the task; None for the latter


def decode(
    decoding: Decoding, requests: Sequence[GateRequest], outputs: Sequence[RowOutputs]
) -> list[Decoded]:
    """Return the answer to each request, decoded from the core's outputs for its rows.

    Args:
        requests: Requests of one row each.
        outputs: Outputs of each core row; per-token outputs have one entry for each token.

    Raises:
        ValueError: The number of outputs differs from the number of core rows.
    """
    if len(outputs) != sum(len(request.rows) for request in requests):
        raise ValueError(f"{len(outputs)} outputs are not one for each core row of the requests")
    decoder = decoding.decoder
    if decoder is None:
        decoder = find_class(decoding.task.decode)(decoding.settings, decoding.folder)
    answers: list[Decoded] = []
    for request, rows in zip(requests, by_request(requests, outputs), strict=True):
        columns = {name: _stack([row[name] for row in rows]) for name in rows[0]}
        metadata = [unpack_metadata(row_metadata) for row_metadata in request.metadata]
        columns |= request.past_core
        answers.append(decoder.decode(columns, metadata, as_floats(request.parameters)))
    return answers


def decode_reference(
    decoding: Decoding, requests: Sequence[GateRequest], outputs: Sequence[RowOutputs]
) -> list[Decoded]:
    """Return the answer that each request must have, from the original model's outputs."""
    answers = decode(decoding, requests, outputs)
    if decoding.reference is None:
        return answers
    return answer_all(decoding.reference, requests, answers)


def _stack(arrays: Sequence[Array]) -> Array:
    """Return rows as one array, padded with zeros to the longest row, as on a server."""
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    width = max(len(array) for array in arrays)
    rest = [(0, 0)] * (arrays[0].ndim - 1)
    return np.stack([np.pad(array, [(0, width - len(array)), *rest]) for array in arrays])


def reference_row_outputs(
    core: Core, expected: Sequence[Expected], like: Sequence[RowOutputs] | None = None
) -> list[RowOutputs]:
    """Return the reference in the form of the artifact's outputs.

    Args:
        core: Core whose outputs the artifact returns.
        expected: Outputs of the reference for each row.
        like: Outputs of the artifact. If the reference scores classes equally up to rounding, the
            class that the artifact chose is used, so that a tie is not a difference.
    """
    results = core.results
    if like is None:
        return [results.as_outputs(each) for each in expected]
    return [results.as_outputs(*each) for each in zip(expected, like, strict=True)]


CODE = (
    "core/gate/runs.py",
    "repository/config.py",
    "core/requests.py",
    "base/onnx_graph.py",
)
TOGETHER = 2
"""Number of rows in the trial batch; more copies of the row would show nothing more."""


def write_warm_ups(
    inputs: PipelineInputs, artifact: Path, files: Mapping[str, str], progress: Progress
) -> Path:
    """Return a cached folder with one row of the traffic for each length that the plan warms up.

    Each file is one input of the core, as Triton reads an ``input_data_file``.

    Args:
        inputs: Inputs of the pipeline, planned in the layout of the artifact.
        artifact: Path of the ``model.onnx`` that must run the rows, alone and in a batch.
        files: Hashes of the file and of its weight files, by name.
        progress: Receives a line for a damaged entry of the cache.

    Raises:
        UserError: The artifact fails on a row, or returns NaN or infinity.
    """
    plan = inputs.plan
    traffic = [request for request in inputs.requests if not request.edge]
    known = [*rows_of(traffic), *inputs.calibration]
    rows = {
        warm_up.tokens: _row_of(known, warm_up.tokens, plan.core_inputs)
        for warm_up in plan.warm_ups
    }

    def work(target: Path) -> None:
        session = open_session(artifact)
        for tokens, row in rows.items():
            for count in (1, TOGETHER):
                feed = core_feed(
                    [row] * count,
                    plan.core_inputs,
                    pad_token_id=plan.info.pad_token_id,
                    width=tokens,
                )
                try:
                    outputs = session.run(None, feed)
                except Exception as error:
                    raise _refused(tokens, str(error)) from error
                if not all(np.isfinite(output).all() for output in outputs):
                    raise _refused(tokens, "a result that is not a number")
                if count == 1:
                    for tensor in plan.core_inputs:
                        file = target / warm_up_file(tensor, tokens)
                        file.write_bytes(feed[tensor.name].tobytes())

    stage = {
        "artifact": files,
        "rows": {str(tokens): hash_rows([row]) for tokens, row in rows.items()},
        "layout": plan.layout,
        "pad": plan.info.pad_token_id,
        "versions": versions_of("onnxruntime"),
        "code": code_hash(*CODE),
    }
    return cached_stage("warm_ups", stage, work, progress).folder


def _row_of(rows: list[Sample], tokens: int, inputs: tuple[Tensor, ...]) -> Sample:
    """Return the longest row that fits, else the shortest row without its middle tokens."""
    texts = [row for row in rows if isinstance(row, TokenRow)]
    if not texts:
        sizes = [max(record_sizes(np.asarray(row), inputs).values(), default=0) for row in rows]
        indexes = [index for index, size in enumerate(sizes) if size <= tokens]
        if indexes:
            return rows[max(indexes, key=sizes.__getitem__)]
        return cut_record(np.asarray(rows[0]), inputs, tokens)
    fitting = [row for row in texts if len(row.ids) <= tokens]
    if fitting:
        return max(fitting, key=lambda row: len(row.ids))
    row = min(texts, key=lambda row: len(row.ids))
    ids = (*row.ids[: tokens - 1], row.ids[-1])
    return TokenRow(ids, min(row.first_segment, tokens), row.prompt, min(row.attended, tokens))


def _refused(tokens: int, given: str) -> UserError:
    return UserError(
        "core",
        f"fails on the warm-up of {tokens} tokens, so no server would load it",
        given=" ".join(given.split())[:300],
        remedy="Choose another model or precision",
    )
