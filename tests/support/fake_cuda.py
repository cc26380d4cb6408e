"""A fake of the part of ``cuda.bindings.runtime`` that engines need: a GPU made of host memory.

Device addresses are numbers that no host code can read, fresh memory holds garbage, and what is put
on a stream happens when the stream is waited for: so a missing copy or wait shows.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

LOG_VARIABLE = "FAKE_CUDA_LOG"
"""Environment: a file that gets one line of JSON for each event, also from other processes."""

_FIRST_ADDRESS = 0x7F00_0000_0000
_GARBAGE = 0xA5
Work = Callable[[], object]


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInvalidDevice = 101
    cudaErrorLaunchFailure = 719
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorStreamCaptureInvalidated = 901


class cudaMemcpyKind(IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


class cudaStreamCaptureMode(IntEnum):
    cudaStreamCaptureModeThreadLocal = 1


TEXTS = {
    cudaError_t.cudaErrorInvalidValue: b"invalid argument",
    cudaError_t.cudaErrorMemoryAllocation: b"out of memory",
    cudaError_t.cudaErrorInvalidDevice: b"invalid device ordinal",
    cudaError_t.cudaErrorLaunchFailure: b"unspecified launch failure",
    cudaError_t.cudaErrorStreamCaptureUnsupported: b"operation not permitted when stream captures",
    cudaError_t.cudaErrorStreamCaptureInvalidated: b"operation failed due to a previous error",
}
OK = cudaError_t.cudaSuccess
INVALID = cudaError_t.cudaErrorInvalidValue


class Stream:
    def __init__(self) -> None:
        self.waiting: list[Work] = []
        self.captured: list[Work] | None = None
        self.invalid = False


class FakeCuda:
    """One fake GPU.

    Attributes:
        total: Size of its memory in bytes.
        failing: Functions that fail from now on, with their error.
        device: Allocations by address.
        host: Page-locked allocations by address.
        graphs: Captured and instantiated graphs by handle.
        events: Events in order, each a name and its numbers.
    """

    def __init__(self) -> None:
        self.total = 1 << 30
        self.failing: dict[str, cudaError_t] = {}
        self.device: dict[int, np.ndarray[Any, Any]] = {}
        self.host: dict[int, np.ndarray[Any, Any]] = {}
        self.streams: dict[int, Stream] = {}
        self.graphs: dict[int, list[Work]] = {}
        self.events: list[tuple[str, Any]] = []
        self._next = _FIRST_ADDRESS

    # What the fake TensorRT uses.

    def memory(self, address: int, size: int) -> np.ndarray[Any, Any]:
        """Return `size` bytes of device memory."""
        for start, block in self.device.items():
            if start <= address and address + size <= start + block.size:
                return block[address - start : address - start + size]
        raise LookupError(f"{size} bytes at {address:#x} are no device memory")

    def is_capturing(self, handle: int) -> bool:
        """Return whether a stream captures a graph."""
        return self.streams[handle].captured is not None

    def put(self, handle: int, work: Work, *, event: tuple[str, Any]) -> bool:
        """Put a kernel on a stream, or into the graph that the stream captures."""
        stream = self.streams[handle]
        if "enqueue" in self.failing:
            return False
        if "captured enqueue" in self.failing and stream.captured is not None:
            stream.invalid = True
            return False

        def run() -> None:
            self.record(*event)
            work()

        if stream.captured is not None:
            stream.captured.append(run)
        else:
            stream.waiting.append(run)
        return True

    def record(self, name: str, numbers: Any) -> None:
        """Remember an event."""
        self.events.append((name, numbers))
        if path := os.environ.get(LOG_VARIABLE):
            with Path(path).open("a", encoding="utf-8") as log:
                log.write(json.dumps([name, numbers]) + "\n")

    def counted(self, name: str) -> int:
        """Return how often an event happened."""
        return sum(event == name for event, _ in self.events)

    @property
    def leaks(self) -> list[str]:
        """Return the kinds of what has not been given back."""
        held = {"device memory": self.device, "host memory": self.host}
        held |= {"stream": self.streams, "graph": self.graphs}  # type: ignore[dict-item]
        return [kind for kind, things in held.items() for _ in things]

    # The functions of the module.

    def cudaSetDevice(self, device: int) -> tuple[Any, ...]:
        return (OK if device == 0 else cudaError_t.cudaErrorInvalidDevice,)

    def cudaRuntimeGetVersion(self) -> tuple[Any, ...]:
        return OK, 13020

    def cudaMemGetInfo(self) -> tuple[Any, ...]:
        used = sum(block.size for block in self.device.values())
        return OK, self.total - used, self.total

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        if size > self.cudaMemGetInfo()[1]:
            return cudaError_t.cudaErrorMemoryAllocation, None
        address = self._new_handle(size)
        self.device[address] = np.full(size, _GARBAGE, np.uint8)
        self.record("malloc", size)
        return OK, address

    def cudaFree(self, address: int) -> tuple[Any, ...]:
        return (OK if self.device.pop(address, None) is not None else INVALID,)

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[Any, ...]:
        assert flags == 0
        block = np.full(size, _GARBAGE, np.uint8)
        self.host[block.ctypes.data] = block
        return OK, block.ctypes.data

    def cudaFreeHost(self, address: int) -> tuple[Any, ...]:
        return (OK if self.host.pop(address, None) is not None else INVALID,)

    def cudaMemcpyAsync(
        self, target: int, source: int, size: int, kind: cudaMemcpyKind, handle: Any
    ) -> tuple[Any, ...]:
        stream = self.streams[int(handle)]
        try:
            if kind == cudaMemcpyKind.cudaMemcpyHostToDevice:
                block = self.memory(target, size)
                ends = (block.ctypes.data, source)
            else:
                block = self.memory(source, size)
                ends = (target, block.ctypes.data)
        except LookupError:
            return (INVALID,)
        self.record(kind.name, size)
        stream.waiting.append(partial(ctypes.memmove, *ends, size))
        return (OK,)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        assert flags == 1
        handle = self._new_handle(1)
        self.streams[handle] = Stream()
        return OK, handle

    def cudaStreamDestroy(self, handle: Any) -> tuple[Any, ...]:
        return (OK if self.streams.pop(int(handle), None) is not None else INVALID,)

    def cudaStreamSynchronize(self, handle: Any) -> tuple[Any, ...]:
        stream = self.streams[int(handle)]
        if stream.captured is not None:
            stream.invalid = True
            return (cudaError_t.cudaErrorStreamCaptureUnsupported,)
        work, stream.waiting = stream.waiting, []
        try:
            for step in work:
                step()
        except Exception as error:
            self.record("failure", str(error))
            return (cudaError_t.cudaErrorLaunchFailure,)
        return (OK,)

    def cudaStreamBeginCapture(self, handle: Any, mode: cudaStreamCaptureMode) -> tuple[Any, ...]:
        assert mode == cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.streams[int(handle)].captured = []
        return (OK,)

    def cudaStreamEndCapture(self, handle: Any) -> tuple[Any, ...]:
        stream = self.streams[int(handle)]
        work, stream.captured = stream.captured, None
        if stream.invalid or work is None:
            stream.invalid = False
            return cudaError_t.cudaErrorStreamCaptureInvalidated, None
        return OK, self._new_graph(work)

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any, ...]:
        assert flags == 0
        self.record("graph", int(graph))
        return OK, self._new_graph(self.graphs[int(graph)])

    def cudaGraphDestroy(self, graph: Any) -> tuple[Any, ...]:
        return (OK if self.graphs.pop(int(graph), None) is not None else INVALID,)

    cudaGraphExecDestroy = cudaGraphDestroy

    def cudaGraphLaunch(self, graph: Any, handle: Any) -> tuple[Any, ...]:
        self.record("launch", int(graph))
        self.streams[int(handle)].waiting += self.graphs[int(graph)]
        return (OK,)

    def cudaGetLastError(self) -> tuple[Any, ...]:
        return (OK,)

    def cudaGetErrorString(self, error: cudaError_t) -> tuple[Any, ...]:
        return OK, TEXTS[error]

    def _new_graph(self, work: list[Work]) -> int:
        handle = self._new_handle(1)
        self.graphs[handle] = work
        return handle

    def _new_handle(self, size: int) -> int:
        handle = self._next
        self._next += -(-size // 256) * 256 + 256
        return handle


def make_module(cuda: FakeCuda) -> ModuleType:
    """Return the module ``cuda.bindings.runtime`` of a fake GPU, which is its ``_fake``."""
    module = ModuleType("cuda.bindings.runtime")
    contents: dict[str, Any] = {
        name: _function(cuda, name) for name in dir(FakeCuda) if name.startswith("cuda")
    }
    contents |= {
        "_fake": cuda,
        "cudaError_t": cudaError_t,
        "cudaMemcpyKind": cudaMemcpyKind,
        "cudaStreamCaptureMode": cudaStreamCaptureMode,
        "cudaStreamNonBlocking": 1,
    }
    module.__dict__.update(contents)
    return module


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Make ``import cuda.bindings.runtime`` give a fake GPU until the test ends."""
    cuda = FakeCuda()
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", make_module(cuda))
    return cuda


def _function(cuda: FakeCuda, name: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        if name in cuda.failing:
            return cuda.failing[name], None
        return getattr(cuda, name)(*arguments)

    return call
