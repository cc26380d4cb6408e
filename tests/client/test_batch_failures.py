"""A batch that fails: each row is sent again alone, within a budget, and only the bad one fails."""

import time
from typing import Any

import numpy as np
import pytest

from tests.support.client_toy import Call, Toy, expected, expected_all, opened, wait_until
from triptych.client import (
    BatchFailedError,
    InferenceError,
    InvalidRequestError,
    OverloadedError,
    PipelineFailedError,
    PipelineNotReadyError,
    Retry,
)
from triptych.client.errors import status_error, stream_error
from triptych.client.retry import Deadline, Retries
from triptych.serving.bench.resources import fetch_metrics

RANGE = "in ensemble 'days', onnx runtime error 2: Non-zero status code returned while running"
SPLIT = "failed to split the output tensor 'y' in responses: expected batch size of at least 2"
KINDS: list[tuple[str, str, type[InferenceError]]] = [
    ("INTERNAL", f"{RANGE} Gather node.", BatchFailedError),
    ("INTERNAL", "Failed to process the request(s) for model 'a_0_0': KeyError", BatchFailedError),
    ("UNIMPLEMENTED", SPLIT, BatchFailedError),
    ("INTERNAL", "in ensemble 'days', [internal] RuntimeError: no.", PipelineFailedError),
    ("INTERNAL", "[internal row=0] HookFailure: no.", PipelineFailedError),
    ("INTERNAL", "[engine_failed] no.", PipelineFailedError),
    ("UNKNOWN", "a proxy", PipelineFailedError),
    ("INTERNAL", "Stub process 'days_core_0_0' is not healthy.", PipelineNotReadyError),
    ("UNAVAILABLE", "[overloaded retry_after_ms=5] full.", OverloadedError),
    ("UNIMPLEMENTED", "other", InvalidRequestError),
]


def test_only_a_failed_batch_may_be_the_fault_of_another_request() -> None:
    for code, text, kind in KINDS:
        error = status_error(code, text, url="a:1")
        assert type(error) is kind, text
        assert ("another request of its batch may be" in str(error)) is (kind is BatchFailedError)
    # Generated text is never sent again.
    assert type(stream_error(f"{RANGE} Gather node.", url="a:1")) is PipelineFailedError


def test_rows_sent_alone_are_a_tenth_of_the_requests_with_pauses_that_grow() -> None:
    never = Deadline.after(None)

    def is_sent(retries: Retries, rows: int = 1, attempts: int = 1) -> bool:
        return retries.pause_alone_s(rows, attempts, never)[1]

    retries = Retries(Retry(budget=10, budget_share=0.2))
    assert [is_sent(retries) for _ in range(7)] == [True] * 5 + [False] * 2
    for _ in range(300):
        retries.answered()
    sent = 0
    for _ in range(1000):
        retries.answered()
        sent += is_sent(retries)
    assert 100 <= sent <= 105
    many, none = Retries(Retry(budget=10**9)), Retries(Retry(budget=0))
    for retries, attempts, limit in (
        (many, 1, 0.05),
        (many, 2, 0.4),
        (many, 3, 2.0),
        (none, 1, 2.0),
    ):
        pauses = [retries.pause_alone_s(1, attempts, never)[0] for _ in range(300)]
        assert 0.8 * limit < max(pauses) <= limit
    for retries, attempts in ((many, 4), (Retries(Retry(attempts=1)), 1), (Retries(None), 1)):
        assert retries.pause_alone_s(1, attempts, never) == (0.0, False)
    assert many.pause_alone_s(1, 3, Deadline(1.0, time.monotonic())) == (0.0, False)
    soon = none.pause_alone_s(1, 1, Deadline(1.0, time.monotonic() + 0.2))[0]
    assert 0 <= soon <= 0.1
    few = Retries(Retry(budget=15))
    assert (is_sent(few, rows=8), is_sent(few, rows=7)) == (False, True)


@pytest.mark.server
def test_rows_in_the_batch_of_a_bad_one_are_sent_again(toy: Toy, style: str) -> None:
    """A step of Python, which fails a batch as the backends of compiled cores do."""
    name = f"batch-{style}"

    def waiting() -> float:
        found = fetch_metrics(toy.metrics_url)
        key = "nv_inference_pending_request_count"
        return sum(v for n, labels, v in found if n == key and labels.get("model") == "toy_step")

    with (
        opened(style, "toy", toy.url, timeout_s=300) as good,
        opened(style, "toy", toy.url, timeout_s=300, retry=None) as bad,
        opened(style, "toy", toy.url, timeout_s=300) as other,
    ):
        texts = [f"{name} {index}" for index in range(6)]
        held = other("embed", [f"hold:{name}"])
        toy.wait_begun(f"hold:{name}")
        broken = bad("embed", ["break"])
        answers = [good("embed", [text]) for text in texts]
        wait_until(lambda: waiting() >= 7, "all of them wait for a batch")
        toy.release(name)
        held.result()
        found = np.concatenate([answer.result() for answer in answers])
        np.testing.assert_array_equal(found, expected_all(texts))
        assert isinstance(broken.exception(), BatchFailedError)


@pytest.mark.server
def test_a_row_that_fails_alone_is_named_and_its_neighbors_are_answered(call: Call) -> None:
    texts: list[Any] = [f"good {index}" for index in range(20)]
    texts[7] = "break"
    results = call("toy", "embed_each", texts)
    for row, (text, result) in enumerate(zip(texts, results, strict=True)):
        if row != 7:
            np.testing.assert_array_equal(result, expected(text))
    assert results[7].row == 7
    with pytest.raises(
        BatchFailedError, match=r"(?s)row 7: .*broken.* batch may be .*Tried 4 times"
    ):
        call("toy", "embed", texts)
    with pytest.raises(BatchFailedError, match="broken") as caught:
        call("toy", "embed", texts, options={"retry": None})
    assert caught.value.row is None
    poor = {"retry": Retry(budget=0, longest_pause_s=0.02)}
    with pytest.raises(BatchFailedError, match="broken"):
        call("toy", "embed", texts, options=poor)
    (broken,) = call("toy", "embed_each", ["break"], options=poor)
    assert isinstance(broken, BatchFailedError)
