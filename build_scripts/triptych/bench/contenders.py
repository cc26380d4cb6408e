"""The baselines of a pipeline: started once, measured in turns with it, ended with the context."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from triptych.bench.baseline_process import WorkerFailed, WorkerProcess
from triptych.bench.baseline_work import work_of, write_work
from triptych.bench.calls import ROWS_A_CALL
from triptych.bench.perf_output import histogram_of
from triptych.bench.points import Load, Measurement, ProcessUse, Resources
from triptych.errors import Progress, UserError
from triptych.requests.inputs import PipelineInputs

ALL = tuple(ROWS_A_CALL)
START_LIMIT_S = 300.0
COMPILE_LIMIT_S = 240.0
ANSWER_LIMIT_S = 120.0
"""How long after the end of a measurement its last call may take."""


class Baselines:
    """In-process contenders, each in a worker of its own that idles between measurements.

    All run on the CPU, whatever the pipeline's core runs on.

    Args:
        prepared: the pipeline; its `traffic` is what is sent.
        core_file: the pipeline's ``model.onnx``, in fp32 and in the plan's layout.
        names: which of `ALL`.
        progress: told what became of each.
        compile_limit_s: how long ``torch.compile`` may take to load, compile and warm up.

    Attributes:
        not_runnable: name to why it does not run, or does not any more.
        ready_s: name to how long it took to load, compile and warm up.

    Raises:
        UserError: a name is none of `ALL`.
    """

    def __init__(
        self,
        prepared: PipelineInputs,
        core_file: Path,
        *,
        names: Sequence[str] = ALL,
        progress: Progress,
        compile_limit_s: float = COMPILE_LIMIT_S,
    ) -> None:
        for name in names:
            if name not in ALL:
                raise UserError("baseline", f"must be one of {', '.join(ALL)}", given=name)
        self._asked = tuple(dict.fromkeys(names))
        self._prepared = prepared
        self._core_file = core_file
        self._progress = progress
        self._compile_limit_s = compile_limit_s
        self._workers: dict[str, WorkerProcess] = {}
        self.not_runnable: dict[str, str] = {}
        self.ready_s: dict[str, float] = {}

    def __enter__(self) -> Baselines:
        self._scratch = tempfile.TemporaryDirectory(prefix="triptych-baselines-")
        try:
            work_file = Path(self._scratch.name, "work.pickle")
            write_work(work_of(self._prepared, self._core_file), work_file)
            # One after the other: none takes the cores from another that compiles.
            for name in self._asked:
                self._start(name, work_file)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @property
    def names(self) -> tuple[str, ...]:
        """Those that run."""
        return tuple(self._workers)

    @property
    def pids(self) -> Mapping[str, int]:
        """Of their workers."""
        return {name: worker.pid for name, worker in self._workers.items()}

    def load_of(self, name: str) -> Load:
        """What `measure` offers."""
        return Load("in_process", ROWS_A_CALL[name])

    def measure(self, name: str, seconds: float) -> Measurement:
        """Call it for `seconds`, going on in the traffic where it stopped before.

        A latency is that of a call, and counts once for each of its requests.

        Raises:
            UserError: it does not run, or ended; from then on it is in `not_runnable`.
        """
        worker = self._workers.get(name)
        if worker is None:
            raise _does_not_run(name, self.not_runnable.get(name, "it was not asked for"))
        try:
            worker.ask({"measure": seconds})
            answer = worker.answer(seconds + ANSWER_LIMIT_S)
        except WorkerFailed as failure:
            self._drop(name, str(failure))
            raise _does_not_run(name, str(failure)) from failure
        return _measurement(name, answer)

    def _start(self, name: str, work_file: Path) -> None:
        scratch = Path(self._scratch.name, name.replace(" ", "-"))
        scratch.mkdir()
        limit_s = self._compile_limit_s if name == "torch.compile" else START_LIMIT_S
        began = time.monotonic()
        self._workers[name] = WorkerProcess(work_file, name, scratch)
        try:
            self._workers[name].answer(limit_s)
        except WorkerFailed as failure:
            self._drop(name, str(failure))
            self._progress("baseline", f"{name} does not run: {failure}")
            return
        self.ready_s[name] = time.monotonic() - began
        self._progress("baseline", f"{name} ready in {self.ready_s[name]:.1f} s")

    def _drop(self, name: str, reason: str) -> None:
        self.not_runnable[name] = reason
        self._workers.pop(name).end()

    def _end(self) -> None:
        while self._workers:
            self._workers.popitem()[1].end()
        self._scratch.cleanup()


def _does_not_run(name: str, reason: str) -> UserError:
    return UserError(f"baseline {name}", "must run", given=reason, remedy="Leave it out")


def _measurement(name: str, answer: Mapping[str, Any]) -> Measurement:
    calls, rows = (np.array(column) for column in zip(*answer["calls"], strict=True))
    latencies = np.repeat(calls, rows.astype(int))
    p50, p90, p95, p99, p99_9 = np.percentile(latencies, (50, 90, 95, 99, 99.9)).tolist()
    seconds = answer["seconds"]
    cores = len(os.sched_getaffinity(0))
    use = ProcessUse(name, answer["cpu_seconds"] / seconds, answer["memory_mib"])
    return Measurement(
        seconds=seconds,
        requests=len(latencies),
        errors={},
        throughput_per_s=len(latencies) / seconds,
        mean_us=float(latencies.mean()),
        p50_us=p50,
        p90_us=p90,
        p95_us=p95,
        p99_us=p99,
        p99_9_us=p99_9,
        is_stable=None,
        histogram_us=histogram_of(latencies.tolist()),
        resources=Resources(cores, machine_cpu=None, client_cpu_cores=0.0, processes=(use,)),
    )
