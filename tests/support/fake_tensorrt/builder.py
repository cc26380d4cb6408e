"""The building half of the fake TensorRT: networks, the parser, configs, timing caches, plans."""

import json
import math
from typing import Any

import onnx

from tests.support.fake_tensorrt.records import Fake
from tests.support.fake_tensorrt.runtime import pack_plan
from triptych.base.onnx_graph import value_types

TIMES = b"FAKE-TIMES\n"
TYPES = {1: "FLOAT", 2: "UINT8", 3: "INT8", 6: "INT32", 7: "INT64", 9: "BOOL", 10: "HALF"}
TYPES |= {16: "BF16", 17: "FP8"}
Dims = tuple[int, ...]


class IHostMemory(Fake):
    def __init__(self, data: bytes) -> None:
        self._data = data

    def __bytes__(self) -> bytes:
        return self._data


class ITimingCache(Fake):
    def __init__(self, version: str, times: set[str]) -> None:
        self._version = version
        self._times = times

    def combine(self, input_cache: Any, ignore_mismatch: bool) -> bool:
        if input_cache._version != self._version and not ignore_mismatch:
            return False
        self._times |= input_cache._times
        return True

    def serialize(self) -> Any:
        text = json.dumps([self._version, sorted(self._times)])
        return self._trt.IHostMemory(TIMES + text.encode())


class IOptimizationProfile(Fake):
    def __init__(self) -> None:
        self._shapes: dict[str, list[Dims]] = {}

    def set_shape(self, input: str, min: Dims, opt: Dims, max: Dims) -> None:
        self._shapes[input] = [tuple(min), tuple(opt), tuple(max)]


class IBuilderConfig(Fake):
    def __init__(self) -> None:
        self._flags = {self._trt.BuilderFlag.TF32}
        self._limits: dict[str, int] = {}
        self._profiles: list[Any] = []
        self._cache: Any = None
        self.builder_optimization_level = 3
        self.progress_monitor: Any = None
        self.profiling_verbosity = self._trt.ProfilingVerbosity.LAYER_NAMES_ONLY
        self.hardware_compatibility_level = self._trt.HardwareCompatibilityLevel.NONE

    def set_flag(self, flag: Any) -> None:
        self._flags.add(flag)

    def clear_flag(self, flag: Any) -> None:
        self._flags.discard(flag)

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self._limits[pool.name] = pool_size

    def add_optimization_profile(self, profile: Any) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> Any:
        if not serialized_timing_cache:
            return self._trt.ITimingCache(self._trt.__version__, set())
        if not serialized_timing_cache.startswith(TIMES):
            return None
        version, times = json.loads(serialized_timing_cache[len(TIMES) :])
        return self._trt.ITimingCache(version, set(times))

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        if cache._version != self._trt.__version__ and not ignore_mismatch:
            return False
        self._cache = cache
        return True

    def get_timing_cache(self) -> Any:
        return self._cache

    def _has(self, name: str) -> bool:
        return name in {flag.name for flag in self._flags}


class IProgressMonitor(Fake):
    pass


class INetworkDefinition(Fake):
    """A parsed graph: its inputs and outputs (name -> type and dims) and its matrix products."""

    def __init__(self, flags: int) -> None:
        self._flags = flags
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, Any] = {}
        self._onnx = b""
        self._products: list[dict[str, Any]] = []

    def _names_of_flags(self) -> list[str]:
        every = self._trt.NetworkDefinitionCreationFlag
        return sorted(flag.name for flag in every if self._flags & 1 << int(flag))


class ParserError(Fake):
    def __init__(self, fields: dict[str, Any]) -> None:
        self.code = lambda: getattr(self._trt.ErrorCode, fields["code"])
        self.desc = lambda: fields["desc"]
        self.node = lambda: fields["node"]
        self.node_name = lambda: fields["node_name"]
        self.node_operator = lambda: fields["node_operator"]


