"""The fake TensorRT's engine inspector: what each release tells of layers, in its own form."""

from __future__ import annotations

import json
from typing import Any

from fake_tensorrt.records import typed

MYELIN = {"FLOAT": "Float", "HALF": "Half", "BF16": "BFloat16", "INT8": "Int8", "FP8": "FP8"}
"""Words for types as 10 and 11 have them for kernels of Myelin's."""


class EngineInspector:
    _trt: Any

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def get_engine_information(self, format: Any) -> str:
        assert typed(format, self._trt.LayerInformationFormat).name == "JSON"
        header = self._engine._header
        names = [*header["inputs"], *header["outputs"]]
        ends: dict[str, Any] = {"Bindings": names}
        if self._trt.__version__.startswith("11."):
            ends = {"I/O Tensors": [{"Name": name} for name in names]}
        return json.dumps({"Layers": self._layers(header), **ends})

    def _layers(self, header: dict[str, Any]) -> list[Any]:
        layers = header["layers"]
        if not header["detailed"]:
            return [layer["name"] for layer in layers]
        if header["fused"]:
            return [self._region(header, [layer["name"] for layer in layers])]
        return [self._kernel(layer) for layer in layers]

    def _kernel(self, layer: dict[str, str]) -> dict[str, Any]:
        tensor = self._tensor(layer["dtype"])
        return {
            "Name": f"{layer['name']}_myl0_7",
            "LayerType": "gemm",
            "Inputs": [tensor],
            "Outputs": [tensor],
            "TacticName": "",
            "StreamId": 0,
            "Metadata": f"[ONNX Layer: {layer['name']}]",
        }

    def _region(self, header: dict[str, Any], nodes: list[str]) -> dict[str, Any]:
        sides = [
            [self._tensor(dtype) for dtype, _ in header[side].values()]
            for side in ("inputs", "outputs")
        ]
        return {
            "Name": "{ForeignNode[" + f"{nodes[0]}...{nodes[-1]}" + "]}",
            "LayerType": "Myelin",
            "Inputs": sides[0],
            "Outputs": sides[1],
            "Metadata": "\x1e".join(f"[ONNX Layer: {node}]" for node in nodes),
        }

    def _tensor(self, dtype: str) -> dict[str, Any]:
        start = {"Name": "t", "Dimensions": [-1]}
        kind = MYELIN.get(dtype, dtype)
        if self._trt.__version__.startswith("11."):
            return {**start, "Format": "Row major linear (kLINEAR)", "Datatype": kind}
        return {**start, "Format/Datatype": kind}


CLASSES: dict[str, type] = {"EngineInspector": EngineInspector}
