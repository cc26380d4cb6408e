"""Small tokenizers, each of the class and pipeline its architecture has, trained on some texts."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from small_tokenizers import byte_level

VOCABULARY = 700
LONGEST = 128
"""Tokens of a row, special ones included."""

ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
SPECIAL: Mapping[str, Sequence[str]] = {
    "XLMRobertaTokenizer": ROBERTA,
    "RobertaTokenizer": ROBERTA,
    "MPNetTokenizer": ("<s>", "<pad>", "</s>", "[UNK]", "<mask>"),
    "DebertaV2Tokenizer": ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"),
    "AlbertTokenizer": ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"),
    "T5Tokenizer": ("<pad>", "</s>", "<unk>"),
    "Qwen2Tokenizer": ("<|endoftext|>",),
    "BertTokenizer": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
}
"""A class of transformers to its special tokens, in the order of the published vocabularies."""


def train(kind: str, texts: Sequence[str]) -> Any:
    """A tokenizer of the class `kind`: its own normalizer, model and template, a new vocabulary.

    The special tokens have the ids they have in published models: `SPECIAL` counted from 0.
    """
    import transformers

    if kind == "PreTrainedTokenizerFast":
        return _byte_pairs_without_class(texts)
    made, special = getattr(transformers, kind), SPECIAL[kind]
    learned = made().train_new_from_iterator(texts, VOCABULARY)
    model = json.loads(learned.backend_tokenizer.to_str())["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        pieces = [p for p in sorted(vocabulary, key=vocabulary.__getitem__) if p not in special]
        vocabulary = {piece: number for number, piece in enumerate([*special, *pieces])}
    else:
        scored = [(piece, score) for piece, score in vocabulary if piece not in special]
        vocabulary = [*((token, 0.0) for token in special), *scored]
    merges = {"merges": [tuple(pair) for pair in model["merges"]]} if "merges" in model else {}
    return made(vocab=vocabulary, model_max_length=LONGEST, **merges)


def _byte_pairs_without_class(texts: Sequence[str]) -> Any:
    """A byte-level BPE whose ``tokenizer.json`` says all, as ModernBERT has it."""
    from tokenizers import AddedToken, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    mask = AddedToken("[MASK]", lstrip=True)
    special: list[str | AddedToken] = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", mask]
    tokenizer = byte_level(texts, special, vocabulary=VOCABULARY, normalizer=normalizers.NFC())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        mask_token=mask,
        model_max_length=LONGEST,
        model_input_names=["input_ids", "attention_mask"],
    )
