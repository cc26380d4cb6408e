"""Bytes that pass each step of an ensemble, counted in real responses.

The steps are requested one after the other, as the ensemble connects them. Every tensor into or out
of a Python step is copied once, since the step shares other memory with the server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient import grpc
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from benchmarks.harness import tabulate
from benchmarks.results import Table
from triptych.serving.bench.perf_analyzer import Request


@dataclass(frozen=True)
class StepBytes:
    """Bytes of a step for all requests by tensor, and the number of texts."""

    step: str
    texts: int
    inputs: Counter[str] = field(default_factory=Counter)
    outputs: Counter[str] = field(default_factory=Counter)


def count_bytes(
    url: str, model: str, requests: Sequence[Request], texts_per_request: int
) -> list[StepBytes]:
    """Send all `requests` once and return the bytes of each step.

    Args:
        url: ``host:port`` of a server without other load.
        model: Ensemble.
        requests: Requests of one row each, which are joined to larger ones.
    """
    with grpc.InferenceServerClient(url) as client:
        steps = client.get_model_config(model).config.ensemble_scheduling.step
        sums = [StepBytes(step.model_name, len(requests)) for step in steps]
        for start in range(0, len(requests), texts_per_request):
            known = _make_arrays(requests[start : start + texts_per_request])
            for step, total in zip(steps, sums, strict=True):
                inputs = []
                for name, source in step.input_map.items():
                    if source not in known:  # an optional input of the pipeline
                        continue
                    array = known[source]
                    kind = np_to_triton_dtype(array.dtype)
                    inputs.append(grpc.InferInput(name, array.shape, kind))
                    inputs[-1].set_data_from_numpy(array)
                    total.inputs[name] += _count(array)
                # Without a list, a step also returns outputs that the ensemble does not use.
                outputs = [grpc.InferRequestedOutput(name) for name in step.output_map]
                response = client.infer(step.model_name, inputs, outputs=outputs)
                for output in response.get_response().outputs:
                    array = response.as_numpy(output.name)
                    total.outputs[output.name] += _count(array)
                    known[step.output_map[output.name]] = array
    return sums


def make_table(counted: Mapping[str, Sequence[StepBytes]]) -> Table:
    """Return a table with a row for each step of each system."""
    return tabulate(
        "Bytes through each step",
        [(name, step) for name, steps in counted.items() for step in steps],
        {
            "system": lambda one: one[0],
            "step": lambda one: one[1].step,
            "bytes in, per text": lambda one: f"{one[1].inputs.total() / one[1].texts:.0f}",
            "bytes out, per text": lambda one: f"{one[1].outputs.total() / one[1].texts:.0f}",
            "outputs": lambda one: ", ".join(
                f"{name} {size / one[1].texts:.0f}" for name, size in one[1].outputs.items()
            ),
        },
    )


def _make_arrays(requests: Sequence[Request]) -> dict[str, NDArray[Any]]:
    """Return the ensemble's inputs for these rows, as BYTES ``[rows, 1]``."""
    rows = [{"text": row} if isinstance(row, str) else row for row in requests]
    arrays = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        data = [value.encode() if isinstance(value, str) else value for value in values]
        arrays[name] = np.array(data, dtype=np.object_).reshape(-1, 1)
    return arrays


def _count(array: NDArray[Any]) -> int:
    is_bytes = array.dtype == np.object_
    return len(serialize_byte_tensor(array).item()) if is_bytes and array.size else array.nbytes
