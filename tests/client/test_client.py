"""The client against a real tritonserver: results, order, splitting, the call of every task."""

import hashlib
import inspect
import math
import time
from typing import Any

import numpy as np
import pytest

from tests.support.client_toy import (
    DIM,
    MAX_BATCH_SIZE,
    Call,
    Toy,
    caller,
    expected,
    expected_all,
    opened,
    texts_of_many_lengths,
    wait_until,
)
from triptych.client import (
    Answer,
    AsyncClient,
    BatchFailedError,
    Choice,
    Client,
    Entity,
    InvalidRequestError,
    Ranked,
    StepStatistics,
    tasks,
)

pytestmark = pytest.mark.server
TEXTS = [f"text {index} " + "x" * (index * 7 % 50) for index in range(30)]
TYPED = sorted(name for name in vars(Client) if name != "infer" and f"{name}_each" in vars(Client))


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
    outputs = call("reader", "infer", {"text": [], "text_pair": []})
    shapes = {name: array.shape for name, array in outputs.items()}
    assert shapes == dict.fromkeys(("answer", "score", "start", "end"), (0, 1))


def test_dimensions_and_prompt_reach_the_model(call: Call) -> None:
    texts = [f"parameter {index}" for index in range(40)]
    vectors = call("toy", "embed", texts, dimensions=3, prompt="query: ")
    assert vectors.shape == (40, 3)
    np.testing.assert_array_equal(
        vectors, np.stack([expected("query: " + text, 3) for text in texts])
    )


def test_infer_sends_any_inputs_and_parameters_and_returns_every_output(
    call: Call, toy: Toy
) -> None:
    texts = ["a" * (index % 7) for index in range(30)]
    pairs = ["b" * (index % 5) + text for index, text in enumerate(texts)]
    inputs = {"text": texts, "text_pair": pairs}
    options = {"max_answer_len": 3, "handle_impossible_answer": True}
    outputs = call("reader", "infer", inputs, parameters=options, timeout_s=None)
    starts = [[pair.find(text)] for text, pair in zip(texts, pairs, strict=True)]
    found = [[pair[start : start + 3]] for (start,), pair in zip(starts, pairs, strict=True)]
    assert (outputs["start"].dtype, outputs["start"].tolist()) == (np.int32, starts)
    assert outputs["answer"].tolist() == found
    assert outputs["score"].tolist() == [[0.25]] * 30
    parameters = {"top_k": 2, "sharp": True, "floor": 0.5, "name": "x", "count": np.int64(9)}
    mark = f"parameters {time.monotonic()}"
    call("toy", "infer", {"text": [mark]}, parameters=parameters)
    assert [request.parameters for request in toy.seen(mark)] == [parameters]


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
    good, broken = call("toy", "embed_each", ["good", "break"])
    assert (good.shape, type(broken), broken.row) == ((DIM,), BatchFailedError, 1)


def test_step_statistics_count_what_happened_between(call: Call) -> None:
    (before,) = call("counted", "step_statistics")
    texts = [f"counted {index}" for index in range(100)]
    call("counted", "embed", texts, options={"rows_per_request": 1})
    with pytest.raises(InvalidRequestError):
        call("counted", "embed", ["refuse"])

    def counted() -> StepStatistics:
        (after,) = call("counted", "step_statistics")
        during: StepStatistics = after - before
        return during

    # Triton's Python backend answers first, and counts then.
    wait_until(lambda: counted().rows >= 101, "the count of the last row")
    wait_until(lambda: counted().requests + counted().failures >= 101, "that of the last request")
    during = counted()
    found = (during.model, during.rows, during.requests + during.failures)
    assert found == ("counted_step", 101, 101)
    assert 1 <= during.executions <= 101
    assert during.mean_batch == 101 / during.executions
    assert during.compute_infer_us > 0
    assert during.queue_us > 0
    assert during.compute_infer_total_us == pytest.approx(during.compute_infer_us * during.requests)
    nothing = during - during
    assert (nothing.mean_batch, nothing.queue_us, nothing.compute_infer_us) == (0.0, 0.0, 0.0)


@pytest.fixture
def ask(toy: Toy) -> Call:
    """The blocking client alone: what a task adds is one code for both."""
    return caller("sync", toy.url)


def choices(row: bytes, count: int) -> list[Choice]:
    word = hashlib.sha256(row).hexdigest()[:8]
    return [Choice(f"{word} {number}", 0.5**number) for number in range(count)]


def numbers(text: str) -> Any:
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.uint8) + 1.0


