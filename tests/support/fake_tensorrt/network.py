"""The fake TensorRT's network: tensors and layers, one for each node of the parsed graph."""

from __future__ import annotations

from typing import Any


class ITensor:
    _trt: Any

    def __init__(self, name: str, dtype: Any, shape: tuple[int, ...]) -> None:
        self.name = name
        self._dtype = dtype
        self.shape = shape
        self.is_shape_tensor = False

    @property
    def dtype(self) -> Any:
        return self._dtype


class ILayer:
    _trt: Any

    def __init__(self, name: str, kind: Any, metadata: str, outputs: list[Any]) -> None:
        self.name = name
        self.type = kind
        self.metadata = metadata
        self.num_outputs = len(outputs)
        self._outputs = outputs

    def get_output(self, index: int) -> Any:
        return self._outputs[index]


class INetworkDefinition:
    _trt: Any

    def __init__(self, flags: int) -> None:
        self._flags = flags
        self._layers: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._onnx = b""
        self._products: list[dict[str, Any]] = []

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def get_layer(self, index: int) -> Any:
        return self._layers[index]

    def _has(self, flag: str) -> bool:
        flags = self._trt.NetworkDefinitionCreationFlag
        return hasattr(flags, flag) and bool(self._flags & 1 << int(getattr(flags, flag)))

    @property
    def _typed(self) -> bool:
        return self._trt.__version__.startswith("11.") or self._has("STRONGLY_TYPED")


CLASSES: dict[str, type] = {
    "ITensor": ITensor,
    "ILayer": ILayer,
    "INetworkDefinition": INetworkDefinition,
}
