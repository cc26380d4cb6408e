"""Loading a checkpoint: the part that a task needs, with all its weights, or one message."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import architectures as models
from checkpoint_files import change
from mistakes import check_refused
from triptych.core.export.to_onnx import load_model
from triptych.spec.model_source import read_model_info

pytestmark = pytest.mark.build

SEQUENCES = "AutoModelForSequenceClassification"
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
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
LINEAR: dict[str, Any] = {
    **{"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
    **{"linear_num_value_heads": 2, "linear_num_key_heads": 2, "layer_types": ["linear_attention"]},
    **{"shared_expert_intermediate_size": 8, "num_key_value_heads": 2, "head_dim": 8},
}
SPARSE = {"block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 96}


def test_weights_that_a_head_lacks_are_refused_unless_nothing_reads_them(tmp_path: Path) -> None:
    for saved, asked in (
        ("AutoModel", SEQUENCES),
        ("AutoModelForMaskedLM", "AutoModelForQuestionAnswering"),
        ("AutoModelForTokenClassification", SEQUENCES),
    ):
        models.save_model("bert", saved, tmp_path / saved)
        check_refused("lacks weights of BertFor", load_model, tmp_path / saved, asked)
    encoder = load_model(tmp_path / "AutoModelForMaskedLM", "AutoModel")
    assert not encoder.pooler.dense.weight.detach().any()
    image = "AutoModelForImageClassification"
    check_refused(image, load_model, tmp_path / "AutoModel", image)


def test_a_config_that_is_not_that_of_the_weights_is_refused(tmp_path: Path) -> None:
    models.save_model("bert", SEQUENCES, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    held = len(config.get("id2label", "ab"))
    names = [f"label {number}" for number in range(held + 1)]
    cases: tuple[tuple[dict[str, Any], list[str]], ...] = (
        ({"id2label": dict(enumerate(names))}, [f"{held + 1} ({', '.join(names)})", f"has {held}"]),
        ({"intermediate_size": 8}, ["other sizes than the weights have", "by config.json"]),
    )
    for changes, words in cases:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        check_refused(words, load_model, tmp_path, SEQUENCES)
    images = transformers.PvtConfig(image_size=64, id2label={0: "a", 1: "b"}, num_labels=5)
    transformers.PvtForImageClassification(images).save_pretrained(tmp_path / "pvt")
    words = ["id2label in config.json", "2 labels, and num_labels is 5"]
    check_refused(words, load_model, tmp_path / "pvt", "AutoModelForImageClassification")


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    models.save_model("bert", "AutoModel", tmp_path)
    broken = transformers.AutoModel.from_pretrained(tmp_path)
    broken.embeddings.word_embeddings.weight.data[7, 3] = torch.nan
    broken.save_pretrained(tmp_path)
    words = ["1 of", "embeddings.word_embeddings.weight", "NaN"]
    check_refused(words, load_model, tmp_path, "AutoModel")


@pytest.mark.parametrize(
    ("kind", "settings", "weights", "encoder_decoder", "loaded"),
    [
        ("t5", T5, "all", True, "T5EncoderModel"),
        ("t5", T5, "encoder", False, "T5EncoderModel"),  # as T5EncoderModel itself writes it
        ("bart", SEQ2SEQ, "all", True, "BartModel"),  # runs as a whole, as sentence-transformers
        ("bart", SEQ2SEQ, "encoder", True, "BartEncoder"),
        ("marian", SEQ2SEQ, "all", True, "MarianEncoder"),
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
    change(tmp_path / "config.json", is_encoder_decoder=encoder_decoder)
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
    words = ["MarianEncoder", "2 missing: layers.0.fc1"]
    check_refused(words, load_model, tmp_path, "AutoModel")


def test_models_that_a_row_of_tokens_does_not_decide_are_refused(tmp_path: Path) -> None:
    for number, (config, words) in enumerate(
        (
            (transformers.BigBirdConfig(**SIZES, **SPARSE), ["attention_type", "original_full"]),
            (transformers.LayoutLMConfig(**SIZES), ["`bbox`", "texts alone"]),
            (transformers.Qwen3NextConfig(**SIZES, **LINEAR), ["chunks", "Qwen3NextGatedDelta"]),
        )
    ):
        folder = tmp_path / str(number)
        transformers.AutoModel.from_config(config).save_pretrained(folder)
        check_refused(words, load_model, folder, "AutoModel")
    change(tmp_path / "0/config.json", attention_type="original_full")
    assert load_model(tmp_path / "0", "AutoModel").config.attention_type == "original_full"


def test_a_model_of_sound_is_refused_in_words(tmp_path: Path) -> None:
    sizes = {key: value for key, value in SEQ2SEQ.items() if "position" not in key}
    config = transformers.WhisperConfig(num_mel_bins=16, **sizes)
    transformers.WhisperModel(config).save_pretrained(tmp_path)
    words = ["texts or images", "WhisperModel, which takes input_feat"]
    check_refused(words, load_model, tmp_path, "AutoModel")
    transformers.WhisperFeatureExtractor(feature_size=16).save_pretrained(tmp_path)
    check_refused(["text or image model", "audio model"], read_model_info, tmp_path)
