"""Entities and answers, which are spans of a text, against the pipelines of transformers."""

import itertools
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors

from tests.support.project import ROOT
from tests.support.tokenizers_of_kinds import byte_level, unigram
from triptych.core.gate.check import describe_outputs
from triptych.runtime.decode_answers import CANDIDATES, AnswerDecoder, _best_spans
from triptych.runtime.decode_entities import EntityDecoder
from triptych.runtime.request_errors import RequestError
from triptych.runtime.row_metadata import OUTSIDE, WORD_INSIDE, WORD_START, RowMetadata
from triptych.runtime.row_types import Arrays
from triptych.runtime.rows_spans import make_kinds, word_offsets

pytestmark = pytest.mark.build

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC", "B-PER-SUB", "ORG-SUB"]
STRATEGIES = ("none", "simple", "first", "max", "average")
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
SAMPLES = [
    "Ada Lovelace met Charles Babbage in London.",
    "In 1843 Zürich's trams cost 49.95€; internationalization of pseudo-anonymous cafés!",
    "naïve İstanbul straße ﬁnance ½ ǆ",
    "東京タワーは高い。 大阪",
    "👩‍💻 writes to bob@example.com 🎉🎉 and (re)opens https://example.org/a?b=c",
    "don't can't it's   many    spaces\tand\ttabs\nand lines\r\n",
    "  leading and trailing  ",
    "한국어 문장입니다 العربية עברית हिन्दी",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "a",
    ".",
    "...!?",
    "",
    " ",
    "\n\t",
    "\u200b\u200d",
    "e\u0301te\u0301 vs été",
    "\U0001d54f\U0001d556 math",
]
TEXTS = [
    *SAMPLES,
    *(f"{first} {second}" for first, second in itertools.pairwise(SAMPLES)),
    *(sample.upper() for sample in SAMPLES[:10]),
]


def _wrapped(tokenizer: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    ends = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=256,
        model_input_names=["input_ids", "attention_mask"],
    )


