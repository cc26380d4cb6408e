"""What one load took of each process, and of the core: processor time, switches, batches."""

from __future__ import annotations

import re
import resource
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import tutorial
from triptych.serving.bench import perf_analyzer
from triptych.serving.bench.resources import SERVER, model_of, process_name, process_tree
from triptych.serving.bench.statistics import STEPS, ServerCounts

CLIENT = "client"
_SWITCHES = re.compile(r"ctxt_switches:\s+(\d+)")


@dataclass(frozen=True)
class Cost:
    """One load.

    Attributes:
        texts_per_s: answered.
        p50_ms: median latency at the client.
        p99_ms: 99th percentile of it.
        core_ms: of processor time a text, by process: ``server``, ``client``, the steps.
        switches: of all threads of a process, from one to another, a text.
        core_batch_ms: mean time that a batch took in the core; 0 without a core.
        core_batch_rows: mean rows of the core's batches; 0 without a core.
        core_wait_ms: mean time in the core's queue.
    """

    texts_per_s: float
    p50_ms: float
    p99_ms: float
    core_ms: dict[str, float]
    switches: dict[str, float]
    core_batch_ms: float
    core_batch_rows: float
    core_wait_ms: float


@dataclass(frozen=True)
class _Taken:
    seconds: dict[str, float]
    switches: dict[str, float]


def measure(
    url: str,
    pid: int,
    model: str,
    requests: Sequence[perf_analyzer.Request],
    *,
    clients: int,
    texts_a_request: int,
    seconds: float,
) -> Cost:
    """Closed loop with `clients` for `seconds`, after a short warm-up."""

    def load(**how: object) -> perf_analyzer.LoadResult:
        return perf_analyzer.run(
            url,
            model,
            requests,
            concurrency=clients,
            batch_size=texts_a_request,
            **how,  # type: ignore[arg-type]
        )

    load(request_count=2 * clients + 100)
    counts = ServerCounts(url, model)
    before, counted = _take(pid, model), counts.read()
    result = load(window_s=seconds / 3)
    after, counted_after = _take(pid, model), counts.read()
    counts.close()
    answered = {name: counted_after[name] - counted[name] for name in counted}
    rows = answered[model].statistics.rows
    core = answered.get(f"{model}_core", answered.get(tutorial.CORE))
    batches = max(core.statistics.executions, 1) if core is not None else 1
    return Cost(
        texts_per_s=result.throughput_per_s,
        p50_ms=result.p50_us / 1e3,
        p99_ms=result.p99_us / 1e3,
        core_ms=_rise(before.seconds, after.seconds, 1e3 / rows),
        switches=_rise(before.switches, after.switches, 1 / rows),
        core_batch_ms=core.busy_us / 1e3 / batches if core is not None else 0.0,
        core_batch_rows=core.statistics.rows / batches if core is not None else 0.0,
        core_wait_ms=core.statistics.queue_us / 1e3 if core is not None else 0.0,
    )


def _rise(before: dict[str, float], after: dict[str, float], factor: float) -> dict[str, float]:
    return {name: factor * (after[name] - before.get(name, 0.0)) for name in after}


def _take(pid: int, model: str) -> _Taken:
    """What the server, its steps and the load generators so far have taken."""
    seconds: dict[str, float] = defaultdict(float)
    switches: dict[str, float] = defaultdict(float)
    for process in process_tree(pid):
        name = _short(model_of(process_name(process, pid)), model)
        times = process.cpu_times()
        seconds[name] += times.user + times.system
        switches[name] += _switches(process)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds[CLIENT] = ended.ru_utime + ended.ru_stime
    switches[CLIENT] = ended.ru_nvcsw + ended.ru_nivcsw
    return _Taken(seconds, switches)


def _short(name: str, model: str) -> str:
    if name == SERVER:
        return "server"
    step = name.removeprefix(f"{model}_")
    return step if step in STEPS else name


def _switches(process: psutil.Process) -> int:
    """Of all its threads: psutil tells those of the first."""
    total = 0
    for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
        try:
            total += sum(int(count) for count in _SWITCHES.findall(status.read_text()))
        except OSError:  # the thread has ended
            continue
    return total
