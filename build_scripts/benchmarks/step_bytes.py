"""Bytes that pass each step of an ensemble, counted in real responses.

The steps are requested one after the other, as the ensemble connects them. Every tensor into a
Python step is copied once into memory that the step shares with the server, and every tensor out
of it is copied once, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from benchmarks.results import Table
from triptych.serving.bench.perf_analyzer import Request

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class StepBytes:
    """Input and output bytes of a step for each text, by tensor."""

    step: str
    inputs: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, float] = field(default_factory=dict)


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
    sums = [StepBytes(step.model_name) for step in steps]
    with _open_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for start in range(0, len(requests), texts_per_request):
            known = _make_tensors(requests[start : start + texts_per_request])
            for step, total in zip(steps, sums, strict=True):
                request = service_pb2.ModelInferRequest(model_name=step.model_name)
                for name, source in step.input_map.items():
                    tensor, data = known[source]
                    shape = list(tensor.shape)
                    request.inputs.add(name=name, datatype=tensor.datatype, shape=shape)
                    request.raw_input_contents.append(data)
                    total.inputs[name] = total.inputs.get(name, 0.0) + len(data)
                response = stub.ModelInfer(request, timeout=_TIMEOUT_S)
                pairs = zip(response.outputs, response.raw_output_contents, strict=True)
                for tensor, data in pairs:
                    total.outputs[tensor.name] = total.outputs.get(tensor.name, 0.0) + len(data)
                    if tensor.name in step.output_map:
                        known[step.output_map[tensor.name]] = tensor, data
    for total in sums:
        for tensors in (total.inputs, total.outputs):
            tensors.update({name: size / len(requests) for name, size in tensors.items()})
    return sums


def make_table(counted: Mapping[str, Sequence[StepBytes]]) -> Table:
    """Return a table with a row for each step of each system."""
    rows = []
    for name, steps in counted.items():
        for step in steps:
            parts = ", ".join(f"{tensor} {size:.0f}" for tensor, size in step.outputs.items())
            sizes = [f"{sum(each.values()):.0f}" for each in (step.inputs, step.outputs)]
            rows.append((name, step.step, *sizes, parts))
    head = ("system", "step", "bytes in, per text", "bytes out, per text", "outputs")
    return Table("Bytes through each step", head, rows)


def _open_channel(url: str) -> Any:
    import grpc as transport  # type: ignore[import-untyped]

    options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)]
    return transport.insecure_channel(url, options=[*options, ("grpc.max_send_message_length", -1)])


def _make_tensors(requests: Sequence[Request]) -> dict[str, tuple[Any, bytes]]:
    """Return the ensemble's inputs for these rows, as BYTES ``[rows, 1]``."""
    rows = [{"text": row} if isinstance(row, str) else row for row in requests]
    tensors = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        data = [value.encode() if isinstance(value, str) else value for value in values]
        column = np.array(data, dtype=np.object_).reshape(-1, 1)
        tensor = service_pb2.ModelInferRequest.InferInputTensor(
            name=name, datatype="BYTES", shape=column.shape
        )
        tensors[name] = tensor, serialize_byte_tensor(column).item()
    return tensors
