"""Measure `core.threads` and each option of `core.session` on MiniLM's core in ONNX Runtime.

Each setting has a process of its own with one session, whose parameters are those of the built
config. Batches have the rows of the traffic in their order, so that nearly each has another shape.

Usage: ``python build_scripts/benchmarks/session_options.py [--rounds 5] [--batches 1 16]``.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.harness import (
    Metrics,
    Turn,
    finish,
    make_parser,
    quiet,
    run_rounds,
    tabulate,
)  # fmt: skip
from benchmarks.model import CACHE, PIPELINE, build
from triptych.base.onnx_graph import MODEL_FILE
from triptych.core.inputs import read_inputs
from triptych.core.requests import Feed, core_feed
from triptych.repository.config import session_parameters
from triptych.serving.backends.onnxruntime.ort_sessions import open_session, run_options
from triptych.spec.fields import SessionOptions
from triptych.spec.spec import load_spec

_LARGEST = 32
"""Rows of the batch whose memory is measured, each of the maximum length."""


class Setting(NamedTuple):
    """Threads of an operator, and options of the session."""

    threads: int
    session: SessionOptions = SessionOptions()


SETTINGS = {
    "defaults, threads: 2": Setting(2),
    "threads: 1": Setting(1),
    "inter_threads: 2": Setting(2, SessionOptions(inter_threads=2)),
    "memory_arena: keep": Setting(2, SessionOptions(memory_arena="keep")),
    "memory_arena: none": Setting(2, SessionOptions(memory_arena="none")),
    "memory_pattern: true": Setting(2, SessionOptions(memory_pattern=True)),
    "keep and memory_pattern": Setting(2, SessionOptions(memory_arena="keep", memory_pattern=True)),
}


def main() -> int:
    """Start a process for each setting, measure memory, then time in rounds."""
    parser = make_parser(__doc__, "session_options", "Options of ONNX Runtime", rounds=5)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16], help="rows of a batch")
    parser.add_argument("--rows", type=int, default=64, help="rows of the traffic in a turn")
    options = parser.parse_args()
    inputs = read_inputs(load_spec(PIPELINE), quiet)
    plan = inputs.plan
    core = build(CACHE / "session") / plan.step("core") / "1" / MODEL_FILE
    rows = [row for request in inputs.requests if not request.edge for row in request.rows]
    longest = max(rows, key=lambda row: len(row.ids))  # type: ignore[union-attr]

    def make_feed(batch: Sequence[Any]) -> Feed:
        return core_feed(batch, plan.core_inputs, pad_token_id=plan.info.pad_token_id)

    feeds = {
        size: [make_feed(rows[start : start + size]) for start in range(0, options.rows, size)]
        for size in options.batches
    }
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(SessionProcess(core, setting))
            for name, setting in SETTINGS.items()
        }
        memory = {
            name: process.measure_memory(make_feed([longest] * _LARGEST), feeds[options.batches[0]])
            for name, process in processes.items()
        }
        groups = [
            [
                Turn(name, partial(process.time, feeds[size], size))
                for name, process in processes.items()
            ]
            for size in options.batches
        ]
        found = run_rounds(groups, options.rounds, max_minutes=options.max_minutes)
    times = {(one.system, one.load): one for one in found}
    columns = {
        f"{what}, batches of {size}": partial(_format, times, str(size), metric)
        for size in options.batches
        for what, metric in (("ms a row", "ms"), ("core-ms a row", "core-ms"))
    }
    table = tabulate(
        f"Medians of {options.rounds} rounds; memory in MiB above the loaded session",
        SETTINGS,
        {
            "setting": str,
            **columns,
            "peak": lambda name: f"{memory[name][0]:.0f}",
            "after it": lambda name: f"{memory[name][1]:.0f}",
        },
    )
    note = f"Peak: during a batch of {_LARGEST} rows of {len(longest.ids)} tokens."  # type: ignore[union-attr]
    finish(options, [table], {"series": found, "memory": memory}, [note])
    return 0


def _format(times: Any, load: str, metric: str, name: str) -> str:
    return str(times[name, load].text(metric, 2))


class SessionProcess:
    """A process with a session; it runs the batches that it is sent."""

    def __init__(self, core: Path, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, core, setting), daemon=True)

    def __enter__(self) -> SessionProcess:
        self._process.start()
        self._pipe.recv()
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.close()
        self._process.join()

    def measure_memory(self, largest: Feed, others: Sequence[Feed]) -> tuple[float, float]:
        """Return the peak of a large batch, and what is still in use after `others`, in MiB."""
        before = self._memory()[1]
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")  # begins a new peak
        self.time([largest], _LARGEST)
        peak = self._memory()[0]
        self.time(others, 1)
        return peak - before, self._memory()[1] - before

    def time(self, feeds: Sequence[Feed], size: int) -> list[tuple[str, Metrics]]:
        """Return the milliseconds and the processor time in ms for a row."""
        self._pipe.send(feeds)
        seconds, used_s, count = self._pipe.recv()
        return [(str(size), {"ms": 1e3 * seconds / count, "core-ms": 1e3 * used_s / count})]

    def _memory(self) -> tuple[float, float]:
        """Return the peak and the present resident memory in MiB."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        sizes = {line.partition(":")[0]: line.split()[1] for line in lines if "kB" in line}
        return int(sizes["VmHWM"]) / 1024, int(sizes["VmRSS"]) / 1024


def _serve(pipe: Connection, core: Path, setting: Setting) -> None:
    parameters = session_parameters(setting.session)
    parameters["intra_op_thread_count"] = str(setting.threads)
    config: Any = {"parameters": {key: {"string_value": text} for key, text in parameters.items()}}
    session, run = open_session(core, config), run_options(config)
    process = psutil.Process()
    pipe.send(None)
    try:
        while True:
            feeds = pipe.recv()
            began, before = time.perf_counter(), sum(process.cpu_times()[:2])
            count = sum(len(session.run(None, feed, run)[0]) for feed in feeds)
            used_s = sum(process.cpu_times()[:2]) - before
            pipe.send((time.perf_counter() - began, used_s, count))
    except EOFError:
        pass


if __name__ == "__main__":
    raise SystemExit(main())
