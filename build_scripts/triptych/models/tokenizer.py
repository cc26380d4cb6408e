"""Tokenizers of models: from the class in transformers, or as ``tokenizer.json`` has it.

The class makes it anew from vocabulary and settings, and ignores what else the file says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.base.errors import UserError
from triptych.models.fields import TokenizerSource
from triptych.models.text import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
OTHER_TOKENIZER = "other"
"""Folder beside the ``tokenizer.json`` of a class, with that of the model if it may differ."""
VOCABULARIES = (TOKENIZER_FILE, "vocab.*", "*.model", "*.tiktoken")
OUT_OF_REACH = 1 << 30


def read_tokenizer(
    folder: Path, source: TokenizerSource | None = None, padded: int | None = None
) -> str:
    """Return the model's tokenizer as the text of a ``tokenizer.json``.

    It has no padding unless each text is `padded` to a number of tokens that the model reads.

    Where it cuts long texts at their beginning, the text says so, with a limit out of reach;
    otherwise it says nothing of truncation. It is loaded through transformers, which applies
    ``tokenizer_config.json`` and converts the older formats, so that it tokenizes exactly as the
    reference does.

    Raises:
        UserError: the folder has no tokenizer, or only one without a fast form, or its mask hides
            padding that the model reads.
    """
    tokenizer = load_tokenizer(folder, source)
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    if padded is not None:
        if "attention_mask" in tokenizer.model_input_names:
            raise UserError(
                f"model_input_names in {SETTINGS_FILE}",
                "must be input_ids alone for a model that reads the padding of a text",
                given=", ".join(tokenizer.model_input_names),
                remedy="Correct it in a copy of the folder, as in the checkpoints of SigLIP",
            )
        backend.enable_padding(
            length=padded,
            direction=tokenizer.padding_side,
            pad_id=tokenizer.pad_token_id,
            pad_token=tokenizer.pad_token,
        )
    backend.no_truncation()
    if tokenizer.truncation_side != "right":
        backend.enable_truncation(OUT_OF_REACH, direction=tokenizer.truncation_side)
    text: str = backend.to_str()
    return text


_WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")


def load_tokenizer(folder: Path, source: TokenizerSource | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer that transformers loads, as its pipelines do, or that of the file.

    Raises:
        UserError: The folder has no tokenizer, or only one without a fast form.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    named = read_json(folder / SETTINGS_FILE, default={}).get("tokenizer_class")
    if named in _WITHOUT_VOCABULARY:
        raise UserError(
            "model.source",
            "must have a tokenizer with a fast form",
            given=f"{named}, which reads characters or bytes without a vocabulary",
            remedy="Choose a model with another tokenizer",
        )
    try:
        # Without any vocabulary transformers returns an empty tokenizer without an error.
        files = VOCABULARIES[:1] if source == "file" else VOCABULARIES
        if not has_vocabulary(folder, files):
            raise FileNotFoundError(f"none of {', '.join(files)}")
        kind = PreTrainedTokenizerFast if source == "file" else AutoTokenizer
        tokenizer = kind.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise UserError(
            "model.source",
            "must hold a tokenizer with a fast form (tokenizer.json)",
            given=" ".join(str(error).split())[:200],
            remedy="Save the model's fast tokenizer into the folder",
        ) from error
    if not tokenizer.is_fast:
        raise UserError(
            "model.source",
            "must have a tokenizer with a fast form",
            given=f"{type(tokenizer).__name__}, of which transformers has none",
            remedy="Choose another model, or put a tokenizer.json that makes the same tokens into "
            "the folder and name PreTrainedTokenizerFast in tokenizer_config.json",
        )
    if source == "file":  # `add_bos_token` and `add_eos_token` may have changed it
        own = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        tokenizer.backend_tokenizer.post_processor = own.post_processor
    return tokenizer


def read_other_tokenizer(folder: Path, served: str, padded: int | None = None) -> str | None:
    """Return the ``tokenizer.json`` of a model; None without it, or if it says the same as a class.

    The text has the settings of ``tokenizer_config.json`` that explain a difference from `served`,
    the tokenizer of the class: added tokens, truncation, `add_prefix_space` and `do_lower_case`.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        return None
    found, own = json.loads(read_tokenizer(folder, "file", padded)), json.loads(served)
    settings = read_json(folder / SETTINGS_FILE, default={})
    if "add_prefix_space" in settings:
        _take(found["pre_tokenizer"], own["pre_tokenizer"], ("add_prefix_space", "prepend_scheme"))
    if "do_lower_case" in settings:
        _take(found["normalizer"], own["normalizer"], ("lowercase",))
    return None if found == own else json.dumps(found)


def write_tokenizers(
    folder: Path, target: Path, source: TokenizerSource | None, padded: int | None = None
) -> None:
    """Write ``tokenizer.json`` for `source`, and without one also `OTHER_TOKENIZER`.

    Each text is `padded` as `read_tokenizer` says.
    """
    served = read_tokenizer(folder, source, padded)
    (target / TOKENIZER_FILE).write_text(served, encoding="utf-8")
    other = None if source else read_other_tokenizer(folder, served, padded)
    if other is not None:
        (target / OTHER_TOKENIZER).mkdir()
        (target / OTHER_TOKENIZER / TOKENIZER_FILE).write_text(other, encoding="utf-8")


def _take(target: object, source: object, names: Sequence[str]) -> None:
    """Copy the settings called `names` between parts of the same place, in place."""
    if isinstance(target, dict) and isinstance(source, dict):
        target.update({name: source[name] for name in names if name in target and name in source})
        for name in target.keys() & source.keys():
            _take(target[name], source[name], names)
    elif isinstance(target, list) and isinstance(source, list):
        for some, other in zip(target, source, strict=False):
            _take(some, other, names)


def has_vocabulary(folder: Path, files: Sequence[str] = VOCABULARIES) -> bool:
    return any(True for pattern in files for _ in folder.glob(pattern))
