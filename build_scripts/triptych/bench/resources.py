"""What a load takes of the machine: processor and memory of each process, GPUs; read from /proc."""

from __future__ import annotations

import os
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from triptych.bench.metrics_page import fetch_samples
from triptych.bench.points import GpuUse, ProcessUse, Resources
from triptych.errors import UserError

SERVER = "tritonserver"
CLIENT = "perf_analyzer"
EVERY_S = 0.3
MEMORY_EVERY = 3
"""Memory is summed up by the kernel page by page: it is read with every third sample only."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MIB = 1024 * 1024


@dataclass(frozen=True)
class Sample:
    """One look.

    Attributes:
        time_ns: when, since the epoch.
        cpu_s: process to the seconds of processor time that it has taken so far.
        machine: seconds that the cores of this process were busy so far, and those that passed.
        wait_s: process to the seconds that its threads stood ready and had no core, so far.
        memory_mib: process to the memory that it holds; empty in most samples.
        gpus: GPU to its utilization (0 to 1) and memory in MiB.
    """

    time_ns: int
    cpu_s: dict[str, float]
    machine: tuple[float, float]
    wait_s: dict[str, float] = field(default_factory=dict)
    memory_mib: dict[str, float] = field(default_factory=dict)
    gpus: dict[str, tuple[float, float]] = field(default_factory=dict)


class Watch:
    """Looks at a server from a thread while the context lasts.

    Args:
        pid: of tritonserver; None where it runs on another machine.
        metrics_url: of the server's metrics page; None leaves out GPUs.
    """

    def __init__(self, pid: int | None, metrics_url: str | None) -> None:
        self._pid = pid
        self._metrics_url = metrics_url
        self._samples: list[Sample] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def between(self, start_ns: int, end_ns: int) -> Resources | None:
        """What was taken from `start_ns` to `end_ns` (since the epoch); None without two samples.

        The clock of those times must be this machine's.
        """
        return summarise(self._samples, start_ns, end_ns, is_local=self._pid is not None)

    def _run(self) -> None:
        number = 0
        while True:
            self._samples.append(self._look(number % MEMORY_EVERY == 0))
            number += 1
            if self._over.wait(EVERY_S):
                self._samples.append(self._look(True))
                return

    def _look(self, with_memory: bool) -> Sample:
        cpu_s: dict[str, float] = {}
        wait_s: dict[str, float] = {}
        memory: dict[str, float] = {}
        for name, process in self._processes():
            try:
                cpu_s[name] = cpu_s.get(name, 0.0) + _cpu_s(process)
                wait_s[name] = wait_s.get(name, 0.0) + _wait_s(process)
                if with_memory and name != CLIENT:
                    memory[name] = memory.get(name, 0.0) + _memory_mib(process)
            except OSError:  # ended between the listing and the reading
                continue
        return Sample(time.time_ns(), cpu_s, _machine_s(), wait_s, memory, self._gpus())

    def _processes(self) -> Iterator[tuple[str, int]]:
        children = read_children()
        if self._pid is not None:
            for process in process_tree(self._pid, children):
                try:
                    yield model_of(process_name(process, self._pid)), process
                except OSError:  # ended since it was listed
                    continue
        for process in process_tree(os.getpid(), children):
            if _command(process) == CLIENT:
                yield CLIENT, process

    def _gpus(self) -> dict[str, tuple[float, float]]:
        if self._metrics_url is None:
            return {}
        try:
            samples = fetch_samples(self._metrics_url)
        except UserError:
            return {}
        used = {
            (name, labels.get("gpu_uuid", "")): value
            for name, labels, value in samples
            if name in ("nv_gpu_utilization", "nv_gpu_memory_used_bytes")
        }
        if not used:
            self._metrics_url = None  # no GPU now, none later
        names = dict.fromkeys(gpu for _, gpu in used)
        return {
            gpu: (
                used.get(("nv_gpu_utilization", gpu), 0.0),
                used.get(("nv_gpu_memory_used_bytes", gpu), 0.0) / _MIB,
            )
            for gpu in names
        }


def summarise(
    samples: Sequence[Sample], start_ns: int, end_ns: int, *, is_local: bool
) -> Resources | None:
    """Means and peaks over a span of time; counters are interpolated at its ends.

    Args:
        samples: in order of time.
        start_ns: since the epoch.
        end_ns: since the epoch.
        is_local: whether the server runs on the machine that was looked at.
    """
    if len(samples) < 2 or end_ns <= start_ns:
        return None
    span = (start_ns, end_ns)
    seconds = (end_ns - start_ns) / 1e9
    names = dict.fromkeys(name for one in samples for name in one.cpu_s)
    cores, waits = (
        {
            name: _rise([one.get(name) for one in counters], samples, span) / seconds
            for name in names
        }
        for counters in ([one.cpu_s for one in samples], [one.wait_s for one in samples])
    )
    busy, passed = (_rise([one.machine[at] for one in samples], samples, span) for at in (0, 1))
    within = [one for one in samples if start_ns <= one.time_ns <= end_ns] or list(samples)
    gpus = dict.fromkeys(name for one in within for name in one.gpus)
    return Resources(
        cores=len(os.sched_getaffinity(0)),
        machine_cpu=min(1.0, busy / passed) if is_local and passed > 0 else None,
        client_cpu_cores=cores.get(CLIENT, 0.0),
        processes=tuple(
            ProcessUse(
                name=name,
                cpu_cores=cores[name],
                memory_mib=max(one.memory_mib.get(name, 0.0) for one in samples),
                wait_cores=max(0.0, waits[name]),  # a thread that ended takes its seconds along
            )
            for name in names
            if name != CLIENT
        ),
        gpus=tuple(_gpu_use(name, within) for name in gpus),
    )


def _rise(
    values: Sequence[float | None], samples: Sequence[Sample], span: tuple[int, int]
) -> float:
    """How far a counter went within `span`, read off straight lines between the samples.

    A counter that appears later than the first sample began at 0; one that is gone stays.
    """
    known = [
        (sample.time_ns, value)
        for sample, value in zip(samples, values, strict=True)
        if value is not None
    ]
    if not known:
        return 0.0
    if values[0] is None:
        born = next(index for index, value in enumerate(values) if value is not None)
        known.insert(0, (samples[born - 1].time_ns, 0.0))
    times = [time_ns for time_ns, _ in known]

    def at(moment: int) -> float:
        right = bisect_left(times, moment)
        if right == 0:
            return known[0][1]
        if right == len(known):
            return known[-1][1]
        (before, low), (after, high) = known[right - 1], known[right]
        return low + (high - low) * (moment - before) / (after - before)

    return at(span[1]) - at(span[0])


def _gpu_use(name: str, samples: Sequence[Sample]) -> GpuUse:
    seen = [one.gpus[name] for one in samples if name in one.gpus]
    return GpuUse(
        name=name,
        utilization=sum(utilization for utilization, _ in seen) / len(seen),
        memory_mib=max(memory for _, memory in seen),
    )


def read_children() -> dict[int, list[int]]:
    """Every process of the machine that has children, and these."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    return children


