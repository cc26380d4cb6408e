"""Monitor processor, memory and GPUs during a load, and read the server's metrics page."""

from __future__ import annotations

import os
import re
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from triptych.base.errors import UserError
from triptych.serving.bench.results import GpuUse, ProcessUse, Resources
from triptych.serving.orphan_cleanup import SERVER

MetricSample = tuple[str, dict[str, str], float]
"""Name of the metric, its labels, its value."""

_TIMEOUT_S = 5.0


def read_metrics(text: str) -> list[MetricSample]:
    """Return the samples of a metrics page in order, without invalid lines.

    Args:
        text: Page in Prometheus text format.
    """
    # The verb `build` imports this module, and reads no metrics.
    from prometheus_client.parser import text_string_to_metric_families

    samples: list[MetricSample] = []
    # Line by line, because the parser stops at the first invalid line.
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            try:
                (family,) = text_string_to_metric_families(line)
            except ValueError:
                continue
            samples += [(one.name, one.labels, float(one.value)) for one in family.samples]
    return samples


def fetch_metrics(metrics_url: str) -> list[MetricSample]:
    """Return the samples of the metrics page at a URL, such as `Server.metrics_url`.

    Raises:
        UserError: The page does not answer.
    """
    # No proxy is used, as for gRPC.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(metrics_url, timeout=_TIMEOUT_S) as response:
            return read_metrics(response.read().decode("utf-8", errors="replace"))
    except (OSError, ValueError) as error:
        raise UserError(
            "metrics_url",
            "is not a metrics page that answers",
            given=f"{metrics_url}: {error}",
            remedy="Write for example http://127.0.0.1:8002/metrics",
        ) from error


CLIENT = "perf_analyzer"
EVERY_S = 0.3
MEMORY_EVERY = 3
"""Memory is read with every third snapshot, because the kernel sums it page by page."""

_MIB = 1024 * 1024


