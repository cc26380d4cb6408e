"""Run the core step of text generation: stream new token ids from the engine."""

from __future__ import annotations

import asyncio
import math
import os
import re
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from .engine import Engine
from .engine_errors import EngineDied, EngineFailed
from .engine_queue import EngineQueue
from .generation_messages import (
    CANCELLED,
    DIED,
    LEFT,
    MIN_NAME,
    MODEL_FOLDER,
    NOTHING,
    REFUSED,
    CancelInbox,
    CoreChunk,
    Delta,
    EngineLoad,
    GenerationEngine,
    Opening,
    Order,
    PendingTokens,
    Place,
)
from .generation_metrics import GenerationMetrics, RequestClock
from .in_flight import InFlight
from .overflow import survive_overflow
from .rejections import Overloaded, Stopping
from .request_errors import RequestError, StepError
from .sampling_parameters import FIELD, PRIORITY
from .triton_io import error_response, make_private, read_inputs, read_settings

QUIET_S = 0.5
"""Seconds without a token after which a request sends an empty chunk. Postprocess needs a chunk to
check whether the client still waits."""
TICK_S = 0.1
SETTLE_S = 0.005
LOST_S = 2.0
"""Seconds after which a chunk that postprocess has not acknowledged counts as lost."""
CONFIRM_S = 0.25
"""Seconds after the first token in which a client that received it too late is found to leave."""
EARLY_S = 60.0
"""Maximum seconds between a cancellation and the request that it cancels."""
PROGRESS_S = 2.0
"""Seconds after which an engine that reports no load is asked for a token by a health check."""
LAST_WRITE_S = 0.2
"""Seconds for the last responses to reach their clients before a step without engine ends."""
RETRY_MS = 1000
"""Retry delay of a rejected request in ms; answer lengths vary too much to estimate it."""
_MAX_FAULT = 300


