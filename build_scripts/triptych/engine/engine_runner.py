"""Runs a TensorRT engine on arrays: owns its contexts, memory, stream and CUDA graphs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from triptych.engine.cuda import Cuda, EngineError, HostBuffer
from triptych.engine.engine_file import EngineTensor, OpenEngine, open_engine
from triptych.engine.profiles import Profile, ShapeError, choose_graph, choose_profile
from triptych.plan.engine_spec import Dims, GraphSpec

__all__ = ["EngineError", "EngineRunner"]

Array = np.ndarray[Any, Any]
Feed = dict[str, Array]
_log = logging.getLogger(__name__)


class _Buffer:
    """Memory of one tensor, on the host and on the device, for its largest shape."""

    def __init__(self, tensor: EngineTensor, device: int, host: HostBuffer) -> None:
        self.tensor = tensor
        self.device = device
        self.host = host

    def view(self, dims: Dims) -> Array:
        """The start of the host memory as a tensor of this shape."""
        size = int(np.prod(dims, dtype=np.int64)) * self.tensor.dtype.itemsize
        return self.host.array[:size].view(self.tensor.dtype).reshape(dims)


class _Captured:
    """A CUDA graph that can be launched, and the shapes of what it leaves behind."""

    def __init__(self, executable: Any, outputs: Mapping[str, Dims]) -> None:
        self.executable = executable
        self.outputs = outputs


class EngineRunner:
    """An engine ready to run, one batch at a time; `run` may be called from any thread.

    As Triton's own backend does, it keeps one execution context a profile, and memory for the
    largest shapes of all of them: no run allocates on the device. Inputs and outputs pass through
    page-locked memory, so that the device copies them by itself.

    Args:
        plan: the bytes of ``model.plan``, or the engine opened on that GPU.
        device: number of the GPU.
        pinned: page-lock the host's side of the copies.
        pinned_output: the same for the outputs, where it differs.
        graphs: CUDA graphs to capture; one that cannot be captured is left out with a warning.
        packed: rows lie end to end in one dimension, so that there is no batch dimension to pad:
            such an engine has no graphs.
        profiles: places of the profiles to use; None for all.
        host_code: allow the program code that a version-compatible plan carries.
        warn: takes the warnings.

    Attributes:
        inputs: the engine's inputs.
        outputs: the engine's outputs.
        profiles: the profiles in use, by place.

    Raises:
        EngineError: the plan, a profile, a graph or the GPU does not fit; nothing stays allocated.
    """

    def __init__(
        self,
        plan: bytes | OpenEngine,
        *,
        device: int = 0,
        pinned: bool = True,
        pinned_output: bool | None = None,
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
        self._captured: dict[int, list[tuple[GraphSpec, _Captured]]] = {}
        self._contexts: dict[int, Any] = {}
        # A context does not keep its engine alive: this does.
        self._opened = [open_engine(plan, host_code=host_code) if isinstance(plan, bytes) else plan]
        self._owned.callback(self._opened.clear)
        try:
            self._open(*self._opened, wanted=profiles)
            out = pinned if pinned_output is None else pinned_output
            self._allocate(
                dict.fromkeys((t.name for t in self.inputs), pinned)
                | dict.fromkeys((t.name for t in self.outputs), out)
            )
            for spec in graphs:
                self._capture(spec)
        except BaseException:
            self.close()
            raise

    @property
    def captured(self) -> tuple[GraphSpec, ...]:
        """The CUDA graphs that batches can run in."""
        return tuple(spec for specs in self._captured.values() for spec, _ in specs)

    def run(self, feed: Mapping[str, Array]) -> Feed:
        """Run one batch.

        Args:
            feed: every input of the engine by name, in its type and in a shape some profile holds.

        Returns:
            The outputs by name, in memory of their own.

        Raises:
            ShapeError: `feed` does not fit the engine.
            EngineError: the GPU failed.
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
                self._drain()
                raise

    def close(self) -> None:
        """Give back all that the engine holds on the GPU; harmless if called twice."""
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

    def _new_context(self, opened: OpenEngine, place: int) -> Any:
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

    def _largest(self) -> dict[str, int]:
        """By tensor: how many elements it has at most, over all profiles."""
        largest: dict[str, int] = {}
        for place, profile in self.profiles.items():
            shapes = {name: limits.maximum for name, limits in profile.items()}
            for name, dims in {**shapes, **self._set_shapes(place, shapes)}.items():
                count = int(np.prod(dims, dtype=np.int64))
                largest[name] = max(largest.get(name, 1), count)
        return largest

    def _allocate(self, pinned: Mapping[str, bool]) -> None:
        largest = self._largest()
        self._buffers: dict[str, _Buffer] = {}
        for tensor in (*self.inputs, *self.outputs):
            size = largest[tensor.name] * tensor.dtype.itemsize
            address = self._cuda.allocate(size, purpose=f"tensor '{tensor.name}'")
            self._owned.callback(self._cuda.free, address)
            host = self._cuda.host_buffer(size, pinned=pinned[tensor.name])
            self._owned.callback(host.close)
            self._buffers[tensor.name] = _Buffer(tensor, address, host)
            for context in self._contexts.values():
                if not context.set_tensor_address(tensor.name, address):
                    raise EngineError(f"the engine refused the memory of tensor '{tensor.name}'")

    def _set_shapes(self, place: int, shapes: Mapping[str, Dims]) -> dict[str, Dims]:
        """Set the input shapes of a context; returns the shapes its outputs have then."""
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
            for name, dims in shapes.items():  # what the warm-up computes must be valid values
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
        self._captured.setdefault(place, []).append((spec, _Captured(graph, outputs)))

    def _run(self, place: int, arrays: Feed, shapes: Mapping[str, Dims]) -> Feed:
        rows = None
        captured = self._graph(place, shapes)
        if captured is None:
            outputs = self._set_shapes(place, shapes)
            for name, array in arrays.items():
                self._buffers[name].view(array.shape)[...] = array
                self._copy_in(name, array.shape)
            self._enqueue(place)
        else:
            spec, graph = captured
            outputs = dict(graph.outputs)
            for name, array in arrays.items():
                rows = array.shape[0]
                dims = (spec.batch_size, *array.shape[1:])
                whole = self._buffers[name].view(dims)
                whole[:rows] = array
                # Copies of a real row: whatever the model computes, it computes nothing odd.
                whole[rows:] = array[-1:]
                self._copy_in(name, dims)
            self._cuda.launch(graph.executable, self._stream)
        for name, dims in outputs.items():
            self._copy_out(name, dims)
        self._cuda.synchronize(self._stream)
        return {
            name: self._buffers[name].view(dims)[slice(rows)].copy()
            if dims
            else self._buffers[name].view(dims).copy()
            for name, dims in outputs.items()
        }

    def _graph(self, place: int, shapes: Mapping[str, Dims]) -> tuple[GraphSpec, _Captured] | None:
        candidates = self._captured.get(place, [])
        spec = choose_graph([spec for spec, _ in candidates], shapes)
        return next(((own, graph) for own, graph in candidates if own is spec), None)

    def _copy_in(self, name: str, dims: Dims) -> None:
        buffer = self._buffers[name]
        values = buffer.view(dims).reshape(-1).view(np.uint8)
        if values.size:
            self._cuda.copy_in(buffer.device, values, self._stream)

    def _copy_out(self, name: str, dims: Dims) -> None:
        buffer = self._buffers[name]
        values = buffer.view(dims).reshape(-1).view(np.uint8)
        if values.size:
            self._cuda.copy_out(values, buffer.device, self._stream)

    def _enqueue(self, place: int) -> None:
        if not self._contexts[place].execute_async_v3(int(self._stream)):
            raise self._opened[0].failure(
                f"the engine could not be run in optimization profile {place}"
            )

    def _drain(self) -> None:
        """Let the stream end what it began, so that the next batch finds it and the memory free."""
        try:
            self._cuda.synchronize(self._stream)
        except EngineError as error:
            _log.debug("after a failed run: %s", error)


def _checked(tensor: EngineTensor, feed: Mapping[str, Array]) -> Array:
    if tensor.name not in feed:
        raise ShapeError(f"input '{tensor.name}' of the engine is missing")
    array = feed[tensor.name]
    if array.dtype != tensor.dtype:
        raise ShapeError(f"input '{tensor.name}' must be {tensor.dtype}, not {array.dtype}")
    return array
