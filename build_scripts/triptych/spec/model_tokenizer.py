"""Tokenizers of models: from the class in transformers, or as ``tokenizer.json`` has it.

transformers 5 makes the tokenizer of most classes anew, from the vocabulary and
``tokenizer_config.json``, and ignores what else ``tokenizer.json`` says. Other libraries read the
file alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from triptych.base.errors import UserError
from triptych.spec.model_text import read_json

TokenizerSource = Literal["file", "class"]
"""Origin of a tokenizer: ``tokenizer.json`` as it is, or the class in transformers."""

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
OUT_OF_REACH = 1 << 30


def read_tokenizer(folder: Path, source: TokenizerSource = "class") -> str:
    """Return the model's tokenizer as the text of a ``tokenizer.json``, without padding.

    Where it cuts long texts at their beginning, the text says so, with a limit out of reach;
    otherwise it says nothing of truncation. It is loaded through transformers, which applies
    ``tokenizer_config.json`` and converts the older formats, so that it tokenizes exactly as the
    reference does.

    Raises:
        UserError: the folder has no tokenizer, or only one without a fast form.
    """
    tokenizer = load_tokenizer(folder, source)
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    if tokenizer.truncation_side != "right":
        backend.enable_truncation(OUT_OF_REACH, direction=tokenizer.truncation_side)
    text: str = backend.to_str()
    return text


_WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")


def load_tokenizer(folder: Path, source: TokenizerSource | None = None) -> Any:
    """Return the tokenizer that transformers loads, as its pipelines do.

    With the source ``file`` it makes the tokens that ``tokenizer.json`` says, and has the other
    settings of the class.

    Raises:
        UserError: The folder has no tokenizer, or only one without a fast form.
    """
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
        if not has_vocabulary(folder):
            raise FileNotFoundError(f"none of {', '.join(VOCABULARIES)}")
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
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
    if source != "file":
        return tokenizer
    if not (folder / TOKENIZER_FILE).is_file():
        raise UserError(
            "tokenizer.source",
            f"requires a {TOKENIZER_FILE} in the folder of the model",
            given=source,
            remedy="Remove it",
        )
    found = PreTrainedTokenizerFast.from_pretrained(folder)
    found.model_input_names = tokenizer.model_input_names
    # Settings of tokenizer_config.json may have changed it.
    found.backend_tokenizer.post_processor = _read_file(folder).post_processor
    return found


def _read_file(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / TOKENIZER_FILE))


def read_other_tokenizer(folder: Path, served: str) -> str | None:
    """Return the ``tokenizer.json`` of a model that may make other tokens than its class does.

    The text has the settings of ``tokenizer_config.json`` that explain a difference: added tokens,
    truncation, `add_prefix_space` and `do_lower_case`.

    Args:
        folder: Folder of the model.
        served: Result of `read_tokenizer` for the class.

    Returns:
        None if there is no file, or if it says the same as the class.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        return None
    found, own = json.loads(_read_file(folder).to_str()), json.loads(served)
    settings = read_json(folder / SETTINGS_FILE, default={})
    found["truncation"], found["padding"] = own["truncation"], own["padding"]
    named = [token["content"] for token in settings.get("added_tokens_decoder", {}).values()]
    tokens = {token["content"]: token for token in found["added_tokens"]}
    for token in own["added_tokens"]:
        if token["content"] not in tokens or token["content"] in named:
            tokens[token["content"]] = token
    found["added_tokens"] = sorted(tokens.values(), key=lambda token: int(token["id"]))
    if "add_prefix_space" in settings:
        before = bool(settings["add_prefix_space"])
        for part in _parts(found["pre_tokenizer"]):
            if part["type"] == "ByteLevel":
                part["add_prefix_space"] = before
            elif part["type"] == "Metaspace":
                part["prepend_scheme"] = "always" if before else "never"
    if "do_lower_case" in settings:
        _set_lowercase(found, bool(settings["do_lower_case"]))
    return None if found == own else json.dumps(found)


def _parts(part: Any) -> list[Any]:
    """Return the parts of a normalizer or pre-tokenizer of ``tokenizer.json``."""
    if part is None:
        return []
    inner = part.get("normalizers", part.get("pretokenizers"))
    return [part] if inner is None else [each for item in inner for each in _parts(item)]


def _set_lowercase(content: dict[str, Any], lowercase: bool) -> None:
    """Set whether the normalizer in the content of a ``tokenizer.json`` lower-cases texts."""
    parts = _parts(content["normalizer"])
    kinds = [part["type"] for part in parts]
    if "BertNormalizer" in kinds:
        parts[kinds.index("BertNormalizer")]["lowercase"] = lowercase
    elif ("Lowercase" in kinds) != lowercase:
        kept = [part for part in parts if part["type"] != "Lowercase"]
        kept += [{"type": "Lowercase"}] * lowercase
        content["normalizer"] = {"type": "Sequence", "normalizers": kept}


def has_vocabulary(folder: Path) -> bool:
    return any(True for pattern in VOCABULARIES for _ in folder.glob(pattern))
