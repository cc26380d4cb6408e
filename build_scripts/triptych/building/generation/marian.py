"""Marian's tokenizer, which has no fast form, as files that the steps read.

``source.spm`` finds the pieces of a text, ``vocab.json`` has the ids of both languages: what makes
ids of a text is not what makes text of ids.
"""

from __future__ import annotations

import json
import warnings
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models

from triptych.base.errors import UserError
from triptych.runtime.generation_wire import TOKENIZER_FILE
from triptych.runtime.source_pieces import PIECES_FILE, SPACE

SOURCE_FILE = "source.spm"
UNIGRAM = 1
NORMAL, UNKNOWN, CONTROL = 1, 2, 3
"""Numbers of ``sentencepiece_model.proto``: of a model's type, and of its pieces."""
MARGINS = r"\A +| +\z"


def is_marian(folder: Path) -> bool:
    """Whether the tokenizer in `folder` is one of Marian's, without a fast form."""
    return (folder / SOURCE_FILE).is_file() and not (folder / TOKENIZER_FILE).is_file()


@contextmanager
def without_advice() -> Iterator[None]:
    """Load Marian's tokenizer without its advice: a package for what it does not do itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Recommended: pip install sacremoses")
        yield


def write_marian(folder: Path, source: Path, target: Path) -> None:
    """Write the files of preprocess into `source`, those of postprocess into `target`.

    Raises:
        UserError: a tokenizer of another kind than published models have, or no sentencepiece.
    """
    if find_spec("sentencepiece") is None:
        raise UserError(
            "model.source",
            "needs sentencepiece: Marian's tokenizer is one",
            given="not installed",
            remedy="Run `make setup`, or `pip install -e .[text2text]`",
        )
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if tokenizer.separate_vocabs:
        raise _refused("a vocabulary for each language", "Choose a model with one for both")
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    model = _read(folder / SOURCE_FILE)
    (source / TOKENIZER_FILE).write_text(_finds_pieces(model).to_str(), encoding="utf-8")
    known = {
        "ids": vocabulary,
        "special": sorted(tokenizer.added_tokens_encoder, key=len, reverse=True),
        "unknown": tokenizer.unk_token_id,
        "end": tokenizer.eos_token_id,
        "characters": b64encode(model.normalizer_spec.precompiled_charsmap).decode(),
    }
    (source / PIECES_FILE).write_text(json.dumps(known), encoding="utf-8")
    (target / TOKENIZER_FILE).write_text(_decodes(tokenizer, vocabulary), encoding="utf-8")


def _read(path: Path) -> Any:
    """A model of sentencepiece, as its protobuf message."""
    from transformers.convert_slow_tokenizer import import_protobuf

    model = import_protobuf().ModelProto()
    model.ParseFromString(path.read_bytes())
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    plain = normalizer.add_dummy_prefix and normalizer.remove_extra_whitespaces
    plain = plain and normalizer.escape_whitespaces and not trainer.treat_whitespace_as_suffix
    kinds = {piece.type for piece in model.pieces}
    if trainer.model_type != UNIGRAM or not kinds <= {NORMAL, UNKNOWN, CONTROL} or not plain:
        raise _refused("source.spm of another kind", "Choose a model with a unigram one")
    return model


def _finds_pieces(model: Any) -> Tokenizer:
    # What is not of a text is found in none: none has a space when pieces are looked for.
    pieces = [
        (one.piece if one.type == NORMAL else f" {one.piece}", one.score) for one in model.pieces
    ]
    return Tokenizer(models.Unigram(pieces, unk_id=model.trainer_spec.unk_id))


def _decodes(tokenizer: Any, vocabulary: dict[str, int]) -> str:
    """A tokenizer that is used to decode alone."""
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=tokenizer.unk_token))
    special = [AddedToken(token, special=True) for token in tokenizer.added_tokens_encoder]
    made.add_special_tokens(special)
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Replace(Regex(MARGINS), "")]
    )
    text: str = made.to_str()
    return text


def _refused(given: str, remedy: str) -> UserError:
    return UserError(
        "model.source",
        "must have a tokenizer as Marian's published models",
        given=given,
        remedy=remedy,
    )
