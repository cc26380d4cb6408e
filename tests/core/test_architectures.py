"""Exported cores of many architectures, every head and both layouts, against transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers

import architectures as models
from architectures import OTHERS, SHARED
from triptych.base.errors import UserError
from triptych.core.export.packing import CannotPack
from triptych.core.export.to_onnx import export_onnx, load_model
from triptych.spec.model_source import read_model_info

pytestmark = pytest.mark.build

TOLERANCE = 2e-6
CASES = [*SHARED, *(pytest.param(*case, marks=pytest.mark.long) for case in OTHERS)]


@pytest.mark.parametrize(("name", "head", "layout"), CASES)
def test_every_row_equals_transformers_on_it_alone(name: str, head: str, layout: str) -> None:
    core, packed = models.HEADS[head], layout == "packed"
    folder, facts = models.exported(name, head, layout)
    rows = models.random_rows()
    rows += models.with_special(rows, transformers.AutoConfig.from_pretrained(folder))
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
    if packed:  # the same bits alone and in a batch
        for row, found in zip(
            rows[:7], models.run_graph(path, facts, core, rows, packed=True), strict=False
        ):
            alone = models.run_graph(path, facts, core, [row], packed=True)[0]
            assert all(map(np.array_equal, found, alone))
    # Rows of zeros, whatever they stand for, come to numbers, too.
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
        expected |= {"row_offset": ["rows", 1], "row_stride": ["rows"]}
    for output in models.HEADS[head].outputs:
        per_token = output.dims[0] == "tokens"
        expected[output.name] = [*tokens, *output.dims[1:]] if per_token else ["rows", *output.dims]
    assert axes == expected
    assert list(axes) == list(expected)


def test_a_model_that_reads_its_padding_ends_in_one_message(tmp_path: Path) -> None:
    core = models.HEADS["classification"]
    facts = models.save_model("fnet", core.auto_class, tmp_path)
    packed = models.LAYOUT_INPUTS["packed"]
    with pytest.raises(CannotPack, match=r"rows of a batch differ by \S+ from the same rows alone"):
        export_onnx(tmp_path, facts, core, packed, packed=True, target=tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()
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
    with pytest.raises(UserError, match="lacks weights of BertFor"):
        load_model(tmp_path, asked)


def test_labels_that_are_not_those_of_the_weights_are_counted_and_named(tmp_path: Path) -> None:
    models.save_model("bert", "AutoModelForSequenceClassification", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    held = len(config.get("id2label", "ab"))
    names = [f"label {number}" for number in range(held + 1)]
    for changes, words in (
        ({"id2label": dict(enumerate(names))}, [f"{held + 1} ({', '.join(names)})", f"has {held}"]),
        ({"intermediate_size": 8}, ["other sizes than the weights have", "by config.json"]),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(UserError) as caught:
            load_model(tmp_path, "AutoModelForSequenceClassification")
        for word in words:
            assert word in caught.value.message


def test_a_pooler_that_nothing_reads_may_be_missing(tmp_path: Path) -> None:
    models.save_model("bert", "AutoModelForMaskedLM", tmp_path)
    encoder = load_model(tmp_path, "AutoModel")
    assert not encoder.pooler.dense.weight.detach().any()


def test_a_model_without_such_a_head_is_refused(tmp_path: Path) -> None:
    models.save_model("bert", "AutoModel", tmp_path)
    with pytest.raises(UserError, match="AutoModelForImageClassification"):
        load_model(tmp_path, "AutoModelForImageClassification")


SEQ2SEQ = {
    "d_model": 32,
    "vocab_size": models.VOCABULARY,
    "max_position_embeddings": 96,
    **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, "vocab_size": 120}


@pytest.mark.parametrize(
    ("kind", "settings", "weights", "encoder_decoder", "loaded"),
    [
        ("t5", T5, "all", True, "T5EncoderModel"),
        ("t5", T5, "all", False, "T5EncoderModel"),  # as T5EncoderModel itself writes its config
        ("t5", T5, "encoder", False, "T5EncoderModel"),
        ("bart", SEQ2SEQ, "all", True, "BartModel"),  # runs as a whole, as sentence-transformers
        ("bart", SEQ2SEQ, "encoder", True, "BartEncoder"),
        ("marian", SEQ2SEQ, "all", True, "MarianEncoder"),
        ("marian", SEQ2SEQ, "encoder", True, "MarianEncoder"),
    ],
)
def test_of_an_encoder_decoder_the_part_that_embeds_is_loaded(
    tmp_path: Path, kind: str, settings: Any, weights: str, encoder_decoder: bool, loaded: str
) -> None:
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    kept = model.state_dict()
    if weights == "encoder":
        kept = {name: value for name, value in kept.items() if "decoder" not in name}
    model.save_pretrained(tmp_path, state_dict=kept)
    written = json.loads((tmp_path / "config.json").read_text())
    written["is_encoder_decoder"] = encoder_decoder
    (tmp_path / "config.json").write_text(json.dumps(written))
    found = load_model(tmp_path, "AutoModel")
    assert type(found).__name__ == loaded
    ids = torch.tensor([[7, 9, 8, 2]])
    if loaded != "BartModel":
        want = model.get_encoder()(input_ids=ids).last_hidden_state
        assert torch.equal(found(input_ids=ids).last_hidden_state, want)


def test_an_encoder_without_its_weights_is_refused(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("marian", **SEQ2SEQ)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    kept = {name: value for name, value in model.state_dict().items() if "fc1" not in name}
    model.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(UserError, match=r"MarianEncoder.*2 missing: layers\.0\.fc1"):
        load_model(tmp_path, "AutoModel")


def test_a_model_of_sound_is_refused_in_words(tmp_path: Path) -> None:
    sizes = {key: value for key, value in SEQ2SEQ.items() if "position" not in key}
    config = transformers.WhisperConfig(num_mel_bins=16, **sizes)
    transformers.WhisperModel(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"texts or images.*WhisperModel, which takes input_feat"):
        load_model(tmp_path, "AutoModel")
    transformers.WhisperFeatureExtractor(feature_size=16).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"text or image model.*audio model"):
        read_model_info(tmp_path)
