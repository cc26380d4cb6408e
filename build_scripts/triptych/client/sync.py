"""Client for threads, on gRPC's blocking calls and futures."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import grpc  # type: ignore[import-untyped]

from triptych.client import flows, tasks, zero_shot
from triptych.client.connection import Connection, Opened
from triptych.client.errors import InferenceError, RowError
from triptych.client.flows import (
    Flow,
    Pause,
    PipelineClient,
    UnaryCall,
    make_method,
    task_flows,
)
from triptych.client.streams import GIVE_UP_S, GeneratingClient, Generation
from triptych.client.tasks import Row, TaskCall, Whole
from triptych.client.work import END_S, Portion, Work

if TYPE_CHECKING:
    from tritonclient.grpc import service_pb2_grpc

P = ParamSpec("P")
Result = TypeVar("Result")
Ended = queue.SimpleQueue["grpc.Future | None"]

_MAX_WAIT_S = 1.0
"""Time in seconds after which a wait looks for Ctrl-C, which Python can miss as a wait begins."""

_MAX_FINISH_S = 2 * GIVE_UP_S
"""Time in seconds after which `close` no longer waits for a canceled generation to end."""


def _close(opened: Opened) -> None:
    if opened.is_interrupted:
        # It cancels what an interrupt left there, and may wait for that for ever.
        threading.Thread(target=opened.channel.close, daemon=True).start()
    else:
        opened.channel.close()


def _ended_soon(ended: Ended, count: int) -> Iterator[grpc.Future]:
    """Yield up to `count` futures that come in `ended` within `END_S` seconds, until None."""
    end_s = time.monotonic() + END_S
    with suppress(queue.Empty):
        for _ in range(count):
            call = ended.get(timeout=max(0.0, end_s - time.monotonic()))
            if call is None:
                return
            yield call


def _blocking(
    flow: Callable[Concatenate[PipelineClient, P], Flow[Result]],
) -> Callable[Concatenate[Client, P], Result]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return self._run(flow(self, *args, **kwargs))

    make_method(method, flow, "Client")
    return method


def _blocking_task(
    make: Callable[P, TaskCall[Whole, Row]],
) -> tuple[
    Callable[Concatenate[Client, P], Whole],
    Callable[Concatenate[Client, P], list[Row | RowError]],
]:
    whole, each = task_flows(make)
    return _blocking(whole), _blocking(each)


class Client(GeneratingClient[Generation]):
    """Client for blocking code; any number of threads may share it.

    Its settings are those of `PipelineClient`. Open it after a fork, not before.
    """

    _generation_class = Generation
    _finishing: Sequence[threading.Thread] = ()

    embed, embed_each = _blocking_task(tasks.embed)
    embed_sparse, embed_sparse_each = _blocking_task(tasks.embed_sparse)
    embed_multi_vector, embed_multi_vector_each = _blocking_task(tasks.embed_multi_vector)
    embed_hybrid, embed_hybrid_each = _blocking_task(tasks.embed_hybrid)
    classify, classify_each = _blocking_task(tasks.classify)
    embed_images, embed_images_each = _blocking_task(tasks.embed_images)
    classify_images, classify_images_each = _blocking_task(tasks.classify_images)
    classify_zero_shot, classify_zero_shot_each = _blocking_task(tasks.classify_zero_shot)
    classify_images_zero_shot = _blocking(zero_shot.classify_images_zero_shot)
    classify_images_zero_shot_each = _blocking(zero_shot.classify_images_zero_shot_each)
    fill_mask, fill_mask_each = _blocking_task(tasks.fill_mask)
    entities, entities_each = _blocking_task(tasks.entities)
    answer, answer_each = _blocking_task(tasks.answer)
    rerank, rerank_each = _blocking_task(tasks.rerank)
    infer, infer_each = _blocking(flows.infer), _blocking(flows.infer_each)
    interface, ready = _blocking(flows.interface), _blocking(flows.ready)
    step_statistics = _blocking(flows.step_statistics)

    def _finish_in_background(self, work: threading.Thread) -> None:
        with self._generations_lock:
            self._finishing = [*filter(threading.Thread.is_alive, self._finishing), work]
            work.start()

    def _connect(self) -> Connection:
        return Connection(partial(self._channels.open, grpc), _close, self._dns_refresh_s)

    def close(self) -> None:
        """Close the connection; calls in flight in other threads raise `CanceledError`.

        Incomplete generations are canceled on the server first, which takes at most two seconds.
        """
        self._closed = True
        self._end_generations()
        for thread in self._finishing:
            thread.join(_MAX_FINISH_S)
        self._connection.drain()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, flow: Flow[Result]) -> Result:
        try:
            step = next(flow)
            while True:
                try:
                    answer = self._send(step)
                except InferenceError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(answer)
        except StopIteration as end:
            result: Result = end.value
            return result

    def _send(self, step: UnaryCall | Work | Pause) -> Any:
        try:
            if isinstance(step, Pause):
                return time.sleep(step.s)
            if isinstance(step, UnaryCall):
                with self._stub() as stub:
                    method = getattr(stub, step.method)
                    return method(step.request, timeout=step.remaining_s, metadata=self._metadata)
            if step.waiting > 1:
                return self._send_concurrently(step)
            return self._send_in_turn(step)
        except grpc.RpcError as status:
            raise self._error(status.code(), status.details()) from None
        except ValueError:
            self._raise_if_closed()
            raise

    @contextmanager
    def _stub(self) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
        opened = self._take()
        interrupted = True
        try:
            yield opened.stub
            interrupted = False
        except grpc.RpcError:
            interrupted = False
            raise
        finally:
            self._connection.give_back(opened, interrupted=interrupted)

    def _take(self) -> Opened:
        self._raise_if_closed()
        return self._connection.take()

    def _send_in_turn(self, work: Work) -> None:
        # A blocking call spares the two thread switches of a future: 15 % of a short request.
        while work.waiting:
            portion = work.take()
            if portion is None:
                time.sleep(work.pause_s() or 0.0)
                continue
            request, remaining_s = work.request(portion)
            try:
                with self._stub() as stub:
                    response = stub.ModelInfer(
                        request, timeout=remaining_s, metadata=self._metadata
                    )
            except grpc.RpcError as status:
                work.failed(portion, self._error(status.code(), status.details(), portion.rows))
            else:
                work.answered(portion, response)

    def _send_concurrently(self, work: Work) -> None:
        ended: Ended = queue.SimpleQueue()
        if threading.current_thread() is not threading.main_thread():
            self._send_futures(work, ended)
            return
        # Python interrupts the main thread only, and gRPC loses a future that is interrupted while
        # it starts. In another thread all futures are known when the call is interrupted.
        pool = ThreadPoolExecutor(1)
        try:
            sending = pool.submit(self._send_futures, work, ended)
            while not wait([sending], _MAX_WAIT_S).done:
                pass
        except BaseException:
            ended.put(None)
            raise
        finally:
            pool.shutdown()
        sending.result()

    def _send_futures(self, work: Work, ended: Ended) -> None:
        """Send all portions; None in `ended`, the queue of futures that ended, cancels the rest."""
        in_flight: dict[grpc.Future, tuple[Portion, Opened]] = {}
        try:
            while work.waiting or in_flight:
                while len(in_flight) < self._max_in_flight and (portion := work.take()):
                    request, remaining_s = work.request(portion)
                    opened = self._take()
                    send = opened.stub.ModelInfer.future
                    call = send(request, timeout=remaining_s, metadata=self._metadata)
                    in_flight[call] = portion, opened
                    call.add_done_callback(ended.put)
                if not (work.waiting or in_flight):
                    return
                full = len(in_flight) == self._max_in_flight
                try:
                    call = ended.get(timeout=None if full else work.pause_s())
                except queue.Empty:
                    continue
                if call is None:
                    return
                portion, opened = in_flight.pop(call)
                self._connection.give_back(opened)
                if call.code() is grpc.StatusCode.OK:
                    work.answered(portion, call.result())
                else:
                    work.failed(portion, self._error(call.code(), call.details(), portion.rows))
        except InferenceError:
            for call in _ended_soon(ended, len(in_flight)):
                self._connection.give_back(in_flight.pop(call)[1])
            raise
        finally:
            # No request stays in flight, whatever ended the call.
            for call, (_, opened) in in_flight.items():
                call.cancel()
                self._connection.give_back(opened)
