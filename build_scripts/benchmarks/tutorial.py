"""The ensemble of Triton's tutorials for the same model: see ``tutorial/``."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks import emulated_core
from benchmarks.model import model_folder

_TEMPLATE = Path(__file__).parent / "tutorial"
ENSEMBLE = "sentence_embedding"
CORE = "transformer"


def write_repository(target: Path, core_time: emulated_core.CoreTime | None = None) -> None:
    """Write the tutorial's model repository to `target`, in place of an existing one.

    With `core_time` its transformer is an emulated core, otherwise the real one.
    """
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(_TEMPLATE, target, ignore=shutil.ignore_patterns("__pycache__", ".keep"))
    (target / ENSEMBLE / "1").mkdir()
    transformer = target / CORE
    if core_time is None:
        _export_padded(transformer / "1" / "model.onnx")
    else:
        emulated_core.write_core(transformer / "config.pbtxt", transformer, core_time)
    tokenizer = target / "tokenizer" / "1" / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copyfile(model_folder() / name, tokenizer / name)


def _export_padded(path: Path) -> None:
    """Export three INT64 ``[batch, sequence]`` inputs and the last hidden state."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(model_folder(), add_pooling_layer=False).eval()
    example = {
        "input_ids": torch.tensor([[101, 7592, 2088, 102], [101, 2204, 102, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "token_type_ids": torch.zeros(2, 4, dtype=torch.long),
    }
    dynamic = torch.export.Dim.DYNAMIC
    program = torch.onnx.export(
        model,
        kwargs=example,
        dynamo=True,
        input_names=list(example),
        output_names=["last_hidden_state"],
        dynamic_shapes={name: {0: dynamic, 1: dynamic} for name in example},
        verbose=False,
    )
    if program is None:
        raise RuntimeError("torch.onnx.export returned nothing.")
    program.save(path)
