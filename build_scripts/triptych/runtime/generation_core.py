"""The core of a generation: token ids in, new token ids out while the engine makes them."""

from __future__ import annotations

import asyncio
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from .engine import Engine
from .generation_messages import (
    CANCELLED,
    MIN_NAME,
    MODEL_FOLDER,
    NOTHING,
    REFUSED,
    CancelInbox,
    CoreChunk,
    Delta,
    EngineLoad,
    Opening,
    Order,
    PendingTokens,
    Place,
)
from .generation_metrics import GenerationMetrics, RequestClock
from .in_flight import InFlight
from .request_errors import EngineFailed, Overloaded, RequestError, Stopping
from .sampling_parameters import FIELD
from .triton_io import error_response, inputs_of, make_private, settings_of

QUIET_S = 0.5
"""Time without a token after which a request sends an empty chunk, in seconds.

Only with a chunk can postprocess see whether the client still waits."""
TICK_S = 0.1
SETTLE_S = 0.005
LOST_S = 2.0
"""Time after which a chunk that postprocess has not taken counts as lost, in seconds."""
EARLY_S = 60.0
"""Maximum time between a cancellation and the request that it cancels, in seconds."""
RETRY_MS = 1000
"""Retry delay of a rejected request, in milliseconds; answer lengths vary too much to estimate."""
_MAX_FAULT = 300


class _RequestStream:
    """State of one request in the core.

    Attributes:
        name: Id by which a later request may cancel it; None if it has none.
        told_at: Time of its last chunk, by `time.monotonic`.
        number: Number of that chunk among those of all streams; 0 before the first.
    """

    def __init__(
        self, sender: Any, opening: Opening, cancel_at: str, name: str = "", tokens: int = 1
    ) -> None:
        self.key = secrets.token_hex(16)
        self.name = name if len(name) >= MIN_NAME else None
        self.sender = sender
        self.told_at = time.monotonic()
        self.number = 0
        self.waiting = PendingTokens(tokens)
        self.clock = RequestClock(streamed=opening.stream)
        self.prompt_tokens = opening.prompt_tokens
        self._opening: Opening | None = opening
        self._cancel_at = cancel_at

    def chunk(self, place: Place, delta: Delta, *, finish: str = "", error: str = "") -> Any:
        """Return the next response."""
        self.told_at = time.monotonic()
        self.number = place.number
        chunk = CoreChunk(
            self.key,
            self._cancel_at,
            place,
            self._opening,
            finish or delta.finish,
            delta.cached_tokens,
            delta.logprobs,
            error,
        )
        self._opening = None
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("token_ids", np.array(delta.token_ids, np.int32)),
                pb_utils.Tensor("chunk", np.array([chunk.pack()], np.object_)),
            ]
        )


