"""A model's folder may bring code of its own: it is refused, and never runs."""

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from checkpoint_files import change, write
from triptych.base.errors import UserError
from triptych.core.export.to_onnx import load_model
from triptych.spec.fields import ModelSource
from triptych.spec.model_source import locate, read_model_info, read_tokenizer

OWN_CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import BertConfig, BertModel, BertTokenizerFast
class OwnConfig(BertConfig): model_type = "own"
class OwnModel(BertModel): config_class = OwnConfig
class OwnTokenizer(BertTokenizerFast): pass
"""


def test_code_of_a_model_is_refused_and_never_runs(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is asked, either: whoever answers for the user would say yes."""
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
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
        with pytest.raises(UserError, match="without its own code") as caught:
            locate(source, tmp_path)
        assert name in caught.value.given
        # Nor does it run where nobody looked at the folder before.
        for read in (read_model_info, read_tokenizer, partial(load_model, auto_class="AutoModel")):
            with suppress(UserError):
                read(model)
        path.unlink() if before is None else path.write_bytes(before)
    write(model / "modules.json", [{"type": "own.Pooling", "path": "1_Pooling"}])
    with pytest.raises(UserError, match=r"own\.Pooling"):
        locate(source, tmp_path)
    (model / "modules.json").unlink()
    assert locate(source, tmp_path) == model
    assert not marker.exists()
