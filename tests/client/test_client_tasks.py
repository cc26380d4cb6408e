"""The typed call of every task, against a real server that plays the tasks."""

import hashlib
import inspect
import math
from typing import Any

import numpy as np
import pytest

from client_toy import Call, Toy, caller
from triptych.client import (
    Answer,
    AsyncClient,
    Choice,
    Client,
    Entity,
    InvalidRequestError,
    Ranked,
    tasks,
)

pytestmark = pytest.mark.server

TEXTS = [f"text {index} " + "x" * (index * 7 % 50) for index in range(30)]
TYPED = sorted(name for name in vars(Client) if name != "infer" and f"{name}_each" in vars(Client))


@pytest.fixture
def call(toy: Toy) -> Call:
    """The blocking client alone: what a task adds is one code for both."""
    return caller("sync", toy.url)


def word(row: bytes) -> str:
    return hashlib.sha256(row).hexdigest()[:8]


def numbers(text: str) -> Any:
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.uint8) + 1.0


def test_classify(call: Call) -> None:
    results = call("classifier", "classify", TEXTS, top_k=3)
    assert results == [
        [Choice(f"{word(text.encode())} {i}", 0.5**i) for i in range(3)] for text in TEXTS
    ]
    assert type(results[0][0].label) is str
    assert type(results[0][0].score) is float
    (single,) = call("classifier", "classify", [b"bytes"])
    assert single == [Choice(f"{word(b'bytes')} 0", 1.0)]
    assert call("classifier", "classify", []) == []


def test_classify_images(call: Call) -> None:
    images = [bytes([index, 255, 0, 216]) * (1 + index % 3) for index in range(20)]
    results = call("seer", "classify_images", images, top_k=2)
    assert [choices[1] for choices in results] == [Choice(f"{word(i)} 1", 0.5) for i in images]
    assert call("seer", "classify_images_each", images, top_k=2) == results


def test_classify_zero_shot(call: Call) -> None:
    labels = ["Zürich, die Stadt", 'a "quote"', "c"]
    results = call("classifier", "classify_zero_shot", TEXTS, labels)
    assert [[choice.label for choice in choices] for choices in results] == [labels] * 30
    assert results[7][0].score == pytest.approx(1 / 3)
    (asked,) = call(
        *("classifier", "classify_zero_shot", ["a"], labels),
        multi_label=True,
        hypothesis_template="About {}.",
    )
    assert asked == [Choice(f"About {label}.", 1.0) for label in labels]
    for wrong in ("billing", [1, 2]):
        with pytest.raises(
            InvalidRequestError, match="parameter `candidate_labels` must be a list of str"
        ):
            call("classifier", "classify_zero_shot", ["a"], wrong)
    surrogate = r"parameter candidate_labels.*lone surrogate U\+D800"
    with pytest.raises(InvalidRequestError, match=surrogate):
        call("classifier", "classify_zero_shot", ["a"], ["\ud800"])


def test_fill_mask(call: Call) -> None:
    results = call("filler", "fill_mask", ["é [MASK]", "b [MASK]"], top_k=2)
    assert results[0] == [Choice("é [MASK]0", 1.0), Choice("é [MASK]1", 0.5)]
    assert len(call("filler", "fill_mask", ["[MASK]"])[0]) == 5


def test_entities(call: Call) -> None:
    texts = ["no one", "für Anna and Bob", "Nobody"] * 5
    results = call("tagger", "entities", texts)
    assert [len(found) for found in results] == [0, 2, 1] * 5
    assert results[1] == [
        Entity("simple", "Anna", 0.75, 4, 8),
        Entity("simple", "Bob", 0.75, 13, 16),
    ]
    assert math.isnan(results[2][0].score)
    (first,) = call("tagger", "entities", ["Anna"], aggregation="first")
    assert first[0].entity == "first"


