"""Write sampled rows in a separate thread, from a reservoir for each time window.

Sampling must not delay or fail a request. Rows that cannot be taken, redacted or written are
counted.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from .counters import CounterSet, Series
from .hooking import REDACT, RowForm, load_hooks
from .sampling import (
    FOLDER_VARIABLE,
    SampledRows,
    remove_old,
    unpack_sample,
    write_file,
)

MANIFEST_FILE = "triptych.lock.json"
SCHEMA = 1
MAX_WAITING = 1024
MAX_WAITING_BYTES = 64 << 20
"""Maximum requests, and their bytes, that wait for the writer; further ones are dropped."""

WINDOWS = 10
"""Number of time windows that share the folder's limits, so that one burst does not fill it."""

TICK_S = 0.5
SETTLING_S = 60.0
"""Seconds after a change of the repository's files until the new build certainly answers."""

DROPPED = ("waiting", "large", "redact", "disk", "exchange", "fault", "forged")
WRITTEN, DROPS, BYTES = (
    "triptych_samples_written_total",
    "triptych_samples_dropped_total",
    "triptych_sample_written_bytes_total",
)
METRICS = (
    (WRITTEN, "Sampled rows that were written", ("",)),
    (
        DROPS,
        "Sampled rows that were dropped, by reason; requests for the reasons `waiting` and "
        "`forged`",
        DROPPED,
    ),
    (BYTES, "Bytes of samples that were written", ("",)),
)
Redact = Callable[[dict[str, Any], dict[str, Any]], "tuple[Any, Any] | None"]


class SampledAnswer(NamedTuple):
    """Sampled row: inputs as sent, and its answer, ``[1, …]`` for each output."""

    at: float
    inputs: Mapping[str, bytes]
    parameters: str
    answer: Mapping[str, NDArray[Any]]

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        return sum(map(len, self.inputs.values())) + sum(
            sum(map(len, array.flat)) if array.dtype == object else array.nbytes
            for array in self.answer.values()
        )


