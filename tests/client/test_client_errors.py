"""The client when something is wrong: deadlines, cancellation, overload, every kind of error."""

import linecache
import os
import pickle
import signal
import socket
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from typer.testing import CliRunner

from tests.support.client_toy import Call, Toy, expected_all, opened, wait_until
from triptych.base.errors import UserError
from triptych.client import (
    CanceledError,
    Client,
    DeadlineExceededError,
    InferenceError,
    InvalidRequestError,
    OverloadedError,
    PipelineNotFoundError,
    PipelineNotReadyError,
    Retry,
    ServerUnreachableError,
    asynchronous,
    sync,
)
from triptych.interface.cli import app
from triptych.serving.bench.resources import fetch_metrics

pytestmark = pytest.mark.server


ENDLESS = "sleep:600"
"""A text that is answered when its request is cancelled."""


def test_a_deadline_covers_the_whole_call(call: Call, toy: Toy) -> None:
    with pytest.raises(
        DeadlineExceededError, match=r"deadline of 0\.5 s passed\. \d+ of 150 rows were"
    ):
        call("single_step", "embed", ["sleep:0.2"] * 150, timeout_s=0.5)
    with pytest.raises(DeadlineExceededError):
        call("toy", "embed", ["late"], options={"timeout_s": 0.0})
    with pytest.raises(DeadlineExceededError):
        call("toy", "step_statistics", timeout_s=1e-9)
    mark = f"endless {time.monotonic()}"  # without a deadline none is sent
    call("toy", "embed", [mark], timeout_s=float("inf"))
    call("toy", "embed", [mark], options={"timeout_s": None})
    assert [request.parameters for request in toy.seen(mark)] == [{}, {}]


def test_work_past_its_deadline_is_dropped_by_the_servers_queue(call: Call, toy: Toy) -> None:
    name = f"drop-{time.monotonic()}"

    def queue() -> tuple[float, float]:
        """Number of requests that the step's queue dropped, and of those that wait in it."""
        found = {
            (metric, labels.get("reason")): value
            for metric, labels, value in fetch_metrics(toy.metrics_url)
            if labels.get("model") == "narrow_step"
        }
        dropped = found.get(("nv_inference_request_failure", "REJECTED"), 0.0)
        return dropped, found.get(("nv_inference_pending_request_count", None), 0.0)

    before = queue()
    with Client("narrow", toy.url, timeout_s=300) as other, ThreadPoolExecutor(1) as pool:
        busy = pool.submit(other.embed, [f"hold:{name}"])
        toy.wait_begun(f"hold:{name}", "narrow_step")
        for timeout_s in (0.2, 2, 6, 60):  # until it is in the queue by then
            with pytest.raises(DeadlineExceededError):
                call("narrow", "embed", [f"{name} late"], timeout_s=timeout_s)
            if queue() != before:
                break
        wait_until(lambda: queue() > before and not queue()[1], "the queue drops the request")
        toy.release(name, "narrow_step")
        busy.result()
        other.embed([f"{name} after"])
    seen = [request.texts for request in toy.seen(name, "narrow_step")]
    assert seen == [[f"hold:{name}"], [f"{name} after"]]


def test_a_deadline_cancels_what_runs(call: Call, toy: Toy) -> None:
    for timeout_s in (0.3, 2, 6, 60):  # until it runs by then
        text = f"{ENDLESS} deadline {time.monotonic()}"
        with pytest.raises(DeadlineExceededError):
            call("toy_step", "embed", [text], timeout_s=timeout_s)
        if toy.has_begun(text):
            break
    assert toy.wait_seen(text)[-1].cancelled


