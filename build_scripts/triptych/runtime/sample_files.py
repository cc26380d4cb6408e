"""The folder of a pipeline's samples: whole, private files, bounded in rows, bytes and age.

Several servers may write into one folder: each holds to the limits before it adds a file, so that
the folder may be over them by one file a server for a moment. A file's name says when it was
written (nanoseconds since 1970) and how many rows it has.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

FOLDER_VARIABLE = "TRIPTYCH_SAMPLES"
"""Of the server's environment: the folder of all samples, one for each pipeline in it. Without it
nothing is sampled."""

PARTIAL = ".partial-"
FUTURE_S = 3600.0
"""A file from further ahead is of a clock that was wrong: it goes, since nobody knows its age."""

_NANO = 10**9


class SampleFile(NamedTuple):
    """One file.

    Attributes:
        written_ns: when, in nanoseconds since 1970.
        rows: in it.
        size: in bytes.
    """

    path: Path
    written_ns: int
    rows: int
    size: int


def list_files(folder: Path, pipeline: str) -> list[SampleFile]:
    """The pipeline's files, oldest first; none where there is no such folder."""
    found = []
    for path in folder.glob(f"{pipeline}.*.jsonl"):
        parts = path.name.split(".")
        if len(parts) == 5 and parts[1].isdecimal() and parts[2].isdecimal():
            with suppress(OSError):  # another server removed it
                found.append(SampleFile(path, int(parts[1]), int(parts[2]), path.stat().st_size))
    return sorted(found, key=lambda file: file.written_ns)


def remove_old(folder: Path, pipeline: str, keep_hours: float, now_s: float | None = None) -> None:
    """Delete what is older than `keep_hours`, or from a clock that was wrong."""
    now_ns = time.time_ns() if now_s is None else int(now_s * _NANO)
    oldest, newest = now_ns - int(keep_hours * 3600 * _NANO), now_ns + int(FUTURE_S * _NANO)
    for file in list_files(folder, pipeline):
        if not oldest <= file.written_ns <= newest:
            file.path.unlink(missing_ok=True)
    longest_s = min(keep_hours * 3600, FUTURE_S)
    for path in folder.glob(f"{PARTIAL}*"):  # of writers that were killed
        with suppress(OSError):
            if abs(now_ns - path.stat().st_mtime_ns) > longest_s * _NANO:
                path.unlink()


def write_file(
    folder: Path, pipeline: str, lines: Sequence[bytes], *, rows: int, most_rows: int, most: int
) -> int:
    """Write a file whole, private to this user; its bytes.

    Args:
        folder: made where it is missing, for this user alone.
        pipeline: whose samples they are.
        lines: of the file.
        rows: that it has.
        most_rows: of all files of the pipeline; the oldest make room.
        most: bytes of all files.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    content = b"".join(lines)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = list_files(folder, pipeline)
    over_rows = sum(file.rows for file in files) + rows - most_rows
    over = sum(file.size for file in files) + len(content) - most
    for old in files:
        if over_rows <= 0 and over <= 0:
            break
        old.path.unlink(missing_ok=True)
        over_rows, over = over_rows - old.rows, over - old.size
    token = secrets.token_hex(4)
    partial = folder / f"{PARTIAL}{token}"
    try:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        partial.replace(folder / f"{pipeline}.{time.time_ns()}.{rows}.{token}.jsonl")
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    return len(content)