class SampleWriter:
    """Writer of the sampled answers of one postprocess instance.

    Args:
        settings: Settings of the step; ``sample`` has rate, max_rows, max_bytes,
            retention_hours, window_s and redact of the pipeline.
        step: Folder ``REPOSITORY/STEP/VERSION``.
    """

    def __init__(self, settings: Mapping[str, Any], step: Path) -> None:
        own = settings["sample"]
        self._pipeline: str = settings["pipeline"]
        self._contents: Mapping[str, str] = settings["sample_inputs"]
        self._max_rows, self._max_bytes = own["max_rows"], own["max_bytes"]
        self._retention_hours, self._window_s = own["retention_hours"], own["window_s"]
        self._form = RowForm(settings["outputs"])
        self._redact: Redact | None = None
        if own["redact"]:
            self._redact = getattr(load_hooks(step), REDACT, None)
        if own["redact"] and self._redact is None:
            raise RuntimeError(f"hooks.py must have the function `{REDACT}`, which samples need")
        self._manifest_file = step.parents[1] / self._pipeline / MANIFEST_FILE
        self._manifest_status, self._build = _read_build(self._manifest_file)
        self._random = random.Random()
        self._condition = threading.Condition()
        self._waiting: list[tuple[bytes, Mapping[str, NDArray[np.generic]]]] = []
        self._waiting_bytes = 0
        self._ending = False
        self._reservoir: list[SampledAnswer] = []
        self._reservoir_bytes = self._seen = self._forged = 0
        self._settled_at = 0.0
        self._counts: Counter[Series] = Counter()
        self._metrics: CounterSet | None = None
        with suppress(Exception):  # a server without custom metrics
            metrics = CounterSet(self._pipeline)
            for name, description, values in METRICS:
                label = "reason" if len(values) > 1 else ""
                metrics.add(name, description, label=label, values=values)
            self._metrics = metrics
        folder = os.environ.get(FOLDER_VARIABLE)
        self._folder = Path(folder) / self._pipeline if folder else None
        if self._folder is None:
            pb_utils.Logger.log_warn(
                f"{self._pipeline} samples nothing because {FOLDER_VARIABLE} is not set"
            )
        self._thread = threading.Thread(target=self._run, name="sample-writer", daemon=True)
        self._thread.start()

    def put(self, payload: bytes, outputs: Mapping[str, NDArray[np.generic]]) -> None:
        """Queue the answer of a request with a sample payload, or drop it."""
        if self._folder is None:
            return
        with self._condition:
            fits = self._waiting_bytes + len(payload) <= MAX_WAITING_BYTES
            fits = fits and len(self._waiting) < MAX_WAITING
            if fits:
                # The arrays may lie in memory that Triton takes back after the answer.
                self._waiting.append((payload, {name: a.copy() for name, a in outputs.items()}))
                self._waiting_bytes += len(payload)
        if not fits:  # counted here, because the writer may hang in `redact`
            self._count({(DROPS, "waiting"): 1})

    def count_forged(self) -> None:
        """Count a request whose sample no preprocess step made, or which was answered before."""
        with self._condition:
            self._forged += 1
        self._count({(DROPS, "forged"): 1})

    def close(self, timeout_s: float = 5.0) -> None:
        """Write the remaining samples."""
        with self._condition:
            self._ending = True
            self._condition.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        ends_at = time.monotonic() + self._window_s
        while True:
            with self._condition:
                if not self._ending:
                    self._condition.wait(TICK_S)
                waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
                ending = self._ending
            try:
                self._note_reload()
                for payload, outputs in waiting:
                    self._take_safely(payload, outputs)
                if ending or time.monotonic() >= ends_at:
                    ends_at = time.monotonic() + self._window_s
                    self._flush()
            except Exception as error:  # an unforeseen message may quote user text
                self._counts[DROPS, "fault"] += len(self._reservoir)
                self._reservoir, self._reservoir_bytes, self._seen = [], 0, 0
                pb_utils.Logger.log_warn(f"samples of {self._pipeline}: {type(error).__name__}")
            counts, self._counts = self._counts, Counter()
            self._count(counts)
            if ending:
                return

    def _note_reload(self) -> None:
        """Write the reservoir when the files change: its rows belong to the previous build."""
        status, build = _read_build(self._manifest_file, known=(self._manifest_status, self._build))
        if build != self._build:
            self._flush()
            self._build, self._settled_at = build, time.monotonic() + SETTLING_S
        self._manifest_status = status

    def _take_safely(self, payload: bytes, outputs: Mapping[str, NDArray[np.generic]]) -> None:
        """Take a request; an invalid one must not cost the rows of others."""
        try:
            self._take(payload, outputs)
        except Exception:  # for example, an output of another number of rows
            self._counts[DROPS, "fault"] += 1

    def _take(self, payload: bytes, outputs: Mapping[str, NDArray[np.generic]]) -> None:
        sampled = unpack_sample(payload)
        if time.monotonic() < self._settled_at:
            self._counts[DROPS, "exchange"] += len(sampled.rows)
        elif not sampled.columns:
            self._counts[DROPS, "large"] += len(sampled.rows)
        else:
            for row in _split_rows(sampled, outputs):
                self._keep(row)

    def _keep(self, row: SampledAnswer) -> None:
        """Add a row by Vitter's algorithm R: all rows of a window stay with equal probability."""
        max_rows = max(self._max_rows // WINDOWS, 1)
        self._seen += 1
        if len(self._reservoir) < max_rows:
            self._reservoir.append(row)
        else:
            index = self._random.randrange(self._seen)
            if index >= max_rows:
                return
            self._reservoir_bytes -= self._reservoir[index].size
            self._reservoir[index] = row
        self._reservoir_bytes += row.size
        while self._reservoir_bytes > self._max_bytes // WINDOWS and self._reservoir:
            removed = self._reservoir.pop(self._random.randrange(len(self._reservoir)))
            self._reservoir_bytes -= removed.size

    def _flush(self) -> None:
        rows, seen = self._reservoir, self._seen
        self._reservoir, self._reservoir_bytes, self._seen = [], 0, 0
        if self._folder is None:
            return
        with suppress(OSError):  # a failure to write is counted below
            remove_old(self._folder, self._pipeline, self._retention_hours)
        lines = [line for line in map(self._line_safely, rows) if line]
        if not lines:
            return
        with self._condition:
            forged, self._forged = self._forged, 0
        head = {
            "schema": SCHEMA,
            "pipeline": self._pipeline,
            "build": self._build,
            "drawn": seen,
            "forged": forged,
        }
        try:
            size = write_file(
                self._folder,
                self._pipeline,
                [json.dumps(head).encode() + b"\n", *lines],
                rows=len(lines),
                max_rows=self._max_rows,
                max_bytes=self._max_bytes,
            )
        except OSError:
            self._counts[DROPS, "disk"] += len(lines)
            return
        self._counts[BYTES, ""] += size
        self._counts[WRITTEN, ""] += len(lines)  # last, so that the other counts are complete

    def _line_safely(self, row: SampledAnswer) -> bytes:
        try:
            return self._line(row)
        except Exception:  # for example, bytes that are not text
            self._counts[DROPS, "fault"] += 1
            return b""

    def _line(self, row: SampledAnswer) -> bytes:
        """Return a row as JSON; empty if it must not be written."""
        inputs = {name: _READ[self._contents[name]](data) for name, data in row.inputs.items()}
        answer, changed = row.answer, False
        if self._redact is not None:
            try:
                (plain,) = self._form.rows(row.answer)
                before = _fingerprint(inputs, self._form.tensors([plain]))
                redacted = self._redact(inputs, plain)
                if redacted is None:
                    self._counts[DROPS, "redact"] += 1
                    return b""
                inputs, plain = redacted
                rewritten = self._form.tensors([plain])
                changed = _fingerprint(inputs, rewritten) != before
                answer = rewritten if changed else answer
            except BaseException:  # the user's function; its message may quote a text
                self._counts[DROPS, "redact"] += 1
                return b""
        record = {
            "at": round(row.at, 3),
            "inputs": {name: _plain(value) for name, value in inputs.items()},
            "parameters": json.loads(row.parameters or "{}"),
            "answer": {name: _plain_array(array) for name, array in answer.items()},
            "redacted": changed,
        }
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"

    def _count(self, counts: Mapping[Series, int]) -> None:
        if self._metrics is None:
            return
        try:
            self._metrics.update(counts)
        except Exception:  # a failure of the metrics must not stop the sampling
            self._metrics = None


def _split_rows(
    sampled: SampledRows, outputs: Mapping[str, NDArray[np.generic]]
) -> list[SampledAnswer]:
    return [
        SampledAnswer(
            sampled.at,
            {name: values[index] for name, values in sampled.columns.items()},
            sampled.parameters,
            {name: array[row : row + 1] for name, array in outputs.items()},
        )
        for index, row in enumerate(sampled.rows)
    ]


def _read_build(manifest: Path, known: tuple[object, str] = (None, "")) -> tuple[object, str]:
    """Return file status and SHA-256 of the build manifest; `known` if it has not changed."""
    try:
        found = manifest.stat()
        status = found.st_mtime_ns, found.st_size, found.st_ino
        if status == known[0]:
            return known
        return status, hashlib.sha256(manifest.read_bytes()).hexdigest()
    except OSError:
        return known


def _fingerprint(inputs: Mapping[str, object], answer: Mapping[str, NDArray[np.generic]]) -> str:
    plain = {name: _plain(value) for name, value in inputs.items()}
    return json.dumps([plain, {name: _plain_array(array) for name, array in answer.items()}])


_READ: Mapping[str, Callable[[bytes], Any]] = {
    "text": bytes.decode,
    "image": bytes,
    "bytes": bytes,
    "json": json.loads,
}
"""Function that reads a sampled value, by the content of its input."""


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if not isinstance(value, str | bool | int | float | list):
        raise TypeError("an input must be of the type in which it was sent")
    return value


def _plain_array(array: NDArray[Any]) -> dict[str, Any]:
    shape = list(array.shape)
    if array.dtype == object:
        return {"shape": shape, "texts": [item.decode() for item in array.flat]}
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"shape": shape, "dtype": array.dtype.name, "base64": data}
