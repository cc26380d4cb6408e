"""Core rows in an ``.npz`` file without pickle, for checks without traffic and tokenizer.

Equal rows give equal bytes: members have a fixed order, no compression and no time.
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
        path: Path of the file.
        rows: Non-empty list of rows.

    Raises:
        ValueError: There are no rows, or rows of both kinds.
    """
    tokens = [row for row in rows if isinstance(row, TokenRow)]
    if not rows or len(tokens) not in (0, len(rows)):
        raise ValueError(f"{len(tokens)} of {len(rows)} rows are tokens; all or none must be")
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
    """Return the rows that `write_samples` wrote.

    Raises:
        UserError: The file is missing, or is not such a file.
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
            "does not contain the rows to check an engine with",
            given=error,
            remedy="Run `triptych build` again",
        ) from error
    return [
        TokenRow(tuple(ids[end - length : end].tolist()), int(first))
        for end, length, first in zip(ends, lengths, firsts, strict=True)
    ]
