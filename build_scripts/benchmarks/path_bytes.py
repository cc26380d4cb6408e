"""Bytes that pass each step of an ensemble: its tensors, counted in real answers.

The steps are asked one after the other as the ensemble wires them. Every tensor into a Python step
is copied once, into memory it shares with the server, and every tensor out of it is, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from triptych.serving.bench.perf_analyzer import Request

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Passed:
    """What one step was given and what it gave, in bytes a text, by tensor."""

    step: str
    inputs: dict[str, float]
    outputs: dict[str, float]


def count(url: str, model: str, requests: Sequence[Request], texts_a_request: int) -> list[Passed]:
    """Bytes by step over all `requests` once, so many texts together.

    Args:
        url: ``host:port`` of a server that does nothing else.
        model: an ensemble.
        requests: each one row.
        texts_a_request: the last request has fewer where they do not come out even.
    """
    with grpc.InferenceServerClient(url) as client:
        steps = client.get_model_config(model).config.ensemble_scheduling.step
    sums = [Passed(step.model_name, {}, {}) for step in steps]
    with _channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for start in range(0, len(requests), texts_a_request):
            known = _tensors(requests[start : start + texts_a_request])
            for step, passed in zip(steps, sums, strict=True):
                request = service_pb2.ModelInferRequest(model_name=step.model_name)
                for name, source in step.input_map.items():
                    tensor, data = known[source]
                    request.inputs.add(
                        name=name, datatype=tensor.datatype, shape=list(tensor.shape)
                    )
                    request.raw_input_contents.append(data)
                    _add(passed.inputs, name, data)
                answer = stub.ModelInfer(request, timeout=_TIMEOUT_S)
                for tensor, data in zip(answer.outputs, answer.raw_output_contents, strict=True):
                    _add(passed.outputs, tensor.name, data)
                    if tensor.name in step.output_map:
                        known[step.output_map[tensor.name]] = tensor, data
    for passed in sums:
        for tensors in (passed.inputs, passed.outputs):
            for name in tensors:
                tensors[name] /= len(requests)
    return sums


def table(counted: Mapping[str, Sequence[Passed]]) -> str:
    """A line for each step of each contender."""
    lines = ["", "| contender | step | bytes in, a text | bytes out, a text | of it |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for name, steps in counted.items():
        for step in steps:
            parts = [f"{tensor} {size:.0f}" for tensor, size in step.outputs.items()]
            sizes = " | ".join(f"{sum(one.values()):.0f}" for one in (step.inputs, step.outputs))
            lines.append(f"| {name} | {step.step} | {sizes} | {', '.join(parts)} |")
    return "\n".join(lines)


def _channel(url: str) -> Any:
    import grpc as transport  # type: ignore[import-untyped]

    options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)]
    return transport.insecure_channel(url, options=[*options, ("grpc.max_send_message_length", -1)])


def _tensors(requests: Sequence[Request]) -> dict[str, tuple[Any, bytes]]:
    """The ensemble's inputs of these rows, as BYTES ``[n, 1]``."""
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


def _add(sums: dict[str, float], name: str, data: bytes) -> None:
    sums[name] = sums.get(name, 0.0) + len(data)
