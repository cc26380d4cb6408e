"""Code that is copied into the repository as it is, and run by Triton's Python stub.

It imports only the standard library, numpy, tokenizers, Pillow and `triton_python_backend_utils`;
text generation also imports its engine and jinja2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `in_flight` is also imported where there is no numpy
    from .row_types import RowMaker, TextRowMaker


def open_row_maker(name: str, settings: Mapping[str, Any], folder: Path) -> RowMaker:
    """Return the row maker of a task.

    Args:
        name: Module and class, as in the field `rows` of a task.
        settings: Settings of the preprocess step.
        folder: Folder with the ``tokenizer.json`` of tasks on texts.

    Raises:
        RequestError: The settings leave no tokens for a row.
    """
    from .row_types import find_class

    maker: RowMaker = find_class(name)(settings, folder)
    return maker


def open_text_row_maker(name: str, settings: Mapping[str, Any], folder: Path) -> TextRowMaker:
    """Return the row maker of a task on texts; see `open_row_maker`."""
    from .row_types import find_class

    maker: TextRowMaker = find_class(name)(settings, folder)
    return maker
