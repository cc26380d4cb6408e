"""Code copied verbatim into the repository and run by Triton's Python stub.

It imports the standard library, numpy, tokenizers and `triton_python_backend_utils`, nothing else.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `in_flight` is also imported where there is no numpy
    from .row_types import RowMaker, TextRowMaker


def module_of(file: str) -> ModuleType:
    """A module of this package by its file's name, as a task names what it needs of it."""
    return importlib.import_module(f"{__name__}.{Path(file).stem}")


def open_row_maker(file: str, settings: Mapping[str, Any], folder: Path) -> RowMaker:
    """The row maker in `file`.

    Args:
        file: ``rows`` of a task.
        settings: as its preprocess step gets them.
        folder: with the ``tokenizer.json``, where rows are of tokens.

    Raises:
        RequestError: the settings leave no room for a row.
    """
    maker: RowMaker = module_of(file).RowMaker(settings, folder)
    return maker


def open_text_row_maker(file: str, settings: Mapping[str, Any], folder: Path) -> TextRowMaker:
    """The same, of a file whose rows are of tokens."""
    maker: TextRowMaker = module_of(file).RowMaker(settings, folder)
    return maker
