"""One baseline in a process of its own: ``python -m triptych.bench.baseline_worker WORK NAME``.

JSON lines: it says ``{"ready": true}`` once it is warm. To ``{"measure": SECONDS}`` it answers with
``seconds``, ``cpu_seconds``, ``memory_mib`` (the most it ever held) and ``calls``: of each the
latency in microseconds and the requests. Instead of an answer there may be ``{"failed": REASON}``.
It ends with its standard input, at once.
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
from itertools import cycle
from pathlib import Path
from typing import Any, TextIO

from triptych.bench.baseline_work import read_work
from triptych.bench.calls import open_call, plan_calls

WARM_UP_CALLS = 12
LONGEST_REASON = 300


def main(work_file: Path, name: str) -> None:
    """Load, warm up, then measure whenever asked to."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    orders = _orders()
    try:
        work = read_work(work_file)
        call, planned = open_call(name, work), plan_calls(name, work.requests)
        # Short, long and those between: a compiler that fixes a length finds out now.
        ranked = sorted(planned, key=lambda requests: len(str(requests)))
        for requests in ranked[:: -(-len(ranked) // WARM_UP_CALLS)] + ranked[-1:]:
            call(requests)
        _say(answers, {"ready": True})
        turns = cycle(planned)
        while True:
            _say(answers, _measure(call, turns, orders.get()["measure"]))
    except BaseException as error:  # whatever it is, the parent tells it
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        _say(answers, {"failed": reason[:LONGEST_REASON]})
        raise


def _measure(call: Any, turns: Any, seconds: float) -> dict[str, object]:
    """Calls, one after the other, until `seconds` are over; at least one."""
    calls: list[tuple[float, int]] = []
    cpu = time.process_time()
    start = end = time.perf_counter()
    while not calls or end - start < seconds:
        requests, began = next(turns), end
        call(requests)
        end = time.perf_counter()
        calls.append(((end - began) * 1e6, len(requests)))
    return {
        "seconds": end - start,
        "cpu_seconds": time.process_time() - cpu,
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "calls": calls,
    }


def _orders() -> queue.SimpleQueue[dict[str, Any]]:
    """What the parent asks for. When it is gone, so are this process and all that it started."""
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=listen, daemon=True).start()
    return orders


def _say(answers: TextIO, answer: dict[str, object]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
