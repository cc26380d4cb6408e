"""Random-weight models of many architectures, and what transformers itself makes of a row."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from tests.support.project import share_export_registry
from triptych.base.cache import cached_stage, code_hash, sha256_of, versions_of
from triptych.base.tensors import (
    FIRST_SEGMENT,
    INPUT_IDS,
    ROW_LENGTH,
    ROW_OFFSET,
    ROW_SPAN,
    Tensor,
    TokenRow,
)
from triptych.core.export.to_onnx import export_onnx
from triptych.core.gate.runs import RunBatch, open_onnx
from triptych.models.info import ModelInfo
from triptych.tasks.task import Core

VOCABULARY = 120
MASK = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 96,
    "initializer_range": 0.15,
}
ROBERTA = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1}
DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
DEBERTA_V3 = {**DEBERTA, "position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
QWEN3 = {"num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 5, "eos_token_id": 3}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}
ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bert": ("bert", {}),
    "distilbert": (
        "distilbert",
        {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 48, "sinusoidal_pos_embds": True},
    ),
    "roberta": ("roberta", ROBERTA),
    "xlm-roberta": ("xlm-roberta", ROBERTA),
    "mpnet": ("mpnet", {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}),
    "deberta-v2": ("deberta-v2", DEBERTA),
    "deberta-v3": ("deberta-v2", DEBERTA_V3),
    "deberta-conv": ("deberta-v2", {**DEBERTA, "conv_kernel_size": 3, "conv_act": "gelu"}),
    "modernbert": (
        "modernbert",
        {
            "num_hidden_layers": 2,  # one with global attention, one with local
            "global_attn_every_n_layers": 2,
            "local_attention": 16,
            "pad_token_id": 3,
            "initializer_cutoff_factor": 2.0,
            "classifier_pooling": "mean",
        },
    ),
    "convbert": ("convbert", {"num_attention_heads": 4}),
    "roformer": ("roformer", {"embedding_size": 32}),
    "qwen3": ("qwen3", QWEN3),
    "qwen3-dynamic": ("qwen3", {**QWEN3, **DYNAMIC}),
}
"""Name in the tests to transformers' name of the model type and settings beside `SIZES`."""


def make_core(auto_class: str, reads: Any, returns: Any, *outputs: str) -> Core:
    """Return a core whose outputs are given as name, type and dimensions of a row."""
    tensors = []
    for name, dtype, *dims in map(str.split, outputs):
        sizes = tuple(int(dim) if dim.isdigit() else dim for dim in dims)
        tensors.append(Tensor(name, dtype, sizes))  # type: ignore[arg-type]
    return Core(f"AutoModel{auto_class}", reads, returns, tuple(tensors))


ROWS, TOKENS = "ForSequenceClassification", "ForTokenClassification"
CHOICES = ("class_id INT32 2", "class_score FP32 2")
TOKEN_CHOICES = ("token_class INT32 tokens", "token_score FP32 tokens")
SPANS = ("start_logit FP32 tokens", "end_logit FP32 tokens")
MASK_CHOICES = ("class_id INT32 8", "class_score FP32 8")
HEADS: Mapping[str, Core] = {
    "embedding": make_core("", "pooled", "vector", "sentence_embedding FP32 32"),
    "classification": make_core(ROWS, "row", "choices", *CHOICES),
    "scores": make_core(ROWS, "row", "scores", "relevance FP32 3"),
    "logits": make_core(ROWS, "row", "logits", "inference_logits FP32 3"),
    "tokens": make_core(TOKENS, "tokens", "token_choices", *TOKEN_CHOICES),
    "token-scores": make_core(TOKENS, "tokens", "token_scores", "token_scores FP32 tokens 3"),
    "spans": make_core("ForQuestionAnswering", "tokens", "spans", *SPANS),
    "mask": make_core("ForMaskedLM", "mask", "choices", *MASK_CHOICES),
}
"""One core for each thing a core can return."""

INPUTS = (INPUT_IDS, ROW_LENGTH, FIRST_SEGMENT)
LAYOUT_INPUTS = {
    "bucketed": INPUTS,
    "packed": (*INPUTS, ROW_OFFSET),
    "packed for TensorRT": (*INPUTS, ROW_OFFSET, ROW_SPAN),
}
"""Inputs of the core by layout."""
ROW_SIZES = (3, 41, 12, 1, 27, 33, 40)


def save_model(name: str, auto_class: str, folder: Path, **more: Any) -> ModelInfo:
    """Write a random model of an architecture into `folder`; returns its facts."""
    kind, settings = ARCHITECTURES[name]
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if "dim" not in settings or "hidden" not in k}
    labels = {"num_labels": 2 if auto_class == HEADS["spans"].auto_class else 3}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **labels, **settings, **more})
    model = getattr(transformers, auto_class).from_config(config)
    model.save_pretrained(folder)
    return facts_of(model)


