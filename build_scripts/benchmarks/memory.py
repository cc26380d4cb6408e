"""Memory, open files and threads of a server and its Python steps over a long load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import linear_regression, median

import psutil

from benchmarks.results import Table
from triptych.serving.bench.resources import name_process, process_tree

SECONDS = "seconds"
COUNTS = ("files", "threads")
"""Last words of the names of series that are counts, not bytes."""
_SHARED_MEMORY = "/dev/shm"
_MIB = 1024 * 1024


def sample_memory(
    server: int,
    is_over: Callable[[], bool],
    wait: Callable[[], object],
    gateway: int | None = None,
) -> list[dict[str, float]]:
    """Return samples of the memory of `server`, in bytes, until `is_over`; `wait` between two.

    Each sample has its `SECONDS`, the resident and the private memory, the open files and the
    threads of each process, and the shared memory that is mapped.

    Args:
        server: Process id of tritonserver.
        is_over: Whether the load has ended.
        wait: Function that waits until the next sample.
        gateway: Process id of a gateway, if there is one.
    """
    samples: list[dict[str, float]] = []
    began = time.monotonic()
    while not is_over():
        samples.append({SECONDS: time.monotonic() - began, **_read_memory(server, gateway)})
        wait()
    return samples


def _read_memory(server: int, gateway: int | None) -> dict[str, float]:
    memory: dict[str, float] = {}
    regions: set[str] = set()
    beside = [] if gateway is None else process_tree(gateway)
    for process in [*process_tree(server), *beside]:
        try:
            name = "gateway" if process in beside else name_process(process, server)
            info = process.memory_info()
            counts = float(process.num_fds()), float(process.num_threads())
            mapped = [region.path for region in process.memory_maps(grouped=False)]
        except psutil.Error:  # the process has ended since the listing
            continue
        memory[f"{name} resident"] = float(info.rss)
        memory[f"{name} private"] = float(info.rss - info.shared)
        memory[f"{name} files"], memory[f"{name} threads"] = counts
        regions |= {path for path in mapped if path.startswith(f"{_SHARED_MEMORY}/")}
    paths = [Path(region) for region in regions]
    memory[_SHARED_MEMORY] = sum(path.stat().st_blocks * 512.0 for path in paths if path.exists())
    return memory


def make_growth_tables(samples: Sequence[dict[str, float]], requests: int) -> list[Table]:
    """Return the growth of each series of `sample_memory`: of memory, and of files and threads.

    Args:
        samples: Samples in order of time.
        requests: Number of requests of the load.
    """
    duration_s = samples[-1][SECONDS] or 1.0
    bytes_rows, count_rows = [], []
    for name in sorted(samples[-1].keys() - {SECONDS}):
        points = [(sample[SECONDS], sample[name]) for sample in samples if name in sample]
        values = [value for _, value in points]
        quarter = max(1, len(values) // 4)
        slope = linear_regression(*zip(*points, strict=True)).slope if len(points) > 2 else 0.0
        parts = [median(values[:quarter]), median(values[-quarter:]), max(values)]
        if name.endswith(COUNTS):
            count_rows.append((name, *(f"{value:.0f}" for value in parts)))
        else:
            growth = slope * duration_s / requests * 1000 / 1024
            mib = (f"{value / _MIB:.1f}" for value in parts)
            bytes_rows.append((name, *mib, f"{growth:+.2f}"))
    of = f"over {requests} requests; medians of quarters"
    head = ("memory", "first quarter, MiB", "last quarter, MiB", "highest, MiB", "KiB per 1,000")
    counted = ("number", "first quarter", "last quarter", "highest")
    return [
        Table(f"Memory {of}, slope", head, bytes_rows),
        Table(f"Open files and threads {of}", counted, count_rows),
    ]
