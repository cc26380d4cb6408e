"""Client for event loops, with the methods of `Client` as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from triptych.client import flows, tasks, zero_shot
from triptych.client.connection import Connection, Opened
from triptych.client.errors import InferenceError, RowError
from triptych.client.flows import (
    CALL_HEADERS,
    Flow,
    Pause,
    PipelineClient,
    UnaryCall,
    make_method,
    task_flows,
)
from triptych.client.streams import AsyncGeneration, GeneratingClient
from triptych.client.tasks import Row, TaskCall, Whole
from triptych.client.work import END_S, Portion, Work

if TYPE_CHECKING:
    from tritonclient.grpc import service_pb2

P = ParamSpec("P")
Result = TypeVar("Result")
Awaited = Coroutine[Any, Any, Result]


def _awaited(
    flow: Callable[Concatenate[PipelineClient, P], Flow[Result]],
) -> Callable[Concatenate[AsyncClient, P], Awaited[Result]]:
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return await self._run(flow(self, *args, **kwargs))

    make_method(method, flow, "AsyncClient")
    return method


def _awaited_task(
    make: Callable[P, TaskCall[Whole, Row]],
) -> tuple[
    Callable[Concatenate[AsyncClient, P], Awaited[Whole]],
    Callable[Concatenate[AsyncClient, P], Awaited[list[Row | RowError]]],
]:
    whole, each = task_flows(make)
    return _awaited(whole), _awaited(each)


class AsyncClient(GeneratingClient[AsyncGeneration]):
    """Client for one event loop, from its first call to `close`.

    Its settings are those of `PipelineClient`. A task that is canceled during a call cancels the
    call's requests.
    """

    _generation_class = AsyncGeneration

    embed, embed_each = _awaited_task(tasks.embed)
    embed_sparse, embed_sparse_each = _awaited_task(tasks.embed_sparse)
    embed_multi_vector, embed_multi_vector_each = _awaited_task(tasks.embed_multi_vector)
    embed_hybrid, embed_hybrid_each = _awaited_task(tasks.embed_hybrid)
    classify, classify_each = _awaited_task(tasks.classify)
    embed_images, embed_images_each = _awaited_task(tasks.embed_images)
    classify_images, classify_images_each = _awaited_task(tasks.classify_images)
    classify_zero_shot, classify_zero_shot_each = _awaited_task(tasks.classify_zero_shot)
    classify_images_zero_shot = _awaited(zero_shot.classify_images_zero_shot)
    classify_images_zero_shot_each = _awaited(zero_shot.classify_images_zero_shot_each)
    fill_mask, fill_mask_each = _awaited_task(tasks.fill_mask)
    entities, entities_each = _awaited_task(tasks.entities)
    answer, answer_each = _awaited_task(tasks.answer)
    rerank, rerank_each = _awaited_task(tasks.rerank)
    infer, infer_each = _awaited(flows.infer), _awaited(flows.infer_each)
    interface, ready = _awaited(flows.interface), _awaited(flows.ready)
    step_statistics = _awaited(flows.step_statistics)

    def _finish_in_background(self, work: asyncio.Task[None]) -> None:
        self._finishing.add(work)
        work.add_done_callback(self._finishing.discard)

    def _connect(self) -> Connection:
        self._finishing: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        # A channel belongs to the loop that runs when it is opened, so the first call opens it.
        return Connection(
            partial(self._channels.open, grpc.aio), self._close_soon, self._dns_refresh_s
        )

    async def close(self) -> None:
        """Close the connection; calls in flight in other tasks raise `CanceledError`.

        Incomplete generations are canceled on the server first, which takes at most two seconds.
        """
        self._closed = True
        self._end_generations()
        await asyncio.gather(*self._finishing, return_exceptions=True)
        self._connection.drain()
        await asyncio.gather(*self._closing)

    def _close_soon(self, opened: Opened) -> None:
        closing = asyncio.ensure_future(opened.channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, flow: Flow[Result]) -> Result:
        try:
            step = next(flow)
            while True:
                try:
                    answer = await self._send(step)
                except InferenceError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(answer)
        except StopIteration as end:
            result: Result = end.value
            return result

    async def _send(self, step: UnaryCall | Work | Pause) -> Any:
        if isinstance(step, Pause):
            return await asyncio.sleep(step.s)
        if isinstance(step, UnaryCall):
            return await self._call(step.method, step.request, step.remaining_s)
        if step.waiting > 1:
            return await self._send_concurrently(step)
        return await self._send_in_turn(step)

    async def _send_in_turn(self, work: Work) -> None:
        # One call at a time can be awaited without a separate task.
        while work.waiting:
            portion = work.take()
            if portion is None:
                await asyncio.sleep(work.pause_s() or 0.0)
                continue
            try:
                response = await self._start(work, portion)
            except InferenceError as error:
                work.failed(portion, error)
            else:
                work.answered(portion, response)

    async def _send_concurrently(self, work: Work) -> None:
        in_flight: dict[asyncio.Task[service_pb2.ModelInferResponse], Portion] = {}
        try:
            while work.waiting or in_flight:
                while len(in_flight) < self._max_in_flight and (portion := work.take()):
                    in_flight[asyncio.create_task(self._start(work, portion))] = portion
                full = len(in_flight) == self._max_in_flight
                pause_s = None if full else work.pause_s()
                if not in_flight:
                    await asyncio.sleep(pause_s or 0.0)
                    continue
                ended, _ = await asyncio.wait(
                    in_flight, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in ended:
                    portion = in_flight.pop(task)
                    try:
                        response = task.result()
                    except InferenceError as error:
                        work.failed(portion, error)
                    else:
                        work.answered(portion, response)
        except InferenceError:
            if in_flight:
                await asyncio.wait(in_flight, timeout=END_S)
            raise
        finally:
            # No request stays in flight, whatever ended the call, even a cancellation.
            for task in in_flight:
                task.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)

    async def _start(self, work: Work, portion: Portion) -> service_pb2.ModelInferResponse:
        request, remaining_s = work.request(portion)
        return await self._call("ModelInfer", request, remaining_s, portion.rows)

    async def _call(
        self, method: str, request: object, remaining_s: float | None, rows: Sequence[int] = ()
    ) -> Any:
        self._raise_if_closed()
        opened = self._connection.take()
        try:
            call = getattr(opened.stub, method)(
                request, timeout=remaining_s, metadata=self._metadata + CALL_HEADERS.get()
            )
            try:
                # Awaiting the call itself would raise CancelledError for a closed channel as well
                # as for a canceled task; only the code differs.
                code = await call.code()
            except asyncio.CancelledError:
                call.cancel()
                raise
            if code is grpc.StatusCode.OK:
                return await call
            raise self._error(code, await call.details(), rows)
        finally:
            self._connection.give_back(opened)