class TritonPythonModel:
    """``prompt_ids`` INT32 ``[tokens]``, ``order`` BYTES ``[1]`` to any number of responses.

    Each has ``token_ids`` INT32 ``[new tokens]`` and ``chunk`` BYTES ``[1]``.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        settings = settings_of(args)
        self._most_requests: int = settings["max_requests"]
        self._context_tokens: int = settings["context_tokens"]
        self._stream_interval: int = settings["stream_interval"]
        self._in_flight = InFlight(settings["pipeline"])
        self._slot = self._in_flight.take_slot()
        self._sent = 0  # chunks of all requests
        self._unsettled = 0  # requests that have ended, and postprocess does not know
        self._load = EngineLoad()
        self._metrics = GenerationMetrics(settings["pipeline"], settings["latency_bounds_ms"])
        self._streams: dict[str, _RequestStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._keys: dict[str, str] = {}  # by name, of the requests that have one
        self._early: dict[str, float] = {}  # names that were cancelled and are not known, and when
        self._outbox: SimpleQueue[tuple[Any, Any] | None] = SimpleQueue()
        self._inbox = CancelInbox(self._cancel)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="engine", daemon=True).start()
        # Sending waits for the server each time: the engine's loop must not.
        self._deliverer = threading.Thread(target=self._deliver, name="deliver", daemon=True)
        self._deliverer.start()
        self._engine = self._on_loop(self._start(settings))
        make_private()

    def execute(self, requests: Sequence[Any]) -> None:
        """Hand every request to the engine; a request at fault gets its own error."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                inputs = inputs_of(request)
                prompt = inputs["prompt_ids"].as_numpy().ravel().tolist()
                order = Order.unpack(inputs["order"].as_numpy().ravel()[0])
                if order.cancel:
                    stream = _RequestStream(sender, Opening(False, [], [], 0), self._inbox.name)
                    self._loop.call_soon_threadsafe(self._cancel_named, stream, order.cancel)
                    continue
                self._check_room()
                opening = Opening(
                    order.stream,
                    order.sampling["stop"],
                    prompt[-self._context_tokens :] if self._context_tokens else [],
                    len(prompt),
                )
                # An answer sent as a whole is decoded as one, unless a stop string may end it.
                in_pieces = order.stream or order.sampling["stop"]
                tokens = self._stream_interval if in_pieces else order.sampling["max_tokens"]
                stream = _RequestStream(
                    sender, opening, self._inbox.name, request.request_id(), tokens
                )
                self._streams[stream.key] = stream
                self._in_flight.wait(self._slot, 1, 1)
                self._loop.call_soon_threadsafe(self._begin, stream, prompt, order)
            except Exception as error:
                self._outbox.put((sender, error_response(error)))
                self._outbox.put((sender, None))
                how = "overloaded" if isinstance(error, (Overloaded, Stopping)) else "error"
                self._loop.call_soon_threadsafe(self._metrics.count_end, how)

    def finalize(self) -> None:
        async def end() -> None:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            while self._unsettled:
                await asyncio.sleep(SETTLE_S)
            self._engine.close()

        self._on_loop(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._metrics.close()
        self._outbox.put(None)
        self._deliverer.join()
        self._inbox.close()

    async def _start(self, settings: Mapping[str, Any]) -> Engine:
        engine = Engine(settings, Path(__file__).parent / MODEL_FOLDER, self._note)
        await engine.start()
        loop = asyncio.get_running_loop()
        self._inbox.listen(loop)
        self._ticker = loop.create_task(self._tick())
        return engine

    def _check_room(self) -> None:
        if self._in_flight.closed_at:
            raise Stopping
        if len(self._streams) >= self._most_requests:
            raise Overloaded(
                f"The limit of {self._most_requests} requests in flight is reached. Try again "
                "later, or raise serving.queue.max_in_flight in the pipeline.",
                RETRY_MS,
            )

    def _begin(self, stream: _RequestStream, prompt: list[int], order: Order) -> None:
        work = self._generate(stream, prompt, order)
        self._tasks[stream.key] = self._loop.create_task(work)
        if stream.name is not None:
            self._keys[stream.name] = stream.key
            if self._early.pop(stream.name, None) is not None:
                self._cancel(stream.key)

    async def _generate(self, stream: _RequestStream, prompt: list[int], order: Order) -> None:
        answer = self._engine.generate(stream.key, prompt, order.sampling)
        finished = False
        try:
            async for delta in answer:
                finished = bool(delta.finish)
                stream.waiting.add(delta)
                self._send_waiting(stream)
            if not finished:
                raise RuntimeError("the engine ended an answer without a reason")
        except asyncio.CancelledError:
            await answer.aclose()
            self._metrics.count_end(CANCELLED)
            self._send(stream, finish=CANCELLED)
        except ValueError as error:
            refusal = RequestError(
                FIELD, "must be such that the engine takes them", _words(error), "Change them"
            )
            self._metrics.count_end(REFUSED)
            self._send(stream, finish=REFUSED, error=refusal.message)
        except Exception as error:
            failure = EngineFailed(f"{type(error).__name__}: {error}. The engine failed.")
            self._metrics.count_end("error")
            self._send(stream, finish="error", error=failure.message)
        finally:
            self._outbox.put((stream.sender, None))
            del self._streams[stream.key], self._tasks[stream.key]
            if self._keys.get(stream.name or "") == stream.key:
                del self._keys[stream.name or ""]
            self._unsettled += 1
            self._settle(stream)

    def _settle(self, stream: _RequestStream) -> None:
        """Count a request as answered once postprocess has its end: who stops the server waits."""
        if self._is_clear(stream):
            self._unsettled -= 1
            self._in_flight.wait(self._slot, -1, -1)
        else:
            self._loop.call_later(SETTLE_S, self._settle, stream)

    def _cancel(self, key: str) -> None:
        task = self._tasks.get(key)
        if task is not None:
            # Not at once: a task that has not begun yet would end without its last response.
            self._loop.call_soon(task.cancel)

    def _cancel_named(self, stream: _RequestStream, name: str) -> None:
        """Cancel the request with this name, and answer the request of `stream` at once."""
        if name in self._keys:
            self._cancel(self._keys[name])
        else:
            self._early[name] = time.monotonic()
        self._send(stream, finish=CANCELLED)
        self._outbox.put((stream.sender, None))

    def _send_waiting(self, stream: _RequestStream) -> bool:
        """Send what waits, if it is enough; never two chunks of a request at once, but the last.

        So where the engine is faster than the way to the client, chunks get longer, not more.
        """
        if not stream.waiting.enough:
            return False
        if stream.waiting.ends or self._is_clear(stream):
            delta = stream.waiting.take()
            self._metrics.count_delta(stream.clock, delta, stream.prompt_tokens)
            self._send(stream, delta)
        return True

    def _is_clear(self, stream: _RequestStream) -> bool:
        """Whether postprocess has taken the last chunk; or never will."""
        is_taken = self._in_flight.taken(self._slot) >= stream.number
        return is_taken or time.monotonic() - stream.told_at > LOST_S

    def _send(
        self, stream: _RequestStream, delta: Delta = NOTHING, *, finish: str = "", error: str = ""
    ) -> None:
        self._sent += 1
        place = Place(self._slot, self._sent)
        response = stream.chunk(place, delta, finish=finish, error=error)
        self._outbox.put((stream.sender, response))

    def _deliver(self) -> None:
        """Send the responses of the outbox; the response None ends a stream."""
        while (item := self._outbox.get()) is not None:
            sender, response = item
            if response is None:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            else:
                sender.send(response)

    def _note(self, load: EngineLoad) -> None:
        self._load = load

    async def _tick(self) -> None:
        sending: asyncio.Future[None] | None = None
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for stream in list(self._streams.values()):
                is_quiet = now - stream.told_at > QUIET_S and stream.key in self._tasks
                if not self._send_waiting(stream) and is_quiet:
                    self._send(stream)
            self._early = {name: at for name, at in self._early.items() if now - at < EARLY_S}
            # An idle engine takes no steps and does not report its load.
            load = self._load if self._streams else EngineLoad()
            if sending is None or sending.done():
                due = self._metrics.take_due(load, len(self._streams))
                if due:  # the call blocks, so it runs in a thread
                    sending = asyncio.ensure_future(asyncio.to_thread(self._metrics.send, due))

    def _on_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _words(error: Exception) -> str:
    """Return an engine's message in one line, without positions in its sources."""
    return re.sub(r"\[[\d:]+\] \S+?:\d+: ", "", " ".join(str(error).split()))[:_MAX_FAULT]
