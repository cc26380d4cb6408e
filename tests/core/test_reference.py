"""What the gate compares with: the reference gives what transformers' pipelines give."""

import ast
import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mistakes import check_refused
from triptych.base.tensors import TokenRow
from triptych.core.export.to_onnx import load_model
from triptych.core.gate.reference import (
    OVERRIDES,
    check_tokens,
    load_as_user,
    pixel_values,
    reference_outputs,
)
from triptych.core.requests import Sample
from triptych.spec.image_source import _load
from triptych.spec.model_info import ImageInfo, ModelInfo
from triptych.spec.model_source import read_model_info
from triptych.spec.tasks import find_task
from triptych.spec.tasks.task import Core

pytestmark = pytest.mark.build

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXTS = ["hello", "a much longer text than that, with a few commas, too", "so?", "red and green"]


def save(folder: Path, minilm: Path, kind: str, **config: Any) -> Path:
    """A tiny BERT with large weights, so that scores differ, and MiniLM's tokenizer."""
    import torch
    import transformers

    torch.manual_seed(3)
    settings = transformers.BertConfig(
        **SIZES, intermediate_size=64, initializer_range=0.4, **config
    )
    model = getattr(transformers, f"BertFor{kind}")(settings)
    model.base_model.embeddings.token_type_embeddings.weight.data[1] += 3
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    return folder


def pipeline(task: str, folder: Path, **settings: Any) -> Any:
    import transformers

    return transformers.pipeline(task, model=str(folder), device="cpu", **settings)


def rows_of(folder: Path, texts: list[Any]) -> list[Sample]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows: list[Sample] = []
    for text in texts:
        encoded = tokenizer(*(text if isinstance(text, tuple) else (text,)))
        types = encoded["token_type_ids"]
        rows.append(TokenRow(tuple(encoded["input_ids"]), types.count(0)))
    return rows


def read(folder: Path, task: str, **parameters: Any) -> tuple[ModelInfo, Core]:
    facts = read_model_info(folder, loader=find_task(task).loader)
    return facts, find_task(task).core(facts, parameters)


ACTIVATIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "softmax"),
    ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
    ({"num_labels": 1}, "sigmoid"),
    ({"num_labels": 1, "problem_type": "regression"}, "none"),
    ({"id2label": {0: "no", 1: "yes"}, "function_to_apply": "sigmoid"}, "softmax"),
    ({"num_labels": 3, "problem_type": "regression"}, "none"),
]
"""Settings of a model, and what its scores went through."""


def test_scores_of_texts_and_pairs_are_those_of_the_pipeline(
    tmp_path: Path, minilm_folder: Path
) -> None:
    pairs = [(text, "and a second text") for text in TEXTS]
    asked = [*TEXTS, *({"text": one, "text_pair": two} for one, two in pairs)]
    for number, (config, activation) in enumerate(ACTIVATIONS):
        folder = save(tmp_path / str(number), minilm_folder, "SequenceClassification", **config)
        facts, core = read(folder, "text-classification")
        assert (facts.activation, facts.segments) == (activation, 2)
        classify = pipeline("text-classification", folder)
        found = reference_outputs(folder, facts, core, rows_of(folder, [*TEXTS, *pairs]))
        for text, (scores,) in zip(asked, found, strict=True):
            wanted = {answer["label"]: answer["score"] for answer in classify(text, top_k=None)}
            by_label = dict(zip(facts.labels, scores.tolist(), strict=True))
            assert by_label == pytest.approx(wanted, abs=1e-6), config
    # The types of the second text take part: without them the same tokens score otherwise.
    (row, *_) = rows_of(folder, pairs[:1])
    plain = TokenRow(tuple(row[0]), len(row[0]))
    (without,) = reference_outputs(folder, facts, core, [plain])
    assert np.abs(without[0] - found[len(TEXTS)][0]).max() > 1e-3


def test_scores_of_tokens_are_those_of_the_pipeline(tmp_path: Path, minilm_folder: Path) -> None:
    """The activation in the config is for whole texts only."""
    config: dict[str, Any] = {"num_labels": 4, "problem_type": "multi_label_classification"}
    folder = save(tmp_path / "m", minilm_folder, "TokenClassification", **config)
    facts, core = read(folder, "token-classification", aggregation_strategy="average")
    tag = pipeline("token-classification", folder, ignore_labels=[])
    found = reference_outputs(folder, facts, core, rows_of(folder, TEXTS))
    for text, (scores,) in zip(TEXTS, found, strict=True):
        wanted = tag(text)
        best = scores[1:-1]  # the pipeline leaves the special tokens out
        assert [facts.labels[i] for i in best.argmax(1)] == [word["entity"] for word in wanted]
        assert best.max(1) == pytest.approx([word["score"] for word in wanted], abs=1e-6)


def test_a_row_has_one_mask(tmp_path: Path, minilm_folder: Path) -> None:
    folder = save(tmp_path / "m", minilm_folder, "MaskedLM")
    facts, core = read(folder, "fill-mask")
    assert (facts.mask_token, facts.mask_token_id, facts.unk_token_id) == ("[MASK]", 103, 100)
    for text in ("no mask", "[MASK] [MASK]"):
        rows = rows_of(folder, [text])
        check_refused("mask tokens", reference_outputs, folder, facts, core, rows)


def test_pixel_values_without_rescaling_or_normalizing() -> None:
    image = ImageInfo("none", (), "bilinear", None, False, None, None, None, height=1, width=3)
    info = ModelInfo("", "ViTForImageClassification", 32, 1, 0, image=image)
    pixels = np.array([[[0, 128, 255]]], dtype=np.uint8)
    assert pixel_values(pixels, info).tolist() == [[[0]], [[128]], [[255]]]
    with pytest.raises(ValueError, match="no image processor"):
        pixel_values(pixels, replace(info, image=None))


def test_every_setting_of_ours_is_listed_with_its_reason() -> None:
    """Settings are keywords of calls that load a model, and attributes that are set on it."""
    found = set()
    for function in (load_model, load_as_user, reference_outputs, check_tokens, _load):
        for node in ast.walk(ast.parse(inspect.getsource(function))):
            match node:
                case ast.Call(keywords=[*words]) if "trust_remote_code" in {w.arg for w in words}:
                    dicts = [w.value for w in words if isinstance(w.value, ast.Dict)]
                    found |= {w.arg for w in words if not isinstance(w.value, ast.Dict)}
                    found |= {key.value for each in dicts for key in each.keys}  # type: ignore[union-attr]
                case ast.Assign(targets=[ast.Attribute(attr=name)]):
                    found.add(name)
    listed = {re.split("[=(]", name)[0].rpartition(".")[2] for name in OVERRIDES}
    assert found - {"output_loading_info"} == listed - {
        *("set_pooling_include_prompt", "truncation", "pixel_values"),
    }
