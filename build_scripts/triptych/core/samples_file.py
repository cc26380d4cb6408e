"""Core rows in a file, for checks where neither traffic nor tokenizer is: an ``.npz``, no pickle.

Equal rows make equal bytes: members in a fixed order, no compression, no time of day.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.errors import UserError
from triptych.base.tensors import TokenRow
from triptych.core.feeds import Sample

_NO_TIME = (1980, 1, 1, 0, 0, 0)
_TOKENS = ("ids", "lengths", "first_segments")
_PIXELS = "pixels"


def write_samples(path: Path, rows: Sequence[Sample]) -> None:
    """Write core rows, all tokens or all pixels of one size.

    Args:
        path: of the file.
        rows: at least one.

    Raises:
        ValueError: there are none, or they are of both kinds.
    """
    tokens = [row for row in rows if isinstance(row, TokenRow)]
    if not rows or len(tokens) not in (0, len(rows)):
        raise ValueError(f"{len(tokens)} of {len(rows)} rows are tokens: all or none must be")
    arrays: dict[str, NDArray[Any]] = {}
    if tokens:
        arrays["ids"] = np.array([token for row in tokens for token in row.ids], np.int32)
        arrays["lengths"] = np.array([len(row.ids) for row in tokens], np.int32)
        arrays["first_segments"] = np.array([row.first_segment for row in tokens], np.int32)
    else:
        arrays[_PIXELS] = np.stack([np.asarray(row, np.uint8) for row in rows])
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.save(content, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", _NO_TIME), content.getvalue())


def read_samples(path: Path) -> list[Sample]:
    """The rows that `write_samples` wrote.

    Raises:
        UserError: the file is missing, or something else.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        if _PIXELS in arrays:
            return list(arrays[_PIXELS])
        ids, lengths, firsts = (arrays[name] for name in _TOKENS)
        ends = np.cumsum(lengths)
        if len(ids) != (ends[-1] if len(ends) else 0) or len(firsts) != len(lengths):
            raise ValueError("lengths and tokens do not agree")
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(
            str(path),
            "must hold the rows that an engine is checked on",
            given=error,
            remedy="Run `triptych build` again",
        ) from error
    return [
        TokenRow(tuple(ids[end - length : end].tolist()), int(first))
        for end, length, first in zip(ends, lengths, firsts, strict=True)
    ]
