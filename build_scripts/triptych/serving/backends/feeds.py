"""Build the feed of one run from the requests of a batch, and split the results of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from triptych.serving.backends.contract import BatchInputSpec, Contract, OutputSpec

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
"""Tensors by name. Tensors of a request have the batch dimension; strings are `str` objects."""


class SplitError(Exception):
    """Error of an output that is too small for the requests of its batch."""


def build_feed(contract: Contract, requests: Sequence[Arrays]) -> dict[str, Array]:
    """Return the tensors that the model runs on: all rows of the requests, and the batch inputs."""
    feed = {}
    for spec in contract.inputs:
        if spec.name not in requests[0]:  # an optional input may be missing
            continue
        values = [request[spec.name] for request in requests]
        if spec.ragged:
            feed[spec.name] = _join_ragged(contract, [value.reshape(-1) for value in values])
        else:
            feed[spec.name] = values[0] if len(values) == 1 else np.concatenate(values)
    for batch_input in contract.batch_inputs:
        described = _describe(contract, batch_input, requests)
        feed.update(dict.fromkeys(batch_input.targets, described))
    return feed


def split_outputs(
    contract: Contract, values: Arrays, requests: Sequence[Arrays]
) -> list[Arrays | SplitError]:
    """Return the outputs of each request, or the error of a request that lacks rows.

    Args:
        contract: Contract of the model.
        values: Outputs of the model for the whole batch.
        requests: Inputs of each request of the batch.

    Raises:
        SplitError: A scattered output is too small. Triton's own responder would read past its end.
    """
    batched = contract.max_batch_size > 0
    rows = [next(iter(request.values())).shape[0] if batched else 1 for request in requests]
    ends = np.cumsum(rows).tolist()
    scattered = {
        spec.name: _scatter(contract, spec, values[spec.name], requests)
        for spec in contract.outputs
        if spec.scatter_source is not None and spec.answered
    }

    def share(index: int) -> Arrays | SplitError:
        outputs = {}
        for name, dims in ((spec.name, spec.dims) for spec in contract.outputs if spec.answered):
            value = values[name]
            if name in scattered:
                outputs[name] = scattered[name][index]
            elif not batched:
                outputs[name] = value if value.ndim else value.reshape(dims)
            elif value.shape[0] < ends[index]:
                return SplitError(
                    f"failed to split the output tensor '{name}' in responses: expected batch size "
                    f"of at least {ends[index]} in model output, got {value.shape[0]}"
                )
            else:
                outputs[name] = value[ends[index] - rows[index] : ends[index]]
        return outputs

    return [share(index) for index in range(len(requests))]


def _join_ragged(contract: Contract, values: Sequence[Array]) -> Array:
    """Join flat tensors as Triton's `BackendInputCollector` does, with its fault.

    It stops copying at the first request without elements. The rest of the tensor is uninitialized
    memory there, and zeros here, so that results are the same each time.
    """
    if len(values) == 1:
        return values[0]
    joined = np.concatenate(values)
    sizes = [value.size for value in values]
    # The ONNX Runtime backend takes a single buffer as it is, without the collector's copy.
    copies = contract.backend != "onnxruntime" or np.count_nonzero(sizes) > 1
    if 0 in sizes and copies and joined.dtype != np.object_:  # strings are copied one by one
        joined[sum(sizes[: sizes.index(0)]) :] = 0
    return joined


def _describe(contract: Contract, spec: BatchInputSpec, requests: Sequence[Arrays]) -> Array:
    dtype: Any = np.float32 if spec.data_type == "TYPE_FP32" else np.int32
    sources = [request[spec.source] for request in requests]
    if spec.kind in ("BATCH_ITEM_SHAPE", "BATCH_ITEM_SHAPE_FLATTEN"):
        rows = [source.shape[0] for source in sources]
        shapes = np.repeat(np.array([s.shape[1:] for s in sources], dtype), rows, axis=0)
        return shapes if spec.kind == "BATCH_ITEM_SHAPE" else shapes.reshape(-1)
    counts = np.array([source.size for source in sources])
    if spec.kind == "BATCH_ELEMENT_COUNT":
        return counts.astype(dtype)
    if spec.kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
        # Only the shape has a meaning. The contents are zeros in the TensorRT backend. In the ONNX
        # Runtime backend they are uninitialized, so a model must not read them: make that visible.
        poison = np.nan if dtype == np.float32 else np.iinfo(np.int32).min
        content = poison if contract.backend == "onnxruntime" else 0
        return np.full(counts.max(), content, dtype)
    totals: Array = np.cumsum(counts)
    if spec.kind == "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
        totals = np.insert(totals, 0, 0)
    return totals.astype(dtype)


def _scatter(
    contract: Contract, spec: OutputSpec, value: Array, requests: Sequence[Arrays]
) -> list[Array]:
    batch = (-1,) if contract.max_batch_size > 0 else ()
    dims = (*batch, *spec.dims)
    flat = value.reshape(-1)
    shares = []
    start = 0
    for request in requests:
        source = request[spec.scatter_source or ""].shape
        shape = [source[axis] if dim == -1 else dim for axis, dim in enumerate(dims)]
        stop = start + int(np.prod(shape))
        if stop > flat.size:
            raise SplitError(
                f"failed to split the output tensor '{spec.name}' in responses: expected at least "
                f"{stop} elements in model output, got {flat.size}"
            )
        shares.append(flat[start:stop].reshape(shape))
        start = stop
    return shares
