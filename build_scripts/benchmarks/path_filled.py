"""How full the core's batches were of what its queue held, from a trace that Triton writes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.path_table import Load


def flags(file: Path) -> list[str]:
    """Of a server that writes the times of every request to `file` when it ends."""
    settings = ("mode=triton", f"triton,file={file}", "rate=1", "level=TIMESTAMPS")
    return [f"--trace-config={setting}" for setting in settings]


def filled(
    file: Path, core: str, windows_ns: Sequence[tuple[int, int]], *, most_requests: int
) -> list[float]:
    """Requests of a batch by those that waited when it began, or by what a batch holds, if less.

    Args:
        file: of a server that has ended.
        core: its model, with one instance, which says one time of all requests of a batch.
        windows_ns: begin and end of each load, on the monotonic clock.
        most_requests: that a batch may have.

    Returns:
        The mean over all batches of each window.
    """
    times: dict[int, dict[str, int]] = defaultdict(dict)
    cores = set()
    for line in json.loads(file.read_text(encoding="utf-8")):
        if line.get("model_name") == core:
            cores.add(line["id"])
        for stamp in line.get("timestamps", ()):
            times[line["id"]][stamp["name"]] = stamp["ns"]
    batches: dict[int, list[int]] = defaultdict(list)  # when each began: arrivals of its requests
    for one in cores:
        batches[times[one]["COMPUTE_START"]].append(times[one]["QUEUE_START"])
    return [
        mean(_shares({began: batches[began] for began in batches if a <= began < b}, most_requests))
        for a, b in windows_ns
    ]


def table(shares: Mapping[tuple[Load, str], float]) -> str:
    """A line for each load and contender."""
    return "\n".join(
        f"{name}, {load.core}, {load.texts} a request, {load.clients} clients: batches had "
        f"{share:.2f} of what waited for the core, within their limit"
        for (load, name), share in shares.items()
    )


def _shares(batches: dict[int, list[int]], most_requests: int) -> list[float]:
    """Of each batch, in the order they began."""
    arrivals = sorted(arrival for batch in batches.values() for arrival in batch)
    shares, come, gone = [], 0, 0
    for began, batch in sorted(batches.items()):
        while come < len(arrivals) and arrivals[come] <= began:
            come += 1
        shares.append(len(batch) / min(most_requests, max(come - gone, len(batch))))
        gone += len(batch)
    return shares
