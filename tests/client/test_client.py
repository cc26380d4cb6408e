"""The client against a real tritonserver: results, order, splitting, refused rows, settings."""

import json
import time
from typing import Any

import numpy as np
import pytest

from client_toy import (
    DIM,
    MAX_BATCH_SIZE,
    Call,
    Toy,
    expected,
    expected_all,
    opened,
    texts_of_many_lengths,
    wait_until,
)
from triptych.client import (
    InvalidRequestError,
    PipelineFailedError,
    StepStatistics,
)

pytestmark = pytest.mark.server


def test_embed_keeps_the_order_of_a_thousand_texts(call: Call) -> None:
    texts = texts_of_many_lengths(1000, "order")
    vectors = call("toy", "embed", texts)
    assert vectors.dtype == np.float32
    assert vectors.shape == (1000, DIM)
    np.testing.assert_array_equal(vectors, expected_all(texts))


def test_embed_takes_one_text_in_str_or_bytes_and_any_character(call: Call) -> None:
    for text in ("plain", "", "nul \0 inside", "😀 é", "\u2028"):
        np.testing.assert_array_equal(call("toy", "embed", [text]), [expected(text)])
        np.testing.assert_array_equal(call("toy", "embed", [text.encode()]), [expected(text)])
    vectors = call("toy", "embed", ["mine"])
    vectors += 1.0  # the result belongs to the caller


def test_no_texts_give_an_empty_array_of_the_right_width(call: Call) -> None:
    assert call("toy", "embed", []).shape == (0, DIM)
    assert call("toy", "embed", [], dimensions=3).shape == (0, 3)
    assert call("toy", "embed_each", []) == []
    outputs = call("pair", "infer", {"text": [], "text_pair": []})
    assert {name: array.shape for name, array in outputs.items()} == {
        "score": (0, 1),
        "label": (0, 2),
    }


def test_dimensions_and_prompt_reach_the_model(call: Call) -> None:
    texts = [f"parameter {index}" for index in range(40)]
    vectors = call("toy", "embed", texts, dimensions=3, prompt="query: ")
    assert vectors.shape == (40, 3)
    np.testing.assert_array_equal(
        vectors, np.stack([expected("query: " + text, 3) for text in texts])
    )


def test_infer_sends_any_inputs_and_parameters_and_returns_every_output(call: Call) -> None:
    texts = ["a" * (index % 7) for index in range(30)]
    pairs = ["b" * (index % 5) for index in range(30)]
    parameters = {"top_k": 2, "sharp": True, "floor": 0.5, "name": "x", "count": np.int64(9)}
    outputs = call(
        "pair", "infer", {"text": texts, "text_pair": pairs}, parameters=parameters, timeout_s=None
    )
    assert outputs["score"].dtype == np.int32
    lengths = [[len(text) - len(pair)] for text, pair in zip(texts, pairs, strict=True)]
    assert outputs["score"].tolist() == lengths
    assert outputs["label"].shape == (30, 2)
    joined = [(text + pair).encode() for text, pair in zip(texts, pairs, strict=True)]
    assert outputs["label"][:, 0].tolist() == joined
    arrived = json.loads(outputs["label"][0, 1])
    assert {name: arrived[name] for name in parameters} == parameters


@pytest.mark.parametrize("style", ["sync", "async"])
def test_many_calls_share_one_client(toy: Toy, style: str) -> None:
    calls = [[f"{style} {call} {row}" for row in range(1 + call % 30)] for call in range(100)]
    with opened(style, "toy", toy.url, timeout_s=300) as start:
        for texts, future in [(texts, start("embed", texts)) for texts in calls]:
            np.testing.assert_array_equal(future.result(), expected_all(texts))


def test_rows_of_like_length_share_a_request_within_the_batch_limit(call: Call, toy: Toy) -> None:
    mark = f"split {time.monotonic()}"
    texts = texts_of_many_lengths(300, mark)
    call("toy", "embed", texts, options={"rows_per_request": 1000})
    requests = toy.seen(mark)
    sizes = [[len(text.encode()) for text in request.texts] for request in requests]
    assert sorted(text for request in requests for text in request.texts) == sorted(texts)
    assert max(map(len, sizes)) <= MAX_BATCH_SIZE
    padded = sum(len(rows) * max(rows) for rows in sizes)
    assert padded < 1.15 * sum(map(sum, sizes))
    mark = f"room {time.monotonic()}"  # by default requests leave room for each other in a batch
    call("toy", "embed", texts_of_many_lengths(100, mark))
    assert max(len(request.texts) for request in toy.seen(mark)) == MAX_BATCH_SIZE // 4
    mark = f"pad {time.monotonic()}"  # a long text does not pad the short ones
    texts = [f"{mark} a", f"{mark} b" + "long" * 500, f"{mark} c"]
    np.testing.assert_array_equal(call("toy", "embed", texts), expected_all(texts))
    assert sorted(request.texts for request in toy.seen(mark)) == [[texts[0], texts[2]], [texts[1]]]


