"""Fields of ``pipeline.yaml`` on a model's files and its tokenizer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable values; fields that are not declared are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSource(Frozen):
    """Location of the model's files.

    Attributes:
        source: ``package:<module>/<folder>``, a local folder (absolute, or relative to the folder
            of the pipeline), or a Hub id ``owner/name``.
        revision: Commit, tag or branch of a Hub id.
    """

    source: str
    revision: str | None = None


class EncoderSource(ModelSource):
    """Location of an encoder's files.

    Attributes:
        accept_architecture: Whether the class in ``config.json`` may be that of another task.
    """

    accept_architecture: bool = False


def name_of_source(source: str) -> str:
    """Return the name of a model by its source: the last part of a path, or the source itself."""
    is_path = source.startswith((".", "/", "~")) or source.count("/") > 1
    if source.startswith("package:") or not is_path:
        return source
    return source.rstrip("/").rpartition("/")[2] or source


TokenizerSource = Literal["file", "class"]


class TokenizerChoice(Frozen):
    """Tokenizer of the model.

    Attributes:
        source: Origin of the tokenizer: the model's ``tokenizer.json``, as the tokenizers library
            and TEI read it (``file``), or the class in transformers, which ignores parts of the
            file (``class``). None: the class, and the build ends if their tokens differ.
    """

    source: TokenizerSource | None = None
