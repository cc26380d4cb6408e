"""Decoders of vectors, labels and tokens, against sentence-transformers and transformers."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.gate_cases import make
from tests.support.project import quiet
from tests.support.tokenizers_of_kinds import byte_level, unigram
from triptych.core.gate.cached import decoding_of
from triptych.core.gate.check import describe_outputs
from triptych.core.gate.ranges import ranges_of, sizes_of
from triptych.core.gate.reference import reference_of
from triptych.core.gate.runs import decode, reference_row_outputs
from triptych.core.inputs import read_inputs
from triptych.core.requests import rows_of
from triptych.models.info import ModelInfo
from triptych.runtime.decode_classes import ClassDecoder
from triptych.runtime.decode_embeddings import RANGES_FILE, EmbeddingDecoder
from triptych.runtime.decode_masks import MaskDecoder
from triptych.runtime.decode_max_similarity import MaxSimilarityDecoder
from triptych.runtime.decode_zero_shot import ZeroShotDecoder
from triptych.runtime.request_errors import RequestError
from triptych.runtime.row_metadata import OUTSIDE, WORD_START, RowMetadata
from triptych.spec.spec import load_spec
from triptych.tasks.catalog import TASKS

pytestmark = pytest.mark.build

TEXTS = ("The tram to Zürich is late.", "Refund me!", "Ada wrote the first program.")


def small(architecture: str, head: str, **fields: Any) -> Any:
    """A model of random weights, with its logits spread."""
    import torch
    import transformers

    config = getattr(transformers, f"{architecture}Config")(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=0.3,
        **fields,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{architecture}For{head}")(config).eval()


def pipeline_of(task: str, model: Any, tokenizer: Any) -> Any:
    import transformers

    return transformers.pipeline(task, model=model, tokenizer=tokenizer, device="cpu")


def logits_of(model: Any, tokenizer: Any, *segments: list[str]) -> NDArray[np.float32]:
    """One row at a time, as the pipelines run it."""
    import torch

    with torch.no_grad():
        rows = [
            model(**tokenizer(*row, return_tensors="pt")).logits
            for row in zip(*segments, strict=True)
        ]
    found: NDArray[np.float32] = torch.cat(rows).numpy()
    return found


def texts_of(array: NDArray[Any]) -> list[list[str]]:
    assert array.dtype == object
    return [[value.decode("utf-8") for value in row] for row in array]


@pytest.fixture(scope="module")
def tokenizer(minilm_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(minilm_folder)


def embed(decoder: Any, vectors: NDArray[np.float32], **parameters: Any) -> NDArray[Any]:
    """The one array of the three outputs that has elements."""
    found = decoder.decode({"sentence_embedding": vectors}, [], {"encoding": "float", **parameters})
    made = [found[f"embedding{ending}"] for ending in ("", "_int8", "_uint8")]
    assert [array.dtype.name for array in made] == ["float32", "int8", "uint8"]
    assert all(array.flags.c_contiguous for array in made)
    assert {len(array) for array in made} == {len(vectors)}
    filled: list[NDArray[Any]] = [array for array in made if array.shape[1]]
    assert len(filled) == 1
    return filled[0]


def test_vectors_are_shortened_and_encoded_as_by_sentence_transformers(tmp_path: Path) -> None:
    from sentence_transformers.util import (
        normalize_embeddings,
        quantize_embeddings,
        truncate_embeddings,
    )
    from torch import from_numpy

    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((7, 37)).astype(np.float32) * 2
    with_zeros = np.vstack((vectors, np.zeros((1, 37), np.float32)))
    seen = rng.standard_normal((40, 37)).astype(np.float32)
    seen[:, 3] = 0.25  # an element without a range
    sizes = sizes_of(37, None)
    assert sizes == (8, 16, 32, 37)
    np.save(tmp_path / RANGES_FILE, ranges_of(seen, sizes))
    plain = EmbeddingDecoder({}, Path())
    decoder = EmbeddingDecoder({"range_sizes": sizes}, tmp_path)
    assert np.array_equal(embed(plain, vectors), vectors)
    size: int | None
    for size in (1, 8, 37):
        wanted = normalize_embeddings(truncate_embeddings(from_numpy(vectors), size)).numpy()
        np.testing.assert_allclose(embed(plain, vectors, dimensions=size), wanted, atol=1e-6)
    for size in (None, 1, 8, 20):
        for precision in ("binary", "ubinary"):
            found = embed(plain, with_zeros, encoding=precision, dimensions=size)
            expected = quantize_embeddings(with_zeros[:, :size], precision=precision)
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected), (size, precision)
    for size, unit in itertools.product((None, 8, 32, 37), (None, True, False)):
        options = {"dimensions": size, "normalize_embeddings": unit}
        floats, calibration = (embed(decoder, each, **options) for each in (with_zeros, seen))
        assert unit is not True or np.allclose(np.linalg.norm(floats[:-1], axis=1), 1)
        assert unit is not False or np.array_equal(floats, with_zeros[:, :size])
        for precision in ("int8", "uint8"):
            found = embed(decoder, with_zeros, encoding=precision, **options)
            expected = quantize_embeddings(
                floats, precision=precision, calibration_embeddings=calibration
            )
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected), (size, unit, precision)
    with pytest.raises(RequestError, match="one of 8, 16, 32, 37 for int8 and uint8"):
        embed(decoder, vectors, encoding="int8", dimensions=9)
    with pytest.raises(RequestError, match="two or more different texts"):
        embed(plain, vectors, encoding="int8")


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_labels_are_those_of_the_pipeline(tokenizer: Any, problem: str) -> None:
    labels = ["bug", "Zahlung", "退款", "spam 🎉", ""]
    id2label = dict(enumerate(labels))
    model = small("Bert", "SequenceClassification", id2label=id2label, problem_type=problem)
    logits = logits_of(model, tokenizer, list(TEXTS))
    scores = np.exp(logits)
    scores = scores / (scores + 1) if "multi" in problem else scores / scores.sum(1)[:, None]
    class_id = np.argsort(-scores, axis=1).astype(np.int32)
    class_score = np.take_along_axis(scores, class_id, axis=1)
    outputs = {"class_id": class_id, "class_score": class_score}
    decoder = ClassDecoder({"labels": labels, "class_scores": True}, Path())
    classify = pipeline_of("text-classification", model, tokenizer)
    for top_k in (1, 5):
        found = decoder.decode(outputs, [], {"top_k": top_k})
        expected = classify(list(TEXTS), top_k=top_k)
        assert texts_of(found["label"]) == [[choice["label"] for choice in row] for row in expected]
        scores_expected = [[choice["score"] for choice in row] for row in expected]
        np.testing.assert_allclose(found["score"], scores_expected, atol=1e-6)
        assert found["score"].flags.c_contiguous
        np.testing.assert_array_equal(found["scores"], scores)
        assert found["scores"].dtype == class_score.dtype


def test_labels_above_a_threshold_are_those_of_the_scores() -> None:
    scores = np.array([[0.9, 0.6, 0.2], [0.4, 0.3, 0.1], [0.7, 0.5, 0.5]], np.float32)
    outputs = {"class_id": np.array([[2, 0, 1], [0, 1, 2], [1, 2, 0]], np.int32)}
    outputs |= {"class_score": scores}  # type: ignore[dict-item]
    decoder = ClassDecoder({"labels": ["a", "b", "c"]}, Path())
    cases: list[tuple[dict[str, Any], list[list[str]]]] = [
        ({}, [["c", "a"], ["", ""], ["b", ""]]),
        ({"threshold": 0.65}, [["c"], [""], ["b"]]),
        ({"threshold": 0.95}, [[""], [""], [""]]),
        ({"threshold": 0.15}, [["c", "a", "b"], ["a", "b", ""], ["b", "c", "a"]]),
        ({"threshold": 0.15, "top_k": 2}, [["c", "a"], ["a", "b"], ["b", "c"]]),
        ({"threshold": 0.5, "top_k": 1}, [["c"], [""], ["b"]]),
        ({"top_k": 2}, [["c", "a"], ["a", "b"], ["b", "c"]]),  # as before
    ]
    for parameters, labels in cases:
        found = decoder.decode(outputs, [], parameters)
        assert texts_of(found["label"]) == labels, parameters
        kept = np.array([[label != "" for label in row] for row in labels])
        expected = np.where(kept, scores[:, : kept.shape[1]], 0)
        np.testing.assert_array_equal(found["score"], expected)
        assert found["score"].dtype == np.float32
        assert all(array.flags.c_contiguous for array in found.values())
    outputs["class_score"] = np.array([[np.nan, 0.2, 0.1]] * 3, np.float32)
    assert np.isnan(decoder.decode(outputs, [], {})["score"]).all()


@pytest.mark.parametrize("kind", ["byte-level", "unigram", "wordpiece"])
def test_every_token_is_written_as_transformers_does(
    tokenizer: Any, tmp_path: Path, kind: str
) -> None:
    from transformers import PreTrainedTokenizerFast

    if kind != "wordpiece":
        made = (
            byte_level([*TEXTS, "a . b ' s"] * 3, ["<mask>"])
            if kind == "byte-level"
            else unigram(TEXTS, ["<unk>", "<mask>"], vocabulary=80)
        )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=made, mask_token="<mask>", clean_up_tokenization_spaces=True
        )
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    beyond = 3  # a model's vocabulary may be larger than the tokenizer's
    ids = np.arange(len(tokenizer) + beyond, dtype=np.int32).reshape(1, -1)
    decoder = MaskDecoder({}, tmp_path)
    outputs = {"class_id": ids, "class_score": np.zeros(ids.shape, np.float32)}
    for _ in range(2):  # the second time from what is known
        found = decoder.decode(outputs, [], {"top_k": ids.size})
        expected = [tokenizer.decode([token_id]) for token_id in ids[0].tolist()]
        assert texts_of(found["token"]) == [expected]
    assert expected[-beyond:] == [""] * beyond


NLI = (
    ["contradiction", "neutral", "entailment"],
    ["entailment", "neutral", "contradiction"],
    ["not_entailment", "entailment"],
)


@pytest.mark.parametrize("classes", NLI, ids=len)
def test_hypotheses_score_as_in_the_pipeline(tokenizer: Any, classes: list[str]) -> None:
    names = {name: index for index, name in enumerate(classes)}
    id2label = dict(enumerate(classes))
    model = small("Bert", "SequenceClassification", id2label=id2label, label2id=names)
    facts = ModelInfo("", "", 32, 512, 0, labels=tuple(classes))
    settings = json.loads(json.dumps(TASKS["zero-shot-classification"].settings(facts)))
    decoder = ZeroShotDecoder(settings, Path())
    pipeline = pipeline_of("zero-shot-classification", model, tokenizer)
    for labels in (["billing"], ["billing", "travel", "退款", "science"]):
        pairs = [(text, f"This example is {label}.") for text in TEXTS for label in labels]
        first, second = map(list, zip(*pairs, strict=True))
        logits = {"inference_logits": logits_of(model, tokenizer, first, second)}
        for multi_label in (False, True):
            parameters = {"candidate_labels": labels, "multi_label": multi_label}
            found = decoder.decode(logits, [], parameters)
            expected = pipeline(list(TEXTS), **parameters)
            assert texts_of(found["label"]) == [row["labels"] for row in expected]
            scores = [row["scores"] for row in expected]
            np.testing.assert_allclose(found["score"], scores, atol=1e-6)
            assert found["score"].dtype == np.float32


def test_large_logits_do_not_overflow() -> None:
    decoder = ZeroShotDecoder({"entailment": 1, "contradiction": 0}, Path())
    logits = np.array([[-200, 200], [300, -300]], np.float32)
    for multi_label in (False, True):
        parameters = {"candidate_labels": ["a", "b"], "multi_label": multi_label}
        found = decoder.decode({"inference_logits": logits}, [], parameters)
        assert found["score"].tolist() == [[1, 0]]


def test_vectors_are_compared_as_floats_whatever_the_request_asks_for(
    tmp_path: Path, tiny_model: Path
) -> None:
    spec = {"task": "text-embedding", "model": {"source": str(tiny_model)}}
    (tmp_path / "pipeline.yaml").write_text(json.dumps(spec))
    row = {"text": "a", "parameters": {"encoding": "binary", "dimensions": 8}}
    (tmp_path / "traffic.jsonl").write_text(json.dumps(row))
    inputs = read_inputs(load_spec(tmp_path), quiet)
    requests = inputs.requests[-1:]
    decoding = decoding_of(inputs)
    assert decoding is not None
    expected = reference_of(inputs, rows_of(requests), quiet)
    core_outputs = reference_row_outputs(inputs.plan.core, expected)
    (outputs,) = decode(decoding, requests, core_outputs)
    assert outputs["embedding"].shape == (1, 8)


SCORES = np.array([0.1, 0.3, 0.3 - 4e-6, 0.2, 0.05, 0.03, 0.02], dtype=np.float32)


def test_of_equal_classes_the_reference_takes_the_artifacts() -> None:
    core = make("choices").core
    for chosen, wanted in (
        ([1, 2, 3], [1, 2, 3]),
        ([2, 1, 3], [2, 1, 3]),  # a tie: the artifact's order is as good
        ([2, 1, 0], [2, 1, 3]),
        ([2, 3, 1], [2, 1, 3]),
        ([3, 1, 2], [1, 2, 3]),
        ([0, 4, 5], [1, 2, 3]),
    ):
        ids, zeros = np.array(chosen, np.int32), np.zeros(3, np.float32)
        like: Any = [{"class_id": ids, "class_score": zeros}]
        (row,) = reference_row_outputs(core, [(SCORES,)], like)
        assert row["class_id"].tolist() == wanted
        assert row["class_id"].dtype == np.int32
        assert row["class_score"].tolist() == SCORES[wanted].tolist()
    label, score = np.array([[b"late", b"lost\x1b"]], object), np.array([[0.75, 0.25]])
    assert describe_outputs({"label": label, "score": score}) == "late 0.7500, lost\\x1b 0.2500"


@pytest.mark.filterwarnings("ignore:Encountered documents without any scoreable token")
def test_a_passage_without_vectors_scores_below_all_others(tmp_path: Path) -> None:
    import torch
    from sentence_transformers.util.similarity import maxsim

    vectors = np.array([[[1, 0], [0, 1]], [[-1, 0], [0, -1]], [[1, 1], [1, 1]]], np.float32)
    marks = ((-1, WORD_START), (0, WORD_START), (0, OUTSIDE))
    metadata = [
        RowMetadata(row, "", np.zeros((2, 2), np.int32), np.full(2, kind, np.uint8))
        for row, kind in marks
    ]
    found = MaxSimilarityDecoder({}, tmp_path).decode({"token_embedding": vectors}, metadata, {})[
        "score"
    ]
    query, passage, _ = torch.from_numpy(vectors)
    wanted = maxsim([query], [passage, torch.empty(0, 2)])[0].numpy()
    assert found[:, 0].tolist() == wanted.tolist()
