"""LoRA adapters in place of a model: refused, with the commands that merge them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from triptych.base.errors import UserError
from triptych.models.text import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}
"""Task type of an adapter to the class of transformers that loads its base."""
_HEAD = re.compile(r"\b(classifier|score)\b(\.\w+)*\.weight$")
"""Name of the weights of a classifying head; its last layer has a row for each label."""
_MAX_HEADER_BYTES = 1 << 24


def refuse_adapter(folder: Path, field: str, source: str, *, whole: bool) -> None:
    """Raise a `UserError` if a folder has an adapter.

    Args:
        folder: Folder of the model.
        field: Field or option that names the folder, for errors.
        source: Value of the field, for errors.
        whole: Whether the folder also has a config and weights.
    """
    if not (folder / CONFIG).is_file():
        return
    config = read_json(folder / CONFIG)
    base = str(config.get("base_model_name_or_path"))
    if whole:
        raise UserError(
            field,
            f"must not hold an adapter beside the model's weights ({CONFIG})",
            given=f"{source}, an adapter for {base}",
            remedy=f"If the weights contain the adapter, remove {CONFIG} and {WEIGHTS}; else merge "
            "it into the weights",
        )
    raise UserError(
        field,
        f"must contain a whole model, not an adapter for one ({CONFIG})",
        given=f"{source}, an adapter for {base}",
        remedy=f"Merge it: {merge_commands(folder, config, base)}",
    )


def merge_commands(folder: Path, config: Mapping[str, object], base: str) -> str:
    """Return the lines of Python that merge an adapter (tried with peft 0.21).

    They load the base by transformers: peft's own classes know neither the number of labels nor
    the modules of sentence-transformers, without which a model is pooled otherwise.
    """
    labels = _count_labels(folder / WEIGHTS)
    task = str(config.get("task_type"))
    loader = _CLASSES.get(task, _CLASSES["SEQ_CLS"] if labels else "AutoModel")
    number = f", num_labels={labels}" if labels and loader.endswith("Classification") else ""
    lines = [f"m = transformers.{loader}.from_pretrained({base!r}{number})"]
    merged = f"peft.PeftModel.from_pretrained(m, {str(folder)!r}).merge_and_unload()"
    modules = (folder / "modules.json").is_file()
    if loader != "AutoModel" and not modules:
        rest = "copy the tokenizer there" + (", and name the labels in id2label" if number else "")
        lines.append(f"{merged}.save_pretrained('merged')")
        return _quoted(lines) + f"; {rest}"
    sentence = read_json(folder / "config_sentence_transformers.json", default={})
    kind = "CrossEncoder" if sentence.get("model_type") == "CrossEncoder" else "SentenceTransformer"
    lines.append(f"s = sentence_transformers.{kind}({str(folder) if modules else base!r})")
    return _quoted([*lines, f"s[0].model = {merged}", "s.save_pretrained('merged')"])


def _quoted(lines: list[str]) -> str:
    return ", ".join(f"`{line}`" for line in lines)


def _count_labels(file: Path) -> int:
    """Return the number of labels of the classifying head in an adapter's weights, or 0."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(size, _MAX_HEADER_BYTES)))
        heads = [value["shape"] for name, value in header.items() if _HEAD.search(name)]
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return 0
    return int(heads[-1][0]) if heads else 0
