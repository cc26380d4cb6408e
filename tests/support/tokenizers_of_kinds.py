"""Small tokenizers trained on some texts: without a class, or as an architecture has them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

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


def byte_level(
    texts: Sequence[str],
    special: Sequence[str | AddedToken] = (),
    *,
    vocabulary: int = 400,
    prefix_space: bool = False,
    normalizer: Any = None,
) -> Tokenizer:
    """A byte-level BPE with few merges, so that characters are split."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def unigram(
    texts: Sequence[str],
    special: Sequence[str] = ("<unk>",),
    *,
    vocabulary: int = 100,
    normalizes: bool = False,
) -> Tokenizer:
    """A tokenizer in the manner of sentencepiece, whose unknown token is ``<unk>``."""
    tokenizer = Tokenizer(models.Unigram())
    if normalizes:
        tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocabulary, special_tokens=list(special), unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