def exported(name: str, head: str, layout: str) -> tuple[Path, ModelInfo]:
    """A folder with a random model and its core as ``onnx/model.onnx``, from the cache if there."""

    core = HEADS[head]

    def work(folder: Path) -> None:
        share_export_registry()
        facts = save_model(name, core.auto_class, folder)
        packed, inputs = layout != "bucketed", LAYOUT_INPUTS[layout]
        export_onnx(folder, facts, core, inputs, packed=packed, target=folder / "onnx")

    code = [
        code_hash("core/export/*.py", "models/*.py", "base/tensors.py"),
        sha256_of(Path(__file__)),
    ]
    versions = versions_of("torch", "transformers", "onnx", "onnxscript")
    inputs = {"case": [name, head, layout], "code": code, "versions": versions}
    folder = cached_stage("test_exports", inputs, work, lambda _stage, _line: None).folder
    return folder, facts_of(getattr(transformers, core.auto_class).from_pretrained(folder))


def facts_of(model: Any) -> ModelInfo:
    """As `model.source` would read them."""
    config = model.config
    pad = config.pad_token_id
    return ModelInfo(
        sha256="",
        architecture=type(model).__name__,
        hidden_size=32,
        max_length=64,
        pad_token_id=0 if pad is None else pad,
        labels=("a", "b", "c"),
        activation="softmax",
        segments=2 if (getattr(config, "type_vocab_size", 0) or 0) > 1 else 1,
        mask_token="[MASK]",
        mask_token_id=MASK,
    )


def random_rows(*, seed: int = 7) -> list[list[int]]:
    """Rows of several lengths with one mask token each, pads and special tokens left out."""
    random = np.random.default_rng(seed)
    rows = [random.integers(6, VOCABULARY, size).tolist() for size in ROW_SIZES]
    for row in rows:
        row[len(row) // 3] = MASK
    return rows


def with_special(rows: Sequence[Sequence[int]], config: Any) -> list[list[int]]:
    """The rows with tokens in them that end a row and fill one up, as a text may write them."""
    eos, pad = config.eos_token_id, config.pad_token_id
    changed = [list(row) for row in rows]
    for row in changed:
        for place, token in ((1, eos), (-3, pad), (-1, pad)):
            if token is not None and token < VOCABULARY and len(row) > 10:
                row[place] = token
    return changed


def token_row(ids: Sequence[int]) -> TokenRow:
    """A row whose second segment begins in the middle."""
    return TokenRow(tuple(ids), (len(ids) + 1) // 2)


def expected_outputs(
    folder: Path, facts: ModelInfo, core: Core, rows: Sequence[Sequence[int]]
) -> list[list[NDArray[Any]]]:
    """The core's outputs for each row, from transformers' model on that row alone."""
    model = getattr(transformers, core.auto_class).from_pretrained(folder).eval()
    accepted = inspect.signature(model.forward).parameters
    answers = []
    for row in rows:
        inputs = {"input_ids": torch.tensor([row])}
        if facts.segments > 1 and "token_type_ids" in accepted:
            types = [int(index >= (len(row) + 1) // 2) for index in range(len(row))]
            inputs["token_type_ids"] = torch.tensor([types])
        with torch.no_grad():
            answers.append(_outputs(model(**inputs), core, row))
    return answers


def _outputs(output: Any, core: Core, row: Sequence[int]) -> list[NDArray[Any]]:
    if core.returns == "vector":
        return [output.last_hidden_state[0].mean(0).numpy()]
    if core.returns == "spans":
        return [output.start_logits[0].numpy(), output.end_logits[0].numpy()]
    logits = output.logits[0]
    if core.reads == "mask":
        logits = logits[row.index(MASK)]
    if core.returns == "logits":
        return [logits.numpy()]
    scores = logits.softmax(-1)
    if core.returns in ("scores", "token_scores"):
        return [scores.numpy()]
    kept = 1 if core.returns == "token_choices" else core.outputs[0].dims[0]
    top = scores.topk(kept)
    ids, best = top.indices.numpy(), top.values.numpy()
    return [ids[:, 0], best[:, 0]] if core.returns == "token_choices" else [ids, best]


def open_core(path: Path, facts: ModelInfo, core: Core, layout: str) -> RunBatch:
    """A function that runs ``model.onnx`` on the rows of one batch."""
    return open_onnx(path, core, LAYOUT_INPUTS[layout], pad_token_id=facts.pad_token_id)


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
    ("qwen3", "logits", "packed"),
    ("qwen3-dynamic", "embedding", "packed"),
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
    ("deberta-conv", "tokens", "packed"),
    ("roformer", "tokens", "packed"),
    ("modernbert", "classification", "bucketed"),
]
"""With these, each architecture and each head in both layouts. Most are built and served, too."""
