"""Answers of question-answering, against what transformers 4's own pipeline made of the logits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from conftest import ROOT
from small_tokenizers import byte_level, unigram
from triptych.runtime.decode_answers import CANDIDATES, AnswerDecoder, _best_spans
from triptych.runtime.row_metadata import OUTSIDE, WORD_START, RowMetadata
from triptych.runtime.row_types import Arrays
from triptych.runtime.rows_spans import word_offsets

FIXTURE = json.loads((ROOT / "tests/data/question_answering.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = FIXTURE["cases"]
NAMES = ("answer", "score", "start", "end")


@pytest.fixture(scope="module")
def tokenizer(minilm_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))


def parameters_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the request parameters of a recorded case."""
    return {
        "max_answer_len": case["max_answer_tokens"],
        "handle_impossible_answer": case["impossible_answer"],
    }


def windows_of(tokenizer: Tokenizer, case: dict[str, Any], row: int) -> list[RowMetadata]:
    """The metadata of a case's windows, as the rows of question-answering make them."""
    tokenizer.no_padding()
    tokenizer.enable_truncation(case["max_length"], stride=case["stride"], strategy="only_second")
    encoding = tokenizer.encode(case["question"], case["context"])
    metadata = []
    for index, window in enumerate([encoding, *encoding.overflowing]):
        inside = np.array([sequence == 1 for sequence in window.sequence_ids])
        kinds = np.where(inside, WORD_START, OUTSIDE).astype(np.uint8)
        text = case["context"] if index == 0 else ""
        metadata.append(
            RowMetadata(row, text, word_offsets(window.offsets, window.word_ids), kinds)
        )
    return metadata


def decode(cases: list[dict[str, Any]], metadata: list[RowMetadata]) -> Arrays:
    """All cases as the rows of one request; padding holds the highest logits of all."""
    outputs = {}
    width = max(len(row_metadata.kinds) for row_metadata in metadata)
    for name, field in (("start_logit", "start"), ("end_logit", "end")):
        rows = [window for case in cases for window in case[field]]
        padded = np.full((len(rows), width), 99, dtype=np.float32)
        for place, window in zip(padded, rows, strict=True):
            place[: len(window)] = np.array(window) / 100
        outputs[name] = padded
    return AnswerDecoder({}, Path()).decode(outputs, metadata, parameters_of(cases[0]))


def agrees(case: dict[str, Any], found: Arrays, row: int) -> bool:
    expected = case["expected"]
    return (
        found["answer"][row, 0].decode() == expected["answer"]
        and (found["start"][row, 0], found["end"][row, 0]) == (expected["start"], expected["end"])
        and abs(float(found["score"][row, 0]) - expected["score"]) < 1e-5
    )


def test_answers_are_those_of_transformers(tokenizer: Tokenizer) -> None:
    for case in CASES:
        found = decode([case], windows_of(tokenizer, case, 0))
        assert agrees(case, found, 0), (case["expected"], {name: found[name] for name in NAMES})
        assert [found[name].dtype.name for name in NAMES] == ["object", "float32", *["int32"] * 2]
        assert {found[name].shape for name in NAMES} == {(1, 1)}


def test_rows_of_a_request_do_not_mix(tokenizer: Tokenizer) -> None:
    first = parameters_of(CASES[0])
    cases = [case for case in CASES if parameters_of(case) == first]
    assert len(cases) > 1
    metadata = [
        row_metadata
        for row, case in enumerate(cases)
        for row_metadata in windows_of(tokenizer, case, row)
    ]
    found = decode(cases, metadata)
    assert all(agrees(case, found, row) for row, case in enumerate(cases))


def test_context_without_tokens_has_an_empty_answer() -> None:
    row_metadata = RowMetadata(0, "  ", np.zeros((3, 2), np.int32), np.full(3, OUTSIDE, np.uint8))
    logits = np.ones((1, 3), np.float32)
    outputs = {"start_logit": logits, "end_logit": logits}
    parameters = {"max_answer_len": 15, "handle_impossible_answer": False}
    found = AnswerDecoder({}, Path()).decode(outputs, [row_metadata], parameters)
    assert [found[name].tolist() for name in NAMES] == [[[b""]], [[0.0]], [[0]], [[0]]]


def test_best_spans_are_the_best_of_all() -> None:
    for longest in (1, 2, 7, 30, 100):
        rng = np.random.default_rng(longest)
        start, end = rng.random((2, 5, 30), dtype=np.float32)
        for window, spans in enumerate(_best_spans(start, end, longest)):
            every = np.outer(start[window], end[window])
            every = np.tril(np.triu(every), longest - 1).ravel()
            best = np.argsort(-every)[:CANDIDATES]
            assert [first * 30 + last for first, last, _ in spans] == best.tolist()
            assert [score for _, _, score in spans] == every[best].tolist()


@pytest.mark.parametrize("kind", ["byte-level", "unigram"])
def test_word_offsets_are_those_of_the_tokenizer(kind: str) -> None:
    texts = [case["context"] for case in CASES]
    tokenizer: Any = (
        byte_level(texts, prefix_space=True)
        if kind == "byte-level"
        else unigram(texts, normalizes=True)
    )
    tokenizer.enable_truncation(13, stride=3)
    split = 0
    for text in texts:
        encoding = tokenizer.encode(text)
        for window in [encoding, *encoding.overflowing]:
            expected = [window.word_to_chars(word) for word in window.word_ids]
            found = word_offsets(window.offsets, window.word_ids)
            assert found.tolist() == [list(span) for span in expected]
            split += found.tolist() != [list(span) for span in window.offsets]
    assert split
    # Tokens without words keep their offsets.
    found = word_offsets([(0, 0), (0, 3), (3, 5), (0, 0), (7, 9)], [None, 0, 0, None, None])
    assert found.tolist() == [[0, 0], [0, 5], [0, 5], [0, 0], [7, 9]]
    assert word_offsets([], []).shape == (0, 2)