def test_each_task_has_its_answers(ask: Call) -> None:
    images = [bytes([index, 255, 0, 216]) * (1 + index % 3) for index in range(20)]
    contexts = ["é" * index + "where it is" for index in range(20)]
    two = [Entity("simple", "Anna", 0.75, 4, 8), Entity("simple", "Bob", 0.75, 13, 16)]
    tokens = [Choice("é [MASK]0", 1.0), Choice("é [MASK]1", 0.5)]
    first = Entity("first", "Anna", 0.75, 0, 4)
    answers = [Answer("where", 0.25, index, index + 5) for index in range(20)]
    nothing = Answer("", 0.875, 0, 0)
    passages = ["q" * (index * 7 % 20) for index in range(20)]
    ranked = [Ranked(index, index * 7 % 20) for index in range(20)]
    cases: list[tuple[str, str, tuple[Any, ...], dict[str, Any], list[Any]]] = [
        ("classifier", "classify", (TEXTS,), {"top_k": 3}, [choices(t.encode(), 3) for t in TEXTS]),
        ("classifier", "classify", ([b"bytes"],), {}, [choices(b"bytes", 1)]),
        ("seer", "classify_images", (images,), {"top_k": 2}, [choices(i, 2) for i in images]),
        ("filler", "fill_mask", (["é [MASK]"],), {"top_k": 2}, [tokens]),
        ("tagger", "entities", (["no one", "für Anna and Bob"] * 5,), {}, [[], two] * 5),
        ("tagger", "entities", (["Anna"],), {"aggregation": "first"}, [[first]]),
        ("reader", "answer", (["where"] * 20, contexts), {"max_answer_tokens": 5}, answers),
        ("reader", "answer", (["x"], ["where"]), {"impossible_answer": True}, [nothing]),
        ("reranker", "rerank_each", ("q", passages), {}, ranked),
        ("reranker", "rerank", ("q", passages), {}, sorted(ranked, key=lambda one: -one.score)),
        ("reranker", "rerank", ("q", ["no", "none"]), {}, [Ranked(0, 0.0), Ranked(1, 0.0)]),
    ]
    for pipeline, method, arguments, options, expected_answers in cases:
        found = ask(pipeline, method, *arguments, **options)
        assert found == expected_answers, method
    ((choice,),) = ask("classifier", "classify", ["a"])
    (entity,) = ask("tagger", "entities", ["Nobody"])
    assert (type(choice.label), type(choice.score)) == (str, float)
    assert math.isnan(entity[0].score)
    for pipeline, method, arguments, message in (
        ("reader", "answer", (["a", "b"], ["c"]), "Given: `text` 2, `text_pair` 1"),
        ("reranker", "rerank", ("q", "one passage"), "`text_pair` must be a list"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            ask(pipeline, method, *arguments)


def test_classify_zero_shot(ask: Call) -> None:
    labels = ["Zürich, die Stadt", 'a "quote"', "c"]
    results = ask("classifier", "classify_zero_shot", TEXTS, labels)
    assert [[choice.label for choice in choices] for choices in results] == [labels] * 30
    assert results[7][0].score == pytest.approx(1 / 3)
    form = {"multi_label": True, "hypothesis_template": "About {}."}
    (asked,) = ask("classifier", "classify_zero_shot", ["a"], labels, **form)
    assert asked == [Choice(f"About {label}.", 1.0) for label in labels]
    for wrong in ("billing", [1, 2]):
        with pytest.raises(InvalidRequestError, match="`candidate_labels` must be a list of str"):
            ask("classifier", "classify_zero_shot", ["a"], wrong)
    surrogate = r"parameter candidate_labels.*lone surrogate U\+D800"
    with pytest.raises(InvalidRequestError, match=surrogate):
        ask("classifier", "classify_zero_shot", ["a"], ["\ud800"])


def test_embed_in_every_encoding(ask: Call) -> None:
    whole = np.stack([numbers(text) for text in TEXTS])
    for encoding, dtype, wanted in (
        ("float", np.float32, whole),
        ("int8", np.int8, whole - 128),
        ("binary", np.int8, whole[:, :1] // 2),
        (None, np.int8, whole - 128),  # this pipeline's own
    ):
        vectors = ask("embedder", "embed", TEXTS, encoding=encoding)
        assert vectors.dtype == dtype
        np.testing.assert_array_equal(vectors, wanted.astype(dtype))
        each = ask("embedder", "embed_each", TEXTS[:3], encoding=encoding)
        np.testing.assert_array_equal(np.stack(each), wanted[:3].astype(dtype))
        assert ask("embedder", "embed", [], encoding=encoding).shape == (0, vectors.shape[1])
        assert ask("embedder", "embed_each", [], encoding=encoding) == []
    with pytest.raises(InvalidRequestError, match=r"the output `embedding_int8`.*Given: embedding"):
        ask("toy", "embed", ["a"], encoding="int8")


@pytest.mark.parametrize(
    ("pipeline", "method", "arguments"),
    [
        ("classifier", "classify", ([],)),
        ("seer", "classify_images", ([],)),
        ("classifier", "classify_zero_shot", ([], ["label"])),
        ("filler", "fill_mask", ([],)),
        ("tagger", "entities", ([],)),
        ("reader", "answer", ([], [])),
        ("reranker", "rerank", ("query", [])),
    ],
)
def test_each_loses_only_the_bad_rows(
    ask: Call, pipeline: str, method: str, arguments: tuple[Any, ...]
) -> None:
    def with_rows(rows: list[Any]) -> tuple[Any, ...]:
        return tuple(rows if each == [] else each for each in arguments)

    good = [b"good %d" % index for index in range(12)]
    bad = [*good[:3], b"refuse", *good[3:], 7]
    results = ask(pipeline, f"{method}_each", *with_rows(bad))
    refused = {row: r.row for row, r in enumerate(results) if isinstance(r, InvalidRequestError)}
    assert refused == {3: 3, 13: 13}
    kept = [result for result in results if not isinstance(result, InvalidRequestError)]
    if method == "rerank":
        assert [ranked.index for ranked in kept] == [0, 1, 2, *range(4, 13)]
    else:
        alone = ask(pipeline, f"{method}_each", *with_rows(good))
        assert kept == alone == ask(pipeline, method, *with_rows(good))
    with pytest.raises(InvalidRequestError, match=r"row 13: .*must be str or bytes"):
        ask(pipeline, method, *with_rows(bad))
    with pytest.raises(InvalidRequestError, match="row 3: `text` must not be refused"):
        ask(pipeline, method, *with_rows(bad[:-1]))
    assert ask(pipeline, method, *arguments) == []


def test_a_call_that_does_not_fit_the_task_says_what_the_pipeline_has(ask: Call) -> None:
    arguments: tuple[Any, ...]
    for pipeline, method, arguments, message in (
        ("tagger", "classify", (["a"],), r"output `label`.*Given: entities\."),
        ("reader", "classify", (["a"],), r"output `label`.*Given: answer, end, score, start"),
        ("classifier", "entities", (["a"],), r"output `entities`.*Given: label, score"),
        ("classifier", "fill_mask", (["a"],), r"output `token`.*Given: label, score"),
        ("embedder", "answer", (["a"], ["b"]), r"output `answer`.*embedding, embedding_int8"),
        ("tagger", "embed", (["a"],), r"output `embedding`.*Given: entities"),
        ("toy", "rerank", ("a", ["b"]), r"output `score`.*Given: embedding\."),
        ("classifier", "rerank", ("a", ["b"]), r"input `text`, `text_pair` for.*Given: text \(out"),
        ("classifier", "classify_images", ([b"a", b"b"],), r"input `image` for.*Given: text \(out"),
        # Refused for its row, which is not the mistake to tell.
        ("tagger", "fill_mask", (["refuse"],), r"the output `token`.*Given: entities"),
    ):
        for name in (method, f"{method}_each")[: 1 if "refuse" in arguments[0] else 2]:
            with pytest.raises(InvalidRequestError, match=message):
                ask(pipeline, name, *arguments)
    interface = ask("reader", "interface")
    assert interface.inputs == ("text", "text_pair")
    assert interface.outputs["answer"][1] == (1,)
    assert (interface.steps, interface.max_batch_size) == (("play",), 8)


def test_both_clients_have_every_typed_call_with_the_same_words() -> None:
    assert len(TYPED) == 13
    for name in (*TYPED, *(f"{name}_each" for name in TYPED)):
        ours, twin = getattr(Client, name), getattr(AsyncClient, name)
        assert inspect.signature(ours) == inspect.signature(twin)
        assert ours.__doc__ == twin.__doc__
        assert (ours.__qualname__, twin.__qualname__) == (f"Client.{name}", f"AsyncClient.{name}")
        assert inspect.iscoroutinefunction(twin)
        assert "timeout_s" in inspect.signature(ours).parameters


def test_arguments_have_the_names_of_transformers_and_the_former_ones() -> None:
    new: dict[str, Any] = {"max_answer_len": 3, "handle_impossible_answer": False}
    old: dict[str, Any] = {"max_answer_tokens": 3, "impossible_answer": False}
    for one, other in (
        (tasks.answer(["a"], ["b"], **new), tasks.answer(["a"], ["b"], **old)),
        (
            tasks.entities(["a"], aggregation_strategy="max"),
            tasks.entities(["a"], aggregation="max"),
        ),
        (
            tasks.classify_zero_shot(["a"], candidate_labels=["x"]),
            tasks.classify_zero_shot(["a"], labels=["x"]),
        ),
    ):
        assert one.parameters == other.parameters != {}
