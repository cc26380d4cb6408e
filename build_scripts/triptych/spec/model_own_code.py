"""Refusing a model folder that brings code of its own: Triptych runs none of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from triptych.base.errors import UserError
from triptych.spec.sentence_modules import read_json

_LIBRARY = "sentence_transformers."


def refuse_own_code(folder: Path) -> None:
    """Raises a `UserError` where the files in `folder` name code outside the libraries.

    transformers would ask on the terminal and run it, or take a class of its own instead, whose
    numbers need not be the model's.
    """
    for path, entry in _own_code(folder):
        raise UserError(
            "model.source",
            "must be a model without code of its own, which is never run",
            given=f"{entry} in {path}",
            remedy="Choose a model that transformers itself has; if it has this one, remove that "
            "entry from a copy of the folder",
        )


def _own_code(folder: Path) -> Iterator[tuple[Path, str]]:
    """The files and the entries in them that name code."""
    for path in sorted(folder.glob("*config.json")):
        for entry in _entries(read_json(path)):
            yield path, entry
    for module in read_json(folder / "modules.json", default=[]):
        if not module["type"].startswith(_LIBRARY):
            yield folder / "modules.json", module["type"]


def _entries(value: object) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _entries(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            is_kernel = key.endswith("_implementation") and "/" in str(item)  # of the Hub
            if is_kernel or (key == "auto_map" and item):
                yield key
            yield from _entries(item)
