"""What the own files of models say of pooling, heads, limits and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint_files import change, write
from triptych.base.errors import UserError
from triptych.spec.model_info import Dense, Normalize
from triptych.spec.model_source import read_facts, read_tokenizer


def test_minilm_is_read_from_its_own_files(minilm_folder: Path) -> None:
    facts = read_facts(minilm_folder)
    assert facts.pooling == ("mean",)
    assert facts.head == (Normalize(),)
    assert (facts.embedding_size, facts.max_length, facts.lowercase) == (384, 256, False)


def test_a_plain_transformer_is_mean_pooled(model: Path) -> None:
    facts = read_facts(model)
    assert (facts.pooling, facts.head, facts.max_length) == (("mean",), (), 512)


def test_flags_limits_and_prompts_are_honored(model: Path) -> None:
    write(
        model / "modules.json",
        [
            {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
        ],
    )
    flags = {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}
    write(model / "1_Pooling/config.json", {"word_embedding_dimension": 32, **flags})
    write(model / "2_Dense/config.json", {"in_features": 64, "out_features": 16, "bias": False})
    write(model / "sentence_bert_config.json", {"max_seq_length": 128, "do_lower_case": True})
    write(
        model / "config_sentence_transformers.json",
        {"prompts": {"query": "query: "}, "default_prompt_name": "query"},
    )
    facts = read_facts(model)
    assert facts.pooling == ("cls", "max")
    assert facts.head == (Dense("2_Dense", 64, 16, False, "torch.nn.modules.activation.Tanh"),)
    assert (facts.embedding_size, facts.max_length, facts.lowercase) == (16, 128, True)
    assert (facts.prompts, facts.default_prompt) == ({"query": "query: "}, "query")


def test_an_unknown_module_is_refused(model: Path) -> None:
    modules = [
        {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_LSTM", "type": "sentence_transformers.models.LSTM"},
    ]
    write(model / "modules.json", modules)
    with pytest.raises(UserError, match="LSTM as module 1"):
        read_facts(model)


@pytest.mark.parametrize(
    "settings", [{"pooling_mode": "median"}, {}, {"pooling_mode": "mean", "include_prompt": False}]
)
def test_an_unknown_pooling_is_refused(model: Path, settings: dict[str, object]) -> None:
    modules = [{"idx": 0, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    write(model / "modules.json", modules)
    write(model / "1_Pooling/config.json", settings)
    with pytest.raises(UserError, match="pool"):
        read_facts(model)


def test_broken_json_names_the_file(model: Path) -> None:
    (model / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json"):
        read_facts(model)


def test_a_folder_without_a_tokenizer_is_refused(model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (model / name).unlink(missing_ok=True)
    with pytest.raises(UserError, match="tokenizer"):
        read_tokenizer(model)


def test_a_tokenizer_without_a_fast_form_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"model_type": "esm"})
    (tmp_path / "vocab.txt").write_text("\n".join(["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVS"]))
    with pytest.raises(UserError, match="EsmTokenizer, of which transformers has none"):
        read_tokenizer(tmp_path)


def test_the_hash_follows_the_content(model: Path) -> None:
    before = read_facts(model).sha256
    assert read_facts(model).sha256 == before
    config = json.loads((model / "config.json").read_text())
    write(model / "config.json", {**config, "layer_norm_eps": 1e-6})
    assert read_facts(model).sha256 != before


def test_positions_taken_by_padding_are_not_counted(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    write(model / "config.json", {**config, "max_position_embeddings": 514, "pad_token_id": 1})
    write(model / "tokenizer_config.json", {})
    assert read_facts(model).max_length == 512


CLASSIFIER = "BertForSequenceClassification"


@pytest.mark.parametrize(
    ("config", "labels"),
    [
        ({"architectures": ["BertModel"]}, ()),
        ({"architectures": ["BertForMaskedLM"], "id2label": {"0": "a"}}, ()),
        ({"architectures": [CLASSIFIER]}, ("LABEL_0", "LABEL_1")),
        ({"architectures": [CLASSIFIER], "num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2")),
        ({"architectures": [CLASSIFIER], "id2label": {"1": "b", "0": "a"}}, ("a", "b")),
        ({"architectures": ["BertForTokenClassification"], "id2label": {"0": "O"}}, ("O",)),
        ({"id2label": {"0": "a", "1": "b"}}, ("a", "b")),
        ({}, ()),
    ],
)
def test_labels_are_those_of_a_classifying_head(
    model: Path, config: dict[str, object], labels: tuple[str, ...]
) -> None:
    change(model / "config.json", **{"architectures": None, **config})
    assert read_facts(model).labels == labels


@pytest.mark.parametrize("count", [1, 2, 3])
def test_labels_are_those_transformers_loads(model: Path, count: int) -> None:
    from transformers import AutoConfig, BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=count
    )
    BertForSequenceClassification(config).save_pretrained(model)
    known = AutoConfig.from_pretrained(model).id2label
    assert read_facts(model).labels == tuple(known[index] for index in range(count))


@pytest.mark.parametrize("names", [{"0": "a", "2": "b"}, {"x": "a"}, ["a", "b"], {"1": "a"}])
def test_labels_out_of_order_are_refused(model: Path, names: object) -> None:
    change(model / "config.json", architectures=[CLASSIFIER], id2label=names)
    with pytest.raises(UserError, match="id2label"):
        read_facts(model)


IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("config", "sentence", "activation"),
    [
        ({}, {}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": IDENTITY}}, {}, "none"),
        ({"sentence_transformers": {"activation_fn": SIGMOID}}, {}, "sigmoid"),
        ({"sbert_ce_default_activation_function": IDENTITY}, {}, "none"),
        ({}, {"model_type": "CrossEncoder", "activation_fn": IDENTITY}, "none"),
        ({}, {"model_type": "SentenceTransformer", "activation_fn": IDENTITY}, "sigmoid"),
        ({"problem_type": "regression"}, {}, "none"),
        (
            {"problem_type": "regression", "sentence_transformers": {"activation_fn": SIGMOID}},
            {},
            "sigmoid",
        ),
    ],
)
def test_the_activation_of_a_cross_encoder_is_its_own(
    model: Path, config: dict[str, object], sentence: dict[str, object], activation: str
) -> None:
    change(model / "config.json", architectures=[CLASSIFIER], id2label={"0": "x"}, **config)
    write(model / "config_sentence_transformers.json", sentence)
    assert read_facts(model).activation == activation


def test_an_unknown_activation_of_a_cross_encoder_is_refused(model: Path) -> None:
    for named in ("torch.nn.modules.activation.Tanh", "mine.Identity"):
        change(
            model / "config.json",
            architectures=[CLASSIFIER],
            id2label={"0": "x"},
            sentence_transformers={"activation_fn": named},
        )
        with pytest.raises(UserError, match=named):
            read_facts(model)


def test_several_classes_are_scored_as_transformers_does(model: Path) -> None:
    """Cross-encoders for NLI say Identity, and their pipeline takes the softmax."""
    change(
        model / "config.json",
        architectures=[CLASSIFIER],
        sentence_transformers={"activation_fn": IDENTITY},
    )
    assert read_facts(model).activation == "softmax"


CROSS_ENCODER = {"model_type": "CrossEncoder"}
TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.base.modules.Transformer"}


def test_the_modules_of_a_cross_encoder_pool_nothing(model: Path) -> None:
    write(model / "config_sentence_transformers.json", CROSS_ENCODER)
    write(model / "modules.json", [TRANSFORMER])
    assert read_facts(model).head == ()


@pytest.mark.parametrize(
    ("module", "sentence", "words"),
    [
        ("LogitScore", {}, "Transformer alone"),
        (None, {"prompts": {"a": "b: "}, "default_prompt_name": "a"}, "default_prompt_name"),
    ],
)
def test_what_changes_a_cross_encoders_scores_is_refused(
    model: Path, module: str | None, sentence: dict[str, object], words: str
) -> None:
    write(model / "config_sentence_transformers.json", {**CROSS_ENCODER, **sentence})
    more = [{"idx": 1, "path": "1", "type": f"sentence_transformers.{module}"}] if module else []
    write(model / "modules.json", [TRANSFORMER, *more])
    with pytest.raises(UserError, match=words):
        read_facts(model)


def retype(model: Path, change_types: Any) -> None:
    """Change the token types that the tokenizer gives to each part of its templates."""
    path = model / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    for template in ("single", "pair"):
        for piece in content["post_processor"][template]:
            for part in piece.values():
                part["type_id"] = change_types(part)
    write(path, content)
    # BERT's own class would put its usual templates back.
    names = ["input_ids", "token_type_ids", "attention_mask"]
    change(
        model / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        model_input_names=names,
    )


def test_segments_are_those_of_model_and_tokenizer(model: Path) -> None:
    assert read_facts(model).segments == 2
    change(model / "config.json", type_vocab_size=1)
    assert read_facts(model).segments == 1
    change(model / "config.json", type_vocab_size=0)
    assert read_facts(model).segments == 1
    change(model / "config.json", type_vocab_size=None)  # the default of BERT's config
    assert read_facts(model).segments == 2


def test_a_tokenizer_may_mark_no_segments(model: Path) -> None:
    retype(model, lambda part: part["type_id"])
    assert read_facts(model).segments == 2
    retype(model, lambda part: 0)
    assert read_facts(model).segments == 1


def test_a_tokenizer_may_keep_token_types_to_itself(model: Path) -> None:
    names = ["input_ids", "attention_mask"]
    change(model / "tokenizer_config.json", model_input_names=names)
    assert read_facts(model).segments == 1


@pytest.mark.parametrize(
    "types",
    [
        lambda part: 1,
        lambda part: 1 - part["type_id"],
        lambda part: 2 * part["type_id"],
        lambda part: 2 if part["id"] == "[CLS]" else part["type_id"],
    ],
)
def test_other_token_types_are_refused(model: Path, types: Any) -> None:
    retype(model, types)
    with pytest.raises(UserError, match="token types"):
        read_facts(model)


def test_special_tokens_come_from_the_tokenizer(model: Path) -> None:
    facts = read_facts(model)
    assert (facts.mask_token, facts.mask_token_id, facts.unk_token_id) == ("[MASK]", 103, 100)
    change(model / "tokenizer_config.json", mask_token=None, unk_token=None)
    change(model / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    (model / "special_tokens_map.json").unlink(missing_ok=True)
    facts = read_facts(model)
    assert (facts.mask_token, facts.mask_token_id, facts.unk_token_id) == (None, None, None)


def test_a_text_model_without_a_tokenizer_is_refused(model: Path) -> None:
    for name in ("tokenizer.json", "vocab.txt"):
        (model / name).unlink(missing_ok=True)
    with pytest.raises(UserError, match="tokenizer"):
        read_facts(model)


def test_sizes_are_found_under_each_models_own_name(model: Path) -> None:
    from transformers import XLMConfig

    XLMConfig(emb_dim=64, n_heads=2, n_layers=1).save_pretrained(model)
    assert read_facts(model).hidden_size == 64
    change(model / "config.json", model_type="unheard-of", emb_dim=None, hidden_size=None)
    with pytest.raises(UserError, match="unheard-of"):
        read_facts(model)


def test_an_image_model_needs_neither_tokenizer_nor_vectors(tmp_path: Path) -> None:
    from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessor

    folder = tmp_path / "resnet"
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=4)
    ResNetForImageClassification(config).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    facts = read_facts(folder)
    assert facts.image is not None
    assert (facts.image.height, facts.image.width) == (32, 32)
    assert (len(facts.labels), facts.hidden_size, facts.segments) == (4, 0, 1)
    assert (facts.mask_token_id, facts.unk_token_id) == (None, None)
