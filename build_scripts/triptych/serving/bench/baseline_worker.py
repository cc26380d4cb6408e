"""Run a baseline: ``python -m triptych.serving.bench.baseline_worker WORK NAME``.

The worker exchanges lines of JSON with its parent. It sends an empty `WorkerReply` after the
warm-up, and a reply with measurements for each number of seconds that it reads. After an error it
replies with the reason and exits. It exits immediately when its standard input closes.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path

from triptych.serving.bench.baseline_calls import Call, Request, open_call, plan_calls, read_work

WARM_UP_CALLS = 12
MAX_REASON = 300


@dataclass(frozen=True)
class WorkerReply:
    failed: str = ""  # reason of a failure, which leaves the other fields unset
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory_mib: float = 0.0  # maximum resident memory of the process
    calls: list[tuple[float, int]] = field(default_factory=list)
    """Latency in microseconds and number of requests of each call."""


def main(work_file: Path, name: str) -> None:
    """Load the baseline, warm it up, then measure on each order of the parent."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries may print to stdout

    def send(reply: WorkerReply) -> None:
        print(json.dumps(asdict(reply)), file=replies, flush=True)

    orders = _orders()
    try:
        work = read_work(work_file)
        call, planned = open_call(name, work), plan_calls(name, work.requests)
        # Calls of all lengths make a compiler recompile for dynamic lengths before the measurement.
        ranked = sorted(planned, key=lambda requests: len(str(requests)))
        for requests in ranked[:: -(-len(ranked) // WARM_UP_CALLS)] + ranked[-1:]:
            call(requests)
        send(WorkerReply())
        turns = cycle(planned)
        while True:
            send(_measure(call, turns, orders.get()))
    except BaseException as error:  # the parent reports every kind of error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        send(WorkerReply(failed=reason[:MAX_REASON]))
        raise


def _measure(call: Call, turns: Iterator[Sequence[Request]], seconds: float) -> WorkerReply:
    """Return measurements of consecutive calls during `seconds`, at least one call."""
    calls: list[tuple[float, int]] = []
    cpu = time.process_time()
    start = end = time.perf_counter()
    while not calls or end - start < seconds:
        requests, began = next(turns), end
        call(requests)
        end = time.perf_counter()
        calls.append(((end - began) * 1e6, len(requests)))
    cpu_seconds = time.process_time() - cpu
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return WorkerReply("", end - start, cpu_seconds, memory_mib, calls)


def _orders() -> queue.SimpleQueue[float]:
    """Return the queue of the parent's orders: durations in seconds.

    A thread kills the process group when standard input closes.
    """
    orders: queue.SimpleQueue[float] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=listen, daemon=True).start()
    return orders


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
