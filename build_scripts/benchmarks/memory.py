"""Memory of a server and its Python steps over a long load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import linear_regression, median

import psutil

from benchmarks.results import Table
from triptych.serving.bench.resources import name_process, process_tree

SECONDS = "seconds"
_SHARED_MEMORY = "/dev/shm"
_MIB = 1024 * 1024


def sample_memory(
    server: int, is_over: Callable[[], bool], wait: Callable[[], object]
) -> list[dict[str, float]]:
    """Return samples of the memory of `server`, in bytes, until `is_over`; `wait` between two.

    Each sample has its `SECONDS`, the resident and the private memory of each process, and the
    shared memory that is mapped.
    """
    samples: list[dict[str, float]] = []
    began = time.monotonic()
    while not is_over():
        samples.append({SECONDS: time.monotonic() - began, **_read_memory(server)})
        wait()
    return samples


def _read_memory(server: int) -> dict[str, float]:
    memory: dict[str, float] = {}
    regions: set[str] = set()
    for process in process_tree(server):
        try:
            name = name_process(process, server)
            info = process.memory_info()
            mapped = [region.path for region in process.memory_maps(grouped=False)]
        except psutil.Error:  # the process has ended since the listing
            continue
        memory[f"{name} resident"] = float(info.rss)
        memory[f"{name} private"] = float(info.rss - info.shared)
        regions |= {path for path in mapped if path.startswith(f"{_SHARED_MEMORY}/")}
    paths = [Path(region) for region in regions]
    memory[_SHARED_MEMORY] = sum(path.stat().st_blocks * 512.0 for path in paths if path.exists())
    return memory


def make_growth_table(samples: Sequence[dict[str, float]], requests: int) -> Table:
    """Return the growth of each series of `sample_memory`; `requests` is their number."""
    duration_s = samples[-1][SECONDS] or 1.0
    rows = []
    for name in samples[-1].keys() - {SECONDS}:
        points = [(sample[SECONDS], sample[name]) for sample in samples if name in sample]
        values = [value for _, value in points]
        quarter = max(1, len(values) // 4)
        slope = linear_regression(*zip(*points, strict=True)).slope if len(points) > 2 else 0.0
        mib = [median(values[:quarter]), median(values[-quarter:]), max(values)]
        growth = slope * duration_s / requests * 1000 / 1024
        rows.append((name, *(f"{value / _MIB:.1f}" for value in mib), f"{growth:+.2f}"))
    head = ("memory", "first quarter, MiB", "last quarter, MiB", "highest, MiB", "KiB per 1,000")
    title = f"Memory over {requests} requests; medians of quarters, slope"
    return Table(title, head, sorted(rows))
