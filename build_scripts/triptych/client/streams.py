"""Streams of generations: chunks as they arrive, or the complete response.

`tritonclient` has one stream per client with one callback for all responses. Here each generation
calls the stub's ``ModelStreamInfer``, so that many run at once and each ends by itself.

A generation is canceled by a request on the same stream, not by canceling the call: if that meets
the end of a stream, Triton 24.10 may abort (``ASSERTION FAILED: prior > 0``; server#7368, #8034).
The
call is canceled only if the server does not end it soon.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from triptych.client.connection import Opened
from triptych.client.errors import (
    CanceledError,
    DeadlineExceededError,
    InferenceError,
    stream_error,
)
from triptych.client.flows import PipelineClient
from triptych.client.generation import Chunk, Completion, GenerationRequest, GenerationState

GIVE_UP_S = 2.0
"""Time in seconds that the server has to end a canceled generation before its call is canceled."""
LATE_S = 0.5
"""Time in seconds after the deadline before the call is canceled; the caller waits for it."""

_ENDING: set[Any] = set()


class _Messages:
    """Messages sent on the stream of a generation.

    Attributes:
        late: Whether the deadline has passed.
    """

    def __init__(self, asked: GenerationRequest) -> None:
        self._asked = asked
        self._over: SimpleQueue[bool] = SimpleQueue()
        self.late = False

    def sent(self) -> Iterator[Any]:
        """Yield each message when it has to be sent."""
        yield self._asked.request
        try:
            leave = self._over.get(timeout=self._asked.remaining_s)
        except Empty:
            leave = self.late = True
        if leave:
            yield self._asked.cancel

    def end(self, *, leave: bool) -> None:
        """End the messages, with a cancellation if the generation is left."""
        self._over.put(leave)


class _AsyncMessages:
    """`_Messages` for event loops."""

    def __init__(self, asked: GenerationRequest) -> None:
        self._asked = asked
        self._over: asyncio.Queue[bool] = asyncio.Queue()
        self.late = False

    async def sent(self) -> AsyncIterator[Any]:
        """Yield each message when it has to be sent."""
        yield self._asked.request
        try:
            leave = await asyncio.wait_for(self._over.get(), self._asked.remaining_s)
        except asyncio.TimeoutError:
            leave = self.late = True
        if leave:
            yield self._asked.cancel

    def end(self, *, leave: bool) -> None:
        self._over.put_nowait(leave)


class _Stream:
    """Common part of both generations: the call and its channel."""

    def __init__(
        self, client: PipelineClient, order: Mapping[str, bytes], timeout_s: float | None
    ) -> None:
        """Create a generation of `client`; `order` has the inputs of its request."""
        self._turn = threading.RLock()
        self._opened: Opened | None = None
        self._call: Any = None
        self._messages: Any = None
        self._ended = self._closed = False
        self._client = client
        deadline = client._deadline(timeout_s)
        self._progress = GenerationState(client.pipeline, order, deadline, client._retries)
        client._remember(self)

    def _begin(self, messages: Callable[[GenerationRequest], Any], *, stream: bool) -> Any:
        if self._call is None:
            self._client._raise_if_closed()
            asked = self._progress.ask(stream=stream)
            self._opened = self._client._connection.take()
            self._messages = messages(asked)
            self._call = self._opened.stub.ModelStreamInfer(
                self._messages.sent(),
                timeout=None if asked.remaining_s is None else asked.remaining_s + LATE_S,
                metadata=self._client._metadata,
            )
            # A call that failed asks for no more messages, and lets go of who waits to send one.
            end = self._messages.end
            self._call.add_done_callback(lambda _call: end(leave=False))
        return self._call

    def _checked(self, response: Any) -> Any:
        """Return the response, or the error that it carries."""
        if self._messages.late:
            return self._client._error(grpc.StatusCode.DEADLINE_EXCEEDED, "")
        if response is not None and response.error_message:
            return stream_error(response.error_message, url=self._client.url)
        return response

    def _let_go(self, *, leave: bool) -> None:
        """End the call and give its channel back; `leave` cancels a call that has not ended."""
        with self._turn:
            call, opened, messages = self._call, self._opened, self._messages
            self._call = self._opened = None
        if call is None or opened is None:
            return
        if leave and not call.done():
            self._leave(call, opened, messages)
        else:
            # Garbage collection cancels a call, so it is referenced until the server has ended it.
            _ENDING.add(call)
            call.add_done_callback(_ENDING.discard)
            messages.end(leave=False)
            self._client._connection.give_back(opened)

    def _leave(self, call: Any, opened: Opened, messages: Any) -> None:
        raise NotImplementedError

    def _read(self, response: Any) -> Chunk:
        """Return the chunk; the last one ends the call."""
        chunk = self._progress.read(response)
        if self._progress.finished:
            self._end()
        return chunk

    def _failed(self, error: InferenceError) -> float:
        """Return the pause in seconds before the next attempt; raise errors that are final."""
        self._let_go(leave=isinstance(error, DeadlineExceededError))
        return self._progress.pause_s(error)

    def _end(self) -> None:
        self._ended = True
        self._let_go(leave=not self._progress.finished)

    def _over(self) -> None:
        """End the iterator; raise `CanceledError` if the client was closed."""
        if not self._closed and not self._progress.finished:
            self._client._raise_if_closed()

    def __del__(self) -> None:
        self._end()


class Generation(_Stream, Iterator[Chunk]):
    """Iterator of chunks. The request is sent with the first chunk, or with `whole`.

    Leaving its context, closing it (from any thread) or dropping it cancels it on the server too.
    """

    def __init__(
        self, client: PipelineClient, order: Mapping[str, bytes], timeout_s: float | None
    ) -> None:
        self._reading = threading.Lock()
        super().__init__(client, order, timeout_s)

    def __next__(self) -> Chunk:
        chunk = self._next(stream=True)
        if chunk is None:
            raise StopIteration
        return chunk

    def whole(self) -> Completion:
        """Return the complete response, sent at once by the server, or the rest of it.

        Raises:
            InferenceError: See its subclasses; `CanceledError` if nothing was left.
        """
        chunks = []
        while (chunk := self._next(stream=False)) is not None:
            chunks.append(chunk)
        if not chunks:
            raise CanceledError("The generation has ended. Start another.")
        return Completion.join(chunks)

    def close(self) -> None:
        """Cancel the generation if it has not ended; the iterator then ends."""
        self._closed = True
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
                response = self._receive(self._begin(_Messages, stream=stream))
                if self._ended:  # closed by another thread
                    break
                if isinstance(response, InferenceError):
                    time.sleep(self._failed(response))
                elif response is None:
                    self._progress.raise_ended()
                else:
                    return self._read(response)
        except BaseException:
            self._end()
            raise
        self._over()
        return None

    def _receive(self, call: Any) -> Any:
        """Return the next response, the error in its place, or None at the end."""
        try:
            with self._reading:
                return self._checked(next(call, None))
        except grpc.RpcError as status:
            return self._client._error(status.code(), status.details())

    def _leave(self, call: Any, opened: Opened, messages: Any) -> None:
        if sys.is_finalizing():  # no thread starts any more
            call.cancel()
            return
        messages.end(leave=True)
        work = (call, self._reading, lambda: self._client._connection.give_back(opened))
        self._client._leave_behind(threading.Thread(target=_read_to_end, args=work))


def _read_to_end(call: Any, reading: threading.Lock, give_back: Callable[[], None]) -> None:
    cut = threading.Timer(GIVE_UP_S, call.cancel)
    cut.start()
    try:
        with reading, suppress(grpc.RpcError):
            for _response in call:
                pass
    finally:
        cut.cancel()
        give_back()


class AsyncGeneration(_Stream, AsyncIterator[Chunk]):
    """`Generation` for event loops; canceling a task that reads it cancels the generation."""

    def __init__(
        self, client: PipelineClient, order: Mapping[str, bytes], timeout_s: float | None
    ) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reading: asyncio.Future[Any] | None = None
        super().__init__(client, order, timeout_s)

    async def __anext__(self) -> Chunk:
        chunk = await self._next(stream=True)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def whole(self) -> Completion:
        """Return the complete response, sent at once by the server, or the rest of it.

        Raises:
            InferenceError: See its subclasses; `CanceledError` if nothing was left.
        """
        chunks = []
        while (chunk := await self._next(stream=False)) is not None:
            chunks.append(chunk)
        if not chunks:
            raise CanceledError("The generation has ended. Start another.")
        return Completion.join(chunks)

    async def close(self) -> None:
        """Cancel the generation if it has not ended; the iterator then ends."""
        self._closed = True
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
                self._loop = asyncio.get_running_loop()
                response = await self._receive(self._begin(_AsyncMessages, stream=stream))
                if self._ended:  # closed by another task
                    break
                if isinstance(response, InferenceError):
                    await asyncio.sleep(self._failed(response))
                elif response is None:
                    self._progress.raise_ended()
                else:
                    return self._read(response)
        except BaseException:
            self._end()
            raise
        self._over()
        return None

    async def _receive(self, call: Any) -> Any:
        """Return the next response, the error in its place, or None at the end."""
        # Canceling a task that waits for a call cancels the call, so another task waits for it.
        self._reading = reading = self._reading or asyncio.ensure_future(call.read())
        try:
            response = await asyncio.shield(reading)
        except grpc.aio.AioRpcError as status:
            return self._client._error(status.code(), status.details())
        except asyncio.CancelledError:
            if not reading.cancelled():
                raise
            return self._client._error(grpc.StatusCode.CANCELLED, "The client was closed")
        finally:
            if reading.done():
                self._reading = None
        return self._checked(None if response is grpc.aio.EOF else response)

    def _leave(self, call: Any, opened: Opened, messages: Any) -> None:
        loop, reading, client = self._loop, self._reading, self._client
        if loop is None or loop.is_closed():
            return

        async def read_to_end() -> None:
            if reading is not None:
                await reading
            while await call.read() is not grpc.aio.EOF:
                pass

        async def end() -> None:
            try:  # a timeout cancels the call
                with suppress(grpc.aio.AioRpcError, asyncio.TimeoutError):
                    await asyncio.wait_for(read_to_end(), GIVE_UP_S)
            finally:
                client._connection.give_back(opened)

        def begin() -> None:
            messages.end(leave=True)
            client._leave_behind(loop.create_task(end()))

        if _running_loop() is loop:
            begin()
        else:  # it was freed on another thread
            loop.call_soon_threadsafe(begin)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
