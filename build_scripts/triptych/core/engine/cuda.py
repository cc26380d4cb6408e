"""CUDA's runtime, as far as an engine needs it, and the GPU that engines are built for.

All calls use ``cuda.bindings.runtime`` of NVIDIA's cuda-python, whose functions return a tuple of
an error code and their values. `read_gpu` uses the same code as the startup check of the serving
image, because that check compares the two results.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from triptych.container.machine import find_driver, find_gpus
from triptych.core.engine.messages import no_gpu

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_MIB = 1 << 20


class EngineError(Exception):
    """Raised if an engine cannot be loaded or run; the message is one sentence."""


class DeviceMemoryError(EngineError):
    """Raised if the GPU has too little free memory."""


class Cuda:
    """A CUDA device, selected by CUDA's number of it.

    Every call that fails raises an `EngineError`.

    Raises:
        EngineError: The bindings are not installed, or the device does not exist.
    """

    def __init__(self, device: int) -> None:
        try:
            self._runtime = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise EngineError(
                f"the CUDA bindings are missing ({error}); install the package cuda-bindings"
            ) from error
        self._device = device
        self._names = self._runtime.cudaError_t
        self.use()

    def use(self) -> None:
        """Select the device for the calling thread.

        CUDA stores the selection per thread.
        """
        self.call("cudaSetDevice", self._device)

    def call(self, name: str, *arguments: object) -> Any:
        """Call a function of the runtime by name; return its value, or None if it has none.

        Raises:
            DeviceMemoryError: There is not enough memory.
            EngineError: Another error, with CUDA's message.
        """
        error, *values = getattr(self._runtime, name)(*arguments)
        if error != self._names.cudaSuccess:
            # CUDA also stores the error, and TensorRT would report it as its own.
            self._runtime.cudaGetLastError()
            _, text = self._runtime.cudaGetErrorString(error)
            words = text.decode() if isinstance(text, bytes) else str(text)
            no_memory = error == self._names.cudaErrorMemoryAllocation
            kind = DeviceMemoryError if no_memory else EngineError
            raise kind(f"{name} failed on GPU {self._device}: {words}")
        return values[0] if len(values) == 1 else (tuple(values) or None)

    def allocate(self, size: int, *, purpose: str) -> int:
        """Allocate `size` bytes of device memory and return the address.

        Raises:
            DeviceMemoryError: There is not enough memory; the message states how much is free.
        """
        try:
            return int(self.call("cudaMalloc", size))
        except DeviceMemoryError as error:
            raise DeviceMemoryError(
                f"GPU {self._device} has no {_mib(size)} of memory left for {purpose}"
                f"{self._free_text()}"
            ) from error

    def free(self, address: int) -> None:
        self.call("cudaFree", address)

    def new_stream(self) -> Any:
        """Return a new stream that does not wait for the default stream."""
        return self.call("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking)

    def destroy_stream(self, stream: object) -> None:
        self.call("cudaStreamDestroy", stream)

    def synchronize(self, stream: object) -> None:
        """Wait until all work on `stream` is done; raise its errors."""
        self.call("cudaStreamSynchronize", stream)

    def copy_in(self, target: int, source: Bytes, stream: object) -> None:
        """Start copying host memory to the device.

        `source` must live until the stream is done.
        """
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.call("cudaMemcpyAsync", target, source.ctypes.data, source.nbytes, kind, stream)

    def copy_out(self, target: Bytes, source: int, stream: object) -> None:
        """Start copying device memory to the host.

        `target` is filled when the stream is done.
        """
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.call("cudaMemcpyAsync", target.ctypes.data, source, target.nbytes, kind, stream)

    def capture(self, stream: object, work: Callable[[], None]) -> object:
        """Record the operations that `work` puts on `stream` as a graph, without running them.

        `launch` runs the graph.

        Raises:
            EngineError: An operation in `work` cannot be recorded, or fails.
        """
        modes = self._runtime.cudaStreamCaptureMode
        self.call("cudaStreamBeginCapture", stream, modes.cudaStreamCaptureModeThreadLocal)
        try:
            work()
        except EngineError:
            # The stream can only be used again after the capture has ended, even if it failed.
            error, partial_graph = self._runtime.cudaStreamEndCapture(stream)
            self._runtime.cudaGetLastError()
            if error == self._names.cudaSuccess:
                self._runtime.cudaGraphDestroy(partial_graph)
            raise
        graph = self.call("cudaStreamEndCapture", stream)
        try:
            return self.call("cudaGraphInstantiate", graph, 0)
        finally:
            self.call("cudaGraphDestroy", graph)

    def launch(self, graph: object, stream: object) -> None:
        self.call("cudaGraphLaunch", graph, stream)

    def destroy_graph(self, graph: object) -> None:
        self.call("cudaGraphExecDestroy", graph)

    def _free_text(self) -> str:
        error, *sizes = self._runtime.cudaMemGetInfo()
        if error != self._names.cudaSuccess:
            return ""
        free, total = sizes
        return f": {_mib(free)} of {_mib(total)} are free"


class HostBuffer:
    """Host memory for copies from and to the device, as one array of bytes.

    Args:
        cuda: Device that copies.
        size: Size of the memory in bytes.
        pinned: Whether the memory is page-locked, so that the device copies without the processor.

    Raises:
        DeviceMemoryError: The memory cannot be pinned.
    """

    def __init__(self, cuda: Cuda, size: int, *, pinned: bool) -> None:
        self._cuda = cuda
        self._address = int(cuda.call("cudaHostAlloc", size, 0)) if pinned else None
        if self._address is None:
            self.array: Bytes = np.empty(size, np.uint8)
        else:
            memory = (ctypes.c_uint8 * size).from_address(self._address)
            self.array = np.ctypeslib.as_array(memory)

    def close(self) -> None:
        if self._address is not None:
            self._cuda.call("cudaFreeHost", self._address)


def _mib(size: int) -> str:
    return f"{max(1, round(size / _MIB))} MiB"


class BuildGpu(NamedTuple):
    """A GPU and its software."""

    name: str
    compute_capability: str  # Compute capability such as ``9.0``
    driver: str  # Version of NVIDIA's driver; empty if the kernel does not report it
    # Version of the CUDA runtime, major and minor; empty if its bindings are not installed.
    cuda: str


def read_gpu() -> BuildGpu:
    """Return the first GPU that CUDA shows to this process; raise a UserError if there is none."""
    gpus = find_gpus()
    if not gpus:
        raise no_gpu("NVIDIA's driver shows no GPU to this process")
    major, minor = gpus[0].compute_capability
    return BuildGpu(gpus[0].name, f"{major}.{minor}", find_driver() or "", _cuda_version())


def _cuda_version() -> str:
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return ""
    error, version = runtime.cudaRuntimeGetVersion()
    return "" if int(error) else f"{version // 1000}.{version % 1000 // 10}"
