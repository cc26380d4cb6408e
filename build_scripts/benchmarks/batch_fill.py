"""Fill ratio of the core's batches compared with its queue, from a trace that Triton writes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean


def trace_flags(file: Path) -> list[str]:
    """Return the flags of a server that writes the times of every request to `file` at its end."""
    settings = ("mode=triton", f"triton,file={file}", "rate=1", "level=TIMESTAMPS")
    return [f"--trace-config={setting}" for setting in settings]


def compute_fill(
    file: Path, core: str, windows_ns: Sequence[tuple[int, int]], max_requests: int
) -> list[float]:
    """Return the mean ratio of a batch to the requests that waited when it began, by window.

    Args:
        file: Trace of a server that has ended.
        core: Model with one instance, which reports one time for all requests of a batch.
        windows_ns: Begin and end of each load, on the monotonic clock.
        max_requests: Maximum number of requests in a batch, which bounds the divisor.
    """
    times: dict[int, dict[str, int]] = defaultdict(dict)
    cores = set()
    for line in json.loads(file.read_text(encoding="utf-8")):
        if line.get("model_name") == core:
            cores.add(line["id"])
        for stamp in line.get("timestamps", ()):
            times[line["id"]][stamp["name"]] = stamp["ns"]
    batches: dict[int, list[int]] = defaultdict(list)  # arrivals of the requests, by begin
    for request in cores:
        batches[times[request]["COMPUTE_START"]].append(times[request]["QUEUE_START"])
    return [
        mean(_ratios({at: batches[at] for at in batches if a <= at < b}, max_requests))
        for a, b in windows_ns
    ]


def _ratios(batches: dict[int, list[int]], max_requests: int) -> list[float]:
    """Return the ratio of each batch in the order of their begin."""
    arrivals = sorted(arrival for batch in batches.values() for arrival in batch)
    ratios, arrived, started = [], 0, 0
    for began, batch in sorted(batches.items()):
        while arrived < len(arrivals) and arrivals[arrived] <= began:
            arrived += 1
        waiting = max(arrived - started, len(batch))
        ratios.append(len(batch) / min(max_requests, waiting))
        started += len(batch)
    return ratios
