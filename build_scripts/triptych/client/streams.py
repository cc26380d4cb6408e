"""Streams of generations: chunks as they arrive, or the complete response.

`tritonclient` has one stream per client with one callback for all responses. Here each generation
calls the stub's ``ModelStreamInfer``, so that many run at once and each ends by itself.

A generation is canceled by a request on the same stream, not by canceling the call: if that meets
the end of a stream, Triton 24.10 may abort (``ASSERTION FAILED: prior > 0``; server#7368, #8034).
The call is canceled only if the server does not end it soon.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from typing_extensions import Unpack

from triptych.client.connection import Opened
from triptych.client.errors import (
    CanceledError,
    DeadlineExceededError,
    InferenceError,
    stream_error,
)
from triptych.client.flows import CALL_HEADERS, PipelineClient
from triptych.client.generation import (
    Chunk,
    Completion,
    GenerationRequest,
    GenerationState,
    Sampling,
    encode_inputs,
)

if TYPE_CHECKING:
    from tritonclient.grpc import service_pb2

    Received: TypeAlias = service_pb2.ModelStreamInferResponse | InferenceError | None

Result = TypeVar("Result")

GIVE_UP_S = 2.0
"""Time in seconds that the server has to end a canceled generation before its call is canceled."""
LATE_S = 0.5
"""Time in seconds after the deadline before the call is canceled; the caller waits for it."""

_ENDING: set[grpc.Call] = set()


class _Messages:
    """Messages sent on the stream of a generation.

    Attributes:
        late: Whether the deadline has passed.
    """

    def __init__(self, request: GenerationRequest, ended: Any) -> None:
        """Create the messages; `ended` is an empty queue of threads or of the event loop."""
        self._request = request
        self._ended = ended
        self.late = False

    def sent(self) -> Iterator[service_pb2.ModelInferRequest]:
        """Yield each message when it has to be sent."""
        yield self._request.request
        try:
            cancel = self._ended.get(timeout=self._request.remaining_s)
        except Empty:
            cancel = self.late = True
        if cancel:
            yield self._request.cancel

    async def sent_async(self) -> AsyncIterator[service_pb2.ModelInferRequest]:
        """Yield each message when it has to be sent, on an event loop."""
        yield self._request.request
        try:
            cancel = await asyncio.wait_for(self._ended.get(), self._request.remaining_s)
        except asyncio.TimeoutError:
            cancel = self.late = True
        if cancel:
            yield self._request.cancel

    def end(self, *, cancel: bool) -> None:
        """End the messages; the last one may cancel the generation."""
        self._ended.put_nowait(cancel)


class _Stream:
    """Common part of both generations, as coroutines; `Generation` runs them without a loop."""

    def __init__(
        self, client: PipelineClient, inputs: Mapping[str, bytes], timeout_s: float | None
    ) -> None:
        """Create a generation of `client`; `inputs` are those of its request."""
        self._lock = threading.RLock()
        self._opened: Opened | None = None
        self._call: Any = None
        self._messages: Any = None
        self._ended = self._closed = False
        self._client = client
        deadline = client._deadline(timeout_s)
        self._state = GenerationState(client.pipeline, inputs, deadline, client._retries)
        client._register(self)

    async def _next(self, *, stream: bool) -> Chunk | None:
        try:
            while not self._ended:
                response = await self._receive(self._begin(stream=stream))
                if self._ended:  # closed by another thread or task
                    break
                if isinstance(response, InferenceError):
                    self._release(cancel=isinstance(response, DeadlineExceededError))
                    await self._sleep(self._state.pause_s(response))
                elif response is None:
                    self._state.raise_ended()
                else:
                    chunk = self._state.read(response)
                    if self._state.finished:
                        self._end()
                    return chunk
        except (InferenceError, asyncio.CancelledError):
            self._end()
            raise
        except BaseException:
            self._end(interrupted=True)
            raise
        if not self._closed and not self._state.finished:
            self._client._raise_if_closed()
        return None

    async def _rest(self) -> Completion:
        chunks = []
        while (chunk := await self._next(stream=False)) is not None:
            chunks.append(chunk)
        if not chunks:
            raise CanceledError("The generation has ended. Start another.")
        return Completion.join(chunks)

    async def _receive(self, call: grpc.Call) -> Received:
        """Return the next response, the error in its place, or None at the end."""
        raise NotImplementedError

    async def _sleep(self, seconds: float) -> None:
        raise NotImplementedError

    def _open_messages(self, request: GenerationRequest) -> tuple[_Messages, object]:
        """Return the messages of an attempt, and the iterator of them that gRPC reads."""
        raise NotImplementedError

    def _cancel(self, call: grpc.Call, messages: _Messages, give_back: Callable[[], None]) -> None:
        """Cancel the generation, and give its channel back when it has ended."""
        raise NotImplementedError

    def _begin(self, *, stream: bool) -> grpc.Call:
        if self._call is None:
            self._client._raise_if_closed()
            request = self._state.next_request(stream=stream)
            self._opened = self._client._connection.take()
            messages, iterator = self._open_messages(request)
            self._messages = messages
            self._call = self._opened.stub.ModelStreamInfer(
                iterator,
                timeout=None if request.remaining_s is None else request.remaining_s + LATE_S,
                metadata=self._client._metadata + CALL_HEADERS.get(),
            )
            # A failed call reads no more messages, so whatever waits to send one must end.
            self._call.add_done_callback(lambda _call: messages.end(cancel=False))
        return self._call

    def _checked(self, response: service_pb2.ModelStreamInferResponse | None) -> Received:
        """Return the response, or the error that it carries."""
        if self._messages.late:
            return self._client._error(grpc.StatusCode.DEADLINE_EXCEEDED, "")
        if response is not None and response.error_message:
            return stream_error(response.error_message, url=self._client.url)
        return response

    def _release(self, *, cancel: bool, interrupted: bool = False) -> None:
        """End the call and give its channel back; `cancel` cancels a call that has not ended."""
        with self._lock:
            call, opened, messages = self._call, self._opened, self._messages
            self._call = self._opened = None
        if opened is None:
            return
        give_back = partial(self._client._connection.give_back, opened, interrupted=interrupted)
        if call is None:  # interrupted in its start
            if messages is not None:
                messages.end(cancel=False)
            give_back()
        elif cancel and not call.done():
            self._cancel(call, messages, give_back)
        else:
            # Garbage collection cancels a call, so it is referenced until the server has ended it.
            _ENDING.add(call)
            call.add_done_callback(_ENDING.discard)
            messages.end(cancel=False)
            give_back()

    def _end(self, *, interrupted: bool = False) -> None:
        self._ended = True
        self._release(cancel=not self._state.finished, interrupted=interrupted)

    def __del__(self) -> None:
        self._end()


Started = TypeVar("Started", bound=_Stream)


class GeneratingClient(PipelineClient, Generic[Started]):
    """Base class of `Client` and `AsyncClient` with the calls that generate text."""

    _generation_class: type[Started]

    def generate(
        self, prompt: str, *, timeout_s: float | None = None, **sampling: Unpack[Sampling]
    ) -> Started:
        """Continue a prompt.

        Returns:
            An iterator of chunks, which also has the `whole`; `timeout_s` is for all of it.

        Raises:
            InvalidRequestError: The request cannot be encoded. The iterator raises other errors.
        """
        return self._generation_class(self, encode_inputs(prompt, None, sampling), timeout_s)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Started:
        """Answer a conversation, of messages with `role` and `content`; else as `generate`.

        The chat template renders `tools`, in the form of OpenAI; calls of them are text.
        """
        return self._generation_class(self, encode_inputs("", messages, sampling, tools), timeout_s)


class Generation(_Stream, Iterator[Chunk]):
    """Iterator of chunks. The request is sent with the first chunk, or with `whole`.

    Leaving its context, closing it (from any thread) or dropping it cancels it on the server too.
    """

    def __init__(
        self, client: PipelineClient, inputs: Mapping[str, bytes], timeout_s: float | None
    ) -> None:
        self._reading = threading.Lock()
        super().__init__(client, inputs, timeout_s)

    def __next__(self) -> Chunk:
        chunk = _run_blocking(self._next(stream=True))
        if chunk is None:
            raise StopIteration
        return chunk

    def whole(self) -> Completion:
        """Return the complete response, sent at once by the server, or the rest of it.

        Raises:
            InferenceError: See its subclasses; `CanceledError` if nothing was left.
        """
        return _run_blocking(self._rest())

    def close(self) -> None:
        """Cancel the generation if it has not ended; the iterator then ends."""
        self._closed = True
        self._end()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _receive(self, call: grpc.Call) -> Received:
        try:
            with self._reading:
                return self._checked(next(call, None))
        except grpc.RpcError as status:
            return self._client._error(status.code(), status.details())

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _open_messages(self, request: GenerationRequest) -> tuple[_Messages, object]:
        messages = _Messages(request, SimpleQueue())
        return messages, messages.sent()

    def _cancel(self, call: grpc.Call, messages: _Messages, give_back: Callable[[], None]) -> None:
        if sys.is_finalizing():  # no thread starts any more
            call.cancel()
            return
        messages.end(cancel=True)
        work = (call, self._reading, give_back)
        reader = threading.Thread(target=_read_to_end, args=work, daemon=True)
        self._client._finish_in_background(reader)


def _run_blocking(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: Result = end.value
        return result
    raise AssertionError("the coroutine suspended")


def _read_to_end(call: grpc.Call, reading: threading.Lock, give_back: Callable[[], None]) -> None:
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

    _loop: asyncio.AbstractEventLoop | None = None
    _reading: asyncio.Future[service_pb2.ModelStreamInferResponse] | None = None

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
        return await self._rest()

    async def close(self) -> None:
        """Cancel the generation if it has not ended; the iterator then ends."""
        self._closed = True
        self._end()

    async def __aenter__(self) -> AsyncGeneration:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _receive(self, call: grpc.Call) -> Received:
        self._loop = asyncio.get_running_loop()
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

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _open_messages(self, request: GenerationRequest) -> tuple[_Messages, object]:
        messages = _Messages(request, asyncio.Queue())
        return messages, messages.sent_async()

    def _cancel(self, call: grpc.Call, messages: _Messages, give_back: Callable[[], None]) -> None:
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
                give_back()

        def begin() -> None:
            messages.end(cancel=True)
            client._finish_in_background(loop.create_task(end()))

        running = None
        with suppress(RuntimeError):
            running = asyncio.get_running_loop()
        if running is loop:
            begin()
        else:  # it was freed on another thread
            loop.call_soon_threadsafe(begin)
