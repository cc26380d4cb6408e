"""Cost of one load: processor time and context switches by process, and batches of the core."""

from __future__ import annotations

import re
import resource
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from triptych.serving.bench import perf_analyzer
from triptych.serving.bench.perf_analyzer import Duration, RequestForm
from triptych.serving.bench.resources import instance_model, name_process, process_tree
from triptych.serving.bench.results import OfferedLoad
from triptych.serving.bench.statistics import STEPS, ServerCounts
from triptych.serving.orphan_cleanup import SERVER

CLIENT, TOTAL = "core-ms client", "core-ms"
_SWITCHES = re.compile(r"ctxt_switches:\s+(\d+)")


def measure_cost(
    url: str,
    pid: int,
    model: str,
    requests: Sequence[perf_analyzer.Request],
    *,
    clients: int,
    texts_per_request: int = 1,
    seconds: float,
    core: str | None = None,
) -> dict[str, float]:
    """Measure a closed loop after a short warm-up.

    Args:
        pid: Process of the server.
        core: Model that is the core; by default ``MODEL_core``.

    Returns:
        ``rate_per_s`` (texts), ``p50_ms`` and ``p99_ms``; processor time in core-milliseconds for
        each text in ``core-ms`` (sum) and ``core-ms PROCESS``; ``switches`` of threads for each
        text; means of the core's batches in ``batch_ms``, ``batch_rows`` and ``queue_ms``, 0
        without a core.
    """
    load = partial(
        perf_analyzer.run, url, model, requests, OfferedLoad("concurrency", clients),
        form=RequestForm(batch_size=texts_per_request),
    )  # fmt: skip
    load(Duration(request_count=2 * clients + 100))
    counts = ServerCounts(url, model)
    used_before, counted_before = _read_usage(pid, model), counts.read()
    result = load(Duration(window_s=seconds / 3))
    used, counted = _read_usage(pid, model), counts.read()
    counts.close()
    answered = {name: counted[name] - counted_before[name] for name in counted}
    rows = answered[model].statistics.rows
    used = {name: (used[name] - used_before.get(name, 0.0)) / rows for name in used}
    batches = answered.get(core or f"{model}_core")
    executions = max(batches.statistics.executions, 1) if batches else 1
    return {
        "rate_per_s": result.throughput_per_s * texts_per_request,
        "p50_ms": result.percentile_us(50) / 1e3,
        "p99_ms": result.percentile_us(99) / 1e3,
        TOTAL: sum(value for name, value in used.items() if name != "switches"),
        **used,
        "batch_ms": batches.busy_us / 1e3 / executions if batches else 0.0,
        "batch_rows": batches.statistics.rows / executions if batches else 0.0,
        "queue_ms": batches.statistics.queue_us / 1e3 if batches else 0.0,
    }


def server_core_ms(metrics: Mapping[str, float]) -> float:
    """Return the processor time of all processes except the client."""
    return metrics[TOTAL] - metrics[CLIENT]


def _read_usage(pid: int, model: str) -> dict[str, float]:
    """Return what the server, its steps and all load generators have used so far."""
    used: dict[str, float] = defaultdict(float)
    for process in process_tree(pid):
        name = instance_model(name_process(process, pid))
        step = "server" if name == SERVER else name.removeprefix(f"{model}_")
        times = process.cpu_times()
        known = step == "server" or step in STEPS
        used[f"core-ms {step if known else name}"] += 1e3 * (times.user + times.system)
        used["switches"] += _count_switches(process)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    used[CLIENT] = 1e3 * (ended.ru_utime + ended.ru_stime)
    used["switches"] += ended.ru_nvcsw + ended.ru_nivcsw
    return dict(used)


def _count_switches(process: psutil.Process) -> int:
    """Return the context switches of all threads; psutil returns those of the first thread."""
    total = 0
    for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
        try:
            total += sum(int(count) for count in _SWITCHES.findall(status.read_text()))
        except OSError:  # the thread has ended
            continue
    return total
