"""A generation under way: its chunks as they come, or the whole; each call is a stream of its own.

`tritonclient` has one stream a client, and one callback for all that it answers. Here each
generation calls the stub's ``ModelStreamInfer``, so that many run at once and each ends alone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from types import TracebackType
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from triptych.client.connection import Opened
from triptych.client.errors import Cancelled, InferenceError, stream_error
from triptych.client.flows import PipelineClient
from triptych.client.generation import METADATA, Chunk, Completion, Progress

_ENDING: set[Any] = set()


class _Stream:
    """What both kinds share: the call, and the channel that it uses."""

    def __init__(
        self, client: PipelineClient, order: Mapping[str, bytes], timeout_s: float | None
    ) -> None:
        """A generation that `client` was asked for; the inputs of its request are in `order`."""
        self._turn = threading.RLock()
        self._opened: Opened | None = None
        self._call: Any = None
        self._ended = False
        self._client = client
        deadline = client._deadline(timeout_s)
        self._progress = Progress(client.pipeline, order, deadline, client._retries)

    def _begin(self, *, stream: bool) -> Any:
        if self._call is None:
            self._client._raise_if_closed()
            request, left_s = self._progress.request(stream=stream)
            self._opened = self._client._connection.take()
            metadata = (*self._client._metadata, *METADATA)
            send = self._opened.stub.ModelStreamInfer
            self._call = send(iter([request]), timeout=left_s, metadata=metadata)
        return self._call

    def _checked(self, response: Any) -> Any:
        if response is not None and response.error_message:
            return stream_error(response.error_message, url=self._client.url)
        return response

    def _let_go(self) -> None:
        """End the call, where it has not ended, and give its channel back."""
        with self._turn:
            call, opened = self._call, self._opened
            self._call = self._opened = None
        if call is not None:
            if self._progress.finished:
                _let_end(call)
            else:
                call.cancel()
        if opened is not None:
            self._client._connection.give_back(opened)

    def _end(self) -> None:
        self._ended = True
        self._let_go()

    def __del__(self) -> None:
        self._end()


def _let_end(call: Any) -> None:
    """Keep a call that the server is ending until it has: dropping it would cancel it.

    A cancel between a stream's last response and its end may abort Triton 24.10 (``ASSERTION
    FAILED: prior > 0``; server#7368, #8034): seen after 500 such cancels.
    """
    _ENDING.add(call)
    call.add_done_callback(_ENDING.discard)


class Generation(_Stream, Iterator[Chunk]):
    """An iterator of chunks; it is sent when the first one is asked for, or the `whole`.

    Leaving it as a context manager, closing it (from any thread) or dropping it cancels what is
    still under way, at the server, too.
    """

    def __next__(self) -> Chunk:
        chunk = self._next(stream=True)
        if chunk is None:
            raise StopIteration
        return chunk

    def whole(self) -> Completion:
        """The whole answer, sent at once by the server; or what is left of it.

        Raises:
            InferenceError: one of its kinds; `Cancelled` where nothing was left.
        """
        chunks = []
        while (chunk := self._next(stream=False)) is not None:
            chunks.append(chunk)
        if not chunks:
            raise Cancelled("The generation has ended. Start another.")
        return Completion.join(chunks)

    def close(self) -> None:
        """Cancel it, if it has not ended; the iterator then ends."""
        self._end()

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _next(self, *, stream: bool) -> Chunk | None:
        try:
            while not self._ended:
                response = self._receive(self._begin(stream=stream))
                if self._ended:  # closed by another thread
                    return None
                if isinstance(response, InferenceError):
                    self._let_go()
                    time.sleep(self._progress.pause_s(response))
                elif response is None:
                    self._end()
                    self._progress.check_end()
                else:
                    return self._progress.read(response)
        except BaseException:
            self._end()
            raise
        return None

    def _receive(self, call: Any) -> Any:
        """The next response, the error that it is instead, or None at the end."""
        try:
            return self._checked(next(call, None))
        except grpc.RpcError as status:
            return self._client._error(status.code(), status.details())


class AsyncGeneration(_Stream, AsyncIterator[Chunk]):
    """The twin of `Generation` for event loops; cancelling a task that reads it cancels it."""

    async def __anext__(self) -> Chunk:
        chunk = await self._next(stream=True)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def whole(self) -> Completion:
        """The whole answer, sent at once by the server; or what is left of it.

        Raises:
            InferenceError: one of its kinds; `Cancelled` where nothing was left.
        """
        chunks = []
        while (chunk := await self._next(stream=False)) is not None:
            chunks.append(chunk)
        if not chunks:
            raise Cancelled("The generation has ended. Start another.")
        return Completion.join(chunks)

    async def close(self) -> None:
        """Cancel it, if it has not ended; the iterator then ends."""
        self._end()

    async def __aenter__(self) -> AsyncGeneration:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _next(self, *, stream: bool) -> Chunk | None:
        try:
            while not self._ended:
                response = await self._receive(self._begin(stream=stream))
                if self._ended:  # closed by another task
                    return None
                if isinstance(response, InferenceError):
                    self._let_go()
                    await asyncio.sleep(self._progress.pause_s(response))
                elif response is None:
                    self._end()
                    self._progress.check_end()
                else:
                    return self._progress.read(response)
        except BaseException:
            self._end()
            raise
        return None

    async def _receive(self, call: Any) -> Any:
        """The next response, the error that it is instead, or None at the end."""
        try:
            response = await call.read()
        except grpc.aio.AioRpcError as status:
            return self._client._error(status.code(), status.details())
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return self._client._error(grpc.StatusCode.CANCELLED, "The client was closed")
        return self._checked(None if response is grpc.aio.EOF else response)