class OnnxParser(Fake):
    def __init__(self, network: Any, logger: Any) -> None:
        self._network = network
        self._logger = logger
        self._errors: list[Any] = []

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> Any:
        return self._errors[index]

    def parse_from_file(self, model: str) -> bool:
        self._errors = list(map(self._trt.ParserError, self._trt._play.parser_errors))
        if not self._errors:
            self._fill(model)
        return not self._errors

    def _fill(self, path: str) -> None:
        loaded = onnx.load(path)
        types = value_types(loaded)
        graph, network = loaded.graph, self._network
        network._onnx = loaded.SerializeToString()
        for values, found in ((graph.input, network._inputs), (graph.output, network._outputs)):
            for value in values:
                dims = [dim.dim_value or -1 for dim in value.type.tensor_type.shape.dim]
                found[value.name] = [TYPES[types[value.name]], dims]
        makers = {name: node for node in graph.node for name in node.output}
        sizes = {weight.name: math.prod(weight.dims) for weight in graph.initializer}
        for node in graph.node:
            if node.op_type in ("MatMul", "Gemm", "Conv"):
                quantized = [_stored(value, types, makers) for value in node.input[:2]]
                network._products.append(
                    {
                        "name": node.name or node.output[0],
                        "dtype": TYPES.get(types[node.input[0]], ""),
                        "quantized": quantized[0] if quantized[0] == quantized[1] else "",
                        "elements": sizes.get(node.input[1], 0),
                    }
                )


class Builder(Fake):
    def __init__(self, logger: Any) -> None:
        self._logger = logger
        if self._trt._play.no_gpu:
            self._say("WARNING", "CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")

    def create_network(self, flags: int = 0) -> Any:
        return self._trt.INetworkDefinition(flags)

    def create_builder_config(self) -> Any:
        return self._trt.IBuilderConfig()

    def create_optimization_profile(self) -> Any:
        return self._trt.IOptimizationProfile()

    def build_serialized_network(self, network: Any, config: Any) -> Any:
        play = self._trt._play
        cache = config._cache
        play.builds.append(_asked(network, config))
        for severity, text in play.log:
            self._say(severity, text)
        if play.build_fails:
            return None
        cache._times.add(f"kernels of {len(network._onnx)} bytes")
        return self._trt.IHostMemory(pack_plan(_header(self._trt, network, config), network._onnx))

    def _say(self, severity: str, text: str) -> None:
        self._logger.log(getattr(self._trt.ILogger, severity), text)


def _asked(network: Any, config: Any) -> dict[str, Any]:
    """What a build was asked for, in plain words."""
    return {
        "network": network._names_of_flags(),
        "flags": sorted(flag.name for flag in config._flags),
        "limits": dict(config._limits),
        "level": config.builder_optimization_level,
        "hardware": config.hardware_compatibility_level.name,
        "times": len(config._cache._times),
    }


def _header(trt: Any, network: Any, config: Any) -> dict[str, Any]:
    profiles = [profile._shapes for profile in config._profiles]
    kernels = [_kernel_type(trt, product) for product in network._products]
    wide = sum(
        2 * product["elements"]
        for product, kernel in zip(network._products, kernels, strict=True)
        if kernel == "FLOAT" and product["dtype"] == "HALF"
    )
    return {
        "tensorrt": trt.__version__,
        "version_compatible": config._has("VERSION_COMPATIBLE"),
        "profiles": profiles[:-1] if trt._play.lost_profile else profiles,
        "inputs": network._inputs,
        "outputs": network._outputs,
        "detailed": config.profiling_verbosity.name == "DETAILED",
        "fused": trt._play.fused,
        "room": "." * wide,  # that fp32 weights take more than those of the graph
        "layers": [
            {"name": product["name"], "dtype": kernel}
            for product, kernel in zip(network._products, kernels, strict=True)
            if product["dtype"] in ("FLOAT", "HALF", "BF16")
        ],
    }


def _kernel_type(trt: Any, product: dict[str, Any]) -> str:
    """The type a product is computed in: that of the graph, unless a test says otherwise."""
    changed: dict[str, str] = trt._play.layer_types
    return changed.get(product["name"]) or str(product["quantized"] or product["dtype"])


def _stored(value: str, types: dict[str, int], makers: dict[str, Any]) -> str:
    """The type a value was quantized to; empty where it was not."""
    maker = makers.get(value)
    while maker is not None and maker.op_type in ("Transpose", "Reshape"):
        maker = makers.get(maker.input[0])
    if maker is None or maker.op_type != "DequantizeLinear":
        return ""
    return TYPES[types[maker.input[0]]]


CLASSES: tuple[type, ...] = (
    *(IHostMemory, ITimingCache, IOptimizationProfile, IBuilderConfig, IProgressMonitor),
    *(INetworkDefinition, ParserError, OnnxParser, Builder),
)
