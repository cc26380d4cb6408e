"""The codes of the steps' errors: what a step sends, and what a client and a health check read."""

import ast
import json
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import triptych.runtime
from tests.support.client_toy import wait_until
from triptych.base.errors import UserError
from triptych.client import (
    BatchFailedError,
    CanceledError,
    InferenceError,
    InvalidRequestError,
    OverloadedError,
    PipelineFailedError,
    PipelineNotReadyError,
    ServerUnreachableError,
)
from triptych.client.errors import status_error, stream_error
from triptych.container.health import error_code
from triptych.runtime.engine_errors import ENGINE_DIED, ENGINE_FAILED, EngineDied, EngineFailed
from triptych.runtime.flow_control import FlowControl
from triptych.runtime.rejections import OVERLOADED, STOPPING, Stopping
from triptych.runtime.request_errors import (
    INTERNAL,
    INVALID_REQUEST,
    InternalError,
    RequestError,
    StepError,
)

URL = "127.0.0.1:8001"
KINDS: dict[str, tuple[type[InferenceError], str]] = {
    INVALID_REQUEST: (InvalidRequestError, "INVALID_ARGUMENT"),
    OVERLOADED: (OverloadedError, "UNAVAILABLE"),
    STOPPING: (PipelineNotReadyError, "UNAVAILABLE"),
    INTERNAL: (PipelineFailedError, "INTERNAL"),
    ENGINE_FAILED: (PipelineFailedError, "INTERNAL"),
    ENGINE_DIED: (PipelineNotReadyError, "UNAVAILABLE"),
}
"""The client's error class and the gRPC status of each code."""


class Refusal(NamedTuple):
    """What a step sends instead of an answer."""

    message: str
    status: str


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of the steps, with a module in the place of the one that Triton gives them."""
    statuses = {"INVALID_ARG": "INVALID_ARGUMENT", "UNAVAILABLE": "UNAVAILABLE"}
    error = type(
        "TritonError",
        (),
        {**statuses, "INTERNAL": "INTERNAL", "__new__": lambda _class, *words: Refusal(*words)},
    )
    given = SimpleNamespace(
        TritonError=error,
        InferenceResponse=lambda output_tensors, error: error,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    )
    monkeypatch.setattr("triptych.runtime.triton_io.pb_utils", given)
    return import_module("triptych.runtime.triton_io")


def overloads(steps: Any) -> Iterator[Refusal]:
    """The rejections of flow control: for the number of requests, and for the wait."""
    errors: list[Any] = []
    settings = {
        "pipeline": f"test-errors-{os.getpid()}",
        "core_rows": 1,
        "core_instances": 1,
        "max_requests": 5,
    }

    def forward(jobs: list[Any]) -> list[Any]:
        for job in jobs:
            flow.admit(job.rows, job)
        return []

    flow = FlowControl(
        {**settings, "max_wait_ms": 200}, forward, lambda _job, error: errors.append(error)
    )
    request = SimpleNamespace(get_response_sender=lambda: None)
    jobs = [SimpleNamespace(request=request, rows=1, left_s=None, sender=None) for _ in range(20)]
    errors += [error for _, error in flow.take(jobs)]
    flow._marks.path.unlink()
    wait_until(lambda: any("waited" in str(error) for error in errors), "a wait that is too long")
    for words in ("requests in flight", "waited for"):
        yield steps.error_response(next(error for error in errors if words in str(error)))


def check(refusal: Refusal, code: str) -> tuple[InferenceError, InferenceError]:
    """Check what the client and the health check read; returns the client's two errors."""
    kind, status = KINDS[code]
    assert refusal.status == status
    told = f"in ensemble 'minilm', [request id: 7] {refusal.message}"
    assert error_code(json.dumps({"error": told})) == code
    error = status_error(status, told, url=URL, rows=[10, 11, 12])
    streamed = stream_error(refusal.message, url=URL)
    for one in (error, streamed):
        assert type(one) is kind
        assert "[" + code not in str(one)
    return error, streamed


def test_an_overload_is_read_with_its_pause(steps: Any) -> None:
    pauses = []
    for refusal in overloads(steps):
        for error in check(refusal, OVERLOADED):
            assert isinstance(error, OverloadedError)
            assert f"Try again in {1e3 * error.again_s:.0f} ms" in error.message
            pauses.append(error.again_s)
            assert error.with_attempts("twice").message.endswith(" twice")
            assert error.with_attempts("twice").again_s == error.again_s
    assert len(pauses) == 4
    assert min(pauses) > 0


def test_every_other_error_is_read(steps: Any) -> None:
    rows = {None: None, 0: 10, 2: 12, 3: None}
    for row, own in rows.items():
        refusal = steps.error_response(
            RequestError("text", "must be valid UTF-8", "row 0: [stopping] ", "Send it", row)
        )
        error, _ = check(refusal, INVALID_REQUEST)
        assert error.row == own
        assert error.message == "`text` must be valid UTF-8. Given: row 0: [stopping] . Send it."
    check(steps.error_response(Stopping()), STOPPING)
    check(steps.error_response(EngineFailed("it ended")), ENGINE_FAILED)
    check(steps.error_response(EngineDied("its process died")), ENGINE_DIED)
    check(steps.error_response(KeyError("requests under way must")), INTERNAL)
    unpaired = steps.error_response(ValueError("\ud800" + "x" * 10**6))
    assert len(unpaired.message) <= steps.MAX_MESSAGE
    check(unpaired, INTERNAL)
    codes = [kind.code for kind in StepError.__subclasses__()]
    assert sorted(codes) == sorted(KINDS)


def test_steps_make_errors_in_one_place() -> None:
    """A `TritonError` elsewhere would reach clients without a code."""
    places = []
    for path in Path(triptych.runtime.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "TritonError":
                places.append(path.name)
    # The second passes on what the core, which made it an error with a code, has told it.
    assert set(places) == {"triton_io.py", "generation_postprocess.py"}


FEW = "expected 3 inputs but got 1 inputs for model"


def test_what_has_no_known_code_is_read_by_its_status() -> None:
    for status, said, kind in (
        ("UNAVAILABLE", "[new_code row=1] It is full", ServerUnreachableError),
        ("INVALID_ARGUMENT", "[Given] is no code", InvalidRequestError),
        ("UNAVAILABLE", "Exceeds maximum queue size", OverloadedError),
        ("INTERNAL", "the server is stopping", BatchFailedError),
        ("INVALID_ARGUMENT", f"{FEW} 'topics'. Got input(s) []", InvalidRequestError),
        ("INVALID_ARGUMENT", f"{FEW} 'topics_core'. Got input(s) []", PipelineNotReadyError),
        ("CANCELLED", "CANCELLED", ServerUnreachableError),
        ("CANCELLED", "Channel closed!", CanceledError),
    ):
        assert type(status_error(status, said, url=URL)) is kind, said
    for body in ("", "{", "[]", "{}", '{"error": 7}', '{"error": "is full"}'):
        assert error_code(body) is None


def test_an_error_of_a_function_of_the_user_names_it() -> None:
    wrong = "hooks.preprocess: `images` must have the shape [1, 3, 64, 64], it has [1, 3, 9, 9]"
    assert InternalError(RuntimeError(wrong)).text.endswith("Correct `preprocess` in hooks.py.")
    assert "bug of the pipeline" in InternalError(KeyError("lost")).text
    assert RequestError("text", "is required", "", "Add it").text == ("`text` is required. Add it.")
    assert UserError("text", "is required", given="", remedy="Add it").message == (
        "`text` is required. Add it."
    )
