"""The running half of the fake TensorRT: plans, engines, contexts over the fake CUDA, inspector."""

import importlib
import json
import zlib
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import onnx as onnx_pb

from tests.support.fake_tensorrt.records import Fake

TAG = b"FAKE-TENSORRT-PLAN\n"
NUMPY = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "INT8": np.int8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
}
MYELIN = {"FLOAT": "Float", "HALF": "Half", "BF16": "BFloat16", "INT8": "Int8", "FP8": "FP8"}
"""Words for types as 10 and 11 have them for kernels of Myelin's."""
Dims = tuple[int, ...]


class Severity(Enum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


def pack_plan(header: Mapping[str, Any], onnx: bytes) -> bytes:
    """A fake plan.

    Args:
        header: ``tensorrt`` (version), ``profiles`` (each input name -> minimum, optimum, maximum),
            ``inputs`` and ``outputs`` (name -> [type, dims]); more is kept as it is.
        onnx: the graph that the engine computes.
    """
    # Nodes are compressed, so that their names weigh as little beside weights as in a real plan.
    model = onnx_pb.ModelProto.FromString(onnx)
    weights = [bytes(tensor.raw_data) for tensor in model.graph.initializer]
    for tensor in model.graph.initializer:
        tensor.ClearField("raw_data")
    sizes = {"weights": list(map(len, weights))}
    lines = [json.dumps({**header, **sizes}).encode(), b"".join(weights)]
    return TAG + b"\n".join(lines) + zlib.compress(model.SerializeToString())


def unpack_plan(plan: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and graph of a fake plan.

    Raises:
        ValueError: it is none.
    """
    if not plan.startswith(TAG):
        raise ValueError("no fake plan")
    line, _, rest = plan[len(TAG) :].partition(b"\n")
    header = json.loads(line)
    sizes = header.pop("weights")
    model = onnx_pb.ModelProto.FromString(zlib.decompress(rest[sum(sizes) :]))
    for tensor, size in zip(model.graph.initializer, sizes, strict=True):
        if size:
            tensor.raw_data, rest = rest[:size], rest[size:]
    return header, model.SerializeToString()


class ILogger:
    Severity = Severity
    INTERNAL_ERROR = Severity.INTERNAL_ERROR
    ERROR = Severity.ERROR
    WARNING = Severity.WARNING
    INFO = Severity.INFO
    VERBOSE = Severity.VERBOSE

    def log(self, severity: Any, msg: str) -> None:
        raise NotImplementedError


class Runtime(Fake):
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger
        self.engine_host_code_allowed = False
        if self._trt._play.no_gpu:
            logger.log(Severity.ERROR, "CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> Any:
        own = self._trt.__version__
        try:
            header, onnx = unpack_plan(bytes(serialized_engine))
        except (ValueError, zlib.error):
            self._logger.log(Severity.ERROR, "Magic tag does not match")
            return None
        built = header["tensorrt"]
        if self._trt._play.stale or not self._loads(built, header.get("version_compatible", False)):
            self._logger.log(
                Severity.ERROR,
                f"Version tag does not match. Note: Current Version: {own}, "
                f"Serialized Engine Version: {built}",
            )
            return None
        return self._trt.ICudaEngine(header, onnx)

    def _loads(self, built: str, version_compatible: bool) -> bool:
        own = self._trt.__version__
        if built == own:
            return True
        ages = [tuple(int(part) for part in v.split(".")) for v in (built, own)]
        return version_compatible and self.engine_host_code_allowed and ages[0] <= ages[1]


class ICudaEngine(Fake):
    def __init__(self, header: Mapping[str, Any], onnx: bytes) -> None:
        self._header = header
        self._onnx = onnx
        self._tensors: dict[str, Any] = {**header["inputs"], **header["outputs"]}
        self.num_io_tensors = len(self._tensors)
        self.num_optimization_profiles = len(header["profiles"])

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        modes = self._trt.TensorIOMode
        return modes.INPUT if name in self._header["inputs"] else modes.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return self._trt.DataType[self._tensors[name][0]]

    def get_tensor_shape(self, name: str) -> Dims:
        return tuple(self._tensors[name][1])

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        return [tuple(dims) for dims in self._header["profiles"][profile_index][name]]

    def create_execution_context(self) -> Any:
        return self._trt.IExecutionContext(self)

    def create_engine_inspector(self) -> Any:
        return self._trt.EngineInspector(self)


class IExecutionContext(Fake):
    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._profile = 0
        self._shapes: dict[str, Dims] = {}
        self._addresses: dict[str, int] = {}
        self._session: Any = None
        self._settled = False  # whether it has run in these shapes: a capture needs that

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._profile = profile_index
        self._shapes = {}
        return 0 <= profile_index < self.engine.num_optimization_profiles and stream_handle > 0

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        low, _, high = self.engine.get_tensor_profile_shape(name, self._profile)
        dims = tuple(shape)
        if len(dims) != len(low) or not all(
            bottom <= dim <= top for bottom, dim, top in zip(low, dims, high, strict=True)
        ):
            return False
        self._settled = self._settled and self._shapes.get(name) == dims
        self._shapes[name] = dims
        return True

    def get_tensor_shape(self, name: str) -> Dims:
        if name in self._shapes:
            return self._shapes[name]
        return self._output_shape(name)

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine._header["inputs"] if name not in self._shapes]

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = int(memory)
        return name in self.engine._tensors

    def execute_async_v3(self, stream_handle: int) -> bool:
        if self.infer_shapes() or set(self._addresses) != set(self.engine._tensors):
            return False
        cuda = importlib.import_module("cuda.bindings.runtime")._fake
        if cuda.is_capturing(stream_handle) and not self._settled:
            return False
        self._settled = True
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        event = ("run", [self._profile, {name: list(dims) for name, dims in shapes.items()}])
        put: bool = cuda.put(
            stream_handle, lambda: self._compute(cuda, shapes, addresses), event=event
        )
        return put

    def _compute(self, cuda: Any, shapes: Mapping[str, Dims], addresses: Mapping[str, int]) -> None:
        feed = {}
        for name, dims in shapes.items():
            dtype = np.dtype(NUMPY[self.engine._tensors[name][0]])
            size = int(np.prod(dims, dtype=np.int64)) * dtype.itemsize
            feed[name] = cuda.memory(addresses[name], size).view(dtype).reshape(dims).copy()
        names = list(self.engine._header["outputs"])
        outputs = dict(zip(names, self._open().run(names, feed), strict=True))
        if self._trt._play.miscompute is not None:
            outputs = self._trt._play.miscompute(outputs)
        for name, value in outputs.items():
            raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            cuda.memory(addresses[name], raw.size)[:] = raw

    def _output_shape(self, name: str) -> Dims:
        """From the names that the graph gives its dimensions; -1 for one no input shares."""
        session = self._open()
        sizes: dict[Any, int] = {}
        for node in session.get_inputs():
            sizes |= dict(zip(node.shape, self._shapes.get(node.name, ()), strict=False))
        (output,) = (node for node in session.get_outputs() if node.name == name)
        return tuple(dim if isinstance(dim, int) else sizes.get(dim, -1) for dim in output.shape)

    def _open(self) -> Any:
        if self._session is None:
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3  # an odd graph of a test's would be told at length
            self._session = onnxruntime.InferenceSession(
                self.engine._onnx, options, providers=["CPUExecutionProvider"]
            )
        return self._session


class EngineInspector(Fake):
    """What each release tells of layers, in its own form."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def get_engine_information(self, format: Any) -> str:
        assert format.name == "JSON"
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


CLASSES: tuple[type, ...] = (ILogger, Runtime, ICudaEngine, IExecutionContext, EngineInspector)
