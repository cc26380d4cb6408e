"""Progress of the models of a server, from its metrics: what computes is busy, not stuck.

A model is stuck if its pipeline has not answered and the model has finished no execution for
twice the longest unit of work of the pipeline: the longest batches of its models, one after the
other. They are measured on this server. Until the largest batch has come, its duration is that of a
row times the rows and tokens of the largest batch. Pipelines that compute at the same time share
the machine, so that for each further one the time of one more unit of work is allowed.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

MIN_STUCK_S = 4.0
FIRST_WORK_S = 60.0
"""Longest unit of work of a pipeline with a model that has computed nothing yet."""
MAX_GAP_S = 60.0
"""Seconds between two checks after which the first one says nothing about the second."""

_METRIC = re.compile(
    rb"^nv_inference_(exec_count|request_success|count|compute_infer_duration_us)"
    rb'{model="([^"]+)",version="[^"]*"} (\S+)',
    re.MULTILINE,
)


class Executions(NamedTuple):
    """Batches, requests and rows that a model has computed since it was loaded."""

    batches: float = 0.0
    requests: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0  # Sum over the requests of the durations of their batches


def read_executions(metrics: bytes) -> dict[str, Executions]:
    """Return what each model has computed, from a page of Triton's metrics."""
    found: dict[str, dict[bytes, float]] = {}
    for name, model, value in _METRIC.findall(metrics):
        values = found.setdefault(model.decode(), {})
        values[name] = values.get(name, 0.0) + float(value)  # all versions
    return {
        model: Executions(
            values.get(b"exec_count", 0.0),
            values.get(b"request_success", 0.0),
            values.get(b"count", 0.0),
            values.get(b"compute_infer_duration_us", 0.0) / 1e6,
        )
        for model, values in found.items()
    }


@dataclass
class ModelProgress:
    """Progress of a model. Times are by `time.monotonic`, which all processes share."""

    done: Executions = field(default_factory=Executions)  # Executions at the last check
    checked_at: float = -math.inf  # Time of the last check
    since: float = 0.0  # Time since when requests have waited and no batch was finished
    longest_s: float = 0.0  # Duration of the longest batch
    # Duration of the last row alone. Without one, the least mean of the rows of batches.
    row_s: float = 0.0

    def update(self, done: Executions, now: float, *, answered: bool) -> None:
        """Update the progress by the executions at a check."""
        if done.requests < self.done.requests:  # the server was started again
            self.done, self.longest_s, self.row_s = Executions(), 0.0, 0.0
        new = Executions(*(after - before for after, before in zip(done, self.done, strict=True)))
        if new.requests:
            batch_s = new.seconds / new.requests
            row_s = batch_s * new.batches / max(new.rows, 1.0)
            is_alone = answered and new.rows == 1  # the request of the check itself
            self.row_s = row_s if is_alone else min(self.row_s or row_s, row_s)
            self.longest_s = max(self.longest_s, batch_s)
        if answered or new.batches or now - self.checked_at > MAX_GAP_S:
            self.since = now
        self.done, self.checked_at = done, now


class ProgressLog:
    """Progress of the models of a server, from check to check.

    Args:
        file: File that keeps the progress for later processes; None to keep it here only.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._seen: dict[str, ModelProgress] = {}
        if file is not None:
            with suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
                for name, values in json.loads(file.read_bytes()).items():
                    done = Executions(*values.pop("done"))
                    self._seen[name] = ModelProgress(done, **values)

    def update(
        self, models: Mapping[str, Executions], work: float, *, answered: bool, busy: int = 1
    ) -> str | None:
        """Add the result of a check; return which model is stuck in a few words, if one is.

        Args:
            models: Executions of each model of a pipeline.
            work: Tokens of the largest batch, by those of the request of the check.
            answered: Whether the pipeline answered the request.
            busy: Number of pipelines that did not answer.
        """
        now = time.monotonic()
        seen = {name: self._seen.setdefault(name, ModelProgress()) for name in models}
        for name, executions in models.items():
            seen[name].update(executions, now, answered=answered)
        longest = [max(each.longest_s, work * each.row_s) for each in seen.values()]
        work_s = sum(longest) if all(longest) else FIRST_WORK_S
        for name, each in seen.items():
            if now - each.since > max((1 + busy) * work_s, MIN_STUCK_S):
                return (
                    f"{name} has computed nothing for {now - each.since:.0f} s; the longest unit "
                    f"of work takes {work_s:.1f} s"
                )
        return None

    def write(self) -> None:
        """Write the file, if there is one."""
        if self._file is not None:
            with suppress(OSError):  # the next check then starts without it
                handle, partial = tempfile.mkstemp(dir=self._file.parent, prefix=".triptych-")
                with os.fdopen(handle, "w") as file:
                    json.dump({name: asdict(each) for name, each in self._seen.items()}, file)
                Path(partial).replace(self._file)
