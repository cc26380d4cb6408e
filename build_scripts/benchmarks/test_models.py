"""Small models for every task: MiniLM's encoder, or another architecture of its size.

Heads, and every architecture except BERT, have random weights: they cost what trained ones cost.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.model import model_folder
from triptych.spec.spec import SPEC_FILE
from triptych.spec.traffic import TRAFFIC_FILE

SIZE: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}
CANDIDATE_LABELS = ["a complaint", "a question", "praise"]
IMAGE_SIZES = ((640, 480), (480, 640), (800, 600), (320, 240), (512, 512), (1024, 768))


@dataclass(frozen=True)
class TaskModel:
    """A task with one architecture; the class of transformers is ``<architecture>For<head>``.

    Attributes:
        config: Configuration of the model, in addition to its size.
        parameters: Parameters of the pipeline.
    """

    task: str
    head: str
    architecture: str = "Bert"
    config: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name in tables, and of the pipeline."""
        return f"{self.task.replace('-', '_')}_{self.architecture.lower()}"


def _with_labels(labels: Sequence[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}


_LABELS = _with_labels([f"label {number}" for number in range(7)])
_CLASSIFIER = "SequenceClassification"
_DEBERTA = {
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "DistilBert": {"dim": 384, "n_layers": 6, "hidden_dim": 1536},
    "Roberta": {"max_position_embeddings": 514},
    "XLMRoberta": {"max_position_embeddings": 514},
    "MPNet": {"max_position_embeddings": 514},
    "DebertaV2": _DEBERTA,
    "ModernBert": {"global_attn_every_n_layers": 3},
}
TEST_MODELS = (
    TaskModel("text-classification", _CLASSIFIER, config=_LABELS),
    TaskModel(
        "token-classification",
        "TokenClassification",
        config=_with_labels(["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG"]),
    ),
    TaskModel("question-answering", "QuestionAnswering"),
    TaskModel("reranking", _CLASSIFIER, config={"num_labels": 1}),
    TaskModel("fill-mask", "MaskedLM"),
    TaskModel(
        "zero-shot-classification",
        _CLASSIFIER,
        config=_with_labels(["contradiction", "neutral", "entailment"]),
        parameters={"candidate_labels": CANDIDATE_LABELS},
    ),
    TaskModel("image-classification", "ImageClassification", "ViT", _LABELS),
    TaskModel("image-classification", "ImageClassification", "ResNet", _LABELS),
    *(
        TaskModel("text-classification", _CLASSIFIER, architecture, {**_LABELS, **extra})
        for architecture, extra in _ARCHITECTURES.items()
    ),
)


def write_model(model: TaskModel, folder: Path) -> Path:
    """Write the model into `folder` unless it exists; return `folder`."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder())
    torch.manual_seed(0)
    made = _make_model(model, tokenizer)
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    made.eval().save_pretrained(partial)
    if model.task == "image-classification":
        size: dict[str, int] = {"height": 224, "width": 224}
        processor: dict[str, Any] = {"image_processor_type": "ViTImageProcessor", "size": size}
        if model.architecture == "ResNet":
            processor = {"image_processor_type": "ConvNextImageProcessor", "crop_pct": 0.875}
            processor["size"] = {"shortest_edge": 224}
        (partial / "preprocessor_config.json").write_text(json.dumps(processor))
    else:
        tokenizer.model_max_length = 512
        tokenizer.save_pretrained(partial)
    partial.rename(folder)
    return folder


def _make_model(model: TaskModel, tokenizer: Any) -> Any:
    import transformers

    kind = getattr(transformers, f"{model.architecture}For{model.head}")
    if model.architecture == "Bert":
        return kind.from_pretrained(model_folder(), **model.config)
    settings = dict(model.config)
    if model.architecture == "ViT":
        settings |= {k: v for k, v in SIZE.items() if k != "max_position_embeddings"}
    elif model.architecture != "ResNet":
        first, last, pad = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
        tokens = {"vocab_size": len(tokenizer), "pad_token_id": pad, "bos_token_id": first}
        tokens |= {"eos_token_id": last, "cls_token_id": first, "sep_token_id": last}
        settings = {**SIZE, **tokens, **settings}
    return kind(getattr(transformers, f"{model.architecture}Config")(**settings))


def write_spec(folder: Path, spec: Mapping[str, Any], traffic: Iterable[str]) -> Path:
    """Write ``pipeline.yaml`` and the lines of the traffic into `folder`; return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SPEC_FILE).write_text(json.dumps(spec, indent=1), encoding="utf-8")  # JSON is YAML
    (folder / TRAFFIC_FILE).write_text("\n".join(traffic) + "\n", encoding="utf-8")
    return folder


def write_pipeline(
    model: TaskModel,
    source: Path,
    folder: Path,
    core: Mapping[str, Any],
    requests: Sequence[Mapping[str, Any]],
) -> Path:
    """Write the pipeline of a task into `folder`; return `folder`.

    Args:
        source: Folder of the model.
        core: The ``core`` section of the spec.
        requests: Requests of one row each.
    """
    rows = []
    for number, request in enumerate(requests):
        row = dict(request)
        if "image" in row:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.jpg").write_bytes(row["image"])
            row["image"] = f"{number}.jpg"
        rows.append(json.dumps(row))
    spec = {
        "task": model.task,
        "model": {"source": str(source)},
        "core": core,
        "parameters": model.parameters,
        # A closed loop bounds the backlog; a slow machine may need long for what is in flight.
        "serving": {"queue": {"max_backlog_ms": 600_000}},
    }
    return write_spec(folder, spec, rows)


def make_requests(
    model: TaskModel, texts: Sequence[str], images: Sequence[bytes] = ()
) -> list[dict[str, Any]]:
    """Return requests of mixed lengths, one row each."""
    if model.task == "image-classification":
        return [{"image": data} for data in images]
    if model.task == "question-answering":
        contexts = [" ".join(texts[i : i + 1 + i % 9]) for i in range(len(texts))]
        question = "What happened to my order?"
        return [{"text": question, "text_pair": context} for context in contexts]
    if model.task == "reranking":
        return [{"text": "where is my parcel", "text_pair": text} for text in texts]
    if model.task == "fill-mask":
        return [{"text": f"[MASK] {text}"} for text in texts]
    return [{"text": text} for text in texts]


def make_images(count: int = 48, sizes: Sequence[tuple[int, int]] = IMAGE_SIZES) -> list[bytes]:
    """Return `count` JPEG files: smooth colors with noise, in these widths and heights."""
    from PIL import Image

    generator = np.random.default_rng(0)
    encoded = []
    for number in range(count):
        small = generator.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        size = sizes[number % len(sizes)]
        image = Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)
        noise = generator.normal(0, 6, (image.height, image.width, 3))
        pixels = np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=88)
        encoded.append(buffer.getvalue())
    return encoded
