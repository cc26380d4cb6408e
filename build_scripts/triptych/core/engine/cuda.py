"""The part of CUDA's runtime that an engine needs: memory, one stream, graphs, errors in words.

All calls go through ``cuda.bindings.runtime`` of NVIDIA's cuda-python, whose functions return a
tuple of an error code and their values.

The GPU that engines are built for: name, compute capability, driver, CUDA.

Read as the start-up check of the serving image reads it: the two are compared.
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
    """An engine that cannot be loaded or run; the message is one sentence."""


class DeviceMemoryError(EngineError):
    """The GPU has too little free memory."""


class Cuda:
    """One CUDA device, by CUDA's number of it: every call that fails raises an `EngineError`.

    Raises:
        EngineError: the bindings are not installed, or there is no such device.
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
        """Select the device for the calling thread: CUDA keeps one for each thread."""
        self.call("cudaSetDevice", self._device)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the runtime by name; returns its value, None if it has none.

        Raises:
            DeviceMemoryError: there is not enough memory.
            EngineError: any other error, in CUDA's words.
        """
        error, *values = getattr(self._runtime, name)(*arguments)
        if error != self._names.cudaSuccess:
            # CUDA also remembers the error, and TensorRT would take it for one of its own.
            self._runtime.cudaGetLastError()
            _, text = self._runtime.cudaGetErrorString(error)
            words = text.decode() if isinstance(text, bytes) else str(text)
            no_memory = error == self._names.cudaErrorMemoryAllocation
            kind = DeviceMemoryError if no_memory else EngineError
            raise kind(f"{name} failed on GPU {self._device}: {words}")
        return values[0] if len(values) == 1 else (tuple(values) or None)

    def allocate(self, size: int, *, purpose: str) -> int:
        """Device memory of `size` bytes; returns its address.

        Raises:
            DeviceMemoryError: the message says how much there is.
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
        """A stream that does not wait for the default one."""
        return self.call("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking)

    def destroy_stream(self, stream: Any) -> None:
        self.call("cudaStreamDestroy", stream)

    def synchronize(self, stream: Any) -> None:
        """Wait until all that was put on `stream` is done; raises its errors."""
        self.call("cudaStreamSynchronize", stream)

    def copy_in(self, target: int, source: Bytes, stream: Any) -> None:
        """Start copying host memory to the device; `source` must live until the stream is done."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.call("cudaMemcpyAsync", target, source.ctypes.data, source.nbytes, kind, stream)

    def copy_out(self, target: Bytes, source: int, stream: Any) -> None:
        """Start copying device memory to the host; `target` is filled once the stream is done."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.call("cudaMemcpyAsync", target.ctypes.data, source, target.nbytes, kind, stream)

    def capture(self, stream: Any, work: Callable[[], None]) -> Any:
        """Record what `work` puts on `stream` as a graph that `launch` runs; nothing runs yet.

        Raises:
            EngineError: something in `work` cannot be recorded, or fails.
        """
        modes = self._runtime.cudaStreamCaptureMode
        self.call("cudaStreamBeginCapture", stream, modes.cudaStreamCaptureModeThreadLocal)
        try:
            work()
        except EngineError:
            # The stream can be used again only after the capture has ended, whatever comes of it.
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

    def launch(self, graph: Any, stream: Any) -> None:
        self.call("cudaGraphLaunch", graph, stream)

    def destroy_graph(self, graph: Any) -> None:
        self.call("cudaGraphExecDestroy", graph)

    def _free_text(self) -> str:
        error, *sizes = self._runtime.cudaMemGetInfo()
        if error != self._names.cudaSuccess:
            return ""
        free, total = sizes
        return f": {_mib(free)} of {_mib(total)} are free"


class HostBuffer:
    """Host memory to copy from and to, behind one array of bytes.

    Args:
        cuda: the device that copies.
        size: in bytes.
        pinned: page-locked: the device copies it by itself, while the processor goes on.

    Raises:
        DeviceMemoryError: so much memory cannot be pinned.
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
    """One GPU and its software.

    Attributes:
        compute_capability: such as ``9.0``.
        driver: version of NVIDIA's driver; empty where the kernel does not tell.
        cuda: version of the CUDA runtime, major and minor; empty where its bindings are missing.
    """

    name: str
    compute_capability: str
    driver: str
    cuda: str


def read_gpu() -> BuildGpu:
    """The first GPU that CUDA shows to this process; a UserError where there is none."""
    gpus = find_gpus()
    if not gpus:
        raise no_gpu("NVIDIA's driver shows none to this process")
    major, minor = gpus[0].compute_capability
    return BuildGpu(gpus[0].name, f"{major}.{minor}", find_driver() or "", _cuda_version())


def _cuda_version() -> str:
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return ""
    error, version = runtime.cudaRuntimeGetVersion()
    return "" if int(error) else f"{version // 1000}.{version % 1000 // 10}"
