"""Sampled rows: their choice, their way to postprocess, and their files.

A payload goes with the ticket of a sampled request: `row_types.make_payload` of the sample payload,
the inputs as the client sent them. Answer and inputs therefore meet in postprocess, lost requests
leave nothing behind, and an unsampled request costs one comparison.

Several servers may write into one folder. Each applies the limits before it adds a file, so the
folder may exceed them by one file per server for a moment.
"""

from __future__ import annotations

import json
import math
import os
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

MAX_SAMPLE_BYTES = 1 << 20
"""Maximum bytes of the sampled rows of one request; larger ones are counted and not forwarded."""

_WORD = 8


class SampledRows(NamedTuple):
    """Inputs of the sampled rows of one request.

    Attributes:
        at: Time of arrival, in seconds since 1970.
        rows: Indices in the request.
        columns: Value of each row for each input, as sent, numbers as JSON; empty if they were too
            large.
        parameters: Parameters of the request, JSON.
    """

    at: float
    rows: Sequence[int]
    columns: Mapping[str, Sequence[bytes]]
    parameters: str


class RowSampler:
    """Random choice of rows, each with the same probability.

    Args:
        rate: Probability of each row.
        source: Random number generator.
    """

    def __init__(self, rate: float, source: random.Random | None = None) -> None:
        self._keep = math.log1p(-rate) if rate < 1 else -math.inf
        self._random = source or random.Random()
        self._before_next = self._gap()

    def draw(self, columns: Mapping[str, Sequence[object]], parameters: str) -> bytes:
        """Return the sample payload of a request; empty if none of its rows is sampled."""
        count = len(next(iter(columns.values())))
        if self._before_next >= count:
            self._before_next -= count
            return b""
        rows = []
        while self._before_next < count:
            rows.append(self._before_next)
            self._before_next += 1 + self._gap()
        self._before_next -= count
        return _pack_sample(rows, columns, parameters)

    def _gap(self) -> int:
        """Return the number of rows before the next sampled one, geometrically distributed."""
        return int(math.log(1.0 - self._random.random()) / self._keep)


def _pack_sample(
    rows: Sequence[int], columns: Mapping[str, Sequence[object]], parameters: str
) -> bytes:
    data = [_encode(columns[name][row]) for name in columns for row in rows]
    if sum(map(len, data)) + len(parameters) > MAX_SAMPLE_BYTES:
        data, columns = [], {}
    head = {
        "at": time.time(),
        "rows": rows,
        "names": list(columns),
        "sizes": [len(value) for value in data],
        "parameters": parameters if data else "",
    }
    text = json.dumps(head).encode()
    return len(text).to_bytes(_WORD, "little") + text + b"".join(data)


def _encode(value: Any) -> bytes:
    """Return a text, the content of a file, or as JSON a number or array."""
    if isinstance(value, str | bytes):
        return value.encode() if isinstance(value, str) else value
    return json.dumps(value.tolist()).encode()


def unpack_sample(payload: bytes) -> SampledRows:
    """Return the sampled rows of a payload."""
    start = _WORD + int.from_bytes(payload[:_WORD], "little")
    head = json.loads(payload[_WORD:start])
    rows, values = head["rows"], []
    for size in head["sizes"]:
        values.append(payload[start : start + size])
        start += size
    columns = {
        name: values[index * len(rows) : (index + 1) * len(rows)]
        for index, name in enumerate(head["names"])
    }
    return SampledRows(head["at"], rows, columns, head["parameters"])


FOLDER_VARIABLE = "TRIPTYCH_SAMPLES"
"""Variable of the server with the folder of all samples, which has a folder for each pipeline.
Nothing is sampled if it is not set."""

PARTIAL = ".partial-"
FUTURE_S = 3600.0
"""Seconds in the future beyond which a file is deleted, because its clock was wrong."""

_NANO = 10**9


class SampleFile(NamedTuple):
    """File of samples; `written_ns` is in nanoseconds since 1970, `size` in bytes."""

    path: Path
    written_ns: int
    rows: int
    size: int


def list_files(folder: Path, pipeline: str) -> list[SampleFile]:
    """Return the pipeline's files, oldest first."""
    found = []
    for path in folder.glob(f"{pipeline}.*.jsonl"):
        parts = path.name.split(".")
        if len(parts) == 5 and parts[1].isdecimal() and parts[2].isdecimal():
            with suppress(OSError):  # another server removed it
                found.append(SampleFile(path, int(parts[1]), int(parts[2]), path.stat().st_size))
    return sorted(found, key=lambda file: file.written_ns)


def remove_old(
    folder: Path, pipeline: str, retention_hours: float, now_s: float | None = None
) -> None:
    """Delete files that are older than `retention_hours` or dated in the future."""
    now_ns = time.time_ns() if now_s is None else int(now_s * _NANO)
    oldest, newest = now_ns - int(retention_hours * 3600 * _NANO), now_ns + int(FUTURE_S * _NANO)
    for file in list_files(folder, pipeline):
        if not oldest <= file.written_ns <= newest:
            file.path.unlink(missing_ok=True)
    longest_s = min(retention_hours * 3600, FUTURE_S)
    for path in folder.glob(f"{PARTIAL}*"):  # of writers that were killed
        with suppress(OSError):
            if abs(now_ns - path.stat().st_mtime_ns) > longest_s * _NANO:
                path.unlink()


def write_file(
    folder: Path, pipeline: str, lines: Sequence[bytes], *, rows: int, max_rows: int, max_bytes: int
) -> int:
    """Write a file atomically, readable only for this user, and return its size in bytes.

    Args:
        folder: Folder of the pipeline's samples; created if it does not exist.
        pipeline: Name of the pipeline.
        lines: Lines of the file.
        rows: Number of rows in the file.
        max_rows: Maximum rows of all files of the pipeline; the oldest files are deleted.
        max_bytes: Maximum bytes of all files.

    Raises:
        OSError: The file cannot be written; nothing of it remains.
    """
    content = b"".join(lines)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = list_files(folder, pipeline)
    over_rows = sum(file.rows for file in files) + rows - max_rows
    over = sum(file.size for file in files) + len(content) - max_bytes
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