@dataclass(frozen=True)
class Snapshot:
    """State of the machine at one time; counters run since the start of processes or machine."""

    time_ns: int  # Unix time
    cpu_s: dict[str, float]  # processor time by process
    machine: tuple[float, float]  # busy and elapsed seconds of this process's cores
    wait_s: dict[str, float] = field(default_factory=dict)
    """Seconds that threads waited for a core, by process."""
    memory_mib: dict[str, float] = field(default_factory=dict)  # empty in most snapshots
    gpus: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Utilization (0 to 1) and memory (MiB) by GPU."""


class ResourceMonitor:
    """Thread that monitors a server while the context is open.

    Args:
        pid: Process id of tritonserver; None on another machine.
        metrics_url: URL of the server's metrics page; None omits GPUs.
    """

    def __init__(self, pid: int | None, metrics_url: str | None) -> None:
        self._pid = pid
        self._metrics_url = metrics_url
        self._snapshots: list[Snapshot] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ResourceMonitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def between(self, start_ns: int, end_ns: int) -> Resources | None:
        """Return the use from `start_ns` to `end_ns`; None with fewer than two snapshots.

        The times are Unix times of this machine's clock, in nanoseconds.
        """
        return summarize(self._snapshots, start_ns, end_ns, is_local=self._pid is not None)

    def _run(self) -> None:
        number = 0
        while True:
            self._snapshots.append(self._take_snapshot(number % MEMORY_EVERY == 0))
            number += 1
            if self._over.wait(EVERY_S):
                self._snapshots.append(self._take_snapshot(True))
                return

    def _take_snapshot(self, with_memory: bool) -> Snapshot:
        cpu_s: dict[str, float] = defaultdict(float)
        wait_s: dict[str, float] = defaultdict(float)
        memory: dict[str, float] = defaultdict(float)
        for name, process in self._processes():
            try:
                times = process.cpu_times()
                cpu_s[name] += times.user + times.system
                wait_s[name] += _wait_s(process.pid)
                if with_memory and name != CLIENT:
                    memory[name] += process.memory_full_info().pss / _MIB
            except psutil.Error:  # ended after it was listed
                continue
        return Snapshot(time.time_ns(), cpu_s, _machine_s(), wait_s, memory, self._gpus())

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        if self._pid is not None:
            for process in process_tree(self._pid):
                try:
                    yield instance_model(name_process(process, self._pid)), process
                except psutil.Error:  # ended since it was listed
                    continue
        for process in process_tree(os.getpid()):
            try:
                if process.name() == CLIENT:
                    yield CLIENT, process
            except psutil.Error:
                continue

    def _gpus(self) -> dict[str, tuple[float, float]]:
        if self._metrics_url is None:
            return {}
        try:
            samples = fetch_metrics(self._metrics_url)
        except UserError:
            return {}
        used = {
            (name, labels.get("gpu_uuid", "")): value
            for name, labels, value in samples
            if name in ("nv_gpu_utilization", "nv_gpu_memory_used_bytes")
        }
        if not used:
            self._metrics_url = None  # without a GPU now, there is none later
        return {
            gpu: (
                used.get(("nv_gpu_utilization", gpu), 0.0),
                used.get(("nv_gpu_memory_used_bytes", gpu), 0.0) / _MIB,
            )
            for _, gpu in used
        }


def summarize(
    snapshots: Sequence[Snapshot], start_ns: int, end_ns: int, *, is_local: bool
) -> Resources | None:
    """Return means and peaks over a time span; counters are interpolated at its ends.

    Args:
        snapshots: Snapshots in order of time.
        start_ns: Start of the span as Unix time.
        end_ns: End of the span as Unix time.
        is_local: Whether the server runs on the monitored machine.
    """
    if len(snapshots) < 2 or end_ns <= start_ns:
        return None
    span = (start_ns, end_ns)
    seconds = (end_ns - start_ns) / 1e9
    names = dict.fromkeys(name for one in snapshots for name in one.cpu_s)
    cores, waits = (
        {
            name: _rise([one.get(name) for one in counters], snapshots, span) / seconds
            for name in names
        }
        for counters in ([one.cpu_s for one in snapshots], [one.wait_s for one in snapshots])
    )
    busy, passed = (_rise([one.machine[at] for one in snapshots], snapshots, span) for at in (0, 1))
    within = [one for one in snapshots if start_ns <= one.time_ns <= end_ns] or list(snapshots)
    gpus = dict.fromkeys(name for one in within for name in one.gpus)
    return Resources(
        cores=len(os.sched_getaffinity(0)),
        machine_cpu=min(1.0, busy / passed) if is_local and passed > 0 else None,
        client_cpu_cores=cores.get(CLIENT, 0.0),
        processes=tuple(
            ProcessUse(
                name=name,
                cpu_cores=cores[name],
                memory_mib=max(one.memory_mib.get(name, 0.0) for one in snapshots),
                wait_cores=max(0.0, waits[name]),  # a thread that ended takes its seconds along
            )
            for name in names
            if name != CLIENT
        ),
        gpus=tuple(_gpu_use(name, within) for name in gpus),
    )


def _rise(
    values: Sequence[float | None], snapshots: Sequence[Snapshot], span: tuple[int, int]
) -> float:
    """Return the increase of a counter within `span`, interpolated linearly.

    A counter that appears after the first snapshot starts at 0; a missing counter stays constant.
    """
    times = [one.time_ns for one in snapshots]
    known = [(time, value) for time, value in zip(times, values, strict=True) if value is not None]
    if not known:
        return 0.0
    if values[0] is None:
        born = next(index for index, value in enumerate(values) if value is not None)
        known.insert(0, (times[born - 1], 0.0))
    origin = times[0]  # a float does not hold nanoseconds since the epoch
    low, high = np.interp(
        [moment - origin for moment in span],
        [time - origin for time, _ in known],
        [value for _, value in known],
    )
    return float(high - low)


def _gpu_use(name: str, snapshots: Sequence[Snapshot]) -> GpuUse:
    seen = [one.gpus[name] for one in snapshots if name in one.gpus]
    return GpuUse(
        name=name,
        utilization=sum(utilization for utilization, _ in seen) / len(seen),
        memory_mib=max(memory for _, memory in seen),
    )


def process_tree(root: int) -> list[psutil.Process]:
    """Return the process `root` and its descendants; empty if it has ended."""
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def name_process(process: psutil.Process, server: int) -> str:
    """Return ``tritonserver`` for the process `server`, else its model instance or program name.

    Child processes of an instance, such as an engine's workers, have the instance's name.

    Raises:
        psutil.Error: The process has ended or cannot be read.
    """
    if process.pid == server:
        return SERVER
    for one in (process, *process.parents()):
        if one.pid == server:
            break
        instances = [word for word in one.cmdline() if re.fullmatch(r"[\w.-]+_\d+_\d+", word)]
        if instances:
            return instances[-1]
    return Path((process.cmdline() or [process.name()])[0]).name


def instance_model(instance: str) -> str:
    """Return the model of an instance: ``minilm_core`` for ``minilm_core_0_1``."""
    return re.sub(r"_\d+_\d+$", "", instance)


def _wait_s(pid: int) -> float:
    """Return the seconds that threads waited for a core (Linux: sched-stats.rst)."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:  # it has ended
        return 0.0
    waited_ns = 0
    for thread in threads:
        try:
            counts = (thread / "schedstat").read_text(encoding="ascii")
            waited_ns += int(counts.split()[1])
        except (OSError, IndexError):  # a thread that ended, or a kernel that does not count
            continue
    return waited_ns / 1e9


def _machine_s() -> tuple[float, float]:
    """Return busy and elapsed seconds of this process's cores."""
    own = os.sched_getaffinity(0)
    busy = passed = 0.0
    for core, times in enumerate(psutil.cpu_times(percpu=True)):
        if core in own:
            # Guests are counted within user time already.
            spent = sum(times) - times.guest - times.guest_nice
            passed += spent
            busy += spent - times.idle - times.iowait
    return busy, passed