def test_no_more_requests_are_in_flight_than_asked(call: Call) -> None:
    # `narrow` runs one row at a time and lets two wait; a third in the queue would be refused.
    texts = [f"sleep:0.02 {index}" for index in range(12)]
    vectors = call("narrow", "embed", texts, options={"max_in_flight": 2, "retry": None})
    np.testing.assert_array_equal(vectors, expected_all(texts))


def test_a_refused_row_is_named_by_the_callers_index(call: Call) -> None:
    texts: list[str | bytes] = [f"fine {index}" * (1 + index % 9) for index in range(50)]
    texts[37] = b"abc \xff"
    with pytest.raises(InvalidRequestError) as caught:
        call("toy", "embed", texts)
    assert caught.value.row == 37
    assert str(caught.value) == (
        "row 37: `text` must be valid UTF-8. Given: byte 0xff at position 4. Send UTF-8."
    )
    with pytest.raises(InvalidRequestError, match=r"^row 0: `text` must not be refused") as caught:
        call("toy", "embed", ["refuse"])
    assert caught.value.message.endswith("Given: row 0: x. Send another.")


def test_what_cannot_be_sent_is_refused_before_sending(call: Call, toy: Toy) -> None:
    mark = f"unsent {time.monotonic()}"
    wrong: Any
    for wrong, message in (
        ("half \ud83d pair", "must be text that UTF-8 supports. Given: the lone surrogate U+D83D"),
        (7, "must be str or bytes. Given: int."),
        (None, "must be str or bytes. Given: NoneType."),
        (bytearray(b"x"), "must be str or bytes. Given: bytearray."),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            call("toy", "embed", [mark, mark, wrong, mark])
        assert caught.value.row == 2
        assert message in str(caught.value)
        str(caught.value).encode()
    assert toy.seen(mark) == []


def test_embed_each_loses_only_the_bad_rows(call: Call) -> None:
    texts: list[Any] = [f"good {index}" for index in range(60)]
    bad = {3: b"\xff", 4: "refuse", 21: "refuse this too", 33: "\udc00", 59: 5}
    for row, text in bad.items():
        texts[row] = text
    results = call("toy", "embed_each", texts)
    assert len(results) == 60
    for row, (text, result) in enumerate(zip(texts, results, strict=True)):
        if row in bad:
            assert isinstance(result, InvalidRequestError)
            assert result.row == row
        else:
            np.testing.assert_array_equal(result, expected(text))
    results = call("toy", "embed_each", ["refuse"] * 9)  # a request of bad rows only
    assert [result.row for result in results] == list(range(9))
    assert [result.row for result in call("toy", "embed_each", ["\ud800"])] == [0]
    with pytest.raises(PipelineFailedError):
        call("toy", "embed_each", ["good", "break"])  # no row is to blame for it


def test_step_statistics_count_what_happened_between(call: Call) -> None:
    before = call("counted", "step_statistics")
    assert [step.model for step in before] == ["counted_step"]
    texts = [f"counted {index}" for index in range(100)]
    call("counted", "embed", texts, options={"rows_per_request": 1})
    with pytest.raises(InvalidRequestError):
        call("counted", "embed", ["refuse"])

    def counted() -> StepStatistics:
        during: StepStatistics
        (during,) = (
            after - earlier
            for after, earlier in zip(call("counted", "step_statistics"), before, strict=True)
        )
        return during

    # Triton's Python backend answers first, and counts then.
    def are_all_counted() -> bool:
        found = counted()
        return min(found.rows, found.requests + found.failures) >= 101

    wait_until(are_all_counted, "the count of the last request")
    during = counted()
    assert during.model == "counted_step"
    assert (during.rows, during.requests + during.failures) == (101, 101)
    assert 1 <= during.executions <= 101
    assert during.mean_batch == 101 / during.executions
    assert during.compute_infer_us > 0
    assert during.queue_us > 0
    assert during.compute_infer_total_us == pytest.approx(during.compute_infer_us * during.requests)
    nothing = during - during
    assert (nothing.mean_batch, nothing.queue_us, nothing.compute_infer_us) == (0.0, 0.0, 0.0)
