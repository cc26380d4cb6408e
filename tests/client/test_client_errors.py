"""The client when something is wrong: deadlines, cancellation, overload, every kind of error."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from numpy.typing import NDArray

from client_toy import (
    DIM,
    EMBED,
    STEP,
    Call,
    Toy,
    expected,
    expected_all,
    write_model,
)
from triptych.client import (
    AsyncClient,
    CanceledError,
    Client,
    DeadlineExceededError,
    InferenceError,
    InvalidRequestError,
    OverloadedError,
    PipelineFailedError,
    PipelineNotFoundError,
    PipelineNotReadyError,
    Retry,
    ServerUnreachableError,
)
from triptych.serving.server import Server

pytestmark = pytest.mark.server


def embed_soon(client: Client, text: str) -> NDArray[np.float32]:
    """Embed as soon as the client has connected again; its pauses are at most 2 s."""
    for _ in range(30):
        try:
            return client.embed([text])
        except ServerUnreachableError:
            time.sleep(0.1)
    raise AssertionError("the client did not connect again within 3 s")


def test_a_deadline_covers_the_whole_call(call: Call) -> None:
    start = time.monotonic()
    with pytest.raises(
        DeadlineExceededError, match=r"deadline of 0\.5 s passed\. \d+ of 150 rows were"
    ):
        call("single_step", "embed", ["sleep:0.2"] * 150, timeout_s=0.5)
    assert 0.5 <= time.monotonic() - start < 10
    with pytest.raises(DeadlineExceededError):
        call("toy", "embed", ["late"], options={"timeout_s": 0.0})
    with pytest.raises(DeadlineExceededError):
        call("toy", "step_statistics", timeout_s=1e-9)


def test_infinity_is_no_deadline(call: Call, toy: Toy) -> None:
    mark = f"endless {time.monotonic()}"
    call("toy", "embed", [mark], timeout_s=float("inf"))
    call("toy", "embed", [mark], options={"timeout_s": None})
    assert [request.parameters for request in toy.seen(mark)] == [{}, {}]


def test_work_past_its_deadline_is_dropped_by_the_servers_queue(call: Call, toy: Toy) -> None:
    mark, long = f"dropped {time.monotonic()}", f"sleep:2 before {time.monotonic()}"
    with Client("narrow", toy.url) as other, ThreadPoolExecutor(1) as pool:
        busy = pool.submit(other.embed, [long])
        toy.wait_begun(long, "narrow_step")
        with pytest.raises(DeadlineExceededError):
            call("narrow", "embed", [mark], timeout_s=0.2)
        busy.result()
        other.embed([after := f"after {mark}"])
    assert [request.texts for request in toy.seen(mark, "narrow_step")] == [[after]]


def test_a_deadline_cancels_what_runs(call: Call, toy: Toy) -> None:
    for timeout_s in (0.3, 2, 6):  # until it runs by then
        start = time.monotonic()
        text = f"sleep:15 deadline {start}"
        with pytest.raises(DeadlineExceededError):
            call("toy_step", "embed", [text], timeout_s=timeout_s)
        if toy.has_begun(text):
            break
    assert toy.wait_seen(text)[-1].cancelled
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("rows", [1, 40])
def test_an_interrupt_leaves_no_request_behind(toy: Toy, rows: int) -> None:
    texts = [f"sleep:15 interrupted of {rows} {index}" for index in range(rows)]

    def interrupt() -> None:
        toy.wait_begun(f"interrupted of {rows} ")
        time.sleep(0.2)  # so that more than the first of many are under way
        os.kill(os.getpid(), signal.SIGINT)

    with Client("toy_step", toy.url, rows_per_request=1) as client:
        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            client.embed(texts)
        interrupter.join()
        # The client is still open, so nothing but the interrupt can have cancelled them.
        client.embed(["after the interrupt"])
    assert time.monotonic() - start < 10
    requests = toy.wait_seen(f"interrupted of {rows} ")
    assert 1 <= len(requests) <= 8
    assert all(request.cancelled for request in requests)


def test_cancelling_a_task_cancels_its_requests(toy: Toy) -> None:
    async def cancel() -> None:
        async with AsyncClient("toy_step", toy.url, rows_per_request=1) as client:
            texts = [f"sleep:15 cancelled {index}" for index in range(30)]
            task = asyncio.create_task(client.embed(texts))
            await asyncio.to_thread(toy.wait_begun, "cancelled ")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await client.embed(["after the cancellation"])

    start = time.monotonic()
    asyncio.run(cancel())
    assert time.monotonic() - start < 10
    requests = toy.wait_seen("cancelled ")
    assert all(request.cancelled for request in requests)


def test_a_refused_row_cancels_the_others(call: Call, toy: Toy) -> None:
    start = time.monotonic()
    mark = f"beside {start}"
    # Each in a request of its own, and an instance of `single_step` for each.
    with pytest.raises(InvalidRequestError) as caught:
        call("single_step", "embed", [f"sleep:15 {mark}", f"refuse after {mark}"])
    assert caught.value.row == 1
    (other,) = toy.wait_seen(f"sleep:15 {mark}", "single_step")
    assert other.cancelled
    assert time.monotonic() - start < 10


def test_closing_the_client_ends_its_calls_in_other_threads(toy: Toy) -> None:
    client = Client("toy_step", toy.url)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(client.embed, ["sleep:8"])
        many = pool.submit(client.embed, ["sleep:8"] * 20)
        time.sleep(0.3)
        client.close()
        for future in (one, many):
            with pytest.raises(CanceledError):
                future.result()
    for texts in (["late"], ["late"] * 20):
        with pytest.raises(CanceledError, match="is closed"):
            client.embed(texts)
    with pytest.raises(CanceledError, match="is closed"):
        client.step_statistics()


def test_closing_the_client_ends_its_calls_in_other_tasks(toy: Toy) -> None:
    async def close() -> None:
        client = AsyncClient("toy_step", toy.url)
        tasks = [asyncio.create_task(client.embed(["sleep:8"] * rows)) for rows in (1, 20)]
        await asyncio.sleep(0.3)
        await client.close()
        for task in tasks:
            with pytest.raises(CanceledError):
                await task
        with pytest.raises(CanceledError, match="is closed"):
            await client.embed(["late"])

    asyncio.run(close())


def test_a_full_queue_is_overload_and_not_unreachable(call: Call) -> None:
    with pytest.raises(OverloadedError, match="Exceeds maximum queue size") as caught:
        call("narrow", "embed", ["sleep:0.1"] * 20, options={"max_in_flight": 10})
    assert caught.value.row is None
    assert not isinstance(caught.value, ServerUnreachableError)


def test_waiting_too_long_in_the_queue_is_overload(call: Call, toy: Toy) -> None:
    long = f"sleep:2 before {time.monotonic()}"
    with Client("narrow", toy.url) as other, ThreadPoolExecutor(1) as pool:
        busy = pool.submit(other.embed, [long])
        toy.wait_begun(long, "narrow_step")
        late = {"timeout": 100_000}
        with pytest.raises(OverloadedError, match="timeout expired"):
            call("narrow", "infer", {"text": ["late"]}, parameters=late, options={"retry": None})
        busy.result()


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
    with pytest.raises(OverloadedError):
        call("narrow", "embed", texts, options=few)
    long = {"max_in_flight": 8, "retry": Retry(first_pause_s=1e6, longest_pause_s=1e6)}
    start = time.monotonic()
    with pytest.raises(OverloadedError):
        call("narrow", "embed", texts, options=long, timeout_s=20)
    assert time.monotonic() - start < 10


def test_a_broken_step_is_the_pipelines_failure(call: Call) -> None:
    with pytest.raises(PipelineFailedError, match="the step is broken"):
        call("toy", "embed", ["break"])


def test_an_unknown_pipeline_is_told_from_one_that_is_not_ready(call: Call, toy: Toy) -> None:
    with pytest.raises(PipelineNotFoundError, match="'nothing' is not found"):
        call("nothing", "embed", ["a"])
    with pytest.raises(PipelineNotFoundError):
        call("nothing", "embed", ["a", "b"])
    with tritonclient.grpc.InferenceServerClient(toy.url) as control:
        headers = dict(toy.operator_headers)
        control.unload_model("pair", headers=headers)
        try:
            with pytest.raises(PipelineNotReadyError):
                call("pair", "infer", {"text": ["a"], "text_pair": ["b"]})
        finally:
            control.load_model("pair", headers=headers)


def test_a_wrong_request_names_no_row(call: Call) -> None:
    with pytest.raises(InvalidRequestError, match="unexpected inference input 'body'") as caught:
        call("toy", "infer", {"body": ["a", "b"]})
    assert caught.value.row is None


def test_a_message_over_the_limit_says_which_setting_to_change(call: Call) -> None:
    for texts in (["x" * 3000], ["x" * 3000] * 5):
        with pytest.raises(InvalidRequestError, match=r"larger than max.*`max_message_bytes`"):
            call("toy", "embed", texts, options={"max_message_bytes": 2000})


def test_no_server_is_unreachable(call: Call) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        for texts in (["a"], ["a", "b"]):
            with pytest.raises(
                ServerUnreachableError, match=f"answered at 127.0.0.1:{port}: .*refused"
            ):
                call("toy", "embed", texts, options={"url": f"127.0.0.1:{port}"})


def test_a_silent_server_meets_the_deadline(call: Call) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        options = {"url": f"127.0.0.1:{silent.getsockname()[1]}"}
        for texts, answered in ((["a"], "0 of 1 rows"), (["a", "b"], "0 of 2 rows")):
            told = rf"deadline of 0\.3 s passed\. {answered} were answered\. Raise `timeout_s`"
            with pytest.raises(DeadlineExceededError, match=told):
                call("toy", "embed", texts, options=options, timeout_s=0.3)
        with pytest.raises(DeadlineExceededError, match=r"deadline of 0\.3 s passed\. Raise"):
            call("toy", "interface", options=options, timeout_s=0.3)


def test_errors_survive_a_trip_between_processes() -> None:
    error = pickle.loads(pickle.dumps(InvalidRequestError("wrong", 4)))
    assert isinstance(error, InvalidRequestError)
    assert (error.message, error.row, str(error)) == ("wrong", 4, "row 4: wrong")
    assert isinstance(error, InferenceError)


def test_a_cut_line_is_told_and_a_new_server_found(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write_model(
        repository / "toy",
        STEP.format(max_batch_size=4, instances=1, dim=DIM, queue_policy=""),
        EMBED,
    )
    with Server(repository) as server, Client("toy", server.grpc_url) as client:
        port = int(server.grpc_url.rpartition(":")[2])
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.embed, ["sleep:9"] * 9)
            time.sleep(0.3)
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(ServerUnreachableError):
                running.result()
        with pytest.raises(ServerUnreachableError):
            client.embed(["nobody there"])
        server.stop()
        with Server(repository, grpc_port=port):
            np.testing.assert_array_equal(embed_soon(client, "back"), [expected("back")])