def test_answer(call: Call) -> None:
    contexts = ["é" * index + "where it is" for index in range(20)]
    results = call("reader", "answer", ["where"] * 20, contexts, max_answer_tokens=5)
    assert results == [Answer("where", 0.25, index, index + 5) for index in range(20)]
    (nowhere,) = call("reader", "answer", ["x"], ["where"], impossible_answer=True)
    assert nowhere == Answer("", 0.875, 0, 0)
    with pytest.raises(InvalidRequestError, match="Given: `text` 2, `text_pair` 1"):
        call("reader", "answer", ["a", "b"], ["c"])


def test_rerank(call: Call) -> None:
    passages = ["q" * (index * 7 % 20) for index in range(20)]
    results = call("reranker", "rerank", "q", passages)
    assert [ranked.score for ranked in results] == [float(n) for n in range(19, -1, -1)]
    assert all(ranked.score == len(passages[ranked.index]) for ranked in results)
    in_order = call("reranker", "rerank_each", "q", passages)
    assert in_order == [Ranked(index, index * 7 % 20) for index in range(20)]
    assert call("reranker", "rerank", "q", ["no", "none"]) == [Ranked(0, 0.0), Ranked(1, 0.0)]
    assert call("reranker", "rerank", "q", []) == []
    with pytest.raises(InvalidRequestError, match="`text_pair` must be a list"):
        call("reranker", "rerank", "q", "one passage")


def test_embed_in_every_encoding(call: Call) -> None:
    whole = np.stack([numbers(text) for text in TEXTS])
    for encoding, dtype, expected in (
        ("float", np.float32, whole),
        ("int8", np.int8, whole - 128),
        ("binary", np.int8, whole[:, :1] // 2),
        (None, np.int8, whole - 128),  # this pipeline's own
    ):
        vectors = call("embedder", "embed", TEXTS, encoding=encoding)
        assert vectors.dtype == dtype
        np.testing.assert_array_equal(vectors, expected.astype(dtype))
        each = call("embedder", "embed_each", TEXTS[:3], encoding=encoding)
        np.testing.assert_array_equal(np.stack(each), expected[:3].astype(dtype))
        assert call("embedder", "embed", [], encoding=encoding).shape == (0, vectors.shape[1])
        assert call("embedder", "embed_each", [], encoding=encoding) == []
    with pytest.raises(InvalidRequestError, match=r"the output `embedding_int8`.*Given: embedding"):
        call("toy", "embed", ["a"], encoding="int8")


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
    call: Call, pipeline: str, method: str, arguments: tuple[Any, ...]
) -> None:
    def with_rows(rows: list[Any]) -> tuple[Any, ...]:
        return tuple(rows if each == [] else each for each in arguments)

    good = [b"good %d" % index for index in range(12)]
    bad = [*good[:3], b"refuse", *good[3:], 7]
    results = call(pipeline, f"{method}_each", *with_rows(bad))
    refused = {row: r.row for row, r in enumerate(results) if isinstance(r, InvalidRequestError)}
    assert refused == {3: 3, 13: 13}
    kept = [result for result in results if not isinstance(result, InvalidRequestError)]
    if method == "rerank":
        assert [ranked.index for ranked in kept] == [0, 1, 2, *range(4, 13)]
    else:
        expected = call(pipeline, f"{method}_each", *with_rows(good))
        assert kept == expected == call(pipeline, method, *with_rows(good))
    with pytest.raises(InvalidRequestError, match=r"row 13: .*must be str or bytes"):
        call(pipeline, method, *with_rows(bad))
    with pytest.raises(InvalidRequestError, match="row 3: `text` must not be refused"):
        call(pipeline, method, *with_rows(bad[:-1]))
    assert call(pipeline, method, *arguments) == []


def test_a_call_that_does_not_fit_the_task_says_what_the_pipeline_has(call: Call) -> None:
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
                call(pipeline, name, *arguments)
    interface = call("reader", "interface")
    assert interface.inputs == ("text", "text_pair")
    assert interface.outputs["answer"][1] == (1,)
    assert (interface.steps, interface.max_batch_size) == (("play",), 8)


def test_both_clients_have_every_typed_call_with_the_same_words() -> None:
    assert len(TYPED) == 8
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
