"""Small tokenizers without a class of transformers, trained on some texts."""

from collections.abc import Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
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
