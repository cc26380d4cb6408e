"""The client when something is wrong: deadlines, cancellation, overload, every kind of error."""

import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from typer.testing import CliRunner

from client_toy import (
    DIM,
    EMBED,
    STEP,
    Call,
    Toy,
    expected,
    expected_all,
    opened,
    wait_until,
    write_model,
)
from triptych.base.errors import UserError
from triptych.client import (
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
    work,
)
from triptych.interface.cli import app
from triptych.serving.server import Server

pytestmark = pytest.mark.server


ENDLESS = "sleep:600"
"""A text that is answered when its request is cancelled."""


@pytest.fixture(params=["sync", "async"])
def style(request: pytest.FixtureRequest) -> str:
    """Which client a test opens by itself."""
    return str(request.param)


def test_a_deadline_covers_the_whole_call(call: Call) -> None:
    with pytest.raises(
        DeadlineExceededError, match=r"deadline of 0\.5 s passed\. \d+ of 150 rows were"
    ):
        call("single_step", "embed", ["sleep:0.2"] * 150, timeout_s=0.5)
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
    name = f"drop-{time.monotonic()}"
    with Client("narrow", toy.url) as other, ThreadPoolExecutor(1) as pool:
        busy = pool.submit(other.embed, [f"hold:{name}"])
        toy.wait_begun(f"hold:{name}", "narrow_step")
        with pytest.raises(DeadlineExceededError):
            call("narrow", "embed", [f"{name} late"], timeout_s=0.2)
        # The timeout in the queue is longer by this grace, and began before the client gave up.
        time.sleep(0.2 + work._QUEUE_GRACE_S)
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


@pytest.mark.parametrize("rows", [1, 40])
def test_an_interrupt_leaves_no_request_behind(toy: Toy, rows: int) -> None:
    texts = [f"{ENDLESS} interrupted of {rows} {index}" for index in range(rows)]

    def interrupt() -> None:
        toy.wait_begun(f"interrupted of {rows} ")
        os.kill(os.getpid(), signal.SIGINT)

    with Client("toy_step", toy.url, rows_per_request=1, timeout_s=300) as client:
        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            client.embed(texts)
        interrupter.join()
        # The client is still open, so nothing but the interrupt can have cancelled them.
        client.embed(["after the interrupt"])
    requests = toy.wait_seen(f"interrupted of {rows} ")
    assert 1 <= len(requests) <= 8
    assert all(request.cancelled for request in requests)


def test_cancelling_a_task_cancels_its_requests(toy: Toy) -> None:
    with opened("async", "toy_step", toy.url, rows_per_request=1, timeout_s=300) as start:
        running = start("embed", [f"{ENDLESS} cancelled {index}" for index in range(30)])
        toy.wait_begun("cancelled ")
        running.cancel()
        with pytest.raises(CancelledError):
            running.result()
        start("embed", ["after the cancellation"]).result()
    assert all(request.cancelled for request in toy.wait_seen("cancelled "))


def test_a_refused_row_cancels_the_others(call: Call, toy: Toy) -> None:
    mark = f"beside {time.monotonic()}"
    # Each in a request of its own, and an instance of `single_step` for each.
    with pytest.raises(InvalidRequestError) as caught:
        call("single_step", "embed", [f"{ENDLESS} {mark}", f"refuse after {mark}"], timeout_s=300)
    assert caught.value.row == 1
    (other,) = toy.wait_seen(f"{ENDLESS} {mark}", "single_step")
    assert other.cancelled


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


def test_a_full_queue_is_overload_and_not_unreachable(toy: Toy, style: str) -> None:
    """Of three requests the queue takes two and refuses one."""
    name = f"full-{style}"
    with opened(style, "narrow", toy.url, retry=None, timeout_s=300) as start:
        busy = start("embed", [f"hold:{name}"])
        toy.wait_begun(f"hold:{name}", "narrow_step")
        calls = [start("embed", ["late"]) for _ in range(3)]
        wait_until(lambda: any(call.done() for call in calls), "the refusal of one call")
        toy.release(name, "narrow_step")
        (error,) = filter(None, [call.exception() for call in calls])
        busy.result()
    assert isinstance(error, OverloadedError)
    assert "Exceeds maximum queue size" in str(error)
    assert error.row is None
    assert not isinstance(error, ServerUnreachableError)


