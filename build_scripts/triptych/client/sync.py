"""The client for threads: the work of a call on gRPC's own callbacks."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
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


def blocking(
    make: Callable[P, TaskCall[Whole, Row]],
) -> tuple[
    Callable[Concatenate[Client, P], Whole],
    Callable[Concatenate[Client, P], list[Row | InvalidRequest]],
]:
    """The two methods of `Client` for the calls that `make` describes."""

    def whole(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Whole:
        call = make(*args, **kwargs)
        return call.whole(self._perform_task(call, keep_going=False).outputs())

    def each(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> list[Row | InvalidRequest]:
        call = make(*args, **kwargs)
        if call.stand_in:
            return []
        return call.each(self._perform_task(call, keep_going=True).each())

    dress_methods("Client", make, whole, each)
    return whole, each


class Client(PipelineClient):
    """A client for ordinary and threaded code; one serves any number of threads.

    Its settings are those of `PipelineClient`. Open it after a fork, not before.
    """

    embed, embed_each = blocking(tasks.embed)
    classify, classify_each = blocking(tasks.classify)
    classify_images, classify_images_each = blocking(tasks.classify_images)
    classify_zero_shot, classify_zero_shot_each = blocking(tasks.classify_zero_shot)
    fill_mask, fill_mask_each = blocking(tasks.fill_mask)
    entities, entities_each = blocking(tasks.entities)
    answer, answer_each = blocking(tasks.answer)
    rerank, rerank_each = blocking(tasks.rerank)

    def infer(
        self,
        inputs: Rows,
        *,
        parameters: Mapping[str, Parameter] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Send rows of any inputs and return every output.

        Args:
            inputs: name -> one element a row; all of the same length.
            parameters: request parameters; `priority` and `timeout` are Triton's own.
            timeout_s: deadline of the whole call; None takes the client's own.

        Returns:
            Name -> array [rows, …] in the order of the rows; BYTES are objects, each `bytes`.

        Raises:
            InferenceError: one of its kinds; an `InvalidRequest` names the row at fault in `row`.
        """
        encoded, deadline = encode_rows(inputs), self._deadline(timeout_s)
        return self._perform(encoded, parameters, deadline, keep_going=False).outputs()

    def infer_each(
        self,
        inputs: Rows,
        *,
        parameters: Mapping[str, Parameter] | None = None,
        timeout_s: float | None = None,
    ) -> list[RowOutputs | InvalidRequest]:
        """For each row its outputs, or why it was refused.

        Arguments and errors are those of `infer`, but a refused row does not raise: the other rows
        of its request are sent again without it.
        """
        encoded, deadline = encode_rows(inputs), self._deadline(timeout_s)
        return self._perform(encoded, parameters, deadline, keep_going=True).each()

    def interface(self, *, timeout_s: float | None = None) -> PipelineConfig:
        """The pipeline's batch limit, inputs, outputs and steps; asked of the server once.

        Raises:
            InferenceError: one of its kinds.
        """
        return self._known_config(self._deadline(timeout_s))

    def step_statistics(self, *, timeout_s: float | None = None) -> list[StepStatistics]:
        """What each step of the pipeline has done since the server loaded it, in order.

        Subtract an earlier value to see a span of time.

        Raises:
            InferenceError: one of its kinds.
        """
        deadline = self._deadline(timeout_s)
        ask = self._stub.ModelStatistics
        return [
            read_statistics(step, self._ask(ask, statistics_request(step), deadline))
            for step in self._known_config(deadline).steps
        ]

    def close(self) -> None:
        """Close the connection; calls under way in other threads raise `Cancelled`."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> None:
        self._channel = self._connection.open()
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def _perform_task(self, call: TaskCall[Any, Any], *, keep_going: bool) -> Work:
        encoded, deadline = encode_rows(call.inputs), self._deadline(call.timeout_s)
        try:
            return self._perform(encoded, call.parameters, deadline, keep_going=keep_going)
        except InvalidRequest as error:
            misfit = None
            if error.row not in encoded.refused:
                # A pipeline of another task complains of an input or a parameter.
                with suppress(InferenceError):
                    misfit = call.misfit(self._known_config(deadline))
            if misfit:
                raise misfit from error
            raise

    def _perform(
        self,
        encoded: EncodedRows,
        parameters: Mapping[str, Parameter] | None,
        deadline: Deadline,
        *,
        keep_going: bool,
    ) -> Work:
        if self._needs_config(encoded, keep_going=keep_going):
            self._known_config(deadline)
        work = self._work(encoded, parameters, deadline, keep_going=keep_going)
        try:
            if work.waiting > 1:
                self._send_at_once(work)
            else:
                self._send_in_turn(work)
        except ValueError:
            self._raise_if_closed()
            raise
        return work

    def _send_in_turn(self, work: Work) -> None:
        # A blocking call spares the two thread switches of a future: 15 % of a short request.
        while work.waiting:
            portion = work.take()
            if portion is None:
                time.sleep(work.pause_s() or 0.0)
                continue
            request, left_s = work.request(portion)
            try:
                response = self._stub.ModelInfer(request, timeout=left_s, metadata=self._metadata)
            except grpc.RpcError as status:
                work.failed(portion, self._error(status.code(), status.details(), portion.rows))
            else:
                work.answered(portion, response)

    def _send_at_once(self, work: Work) -> None:
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        in_flight: dict[Any, Portion] = {}
        try:
            while work.waiting or in_flight:
                while len(in_flight) < self._max_in_flight and (portion := work.take()):
                    request, left_s = work.request(portion)
                    send = self._stub.ModelInfer.future
                    call = send(request, timeout=left_s, metadata=self._metadata)
                    in_flight[call] = portion
                    call.add_done_callback(ended.put)
                full = len(in_flight) == self._max_in_flight
                try:
                    call = ended.get(timeout=None if full else work.pause_s())
                except queue.Empty:
                    continue
                portion = in_flight.pop(call)
                code = call.code()
                if code is grpc.StatusCode.OK:
                    work.answered(portion, call.result())
                else:
                    work.failed(portion, self._error(code, call.details(), portion.rows))
        finally:
            # Whatever ended the call, an interrupt too, leaves no request behind.
            for call in in_flight:
                call.cancel()

    def _known_config(self, deadline: Deadline) -> PipelineConfig:
        config = self._config
        if config is None:
            ask = self._stub.ModelConfig
            config = read_config(self._ask(ask, config_request(self.pipeline), deadline))
            self._config = config
        return config

    def _ask(self, method: Any, request: Any, deadline: Deadline) -> Any:
        try:
            return method(request, timeout=deadline.left_s(), metadata=self._metadata)
        except grpc.RpcError as status:
            raise self._error(status.code(), status.details()) from None
        except ValueError:
            self._raise_if_closed()
            raise
