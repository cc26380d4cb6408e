"""Small encoder-decoder models with random weights, as `save_pretrained` writes them."""

import io
import json
from pathlib import Path
from typing import Any

from tests.support.tokenizers_of_kinds import train
from triptych.building.generation.text2text import without_advice

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Über den Wolken muß die Freiheit wohl grenzenlos sein.",
    "Summaries of long documents are short; translations are not.",
    "dog",
    "A text with  two spaces, numbers 1234 and (brackets).",
)
SIZES = {"d_model": 32, "decoder_layers": 2, "encoder_layers": 2}
MARIAN_FILES = {"source_spm": "source.spm", "target_spm": "target.spm", "vocab": "vocab.json"}
END_BIAS = 2.0
"""Added to the score of the token that ends an answer, so that some answers end by themselves."""


def write_model(kind: str, folder: Path) -> Path:
    """A model of ``t5``, ``flan``, ``mt5``, ``bart`` or ``marian``, with answers of its own."""
    import torch

    torch.manual_seed(7)
    if kind == "marian":
        tokenizer, model = _marian(folder)
    else:
        tokenizer, model = _bart() if kind == "bart" else _t5(kind)
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
        "core": {"max_new_tokens": 40, "threads": 1, **core},
    }
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    lines = [json.dumps({"text_input": text}) for text in TEXTS]
    (folder / "traffic.jsonl").write_text("\n".join(lines))
    return folder


def _t5(kind: str) -> tuple[Any, Any]:
    """T5 of 2019, Flan-T5, whose last layer has weights of its own, or mT5."""
    import transformers

    tokenizer = train("T5Tokenizer", TEXTS)
    family = "MT5" if kind == "mt5" else "T5"
    own = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    config = getattr(transformers, f"{family}Config")(
        **(own if kind == "flan" else {}),
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
    return tokenizer, getattr(transformers, f"{family}ForConditionalGeneration")(config)


def _bart() -> tuple[Any, Any]:
    from transformers import BartConfig, BartForConditionalGeneration

    tokenizer = train("RobertaTokenizer", TEXTS)
    model = BartForConditionalGeneration(BartConfig(**_both(len(tokenizer))))
    model.generation_config.forced_bos_token_id = 0
    return tokenizer, model


def _marian(folder: Path) -> tuple[Any, Any]:
    """Tokenizers of sentencepiece, which share a vocabulary that lacks some of their pieces."""
    import sentencepiece
    from transformers import MarianConfig, MarianMTModel, MarianTokenizer

    folder.mkdir(parents=True)
    pieces: set[str] = set()
    files = {"source_spm": TEXTS, "target_spm": [text[::-1] + "\u65e5" for text in TEXTS]}
    for file, texts in files.items():
        trained = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([*texts] * 4),
            model_writer=trained,
            vocab_size=90,
            hard_vocab_limit=False,
            bos_id=-1,
            minloglevel=2,
        )
        (folder / MARIAN_FILES[file]).write_bytes(trained.getvalue())
        model = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
        pieces |= {model.IdToPiece(piece) for piece in range(model.GetPieceSize())}
    special = {"</s>", "<unk>"}
    known = [piece for place, piece in enumerate(sorted(pieces - special)) if place % 7]
    ids = {piece: n for n, piece in enumerate([*sorted(special), *known, ">>fra<<", "<pad>"])}
    (folder / MARIAN_FILES["vocab"]).write_text(json.dumps(ids))
    places = {name: str(folder / file) for name, file in MARIAN_FILES.items()}
    with without_advice():
        tokenizer = MarianTokenizer(**places, model_max_length=128)
    pad = ids["<pad>"]
    own = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0}
    model = MarianMTModel(MarianConfig(**_both(len(ids)), **own, forced_eos_token_id=0))
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
