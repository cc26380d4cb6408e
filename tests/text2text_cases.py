"""Small encoder-decoder models with random weights, as `save_pretrained` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers_of_kinds import train

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Über den Wolken muß die Freiheit wohl grenzenlos sein.",
    "Summaries of long documents are short; translations are not.",
    "dog",
    "A text with  two spaces, numbers 1234 and (brackets).",
)
SIZES = {"d_model": 32, "decoder_layers": 2, "encoder_layers": 2}
END_BIAS = 2.0
"""Added to the score of the token that ends an answer, so that some answers end by themselves."""


def write_model(kind: str, folder: Path) -> Path:
    """A model of ``t5``, ``bart`` or ``marian`` that says something else for every text."""
    import torch

    torch.manual_seed(7)
    tokenizer, model = {"t5": _t5, "bart": _bart, "marian": _marian}[kind]()
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias[0, model.generation_config.eos_token_id] = END_BIAS
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_pipeline(folder: Path, model: Path, **core: object) -> Path:
    """A pipeline of it whose traffic is `TEXTS`."""
    folder.mkdir(parents=True)
    spec = {
        "task": "text2text-generation",
        "model": {"source": str(model)},
        "core": {"max_answer": 40, "threads": 1, **core},
    }
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    lines = [json.dumps({"text_input": text}) for text in TEXTS]
    (folder / "traffic.jsonl").write_text("\n".join(lines))
    return folder


def _t5() -> tuple[Any, Any]:
    from transformers import T5Config, T5ForConditionalGeneration

    tokenizer = train("T5Tokenizer", TEXTS)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
        initializer_factor=1.5,
    )
    return tokenizer, T5ForConditionalGeneration(config)


def _bart() -> tuple[Any, Any]:
    from transformers import BartConfig, BartForConditionalGeneration

    tokenizer = train("RobertaTokenizer", TEXTS)
    model = BartForConditionalGeneration(BartConfig(**_both(len(tokenizer))))
    model.generation_config.forced_bos_token_id = 0
    return tokenizer, model


def _marian() -> tuple[Any, Any]:
    from transformers import MarianConfig, MarianMTModel

    tokenizer = _unigram()
    pad = tokenizer.pad_token_id
    ids = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0}
    model = MarianMTModel(MarianConfig(**_both(len(tokenizer)), **ids, forced_eos_token_id=0))
    model.generation_config.bad_words_ids = [[pad]]
    return tokenizer, model


def _both(vocabulary: int) -> dict[str, Any]:
    """What BART and Marian are told alike."""
    return {
        "vocab_size": vocabulary,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 128,
        "init_std": 0.5,
    }


def _unigram() -> Any:
    """A fast tokenizer with Marian's order: the end first, padding last."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