def waits_for_response() -> bool:
    """Whether gRPC has started a blocking call of the main thread and waits for its response."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return "call.next_event()" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)


@pytest.mark.parametrize(("how", "rows"), [("interrupt", 1), ("interrupt", 40), ("cancel", 30)])
def test_an_interrupt_or_a_cancelled_task_leaves_no_request_behind(
    toy: Toy, how: str, rows: int
) -> None:
    mark = f"{how}ed of {rows} "
    texts = [f"{ENDLESS} {mark}{index}" for index in range(rows)]

    def interrupt() -> None:
        toy.wait_begun(mark)
        # gRPC 1.85 loses a call that is interrupted before it waits for the response.
        wait_until(lambda: rows > 1 or waits_for_response(), "the main thread waits")
        os.kill(os.getpid(), signal.SIGINT)

    options: dict[str, Any] = {"rows_per_request": 1, "timeout_s": 300}
    # The client is still open after it, so nothing else can have cancelled the requests.
    if how == "interrupt":
        with Client("toy_step", toy.url, **options) as client:
            interrupter = threading.Thread(target=interrupt)
            interrupter.start()
            with pytest.raises(KeyboardInterrupt):
                client.embed(texts)
            interrupter.join()
            client.embed(["after the interrupt"])
    else:
        with opened("async", "toy_step", toy.url, **options) as start:
            running = start("embed", texts)
            toy.wait_begun(mark)
            running.cancel()
            with pytest.raises(CancelledError):
                running.result()
            start("embed", ["after the cancellation"]).result()
    requests = toy.wait_seen(mark)
    assert 1 <= len(requests) <= 8
    assert all(request.cancelled for request in requests)


def test_a_stream_that_grpc_loses_in_an_interrupt_hinders_no_close(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_state: Any) -> None:
        raise KeyboardInterrupt  # as a signal handler does, where no thread reads the call yet

    client = Client("toy_step", toy.url)
    generation = client.generate("lost")
    with monkeypatch.context() as patch:
        patch.setattr("grpc._channel._run_channel_spin_thread", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(generation)
    client.embed(["after the interrupt"])
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()


def test_a_refused_row_cancels_the_others(call: Call, toy: Toy) -> None:
    mark = f"beside {time.monotonic()}"
    # Each in a request of its own, and an instance of `single_step` for each.
    with pytest.raises(InvalidRequestError) as caught:
        call("single_step", "embed", [f"{ENDLESS} {mark}", f"refuse after {mark}"], timeout_s=300)
    assert caught.value.row == 1
    (other,) = toy.wait_seen(f"{ENDLESS} {mark}", "single_step")
    assert other.cancelled


def test_requests_beside_a_refused_one_may_end_before_they_are_canceled(
    call: Call, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (asynchronous, sync):
        monkeypatch.setattr(module, "END_S", 300.0)
    mark = f"beside {time.monotonic()}"
    with ThreadPoolExecutor(1) as pool:
        texts = [f"hold:{mark}", f"refuse after {mark}"]
        refused = pool.submit(call, "single_step", "embed", texts)
        toy.wait_seen(f"refuse after {mark}", "single_step")
        call("toy", "embed", ["meanwhile the client receives the refusal"])
        toy.release(mark, "single_step")
        with pytest.raises(InvalidRequestError):
            refused.result()
    (other,) = toy.wait_seen(f"hold:{mark}", "single_step")
    assert not other.cancelled


def test_closing_the_client_ends_its_calls(toy: Toy, style: str) -> None:
    mark = f"closed {style}"
    with opened(style, "single_step", toy.url, timeout_s=300) as start:
        calls = []
        for rows in (1, 20):
            calls.append(start("embed", [f"{ENDLESS} {mark} {rows}."] * rows))
            toy.wait_begun(f"{mark} {rows}.", "single_step")
        start("close").result()
        calls += [start("embed", ["late"]), start("embed", ["late"] * 20)]
        for call in calls:
            with pytest.raises(CanceledError):
                call.result()
        with pytest.raises(CanceledError, match="is closed"):
            start("step_statistics").result()


@pytest.mark.parametrize("parameters", [{}, {"timeout": 1}], ids=["full", "late"])
def test_a_full_queue_and_a_wait_in_it_are_overload(
    toy: Toy, style: str, parameters: dict[str, int]
) -> None:
    """Of three requests the queue takes two and refuses one; the two may wait too long in it."""
    name = f"{'late' if parameters else 'full'}-{style}"
    with opened(style, "narrow", toy.url, retry=None, timeout_s=300) as start:
        busy = start("embed", [f"hold:{name}"])
        toy.wait_begun(f"hold:{name}", "narrow_step")
        calls = [start("infer", {"text": ["late"]}, parameters=parameters) for _ in range(3)]
        wait_until(lambda: any(call.done() for call in calls), "the end of one call")
        toy.release(name, "narrow_step")
        errors = [*filter(None, [call.exception() for call in calls])]
        busy.result()
    assert {type(error) for error in errors} == {OverloadedError}
    expired = sum("timeout expired" in str(error) for error in errors)
    if parameters:
        assert (len(errors), expired >= 2) == (3, True)
    else:
        (error,) = errors
        assert "Exceeds maximum queue size" in str(error)


def test_retry_rides_out_a_full_queue(call: Call) -> None:
    texts = [f"sleep:0.01 {index}" for index in range(8)]
    retry = Retry(attempts=500, first_pause_s=0.02, longest_pause_s=0.2)
    options = {"max_in_flight": 8, "rows_per_request": 1, "retry": retry}
    np.testing.assert_array_equal(
        call("narrow", "embed", texts, options=options), expected_all(texts)
    )
    many = call("narrow", "embed_each", texts, options=options)
    np.testing.assert_array_equal(np.stack(many), expected_all(texts))


def test_retry_gives_up_after_its_attempts_or_before_the_deadline(call: Call) -> None:
    texts = ["sleep:0.1"] * 8
    few = {"max_in_flight": 8, "retry": Retry(attempts=2, first_pause_s=0.01)}
    with pytest.raises(OverloadedError, match="Tried 2 times"):
        call("narrow", "embed", texts, options=few)
    long = {"max_in_flight": 8, "retry": Retry(first_pause_s=1e6, longest_pause_s=1e6)}
    with pytest.raises(OverloadedError, match="leaves no time for another"):
        call("narrow", "embed", texts, options=long, timeout_s=300)


def test_each_mistake_has_a_class_and_a_remedy(call: Call, toy: Toy) -> None:
    no_rows = "must be a list with one element per row"
    small = {"options": {"max_message_bytes": 2000}}
    too_large = r"larger than max.*`max_message_bytes`"
    http = "the server closes connections of gRPC.*the port of gRPC is 8001 by default"
    pair = {"text": ["a", "b"], "text_pair": ["c"]}
    urgent = {"parameters": {"priority": 1}}
    cases: dict[type[InferenceError], list[tuple[str, tuple[Any, ...], dict[str, Any]]]] = {
        PipelineNotFoundError: [
            ("'nothing' is not found", ("nothing", "embed", ["a"]), {}),
            ("is not found", ("nothing", "embed", ["a", "b"]), {}),
        ],
        ServerUnreachableError: [
            (http, ("toy", "embed", ["a"]), {"options": {"url": toy.http_url}})
        ],
        InvalidRequestError: [
            ("unexpected inference input 'body'", ("toy", "infer", {"body": ["a", "b"]}), {}),
            (
                r"`priority` has no effect.*serving\.priority",
                ("toy", "infer", {"text": ["a"]}),
                urgent,
            ),
            (too_large, ("toy", "embed", ["x" * 3000]), small),
            (too_large, ("toy", "embed", ["x" * 3000] * 5), small),
            (f"`text` {no_rows}", ("toy", "embed", "one text"), {}),
            (f"`text` {no_rows}", ("toy", "embed_each", None), {}),
            (f"`text` {no_rows}", ("toy", "classify", 5), {}),
            (f"`body` {no_rows}", ("toy", "infer", {"body": ""}), {}),
            ("`inputs` must be a mapping", ("toy", "infer", ["a"]), {}),
            ("Given: no input", ("reader", "infer", {}), {}),
            ("Given: `text` 2, `text_pair` 1", ("reader", "infer", pair), {}),
            ("The parameter `dimensions` must be", ("toy", "embed", ["a"]), {"dimensions": [3]}),
        ],
    }
    for kind, message, words, options in (
        (kind, *case) for kind, listed in cases.items() for case in listed
    ):
        with pytest.raises(kind, match=message) as caught:
            call(*words, **options)
        assert caught.value.row is None, words
    with tritonclient.grpc.InferenceServerClient(toy.url) as control:
        headers = dict(toy.operator_headers)
        control.unload_model("reader", headers=headers)
        try:
            with pytest.raises(PipelineNotReadyError):
                call("reader", "infer", {"text": ["a"], "text_pair": ["b"]})
        finally:
            control.load_model("reader", headers=headers)
    error = pickle.loads(pickle.dumps(InvalidRequestError("wrong", 4)))  # between processes
    assert (error.message, error.row, str(error)) == ("wrong", 4, "row 4: wrong")
    done = CliRunner().invoke(app, ["infer", "toys", "-t", "a", "--url", toy.url])
    assert isinstance(done.exception, UserError)
    told = "is not served there. Given: toys. Did you mean `toy`? Pipelines there:"
    assert told in str(done.exception)


def test_no_server_is_unreachable_and_a_silent_one_meets_the_deadline(call: Call) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{other.getsockname()[1]}"
        told = f"answered at {url}: nothing listens there. Start a server"
        for texts in (["a"], ["a", "b"]):
            with pytest.raises(ServerUnreachableError, match=told):
                call("toy", "embed", texts, options={"url": url})
    # Another port: clients of one process share what gRPC knows of an address.
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        url = f"127.0.0.1:{other.getsockname()[1]}"
        for method, words, answered in (
            ("embed", [["a"]], "0 of 1 rows were answered. "),
            ("embed", [["a", "b"]], "0 of 2 rows were answered. "),
            ("interface", [], ""),
        ):
            told = rf"deadline of 0\.3 s passed\. {answered}Raise `timeout_s`"
            with pytest.raises(DeadlineExceededError, match=told):
                call("toy", method, *words, options={"url": url}, timeout_s=0.3)
