"""The client for event loops; the twin of `Client`, method by method."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Concatenate, ParamSpec

import grpc  # type: ignore[import-untyped]
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2_grpc

from triptych.client import tasks
from triptych.client.calls import Row, RowOutputs, TaskCall, Whole, dress_methods
from triptych.client.errors import InferenceError, InvalidRequest
from triptych.client.settings import PipelineClient
from triptych.client.statistics import StepStatistics, read_statistics
from triptych.client.wire import (
    EncodedRows,
    Parameter,
    PipelineConfig,
    Rows,
    config_request,
    encode_rows,
    read_config,
    statistics_request,
)
from triptych.client.work import Deadline, Portion, Work

P = ParamSpec("P")


def awaited(
    make: Callable[P, TaskCall[Whole, Row]],
) -> tuple[
    Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, Whole]],
    Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, list[Row | InvalidRequest]]],
]:
    """The two methods of `AsyncClient` for the calls that `make` describes."""

    async def whole(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Whole:
        call = make(*args, **kwargs)
        return call.whole((await self._perform_task(call, keep_going=False)).outputs())

    async def each(
        self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Row | InvalidRequest]:
        call = make(*args, **kwargs)
        if call.stand_in:
            return []
        return call.each((await self._perform_task(call, keep_going=True)).each())

    dress_methods("AsyncClient", make, whole, each)
    return whole, each


class AsyncClient(PipelineClient):
    """A client for one event loop, from its first call to `close`.

    Its settings are those of `PipelineClient`. A task that is cancelled during a call cancels the
    call's requests.
    """

    embed, embed_each = awaited(tasks.embed)
    classify, classify_each = awaited(tasks.classify)
    classify_images, classify_images_each = awaited(tasks.classify_images)
    classify_zero_shot, classify_zero_shot_each = awaited(tasks.classify_zero_shot)
    fill_mask, fill_mask_each = awaited(tasks.fill_mask)
    entities, entities_each = awaited(tasks.entities)
    answer, answer_each = awaited(tasks.answer)
    rerank, rerank_each = awaited(tasks.rerank)

    async def infer(
        self,
        inputs: Rows,
        *,
        parameters: Mapping[str, Parameter] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Send rows of any inputs and return every output, [rows, …]. As `Client.infer`."""
        encoded, deadline = encode_rows(inputs), self._deadline(timeout_s)
        return (await self._perform(encoded, parameters, deadline, keep_going=False)).outputs()

    async def infer_each(
        self,
        inputs: Rows,
        *,
        parameters: Mapping[str, Parameter] | None = None,
        timeout_s: float | None = None,
    ) -> list[RowOutputs | InvalidRequest]:
        """For each row its outputs, or why it was refused. As `Client.infer_each`."""
        encoded, deadline = encode_rows(inputs), self._deadline(timeout_s)
        return (await self._perform(encoded, parameters, deadline, keep_going=True)).each()

    async def interface(self, *, timeout_s: float | None = None) -> PipelineConfig:
        """The pipeline's batch limit, inputs, outputs and steps. As `Client.interface`."""
        return await self._known_config(self._deadline(timeout_s))

    async def step_statistics(self, *, timeout_s: float | None = None) -> list[StepStatistics]:
        """What each step has done since the server loaded it. As `Client.step_statistics`."""
        deadline = self._deadline(timeout_s)
        ask = self._stub().ModelStatistics
        return [
            read_statistics(step, await self._ask(ask, statistics_request(step), deadline))
            for step in (await self._known_config(deadline)).steps
        ]

    async def close(self) -> None:
        """Close the connection; calls under way in other tasks raise `Cancelled`."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _open(self) -> None:
        # The channel belongs to the loop that runs when it is made, so the first call makes it.
        self._open_stub: Any = None

    def _stub(self) -> Any:
        self._raise_if_closed()
        if self._open_stub is None:
            self._channel = self._connection.open_async()
            self._open_stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self._open_stub

    async def _perform_task(self, call: TaskCall[Any, Any], *, keep_going: bool) -> Work:
        encoded, deadline = encode_rows(call.inputs), self._deadline(call.timeout_s)
        try:
            return await self._perform(encoded, call.parameters, deadline, keep_going=keep_going)
        except InvalidRequest as error:
            misfit = None
            if error.row not in encoded.refused:
                # A pipeline of another task complains of an input or a parameter.
                with suppress(InferenceError):
                    misfit = call.misfit(await self._known_config(deadline))
            if misfit:
                raise misfit from error
            raise

    async def _perform(
        self,
        encoded: EncodedRows,
        parameters: Mapping[str, Parameter] | None,
        deadline: Deadline,
        *,
        keep_going: bool,
    ) -> Work:
        if self._needs_config(encoded, keep_going=keep_going):
            await self._known_config(deadline)
        work = self._work(encoded, parameters, deadline, keep_going=keep_going)
        if work.waiting > 1:
            await self._send_at_once(work)
        else:
            await self._send_in_turn(work)
        return work

    async def _send_in_turn(self, work: Work) -> None:
        # To await one call at a time needs no task of its own.
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

    async def _send_at_once(self, work: Work) -> None:
        in_flight: dict[asyncio.Task[Any], Portion] = {}
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
        finally:
            # Whatever ended the call, a cancellation too, leaves no request behind.
            for task in in_flight:
                task.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)

    async def _start(self, work: Work, portion: Portion) -> Any:
        request, left_s = work.request(portion)
        call = self._stub().ModelInfer(request, timeout=left_s, metadata=self._metadata)
        return await self._response(call, portion.rows)

    async def _known_config(self, deadline: Deadline) -> PipelineConfig:
        config = self._config
        if config is None:
            ask = self._stub().ModelConfig
            config = read_config(await self._ask(ask, config_request(self.pipeline), deadline))
            self._config = config
        return config

    async def _ask(self, method: Any, request: Any, deadline: Deadline) -> Any:
        call = method(request, timeout=deadline.left_s(), metadata=self._metadata)
        return await self._response(call)

    async def _response(self, call: Any, rows: Sequence[int] = ()) -> Any:
        try:
            # Awaiting the call itself would raise CancelledError for a closed channel as well as
            # for a cancelled task; the code tells them apart.
            code = await call.code()
        except asyncio.CancelledError:
            call.cancel()
            raise
        if code is grpc.StatusCode.OK:
            return await call
        raise self._error(code, await call.details(), rows)