def process_tree(root: int, children: dict[int, list[int]] | None = None) -> list[int]:
    """`root` and everything that descends from it."""
    if children is None:
        children = read_children()
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


def process_name(process: int, server: int) -> str:
    """``tritonserver``, or the model instance that a stub runs; else the program's name.

    Raises:
        OSError: there is no such process any more.
    """
    if process == server:
        return SERVER
    arguments = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    instances = [one for one in arguments if re.fullmatch(r"[\w.-]+_\d+_\d+", one)]
    return instances[-1] if instances else Path(arguments[0]).name


def model_of(instance: str) -> str:
    """The model of an instance: ``minilm_core`` of ``minilm_core_0_1``."""
    return re.sub(r"_\d+_\d+$", "", instance)


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _cpu_s(process: int) -> float:
    stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS_PER_S


def _wait_s(process: int) -> float:
    """Seconds its threads were ready to run and did not (Linux: sched-stats.rst)."""
    waited_ns = 0
    for file in Path(f"/proc/{process}/task").glob("*/schedstat"):
        try:
            waited_ns += int(file.read_text(encoding="ascii").split()[1])
        except (OSError, IndexError):  # a thread that ended, or a kernel that does not count
            continue
    return waited_ns / 1e9


def _memory_mib(process: int) -> float:
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8")
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def _machine_s() -> tuple[float, float]:
    """Seconds that the cores of this process were busy, and seconds that passed on them."""
    own = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    busy = passed = 0.0
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        name, *ticks = line.split()
        if name in own:
            # Guests are counted within user time already.
            spent = [int(one) / _TICKS_PER_S for one in ticks[:8]]
            passed += sum(spent)
            busy += sum(spent) - spent[3] - spent[4]  # idle, and idle for a disk
    return busy, passed
