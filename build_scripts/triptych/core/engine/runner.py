"""Run a TensorRT engine on arrays.

`open_engine` loads a serialized engine and lists its tensors and profiles. `choose_profile` and
`choose_graph` select the optimization profile and the CUDA graph for a batch from its shapes alone.
`EngineRunner` owns the contexts, the memory, the stream and the CUDA graphs.
"""

from __future__ import annotations

import importlib
import logging
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from triptych.base.arrays import Array
from triptych.core.engine.cuda import Bytes, Cuda, EngineError, HostBuffer
from triptych.core.engine.messages import Messages
from triptych.spec.engine_plan import Dims, GraphSpec, ShapeRange

if TYPE_CHECKING:
    from tensorrt import ICudaEngine, IExecutionContext, Runtime

# TensorRT's name of a data type -> numpy's. BF16 has none; FP8 and INT4 are no types of inputs.
NUMPY_TYPES: Mapping[str, type[np.generic]] = {
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
    """An input or output of an engine."""

    name: str
    data_type: str  # TensorRT's name of its type, such as ``FLOAT``
    dims: Dims  # Shape with the batch dimension; varying dims are -1

    @property
    def dtype(self) -> np.dtype[Any]:
        """Numpy's type of its elements; raises an EngineError if there is none."""
        if self.data_type not in NUMPY_TYPES:
            raise EngineError(
                f"tensor '{self.name}' of the engine is {self.data_type}, which numpy cannot hold; "
                "inputs and outputs must be " + ", ".join(NUMPY_TYPES)
            )
        return np.dtype(NUMPY_TYPES[self.data_type])


@dataclass(frozen=True)
class OpenEngine:
    """An engine that TensorRT has loaded."""

    trt: ModuleType
    runtime: Runtime  # TensorRT's runtime, which must outlive the engine
    engine: ICudaEngine
    inputs: tuple[EngineTensor, ...]  # Inputs in the engine's order, like `outputs`
    outputs: tuple[EngineTensor, ...]
    # Optimization profiles in order, each by input name.
    profiles: tuple[Mapping[str, ShapeRange], ...]
    # Errors that TensorRT has logged, oldest first. The log is the only place that contains the
    # reason of a failure.
    complaints: list[str]

    def failure(self, sentence: str) -> EngineError:
        """Return an error with this sentence and TensorRT's last logged error; clear the log."""
        error = EngineError(_with_reason(sentence, self.complaints))
        self.complaints.clear()
        return error


def plan_version(plan: bytes) -> str:
    """Return the TensorRT release in a plan's header; empty if the header is not known."""
    if len(plan) < _VERSION_AT + 4 or struct.unpack_from("<II", plan) != (_PLAN_TAG, 0):
        return ""
    return ".".join(str(part) for part in plan[_VERSION_AT : _VERSION_AT + 4])


def open_engine(plan: bytes, *, host_code: bool = False) -> OpenEngine:
    """Load a plan on the current device.

    Args:
        plan: Bytes of ``model.plan``.
        host_code: Whether to allow the program code that a version-compatible plan contains.

    Raises:
        EngineError: TensorRT is not installed, or rejects the plan. The message names both releases
            if they are known.
    """
    try:
        trt = importlib.import_module("tensorrt")
    except ImportError as error:
        raise EngineError(f"TensorRT is missing ({error}); install the package tensorrt") from error
    messages = Messages()
    complaints = messages.errors
    try:
        runtime = trt.Runtime(messages.logger(trt))
    except TypeError as error:  # raised by the bindings if there is no runtime
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


Shapes = Mapping[str, Dims]
Profile = Mapping[str, ShapeRange]


class ShapeError(EngineError):
    """Raised if a batch does not fit the engine: no profile has its shape, or its type differs."""


def choose_profile(profiles: Mapping[int, Profile], shapes: Shapes) -> int:
    """Return the index of the profile that allows all `shapes` and has the nearest optimum.

    The distance is the sum of differences over all axes, as in Triton's own backend.

    Raises:
        ShapeError: No profile allows the shapes. The message names the first input that fits no
            profile, or all inputs if each fits some profile.
    """
    fitting = [
        index
        for index, profile in profiles.items()
        if all(_holds(profile[name], dims) for name, dims in shapes.items())
    ]
    if not fitting:
        raise ShapeError(_misfit(profiles, shapes))
    return min(fitting, key=lambda index: _distance(profiles[index], shapes))


def choose_graph(graphs: Iterable[GraphSpec], shapes: Shapes) -> GraphSpec | None:
    """Return the smallest CUDA graph that can compute a batch of these shapes, or None.

    The first axis of the shapes are the rows.
    """
    rows = {dims[0] if dims else 0 for dims in shapes.values()}
    if len(rows) != 1:
        return None
    (count,) = rows
    matching = [
        graph
        for graph in graphs
        if graph.lowest_batch_size <= count <= graph.batch_size
        and all(tuple(graph.inputs[name]) == dims[1:] for name, dims in shapes.items())
    ]
    return min(matching, key=lambda graph: graph.batch_size, default=None)


def _holds(shape_range: ShapeRange, dims: Dims) -> bool:
    return len(dims) == len(shape_range.minimum) and all(
        low <= dim <= high
        for low, dim, high in zip(shape_range.minimum, dims, shape_range.maximum, strict=True)
    )


def _distance(profile: Profile, shapes: Shapes) -> int:
    return sum(
        abs(dim - optimum)
        for name, dims in shapes.items()
        for dim, optimum in zip(dims, profile[name].optimum, strict=True)
    )


def _misfit(profiles: Mapping[int, Profile], shapes: Shapes) -> str:
    alone = [
        name
        for name, dims in shapes.items()
        if not any(_holds(profile[name], dims) for profile in profiles.values())
    ]
    texts = []
    for name in alone[:1] or shapes:
        ranges = [profile[name] for profile in profiles.values()]
        allowed = dict.fromkeys(f"{list(r.minimum)} to {list(r.maximum)}" for r in ranges)
        shape = list(shapes[name])
        texts.append(f"input '{name}' of shape {shape} (allowed: {', '.join(allowed)})")
    return "no optimization profile of the engine holds " + " with ".join(texts)


Feed = dict[str, Array]
_log = logging.getLogger(__name__)


class _Buffer(NamedTuple):
    """Memory of one tensor for its largest shape, on the host and on the device."""

    dtype: np.dtype[Any]
    device: int
    host: HostBuffer

    def bytes(self, dims: Dims) -> Bytes:
        """Return the start of the host memory, as many bytes as a tensor of this shape has."""
        return self.host.array[: int(np.prod(dims, dtype=np.int64)) * self.dtype.itemsize]

    def view(self, dims: Dims) -> Array:
        return self.bytes(dims).view(self.dtype).reshape(dims)


class _Captured(NamedTuple):
    """A CUDA graph that can be launched, its profile, and the shapes of its outputs."""

    spec: GraphSpec
    place: int
    executable: object
    outputs: Mapping[str, Dims]


class Pinned(NamedTuple):
    """Whether the host memory of inputs and of outputs is page-locked."""

    inputs: bool = True
    outputs: bool = True


_ALL_PINNED = Pinned()


class EngineRunner:
    """An engine that is ready to run one batch at a time; `run` may be called from any thread.

    Like Triton's own backend, it has one execution context per profile and memory for the largest
    shapes of all profiles, so no run allocates memory on the device. Inputs and outputs pass
    through page-locked memory, which the device copies without the processor.

    Args:
        plan: Bytes of ``model.plan``, or the engine opened on that GPU.
        device: Number of the GPU.
        pinned: Tensors whose host memory for copies is page-locked.
        graphs: CUDA graphs to capture; a graph that cannot be captured causes a warning.
        packed: Whether rows lie end to end in one dimension. A packed engine has no batch dimension
            to pad, so it has no graphs.
        profiles: Indices of the profiles to use; None for all.
        host_code: Whether to allow the program code that a version-compatible plan contains.

    Raises:
        EngineError: The plan, a profile, a graph or the GPU does not fit; nothing stays allocated.
    """

    def __init__(
        self,
        plan: bytes | OpenEngine,
        *,
        device: int = 0,
        pinned: Pinned = _ALL_PINNED,
        graphs: Sequence[GraphSpec] = (),
        packed: bool,
        profiles: Sequence[int] | None = None,
        host_code: bool = False,
        warn: Callable[[str], None] = _log.warning,
    ) -> None:
        if packed and graphs:
            raise EngineError("a packed engine has no batch dimension to pad, so no CUDA graphs")
        self._warn = warn
        self._lock = threading.Lock()
        self._owned = ExitStack()
        self._cuda = Cuda(device)
        self._captured: list[_Captured] = []
        self._contexts: dict[int, IExecutionContext] = {}
        # A context does not keep its engine alive; this reference does.
        self._opened = [open_engine(plan, host_code=host_code) if isinstance(plan, bytes) else plan]
        self._owned.callback(self._opened.clear)
        try:
            self._open(*self._opened, wanted=profiles)
            self._allocate(
                dict.fromkeys((t.name for t in self.inputs), pinned.inputs)
                | dict.fromkeys((t.name for t in self.outputs), pinned.outputs)
            )
            for spec in graphs:
                self._capture(spec)
        except BaseException:
            self.close()
            raise

    @property
    def captured(self) -> tuple[GraphSpec, ...]:
        """CUDA graphs that batches can run in."""
        return tuple(one.spec for one in self._captured)

    def run(self, feed: Mapping[str, Array]) -> Feed:
        """Run one batch.

        `feed` has every input by name, in its type and in a shape that a profile allows.

        Returns:
            Copies of the outputs, by name.

        Raises:
            ShapeError: `feed` does not fit the engine.
            EngineError: The GPU failed.
        """
        arrays = {tensor.name: _checked(tensor, feed) for tensor in self.inputs}
        shapes: dict[str, Dims] = {name: array.shape for name, array in arrays.items()}
        place = choose_profile(self.profiles, shapes)
        with self._lock:
            if place not in self._contexts:
                raise EngineError("the engine is closed")
            self._cuda.use()
            try:
                return self._run(place, arrays, shapes)
            except EngineError:
                # Wait for the stream, so that the next batch can use the stream and the memory.
                with suppress(EngineError):
                    self._cuda.synchronize(self._stream)
                raise

    def close(self) -> None:
        """Free everything that the engine holds on the GPU; a second call does nothing."""
        with self._lock, self._owned:
            self._captured.clear()
            self._cuda.use()

    def __enter__(self) -> EngineRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, opened: OpenEngine, *, wanted: Sequence[int] | None) -> None:
        self._stream = self._cuda.new_stream()
        self._owned.callback(self._cuda.destroy_stream, self._stream)
        self.inputs, self.outputs = opened.inputs, opened.outputs
        count = len(opened.profiles)
        places = list(range(count) if wanted is None else dict.fromkeys(wanted))
        for place in places:
            if not 0 <= place < count:
                raise EngineError(
                    f"the engine has no optimization profile {place}: it has {count}, from 0 on"
                )
        self.profiles: dict[int, Profile] = {place: opened.profiles[place] for place in places}
        self._owned.callback(self._contexts.clear)
        for place in places:
            self._contexts[place] = self._new_context(opened, place)

    def _new_context(self, opened: OpenEngine, place: int) -> IExecutionContext:
        context = opened.engine.create_execution_context()
        if context is None:
            raise opened.failure(
                f"no execution context could be made for optimization profile {place}, most likely "
                "for want of device memory"
            )
        if not context.set_optimization_profile_async(place, int(self._stream)):
            raise opened.failure(f"optimization profile {place} could not be chosen")
        self._cuda.synchronize(self._stream)
        return context

    def _allocate(self, pinned: Mapping[str, bool]) -> None:
        largest: dict[str, int] = {}  # elements of each tensor, over all profiles
        for place, profile in self.profiles.items():
            shapes = {name: limits.maximum for name, limits in profile.items()}
            for name, dims in {**shapes, **self._set_shapes(place, shapes)}.items():
                count = int(np.prod(dims, dtype=np.int64))
                largest[name] = max(largest.get(name, 1), count)
        self._buffers: dict[str, _Buffer] = {}
        for tensor in (*self.inputs, *self.outputs):
            size = largest[tensor.name] * tensor.dtype.itemsize
            address = self._cuda.allocate(size, purpose=f"tensor '{tensor.name}'")
            self._owned.callback(self._cuda.free, address)
            host = HostBuffer(self._cuda, size, pinned=pinned[tensor.name])
            self._owned.callback(host.close)
            self._buffers[tensor.name] = _Buffer(tensor.dtype, address, host)
            for context in self._contexts.values():
                if not context.set_tensor_address(tensor.name, address):
                    raise EngineError(f"the engine refused the memory of tensor '{tensor.name}'")

    def _set_shapes(self, place: int, shapes: Mapping[str, Dims]) -> dict[str, Dims]:
        """Set the input shapes of a context; return the resulting shapes of its outputs."""
        context = self._contexts[place]
        for name, dims in shapes.items():
            if not context.set_input_shape(name, dims):
                raise self._opened[0].failure(
                    f"input '{name}' of shape {list(dims)} is refused by optimization profile "
                    f"{place} of the engine"
                )
        outputs = {t.name: tuple(context.get_tensor_shape(t.name)) for t in self.outputs}
        for name, dims in outputs.items():
            if any(dim < 0 for dim in dims):
                raise EngineError(
                    f"the shape of output '{name}' depends on the data ({list(dims)}), which "
                    "cannot be served from memory of a fixed size"
                )
        return outputs

    def _capture(self, spec: GraphSpec) -> None:
        names = {tensor.name for tensor in self.inputs}
        if set(spec.inputs) != names:
            raise EngineError(
                f"a CUDA graph must give the shape of the inputs {', '.join(sorted(names))}, but "
                f"gives {', '.join(sorted(spec.inputs))}"
            )
        shapes = {name: (spec.batch_size, *dims) for name, dims in spec.inputs.items()}
        place = choose_profile(self.profiles, shapes)
        try:
            outputs = self._set_shapes(place, shapes)
            for name, dims in shapes.items():  # the warm-up must compute with valid values
                self._buffers[name].view(dims)[...] = 0
                self._copy_in(name, dims)
            # The first run in a new shape still sets up the context, which cannot be captured.
            self._enqueue(place)
            self._cuda.synchronize(self._stream)
            graph = self._cuda.capture(self._stream, partial(self._enqueue, place))
        except EngineError as error:
            self._warn(f"batches of {spec.batch_size} run without a CUDA graph: {error}")
            return
        self._owned.callback(self._cuda.destroy_graph, graph)
        self._captured.append(_Captured(spec, place, graph, outputs))

    def _run(self, place: int, arrays: Feed, shapes: Mapping[str, Dims]) -> Feed:
        captured = self._graph(place, shapes)
        rows = None
        if captured is None:
            outputs = self._set_shapes(place, shapes)
            for name, array in arrays.items():
                self._buffers[name].view(array.shape)[...] = array
                self._copy_in(name, array.shape)
            self._enqueue(place)
        else:
            outputs = dict(captured.outputs)
            for name, array in arrays.items():
                rows = array.shape[0]
                dims = (captured.spec.batch_size, *array.shape[1:])
                padded = self._buffers[name].view(dims)
                padded[:rows] = array
                # Copies of a real row give the model valid values.
                padded[rows:] = array[-1:]
                self._copy_in(name, dims)
            self._cuda.launch(captured.executable, self._stream)
        for name, dims in outputs.items():
            buffer = self._buffers[name]
            if (target := buffer.bytes(dims)).size:
                self._cuda.copy_out(target, buffer.device, self._stream)
        self._cuda.synchronize(self._stream)
        views = {name: self._buffers[name].view(dims) for name, dims in outputs.items()}
        return {name: (view[:rows] if view.ndim else view).copy() for name, view in views.items()}

    def _graph(self, place: int, shapes: Mapping[str, Dims]) -> _Captured | None:
        candidates = [one for one in self._captured if one.place == place]
        spec = choose_graph([one.spec for one in candidates], shapes)
        return next((one for one in candidates if one.spec is spec), None)

    def _copy_in(self, name: str, dims: Dims) -> None:
        buffer = self._buffers[name]
        if (source := buffer.bytes(dims)).size:
            self._cuda.copy_in(buffer.device, source, self._stream)

    def _enqueue(self, place: int) -> None:
        if not self._contexts[place].execute_async_v3(int(self._stream)):
            raise self._opened[0].failure(
                f"the engine could not be run in optimization profile {place}"
            )


def _checked(tensor: EngineTensor, feed: Mapping[str, Array]) -> Array:
    if tensor.name not in feed:
        raise ShapeError(f"input '{tensor.name}' of the engine is missing")
    array = feed[tensor.name]
    if array.dtype != tensor.dtype:
        raise ShapeError(f"input '{tensor.name}' must be {tensor.dtype}, not {array.dtype}")
    return array
