"""A small random-weight model for each task, with real tokenizers and image processors.

Heads are scaled, so that labels and spans vary from text to text.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # far apart, or every text comes to the same vector
}
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
INFERENCE = ["contradiction", "neutral", "entailment"]
TOPICS = ["billing", "delivery", "returns", "technical", "account"]


def _spread(model: Any, tokenizer: Any, texts: list[str]) -> Any:
    """Shift and scale the last layer so that no class wins on all texts."""
    model.eval()
    last = [m for m in model.modules() if isinstance(m, torch.nn.Linear)][-1]
    with torch.inference_mode():
        encoded = tokenizer(texts[:60], padding=True, truncation=True, return_tensors="pt")
        logits = model(**encoded).logits
    with torch.no_grad():
        # Cut short: processors add up in other orders, and a repository's bytes are on record.
        scale = (2.0 / logits.std(0)).bfloat16().float()
        last.weight.mul_(scale[:, None])
        last.bias.sub_(logits.mean(0).bfloat16().float()).mul_(scale)
    return model


def _loud(model: Any, factor: float = 20.0) -> Any:
    """Scale the head up: with random weights all scores would be near equal."""
    base = {id(parameter) for parameter in model.base_model.parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) not in base:
                parameter.mul_(factor)
    return model.eval()


def _save(model: Any, tokenizer: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


Maker = Callable[[Path, Path, list[str]], Path]
"""Writes a model into a folder, with the tokenizer of MiniLM's folder or one trained on texts."""


def _bert(kind: str, *, by_topic: bool = False, **config: Any) -> Maker:
    """Return what makes a BERT with a head; `by_topic` spreads its classes over the texts."""

    def make(folder: Path, minilm: Path, texts: list[str]) -> Path:
        import transformers

        torch.manual_seed(1)
        tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
        settings = transformers.BertConfig(**SMALL, vocab_size=len(tokenizer), **config)
        model = _loud(getattr(transformers, f"BertFor{kind}")(settings))
        return _save(_spread(model, tokenizer, texts) if by_topic else model, tokenizer, folder)

    return make


def _numbered(labels: list[str]) -> dict[int, str]:
    return dict(enumerate(labels))


def byte_pairs(texts: list[str]) -> Any:
    """A byte-level BPE tokenizer as RoBERTa has it, trained on `texts`."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import RobertaTokenizer

    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(texts, vocab_size=800, special_tokens=special, show_progress=False)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    return RobertaTokenizer(vocab=model["vocab"], merges=merges, model_max_length=128)


text_classifier = _bert("SequenceClassification", by_topic=True, id2label=_numbered(TOPICS))
tagger = _bert("TokenClassification", id2label=_numbered(TAGS))
reader = _bert("QuestionAnswering")
cross_encoder = _bert("SequenceClassification", num_labels=1)
masked_model = _bert("MaskedLM")
inference_model = _bert(
    "SequenceClassification",
    id2label=_numbered(INFERENCE),
    label2id={name: number for number, name in enumerate(INFERENCE)},
)


def multi_label_classifier(folder: Path, minilm: Path, texts: list[str]) -> Path:
    """A RoBERTa with four labels that do not exclude each other."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    torch.manual_seed(2)
    tokenizer = byte_pairs(texts)
    config = RobertaConfig(
        **{**SMALL, "max_position_embeddings": 130},
        vocab_size=len(tokenizer),
        type_vocab_size=1,
        id2label={0: "urgent", 1: "angry", 2: "new", 3: "spam"},
        problem_type="multi_label_classification",
    )
    model = _spread(RobertaForSequenceClassification(config), tokenizer, texts)
    return _save(model, tokenizer, folder)


def image_classifier(folder: Path, minilm: Path, texts: list[str]) -> Path:
    """A ViT with seven classes on images of 32 x 32."""
    from transformers import AutoImageProcessor, ViTConfig, ViTForImageClassification

    torch.manual_seed(3)
    small = {name: SMALL[name] for name in SMALL if name != "max_position_embeddings"}
    config = ViTConfig(
        **small, image_size=32, patch_size=8, id2label={i: f"class {i}" for i in range(7)}
    )
    model = _loud(ViTForImageClassification(config))
    model.save_pretrained(folder)
    settings = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    AutoImageProcessor.from_pretrained(folder).save_pretrained(folder)
    return folder


MODELS: dict[str, tuple[str, Maker]] = {
    "topics": ("text-classification", text_classifier),
    "flags": ("text-classification", multi_label_classifier),
    "tags": ("token-classification", tagger),
    "answers": ("question-answering", reader),
    "ranks": ("reranking", cross_encoder),
    "masks": ("fill-mask", masked_model),
    "hypotheses": ("zero-shot-classification", inference_model),
    "images": ("image-classification", image_classifier),
}
"""Pipeline name -> its task, and what makes its model."""
