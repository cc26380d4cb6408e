"""Progress of the models of a server, from its metrics: what computes is busy, not stuck.

A model is stuck if its pipeline has not answered and the model has finished no execution for
`STUCK_BATCHES` times the longest batch of the pipeline's core on this server. The longest batch is
measured. Before many rows have come, it is scaled from the first, single rows.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

STUCK_BATCHES = 2.0
MIN_STUCK_S = 4.0
FIRST_BATCH_S = 60.0
"""Longest batch until the pipeline has answered, and the maximum scaled from single rows."""
MAX_GAP_S = 60.0
"""Seconds between two checks after which the first one says nothing about the second."""

_METRIC = re.compile(
    rb"^nv_inference_(exec_count|request_success|compute_infer_duration_us)"
    rb'{model="([^"]+)",version="[^"]*"} (\S+)',
    re.MULTILINE,
)


class Executions(NamedTuple):
    """Batches and requests that a model has computed since it was loaded.

    Attributes:
        seconds: Sum over the requests of the durations of their batches.
    """

    batches: float = 0.0
    requests: float = 0.0
    seconds: float = 0.0


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
            values.get(b"compute_infer_duration_us", 0.0) / 1e6,
        )
        for model, values in found.items()
    }


@dataclass
class Progress:
    """Progress of a pipeline. Times are by `time.monotonic`, which all processes share.

    Attributes:
        checked_at: Time of the last check.
        longest_s: Duration of the longest batch of the core.
        requests: Requests that the core has computed.
        seconds: Sum of the durations of their batches.
        unchanged: Batches of each model, and the time since when they have not changed; empty
            after an answer.
    """

    checked_at: float = 0.0
    longest_s: float = 0.0
    requests: float = 0.0
    seconds: float = 0.0
    unchanged: dict[str, tuple[float, float]] = field(default_factory=dict)

    def measure(self, core: Executions, work: float) -> None:
        """Update the longest batch by the mean of those since the last check."""
        if core.requests < self.requests:  # the server was started again
            self.longest_s = self.requests = self.seconds = 0.0
        new = core.requests - self.requests
        if new:
            batch_s = (core.seconds - self.seconds) / new
            if not self.requests:
                batch_s = max(min(work * batch_s, FIRST_BATCH_S), batch_s)
            self.longest_s = max(self.longest_s, batch_s)
            self.requests, self.seconds = core.requests, core.seconds


class ProgressLog:
    """Progress of the pipelines of a server, from check to check.

    Args:
        file: File that keeps the progress for later processes; None to keep it here only.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._seen: dict[str, Progress] = {}
        if file is not None:
            with suppress(OSError, ValueError, TypeError, AttributeError):  # none, or damaged
                content = json.loads(file.read_bytes())
                self._seen = {name: Progress(**values) for name, values in content.items()}

    def update(
        self, pipeline: str, models: Mapping[str, Executions], work: float, *, answered: bool
    ) -> str | None:
        """Add the result of a check; return which model is stuck in a few words, if one is.

        Args:
            pipeline: Name of the pipeline.
            models: Executions of each of its models.
            work: Tokens of the largest batch, by those of the request of the check.
            answered: Whether the pipeline answered the request.
        """
        now, seen = time.monotonic(), self._seen.setdefault(pipeline, Progress())
        if answered or now - seen.checked_at > MAX_GAP_S:
            seen.unchanged = {}
        seen.checked_at = now
        for name, executions in models.items():
            if name.endswith("_core"):
                seen.measure(executions, work)
            batches, since = seen.unchanged.get(name, (-1.0, now))
            if not answered:
                is_same = batches == executions.batches
                seen.unchanged[name] = executions.batches, since if is_same else now
        limit_s = max(STUCK_BATCHES * (seen.longest_s or FIRST_BATCH_S), MIN_STUCK_S)
        for name, (_, since) in seen.unchanged.items():
            if now - since > limit_s:
                return (
                    f"{name} has computed nothing for {now - since:.0f} s; the longest batch of "
                    f"{pipeline} takes {seen.longest_s:.1f} s"
                )
        return None

    def write(self) -> None:
        """Write the file, if there is one."""
        if self._file is not None:
            with suppress(OSError):  # the next check then begins anew
                handle, partial = tempfile.mkstemp(dir=self._file.parent, prefix=".triptych-")
                with os.fdopen(handle, "w") as file:
                    json.dump({name: asdict(each) for name, each in self._seen.items()}, file)
                Path(partial).replace(self._file)