def test_waiting_too_long_in_the_queue_is_overload(toy: Toy, style: str) -> None:
    """Of three requests the queue takes two: when the third is refused, they wait in it."""
    name = f"wait-{style}"
    with opened(style, "narrow", toy.url, retry=None, timeout_s=300) as start:
        busy = start("embed", [f"hold:{name}"])
        toy.wait_begun(f"hold:{name}", "narrow_step")
        calls = [start("infer", {"text": ["late"]}, parameters={"timeout": 1}) for _ in range(3)]
        wait_until(lambda: any(call.done() for call in calls), "the end of one call")
        toy.release(name, "narrow_step")
        errors = [call.exception() for call in calls]
        busy.result()
    assert {type(error) for error in errors} == {OverloadedError}
    assert sum("timeout expired" in str(error) for error in errors) >= 2


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
    with pytest.raises(OverloadedError, match="leaves no time for another"):
        call("narrow", "embed", texts, options=long, timeout_s=300)


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
            told = f"answered at 127.0.0.1:{port}: nothing listens there. Start a server"
            with pytest.raises(ServerUnreachableError, match=told):
                call("toy", "embed", texts, options={"url": f"127.0.0.1:{port}"})


def test_the_port_of_http_is_recognized(call: Call, toy: Toy) -> None:
    told = "the server closes connections of gRPC.*the port of gRPC is 8001 by default"
    with pytest.raises(ServerUnreachableError, match=told):
        call("toy", "embed", ["a"], options={"url": toy.http_url})


@pytest.mark.parametrize("rows", [None, "one text", 5])
def test_one_value_instead_of_rows_is_refused(call: Call, rows: object) -> None:
    told = "must be a list with one element per row"
    for method in ("embed", "embed_each", "classify"):
        with pytest.raises(InvalidRequestError, match=f"`text` {told}"):
            call("toy", method, rows)
    with pytest.raises(InvalidRequestError, match=f"`body` {told}"):
        call("toy", "infer", {"body": rows})
    with pytest.raises(InvalidRequestError, match="`inputs` must be a mapping"):
        call("toy", "infer", rows)


def test_an_unknown_pipeline_is_told_with_those_that_are_served(toy: Toy) -> None:
    done = CliRunner().invoke(app, ["infer", "toys", "-t", "a", "--url", toy.url])
    assert isinstance(done.exception, UserError)
    assert "is not served there. Given: toys. Did you mean `toy`? Pipelines there:" in str(
        done.exception
    )


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
    settings = STEP.format(max_batch_size=4, instances=1, dim=DIM, queue_policy="")
    write_model(tmp_path / "toy", settings, EMBED)
    with Server(tmp_path) as server, Client("toy", server.grpc_url) as client:
        port = int(server.grpc_url.rpartition(":")[2])
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.embed, [ENDLESS] * 9)
            Toy(server.grpc_url, tmp_path).wait_begun(ENDLESS, "toy")
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(ServerUnreachableError):
                running.result()
        with pytest.raises(ServerUnreachableError):
            client.embed(["nobody there"])
        server.stop()
        with Server(tmp_path, grpc_port=port):
            wait_until(answers(client, "back"), "a connection to the new server")


def answers(client: Client, text: str) -> Callable[[], bool]:
    """A condition: the client reaches its server, whose answer must be right."""

    def reached() -> bool:
        try:
            np.testing.assert_array_equal(client.embed([text]), [expected(text)])
        except ServerUnreachableError:
            return False
        return True

    return reached


def test_a_priority_that_has_no_effect_is_refused(toy: Toy) -> None:
    with (
        Client("toy", toy.url) as client,
        pytest.raises(InvalidRequestError, match=r"`priority` has no effect.*serving\.priority"),
    ):
        client.infer({"text": ["a text"]}, parameters={"priority": 1})
