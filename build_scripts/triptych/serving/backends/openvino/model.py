"""The emulated OpenVINO backend of Triton: serves models with ``backend: "openvino"``.

Triton runs this file in a process for each model instance. The native backend compiles a model once
and gives each instance a stream of it; here each process compiles it with one stream and its share
of the threads. What the native backend does not do for a batch is not done here: with
`max_batch_size` a batch must be full.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from triptych.core.openvino import compile_model
from triptych.runtime.overflow import survive_overflow
from triptych.runtime.triton_io import make_private
from triptych.serving.backends import contract as contracts
from triptych.serving.backends import execution, feeds
from triptych.spec.openvino_parameters import properties_of

MODEL_FILE = "model.xml"
TRITON_TYPES = {
    "boolean": "TYPE_BOOL",
    "u8": "TYPE_UINT8",
    "u16": "TYPE_UINT16",
    "u32": "TYPE_UINT32",
    "u64": "TYPE_UINT64",
    "i8": "TYPE_INT8",
    "i16": "TYPE_INT16",
    "i32": "TYPE_INT32",
    "i64": "TYPE_INT64",
    "f16": "TYPE_FP16",
    "f32": "TYPE_FP32",
}


class TritonPythonModel:
    """Instance of a model with ``backend: "openvino"``."""

    def initialize(self, args: dict[str, str]) -> None:
        """Compile the model, and reject a config that does not match it."""
        make_private()
        survive_overflow(args["model_config"])
        config = json.loads(args["model_config"])
        contract = contracts.parse_contract(config, backend="openvino")
        _check_settings(contract, kind=args["model_instance_kind"])
        given = config.get("parameters", {})
        try:
            properties = properties_of({key: given[key]["string_value"] for key in given})
        except ValueError as error:
            raise contracts.ContractError(str(error)) from None
        folder = Path(args["model_repository"], args["model_version"])
        path = contracts.model_file(folder, config, MODEL_FILE)
        model, compiled = compile_model(path, _shared(properties))
        contracts.check_model(contract, _tensors(model.inputs), _tensors(model.outputs))
        self._contract = contract
        self._request = compiled.create_infer_request()
        self._names = [spec.name for spec in contract.outputs]
        precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        pb_utils.Logger.log_info(
            f"{args['model_instance_name']}: emulated OpenVINO backend, computes in {precision}"
        )

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Run all requests as one batch, and return their responses together."""
        size = self._contract.max_batch_size
        first = requests[0].inputs()[0].shape()[0] if size else 0
        if first != size:  # the native backend compares after the first request of a batch
            text = (
                f"expected requests with batch size '{size}', got '{first}'... this error can be "
                "avoided by setting 'ENABLE_BATCH_PADDING' parameter in model configuration to "
                "'YES' at a performance cost."
            )
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(text)) for _ in requests]
        return execution.run_batch(self._contract, requests, self._run, message=_message)

    def _run(self, feed: feeds.Arrays) -> feeds.Arrays:
        results = self._request.infer(dict(feed))
        return {name: results[name] for name in self._names}


def _check_settings(contract: contracts.Contract, *, kind: str) -> None:
    """Reject what the native backend refuses, or runs only by luck."""
    start = f"unable to load model '{contract.model}', "
    if kind != "CPU":
        raise contracts.ContractError(
            start + "Triton OpenVINO backend supports only Kind CPU and AUTO"
        )
    types = {tensor.name: tensor.data_type for tensor in contract.inputs}
    types |= {tensor.name: tensor.data_type for tensor in contract.outputs}
    for name, data_type in types.items():
        if data_type not in TRITON_TYPES.values():
            raise contracts.ContractError(
                f"unsupported datatype {data_type} for '{name}' for model '{contract.model}'"
            )
    ragged = [spec.name for spec in contract.inputs if spec.ragged]
    made = [name for each in contract.batch_inputs for name in each.targets]
    if ragged or made:
        raise contracts.ContractError(
            start + f"the backend does not join rows: {', '.join([*ragged, *made])}"
        )


def _shared(properties: dict[str, str]) -> dict[str, str]:
    """Return the properties of one instance: one stream, with its share of the threads."""
    streams = properties.get("NUM_STREAMS", "1")
    count = max(1, int(streams)) if streams.isdigit() else 1
    shared = {**properties, "NUM_STREAMS": "1"}
    if count > 1 and "INFERENCE_NUM_THREADS" not in properties:
        shared["INFERENCE_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // count))
    elif int(properties.get("INFERENCE_NUM_THREADS", 0)) > 0:
        threads = int(properties["INFERENCE_NUM_THREADS"])
        shared["INFERENCE_NUM_THREADS"] = str(max(1, threads // count))
    return shared


def _tensors(nodes: Sequence[Any]) -> list[contracts.ModelTensor]:
    found = []
    for node in nodes:
        name, kind = node.get_any_name(), node.get_element_type().get_type_name()
        if kind not in TRITON_TYPES:
            raise contracts.ContractError(f"'{name}' has the unsupported type {kind}")
        dims = tuple(dim.get_length() if dim.is_static else -1 for dim in node.get_partial_shape())
        found.append(contracts.ModelTensor(name, TRITON_TYPES[kind], dims))
    return found


def _message(error: Exception) -> str:
    return f"running inference - wait: {error}" if isinstance(error, RuntimeError) else str(error)