class Case:
    """What the pipeline of transformers makes of random logits, and the same logits for ours."""

    def __init__(self, tokenizer: Any) -> None:
        import torch
        import transformers

        names = {label: index for index, label in enumerate(LABELS)}
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = transformers.BertConfig(**sizes, id2label=dict(enumerate(LABELS)), label2id=names)
        model = transformers.BertForTokenClassification(config)  # only its labels are read
        self._pipeline: Any = transformers.pipeline(
            "token-classification", model=model, tokenizer=tokenizer, device="cpu"
        )
        rng, self._ran, scores = np.random.default_rng(0), list[Any](), list[NDArray[Any]]()
        for text in TEXTS:
            (inputs,) = self._pipeline.preprocess(text, is_split_into_words=False)
            shape = (inputs["input_ids"].shape[1], len(LABELS))
            logits = rng.normal(0, 2, shape).astype(np.float32)
            self._ran.append([{**inputs, "logits": torch.from_numpy(logits)[None]}])
            # The pipeline's own arithmetic, to the last bit: near-ties then break alike.
            powers = np.exp(logits - logits.max(-1, keepdims=True))
            scores.append(powers / powers.sum(-1, keepdims=True))
        self.scores = np.full((len(TEXTS), max(map(len, scores)), len(LABELS)), 7, np.float32)
        for place, own in zip(self.scores, scores, strict=True):
            place[: len(own)] = own
        self.metadata = [self._row_metadata(row, text) for row, text in enumerate(TEXTS)]

    def _row_metadata(self, row: int, text: str) -> RowMetadata:
        tokenizer = self._pipeline.tokenizer
        encoding = tokenizer.backend_tokenizer.encode(text)
        model = tokenizer.backend_tokenizer.model
        kinds = make_kinds(
            encoding.tokens,
            encoding.offsets,
            encoding.special_tokens_mask,
            encoding.ids,
            text,
            subword_prefix=getattr(model, "continuing_subword_prefix", None),
            unk_id=tokenizer.unk_token_id,
        )
        return RowMetadata(row, text, np.array(encoding.offsets, np.int32).reshape(-1, 2), kinds)

    def expect(self, strategy: str) -> list[list[dict[str, Any]]]:
        """The pipeline's own entities, in the form of ours."""
        from transformers.pipelines.token_classification import AggregationStrategy

        name, way = (
            "entity" if strategy == "none" else "entity_group",
            AggregationStrategy(strategy),
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Tokenizer does not support real words")
            found = [self._pipeline.postprocess(ran, aggregation_strategy=way) for ran in self._ran]
        return [
            [
                {
                    "entity": entity[name],
                    "text": text[entity["start"] : entity["end"]],
                    "start": entity["start"],
                    "end": entity["end"],
                    "score": pytest.approx(float(entity["score"]), abs=1e-6),
                }
                for entity in entities
            ]
            for text, entities in zip(TEXTS, found, strict=True)
        ]


def decode(
    outputs: Mapping[str, NDArray[Any]],
    metadata: Sequence[RowMetadata],
    aggregation: str,
    labels: Sequence[str] = LABELS,
) -> list[list[dict[str, Any]]]:
    """The decoder's entities, read as a client reads them."""
    decoder = EntityDecoder({"labels": list(labels)}, Path())
    found = decoder.decode(outputs, metadata, {"aggregation_strategy": aggregation})["entities"]
    assert found.shape == (len(metadata), 1)
    return [json.loads(row) for row in found[:, 0]]


@pytest.fixture(scope="module", params=["wordpiece", "byte-level", "unigram"])
def case(request: pytest.FixtureRequest, minilm_folder: Path) -> Case:
    if request.param == "wordpiece":
        from transformers import AutoTokenizer

        return Case(AutoTokenizer.from_pretrained(minilm_folder))
    if request.param == "byte-level":
        return Case(_wrapped(byte_level(SAMPLES, SPECIAL, vocabulary=420)))
    # Other scripts are unknown to it.
    return Case(_wrapped(unigram(SAMPLES[:3], SPECIAL, vocabulary=150, normalizes=True)))


def test_entities_are_those_of_the_pipeline(case: Case) -> None:
    outputs: dict[str, NDArray[Any]] = {"token_scores": case.scores}
    best = {
        "token_class": case.scores.argmax(-1).astype(np.int32),
        "token_score": case.scores.max(-1),
    }
    seen = list[Any]()
    for strategy in STRATEGIES:
        expected = case.expect(strategy)
        assert sum(map(len, expected)) > 100
        assert decode(outputs, case.metadata, strategy) == expected, strategy
        if strategy != "average":
            assert decode(best, case.metadata, strategy) == expected, strategy
        assert expected not in seen  # the texts tell the strategies apart
        seen.append(expected)
    kinds = np.concatenate([row_metadata.kinds for row_metadata in case.metadata])
    assert set(kinds.tolist()) == {OUTSIDE, WORD_START, WORD_INSIDE}


def metadata_of(
    words: Sequence[str], kinds: Sequence[int] | None = None, row: int = 0
) -> RowMetadata:
    """One token a word, with spaces between."""
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    starts = ends - [len(word) for word in words]
    offsets = np.stack((starts, ends), axis=1).astype(np.int32)
    return RowMetadata(
        row, " ".join(words), offsets, np.array(kinds or [WORD_START] * len(words), np.uint8)
    )


def choices(labels: Sequence[str], scores: Sequence[float] | None = None) -> dict[str, Any]:
    ids = np.array([[LABELS.index(label) for label in labels]], np.int32)
    return {"token_class": ids, "token_score": np.array([scores or [0.5] * len(labels)], "f4")}


def test_rows_end_entities_and_words() -> None:
    metadata = [metadata_of(["a"]), metadata_of(["b", "c"], [WORD_INSIDE, WORD_INSIDE], 1)]
    outputs = {"token_class": np.full((2, 2), 2), "token_score": np.full((2, 2), 0.5, "f4")}
    for strategy in ("simple", "first", "max"):
        found = decode(outputs, metadata, strategy)
        assert [[entity["text"] for entity in row] for row in found] == [["a"], ["b c"]]
        assert decode(outputs, [metadata_of(["a"], [OUTSIDE])], strategy) == [[]]


def test_scores_that_are_no_numbers() -> None:
    nan = float("nan")
    row_metadata = metadata_of(["a", "b", "c"], [WORD_START, WORD_INSIDE, WORD_INSIDE])
    known = choices(["B-PER", "I-PER", "I-PER"], [nan, 0.25, 0.75])
    for strategy, expected in (("simple", 0.5), ("first", None), ("max", 0.75)):
        assert decode(known, [row_metadata], strategy)[0][0]["score"] == expected
    unknown = choices(["B-PER", "I-LOC", "I-LOC"], [nan] * 3)
    for strategy, texts in (("simple", ["a", "b c"]), ("first", ["a b c"]), ("max", ["a b c"])):
        found = decode(unknown, [row_metadata], strategy)[0]
        assert [entity["text"] for entity in found] == texts
        assert found[0]["entity"] == "PER"
        assert {entity["score"] for entity in found} == {None}
    scores = np.zeros((1, 3, len(LABELS)), np.float32)
    scores[0, :, 1] = nan, 0.5, 1
    assert decode({"token_scores": scores}, [row_metadata], "average")[0][0]["score"] == 0.75


def test_text_is_not_escaped() -> None:
    outputs = choices(["B-PER"])
    raw = EntityDecoder({"labels": LABELS}, Path()).decode(
        outputs, [metadata_of(["“Zoë” 東京"])], {"aggregation_strategy": "none"}
    )["entities"][0, 0]
    assert "Zoë” 東京".encode() in raw
    found = {"entity": "B-PER", "text": "“Zoë” 東京", "start": 0, "end": 8, "score": 0.5}
    assert json.loads(raw)[0] == found
    assert describe_outputs({"entities": np.array([raw], object)}) == "B-PER '“Zoë” 東京' 0-8"
    assert describe_outputs({"entities": np.array([b"[]"], object)}) == "(nothing)"


def test_average_needs_every_score() -> None:
    with pytest.raises(RequestError, match=r"parameters: \{aggregation_strategy: average\}"):
        decode(choices(["O"]), [metadata_of(["a"])], "average")


FIXTURE = json.loads((ROOT / "tests/data/question_answering.json").read_text(encoding="utf-8"))
ANSWERS: list[dict[str, Any]] = FIXTURE["cases"]
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


def decode_spans(cases: list[dict[str, Any]], metadata: list[RowMetadata]) -> Arrays:
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
    for case in ANSWERS:
        found = decode_spans([case], windows_of(tokenizer, case, 0))
        assert agrees(case, found, 0), (case["expected"], {name: found[name] for name in NAMES})
        assert [found[name].dtype.name for name in NAMES] == ["object", "float32", *["int32"] * 2]
        assert {found[name].shape for name in NAMES} == {(1, 1)}


def test_rows_of_a_request_do_not_mix(tokenizer: Tokenizer) -> None:
    first = parameters_of(ANSWERS[0])
    cases = [case for case in ANSWERS if parameters_of(case) == first]
    assert len(cases) > 1
    metadata = [
        row_metadata
        for row, case in enumerate(cases)
        for row_metadata in windows_of(tokenizer, case, row)
    ]
    found = decode_spans(cases, metadata)
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
    texts = [case["context"] for case in ANSWERS]
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