class _RequestStream:
    """State of one request in the core.

    Attributes:
        name: Id by which a later request may cancel this one; None if it has none.
        sent_at: Time of the last chunk, by `time.monotonic`.
        number: Number of that chunk among the chunks of all streams; 0 before the first.
        is_counted: Whether metrics include it.
        is_canceled: Whether its task has been canceled.
        age_s: Age with which it got a place in the engine, until its first token is received or its
            client has left; None if no other one waited.
        begun_at: Time of the first token, by `time.monotonic`.
    """

    is_counted = True
    is_canceled = False
    age_s: float | None = None
    begun_at = math.inf

    def __init__(
        self,
        sender: pb_utils.InferenceResponseSender,
        opening: Opening,
        cancel_at: str,
        name: str = "",
        tokens: int = 1,
    ) -> None:
        self.key = secrets.token_hex(16)
        self.name = name if len(name) >= MIN_NAME else None
        self.sender = sender
        self.sent_at = time.monotonic()
        self.number = 0
        self.waiting = PendingTokens(tokens)
        self.clock = RequestClock(streamed=opening.stream)
        self.prompt_tokens = opening.prompt_tokens
        self._opening: Opening | None = opening
        self._cancel_at = cancel_at

    def chunk(
        self, place: Place, delta: Delta, *, finish: str = "", error: str = ""
    ) -> pb_utils.InferenceResponse:
        """Return the next response."""
        self.sent_at = time.monotonic()
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
    """Step that runs the engine on ``prompt_ids`` INT32 ``[tokens]`` and ``order`` BYTES ``[1]``.

    Each response has ``token_ids`` INT32 ``[new tokens]`` and ``chunk`` BYTES ``[1]``.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        settings = read_settings(Path(__file__).parent)
        self._max_requests: int = settings["max_requests"]
        self._context_tokens: int = settings["context_tokens"]
        self._stream_interval: int = settings["stream_interval"]
        self._in_flight = InFlight(settings["pipeline"])
        self._sent = 0  # number of chunks of all requests
        # An engine that forms batches of similar lengths chooses from all requests.
        places = "max_requests" if settings["forms_batches"] else "max_sequences"
        self._queue = EngineQueue(settings[places])
        self._unsettled = 0  # number of requests whose end postprocess has not acknowledged
        self._load, self._loaded_at = EngineLoad(), 0.0
        self._death: EngineDied | None = None
        self._metrics = GenerationMetrics(settings["pipeline"], settings["latency_bounds_ms"])
        self._streams: dict[str, _RequestStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._keys: dict[str, str] = {}  # by the name of the request
        self._early: dict[str, float] = {}  # time of cancellation, by names not known yet
        self._outbox: SimpleQueue[
            tuple[pb_utils.InferenceResponseSender, pb_utils.InferenceResponse | None] | None
        ] = SimpleQueue()
        self._inbox = CancelInbox(self._receive_cancel)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="engine", daemon=True).start()
        # Each send waits for the server, which must not block the engine's loop.
        self._deliverer = threading.Thread(target=self._deliver, name="deliver", daemon=True)
        self._deliverer.start()
        self._engine: GenerationEngine = self._on_loop(self._start(settings))
        make_private()
        survive_overflow(args["model_config"])

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        """Pass each request to the engine; an invalid request gets its own error."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                inputs = read_inputs(request)
                prompt = inputs["prompt_ids"].as_numpy().ravel().tolist()
                order = Order.unpack(inputs["order"].as_numpy().ravel()[0])
                if order.cancel:
                    stream = _RequestStream(sender, Opening(False, [], [], 0), self._inbox.name)
                    self._loop.call_soon_threadsafe(self._cancel_named, stream, order.cancel)
                    continue
                self._check_limits(may_exceed=order.is_health_check)
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
                if order.is_health_check:
                    stream.is_counted = False
                    if self._makes_progress():
                        self._loop.call_soon_threadsafe(self._end, stream, "length")
                        continue
                self._streams[stream.key] = stream
                self._in_flight.wait(1, 1)
                self._loop.call_soon_threadsafe(self._begin, stream, prompt, order)
            except Exception as error:
                self._outbox.put((sender, error_response(error)))
                self._outbox.put((sender, None))
                outcome = "overloaded" if isinstance(error, (Overloaded, Stopping)) else "error"
                self._loop.call_soon_threadsafe(self._metrics.count_end, outcome)

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

    async def _start(self, settings: Mapping[str, object]) -> GenerationEngine:
        engine: GenerationEngine = Engine(
            settings, Path(__file__).parent / MODEL_FOLDER, self._on_load
        )
        await engine.start()
        loop = asyncio.get_running_loop()
        self._inbox.listen(loop)
        self._ticker = loop.create_task(self._tick())
        return engine

    def _check_limits(self, *, may_exceed: bool) -> None:
        if self._death is not None:
            raise self._death
        if self._in_flight.closed_at:
            raise Stopping
        if len(self._streams) >= self._max_requests and not may_exceed:
            raise Overloaded(
                f"The limit of {self._max_requests} requests in flight is reached. Try again "
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
        answer = self._answer(stream, prompt, order)
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
            if self._death is not None:
                self._fail(stream, DIED, self._death)
            else:
                self._count_end(stream, CANCELLED)
                self._send(stream, finish=CANCELLED)
        except ValueError as error:
            refusal = RequestError(
                FIELD, "are rejected by the engine", _clean_message(error), "Change the parameters"
            )
            self._fail(stream, REFUSED, refusal)
        except Exception as error:
            if reason := self._engine.find_death():
                self._fail(stream, DIED, EngineDied(reason))
            else:
                failure = EngineFailed(f"{type(error).__name__}: {error}. The engine failed.")
                self._fail(stream, "error", failure)
        finally:
            self._outbox.put((stream.sender, None))
            del self._streams[stream.key], self._tasks[stream.key]
            if self._keys.get(stream.name or "") == stream.key:
                del self._keys[stream.name or ""]
            self._unsettled += 1
            self._settle(stream)

    async def _answer(
        self, stream: _RequestStream, prompt: list[int], order: Order
    ) -> AsyncGenerator[Delta, None]:
        """Yield the engine's answer once there is a place for the request."""
        priority = -1 if order.is_health_check else order.sampling[PRIORITY] or 0
        async with self._queue.place(priority) as stream.age_s:
            if stream.age_s is not None:
                # If its client has left, postprocess finds out, and this task is canceled.
                self._send(stream)
                while not self._is_clear(stream):
                    await asyncio.sleep(SETTLE_S)
            answer = self._engine.generate(stream.key, prompt, order.sampling)
            async with aclosing(answer):
                async for delta in answer:
                    yield delta

    def _settle(self, stream: _RequestStream) -> None:
        """Count a request as answered once postprocess has its end; a shutdown waits for that."""
        if self._is_clear(stream):
            self._learn(stream, is_lost=False)
            self._unsettled -= 1
            self._in_flight.wait(-1, -1)
        else:
            self._loop.call_later(SETTLE_S, self._settle, stream)

    def _learn(self, stream: _RequestStream, *, is_lost: bool) -> None:
        """Learn, once, whether the client of a stream still waited for its first token."""
        if stream.age_s is not None:
            self._queue.learn(stream.age_s, is_lost=is_lost)
            stream.age_s = None

    def _receive_cancel(self, key: str) -> None:
        has_left, key = key.startswith(LEFT), key.removeprefix(LEFT)
        if has_left and key in self._streams:
            self._learn(self._streams[key], is_lost=True)
        self._cancel(key)

    def _cancel(self, key: str) -> None:
        task = self._tasks.get(key)
        # Once: another time would interrupt the end of its work in the engine.
        if task is not None and not self._streams[key].is_canceled:
            self._streams[key].is_canceled = True
            # Not immediately: a task that has not begun would end without its last response.
            self._loop.call_soon(task.cancel)

    def _cancel_named(self, stream: _RequestStream, name: str) -> None:
        """Cancel the request with this name, and answer the request of `stream`."""
        if name in self._keys:
            self._cancel(self._keys[name])
        else:
            self._early[name] = time.monotonic()
        self._end(stream, CANCELLED)

    def _end(self, stream: _RequestStream, finish: str) -> None:
        """Answer a request that the engine does not get."""
        self._send(stream, finish=finish)
        self._outbox.put((stream.sender, None))

    def _fail(self, stream: _RequestStream, finish: str, error: StepError) -> None:
        self._count_end(stream, finish)
        self._send(stream, finish=finish, error=error.message)

    def _count_end(self, stream: _RequestStream, outcome: str) -> None:
        if stream.is_counted:
            self._metrics.count_end(outcome)

    def _send_waiting(self, stream: _RequestStream) -> bool:
        """Send the pending tokens if there are enough, and return whether there were.

        A request has one chunk in flight at a time, except for the last one. If the engine is
        faster than the client, chunks therefore get longer instead of more.
        """
        if not stream.waiting.enough:
            return False
        now = time.monotonic()
        if now - stream.begun_at > CONFIRM_S:
            self._learn(stream, is_lost=False)
        if stream.waiting.ends or self._is_clear(stream):
            stream.begun_at = min(stream.begun_at, now)
            delta = stream.waiting.take()
            if stream.is_counted:
                self._metrics.count_delta(stream.clock, delta, stream.prompt_tokens)
            self._send(stream, delta)
        return True

    def _is_clear(self, stream: _RequestStream) -> bool:
        """Whether postprocess has acknowledged the last chunk, or the chunk counts as lost."""
        is_acknowledged = self._in_flight.acknowledged() >= stream.number
        return is_acknowledged or time.monotonic() - stream.sent_at > LOST_S

    def _send(
        self, stream: _RequestStream, delta: Delta = NOTHING, *, finish: str = "", error: str = ""
    ) -> None:
        self._sent += 1
        place = Place(self._in_flight.slot, self._sent)
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

    def _on_load(self, load: EngineLoad) -> None:
        self._load, self._loaded_at = load, time.monotonic()

    def _makes_progress(self) -> bool:
        """Whether the engine has worked on requests a moment ago."""
        return self._load.running > 0 and time.monotonic() - self._loaded_at < PROGRESS_S

    async def _tick(self) -> None:
        sending: asyncio.Future[None] | None = None
        while True:
            await asyncio.sleep(TICK_S)
            if reason := self._engine.find_death():
                await self._end_step(reason)
            now = time.monotonic()
            for stream in list(self._streams.values()):
                is_quiet = now - stream.sent_at > QUIET_S and stream.key in self._tasks
                if not self._send_waiting(stream) and is_quiet:
                    self._send(stream)
            self._early = {name: at for name, at in self._early.items() if now - at < EARLY_S}
            # An idle engine takes no steps and does not report its load.
            load = self._load if self._streams else EngineLoad()
            load = load._replace(waiting=load.waiting + len(self._queue))
            if sending is None or sending.done():
                due = self._metrics.take_due(load, len(self._streams))
                if due:  # the call blocks, so it runs in a thread
                    sending = asyncio.ensure_future(asyncio.to_thread(self._metrics.send, due))

    async def _end_step(self, reason: str) -> None:
        """Answer all requests, then end this process: a server with a dead step is restarted."""
        self._death = EngineDied(reason)
        pb_utils.Logger.log_error(self._death.message)
        for task in self._tasks.values():
            task.cancel()
        deadline = time.monotonic() + LOST_S
        while (self._streams or self._unsettled) and time.monotonic() < deadline:
            await asyncio.sleep(SETTLE_S)
        await asyncio.sleep(LAST_WRITE_S)
        os._exit(1)

    def _on_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _clean_message(error: Exception) -> str:
    """Return an engine's message in one line, without positions in its sources."""
    return re.sub(r"\[[\d:]+\] \S+?:\d+: ", "", " ".join(str(error).split()))[:_MAX_FAULT]
