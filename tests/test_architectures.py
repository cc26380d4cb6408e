"""Exported cores of many architectures, every head and both layouts, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import architectures as models
from triptych.errors import UserError
from triptych.export.packing import CannotPack
from triptych.export.to_onnx import export_onnx, load_model

TOLERANCE = 2e-6
SHARED = [
    ("bert", "embedding", "packed"),
    ("bert", "embedding", "bucketed"),
    ("roberta", "logits", "bucketed"),
    ("mpnet", "embedding", "bucketed"),
    ("deberta-v3", "spans", "bucketed"),
    ("modernbert", "scores", "packed"),
]
"""An export takes seconds: tests of lower precision and of TensorRT's parsers have these, too."""
OTHERS = [
    ("distilbert", "tokens", "packed"),
    ("distilbert", "token-scores", "bucketed"),
    ("roberta", "mask", "packed"),
    ("xlm-roberta", "token-scores", "packed"),
    ("xlm-roberta", "mask", "bucketed"),
    ("mpnet", "classification", "packed"),
    ("deberta-v2", "spans", "packed"),
    ("deberta-v2", "scores", "bucketed"),
    ("deberta-v3", "logits", "packed"),
    ("deberta-conv", "tokens", "bucketed"),
    ("modernbert", "classification", "bucketed"),
]
"""With these, each architecture and each head in both layouts. Most are built and served, too."""
CASES = [*SHARED, *(pytest.param(*case, marks=pytest.mark.long) for case in OTHERS)]


@pytest.mark.parametrize(("name", "head", "layout"), CASES)
def test_every_row_equals_transformers_on_it_alone(name: str, head: str, layout: str) -> None:
    core, packed = models.HEADS[head], layout == "packed"
    folder, facts = models.exported(name, head, layout)
    rows = models.random_rows()
    path = folder / "onnx/model.onnx"
    expected = models.expected_outputs(folder, facts, core, rows)
    for found, wanted in zip(
        models.run_graph(path, facts, core, rows, packed=packed), expected, strict=True
    ):
        for output, value, target in zip(core.outputs, found, wanted, strict=True):
            assert value.dtype == {"INT32": np.int32, "FP32": np.float32}[output.dtype]
            assert value.shape == target.shape
            assert np.abs(value - target).max() < TOLERANCE * max(1.0, np.abs(target).max())
    check_declared(path, head, packed=packed)
    # Warming up, every input is zeros.
    zeros = models.run_graph(path, facts, core, [[0, 0], [0, 0, 0]], packed=packed)
    assert all(np.isfinite(value).all() for row in zeros for value in row)


def check_declared(path: Path, head: str, *, packed: bool) -> None:
    """Inputs and outputs are what Triton's config will say, sizes that are fixed as numbers."""
    graph = onnx.load(path, load_external_data=False).graph
    axes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    tokens = ["tokens"] if packed else ["rows", "tokens"]
    expected = {"input_ids": tokens, "row_length": ["rows", 1], "first_segment": ["rows", 1]}
    if packed:
        expected["row_stride"] = ["rows"]
    for output in models.HEADS[head].outputs:
        per_token = output.dims[0] == "tokens"
        expected[output.name] = [*tokens, *output.dims[1:]] if per_token else ["rows", *output.dims]
    assert axes == expected
    assert list(axes) == list(expected)


@pytest.mark.parametrize("head", ["classification", "tokens", "mask"])
def test_a_model_that_mixes_neighbouring_tokens_is_not_packed(tmp_path: Path, head: str) -> None:
    core = models.HEADS[head]
    facts = models.save_model("deberta-conv", core.auto_class, tmp_path)
    with pytest.raises(CannotPack, match=r"rows that share a sequence differ by \S+ from rows"):
        export_onnx(tmp_path, facts, core, models.INPUTS, packed=True, target=tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_a_batch_longer_than_the_table_of_positions_by_place_is_not_packed(tmp_path: Path) -> None:
    core = models.HEADS["tokens"]
    facts = models.save_model("roformer", core.auto_class, tmp_path)
    with pytest.raises(CannotPack):
        export_onnx(tmp_path, facts, core, models.INPUTS, packed=True, target=tmp_path / "onnx")


def test_a_model_that_reads_its_padding_ends_in_one_message(tmp_path: Path) -> None:
    core = models.HEADS["classification"]
    facts = models.save_model("fnet", core.auto_class, tmp_path)
    with pytest.raises(CannotPack):
        export_onnx(tmp_path, facts, core, models.INPUTS, packed=True, target=tmp_path)
    with pytest.raises(UserError) as caught:
        export_onnx(tmp_path, facts, core, models.INPUTS, packed=False, target=tmp_path)
    assert caught.value.field == "model.source"
    assert "padding" in caught.value.message
    assert facts.architecture in caught.value.message


@pytest.mark.parametrize(
    ("saved", "asked"),
    [
        ("AutoModel", "AutoModelForSequenceClassification"),
        ("AutoModelForMaskedLM", "AutoModelForQuestionAnswering"),
        ("AutoModelForTokenClassification", "AutoModelForSequenceClassification"),
    ],
)
def test_a_head_without_weights_is_refused(tmp_path: Path, saved: str, asked: str) -> None:
    models.save_model("bert", saved, tmp_path)
    with pytest.raises(UserError, match="must hold every weight of BertFor"):
        load_model(tmp_path, asked)


def test_a_pooler_that_nothing_reads_may_be_missing(tmp_path: Path) -> None:
    models.save_model("bert", "AutoModelForMaskedLM", tmp_path)
    encoder = load_model(tmp_path, "AutoModel")
    assert not encoder.pooler.dense.weight.detach().any()


def test_a_model_without_such_a_head_is_refused(tmp_path: Path) -> None:
    models.save_model("bert", "AutoModel", tmp_path)
    with pytest.raises(UserError, match="AutoModelForImageClassification"):
        load_model(tmp_path, "AutoModelForImageClassification")
