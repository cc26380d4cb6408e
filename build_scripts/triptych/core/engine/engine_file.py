"""A serialized engine, opened: which tensors and profiles it has, or why it cannot be opened."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from triptych.core.engine.cuda import EngineError
from triptych.core.engine.messages import Messages
from triptych.spec.engine_spec import Dims, ShapeRange

# TensorRT's name of a data type -> numpy's. BF16 has none; FP8 and INT4 are no types of inputs.
NUMPY_TYPES: Mapping[str, Any] = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "INT8": np.int8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
}
# The head of a plan, as trtexec --getPlanVersionOnly reads it (samples/common/sampleEngines.cpp in
# NVIDIA/TensorRT): a tag, the version of the layout, and at byte 24 one byte a part of the release.
_PLAN_TAG = 0x74727466
_VERSION_AT = 24


@dataclass(frozen=True)
class EngineTensor:
    """An input or output of an engine.

    Attributes:
        data_type: TensorRT's name of its type, such as ``FLOAT``.
        dims: with the batch dimension; -1 where it varies.
    """

    name: str
    data_type: str
    dims: Dims

    @property
    def dtype(self) -> np.dtype[Any]:
        """Numpy's type of its elements; an EngineError where it has none."""
        if self.data_type not in NUMPY_TYPES:
            raise EngineError(
                f"tensor '{self.name}' of the engine is {self.data_type}, which numpy cannot hold; "
                "inputs and outputs must be " + ", ".join(NUMPY_TYPES)
            )
        return np.dtype(NUMPY_TYPES[self.data_type])


@dataclass(frozen=True)
class OpenEngine:
    """An engine that TensorRT has loaded.

    Attributes:
        runtime: TensorRT's, which must outlive the engine.
        inputs: in the engine's order, as are the outputs.
        profiles: its optimization profiles in order, each by input name.
        complaints: errors that TensorRT has logged, oldest first: it tells why nowhere else.
    """

    trt: Any
    runtime: Any
    engine: Any
    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    profiles: tuple[Mapping[str, ShapeRange], ...]
    complaints: list[str]

    def failure(self, sentence: str) -> EngineError:
        """An error of this sentence and of TensorRT's last complaint, which is then settled."""
        error = EngineError(_with_reason(sentence, self.complaints))
        self.complaints.clear()
        return error


def plan_version(plan: bytes) -> str:
    """The TensorRT release a plan says it was built with; empty where its head is not known."""
    if len(plan) < _VERSION_AT + 4 or struct.unpack_from("<II", plan) != (_PLAN_TAG, 0):
        return ""
    return ".".join(str(part) for part in plan[_VERSION_AT : _VERSION_AT + 4])


def open_engine(plan: bytes, *, host_code: bool = False) -> OpenEngine:
    """Load a plan on the current device.

    Args:
        plan: the bytes of ``model.plan``.
        host_code: allow the program code that a version-compatible plan carries.

    Raises:
        EngineError: TensorRT is not installed, or refuses the plan; the message names both
            releases where they are known.
    """
    try:
        trt = importlib.import_module("tensorrt")
    except ImportError as error:
        raise EngineError(f"TensorRT is missing ({error}); install the package tensorrt") from error
    messages = Messages()
    complaints = messages.errors
    try:
        runtime = trt.Runtime(messages.logger(trt))
    except TypeError as error:  # how the bindings say that there is none
        raise EngineError(_with_reason("TensorRT cannot use this GPU", complaints)) from error
    if host_code:
        runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        built, version = plan_version(plan), trt.__version__
        if built and built.split(".")[:3] != version.split(".")[:3]:
            raise EngineError(
                f"the plan cannot be loaded: it was built for TensorRT {built}, this is {version}; "
                "build it again here"
            )
        sentence = f"the plan cannot be loaded by TensorRT {version}"
        raise EngineError(_with_reason(sentence, complaints))
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    tensors = {
        name: EngineTensor(
            name, engine.get_tensor_dtype(name).name, tuple(engine.get_tensor_shape(name))
        )
        for name in names
    }
    inputs = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
    return OpenEngine(
        trt=trt,
        runtime=runtime,
        engine=engine,
        inputs=tuple(tensors[name] for name in inputs),
        outputs=tuple(tensors[name] for name in names if name not in inputs),
        profiles=tuple(
            {
                name: ShapeRange(*(tuple(s) for s in engine.get_tensor_profile_shape(name, index)))
                for name in inputs
            }
            for index in range(engine.num_optimization_profiles)
        ),
        complaints=complaints,
    )


def _with_reason(sentence: str, complaints: list[str]) -> str:
    return f"{sentence}: {complaints[-1]}" if complaints else sentence
