"""Run the baselines of a pipeline in child processes.

`Baselines` starts them once, so that they can be measured in turns with the pipeline.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from triptych.base.errors import Progress, UserError
from triptych.core.inputs import PipelineInputs
from triptych.serving.bench.baseline_calls import ROWS_A_CALL, work_of, write_work
from triptych.serving.bench.baseline_worker import WorkerReply
from triptych.serving.bench.perf_output import make_histogram
from triptych.serving.bench.results import Measurement, OfferedLoad, ProcessUse, Resources

_END_TIMEOUT_S = 10.0
_MAX_REASON = 300
_LOOK = os.WEXITED | os.WNOWAIT
"""Options of `os.waitid` that leave an ended process for `ChildProcess.end` to reap."""


class ChildProcess:
    """A process with its descendants, in a separate session that Ctrl-C does not reach.

    Args:
        command: Command line of the process.
        log: File for standard error, and for standard output without `pipes`.
        variables: Environment variables that override those of this process.
        folder: Working directory of the process.
        pipes: Whether standard input and output are `process.stdin` and `process.stdout`.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        variables: Mapping[str, str],
        folder: Path | None = None,
        pipes: bool = False,
    ) -> None:
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else errors,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Id of the process and of its process group."""
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; its descendants may run until `end`."""
        return os.waitid(os.P_PID, self.pid, _LOOK | os.WNOHANG) is not None

    def ending(self) -> str:
        """Wait for the end of the process; return its exit status and the last line of its log."""
        ended = os.waitid(os.P_PID, self.pid, _LOOK)
        code = 0 if ended is None else ended.si_status
        exited = ended is None or ended.si_code == os.CLD_EXITED
        how = f"exit code {code}" if exited else f"killed by signal {code}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        log_lines = [line.strip() for line in lines if line.strip()]
        return f"its process ended ({how})" + (
            f": {log_lines[-1][:_MAX_REASON]}" if log_lines else ""
        )

    def end(self, grace_s: float = 0.0) -> None:
        """Kill the process and its descendants, and wait until the process has ended.

        Args:
            grace_s: Time between SIGTERM and SIGKILL, in seconds; 0 sends only SIGKILL.
        """
        if grace_s:
            os.kill(self.pid, signal.SIGTERM)  # `Popen.terminate` would reap the process
            deadline = time.monotonic() + grace_s
            while not self.has_ended and time.monotonic() < deadline:
                time.sleep(0.05)
        # The process has not been reaped, so the system cannot have reused its id.
        os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(_END_TIMEOUT_S)


ALL = tuple(ROWS_A_CALL)
START_LIMIT_S = 300.0
COMPILE_LIMIT_S = 240.0
ANSWER_LIMIT_S = 120.0
"""Maximum time of the last call after the end of a measurement, in seconds."""


class WorkerFailed(Exception):
    """Failure of a worker to reply, with the reason."""


class WorkerProcess(ChildProcess):
    """The parent's side of a worker.

    Args:
        work_file: File that `write_work` wrote.
        name: Name of the baseline.
        scratch: Private folder for standard error and the compiler's cache.
    """

    def __init__(self, work_file: Path, name: str, scratch: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "triptych.serving.bench.baseline_worker",
            str(work_file),
            name,
        ]
        variables = {
            # A waiting thread of torch spins up to 15 ms by default, which takes a core from a
            # thread that lost its own. Spinning for 0.1 ms costs nothing on an idle machine.
            "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "3000"),
            "HF_HUB_OFFLINE": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(scratch),
            # A pool of compiler processes would stay alive while other baselines are measured.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        super().__init__(command, scratch / "stderr.txt", variables=variables, pipes=True)
        self._replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, seconds: float) -> None:
        """Request a measurement of `seconds`.

        Raises:
            WorkerFailed: The worker has ended.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{seconds}\n".encode())
            self.process.stdin.flush()
        except OSError as error:
            raise WorkerFailed(self.ending()) from error

    def answer(self, limit_s: float) -> WorkerReply:
        """Return the next reply.

        Raises:
            WorkerFailed: No reply came within `limit_s`, the worker reported an error, or it ended.
        """
        try:
            line = self._replies.get(timeout=limit_s)
        except queue.Empty:
            raise WorkerFailed(f"no answer within {limit_s:g} s") from None
        if not line:
            raise WorkerFailed(self.ending())
        reply = TypeAdapter(WorkerReply).validate_json(line)
        if reply.failed:
            raise WorkerFailed(reply.failed)
        return reply

    def end(self, grace_s: float = 0.0) -> None:
        """See `ChildProcess.end`."""
        super().end(grace_s)
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # the pipe still holds an unread order
                pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._replies.put(line)
        self._replies.put(b"")


class Baselines:
    """Baselines of a pipeline, each in a worker that idles between measurements.

    All run on the CPU, also if the pipeline's core runs on a GPU.

    Args:
        inputs: Inputs of the pipeline; their `traffic` is sent.
        core_file: The pipeline's ``model.onnx``, in fp32 and in the plan's layout.
        names: Names from `ALL`.
        progress: Called when a baseline is ready or has failed.
        compile_limit_s: Maximum time for ``torch.compile`` to load, compile and warm up.

    Attributes:
        not_runnable: Reason of the failure, by name of the baseline.
        ready_s: Time to load, compile and warm up in seconds, by name of the baseline.

    Raises:
        UserError: A name is not in `ALL`.
    """

    def __init__(
        self,
        inputs: PipelineInputs,
        core_file: Path,
        *,
        names: Sequence[str] = ALL,
        progress: Progress,
        compile_limit_s: float = COMPILE_LIMIT_S,
    ) -> None:
        for name in names:
            if name not in ALL:
                raise UserError("baseline", f"must be one of {', '.join(ALL)}", given=name)
        self._names = tuple(dict.fromkeys(names))
        self._inputs = inputs
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
            if self._names:
                write_work(work_of(self._inputs, self._core_file), work_file)
            # Baselines start one after the other, so that they do not compete for cores.
            for name in self._names:
                self._start(name, work_file)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the running baselines."""
        return tuple(self._workers)

    @property
    def pids(self) -> Mapping[str, int]:
        return {name: worker.pid for name, worker in self._workers.items()}

    def load_of(self, name: str) -> OfferedLoad:
        return OfferedLoad("in_process", ROWS_A_CALL[name])

    def measure(self, name: str, seconds: float) -> Measurement:
        """Measure a baseline for `seconds`, continuing in the traffic where it stopped.

        Each request has the latency of its call.

        Raises:
            UserError: The baseline does not run or has ended; it is then in `not_runnable`.
        """
        worker = self._workers.get(name)
        if worker is None:
            raise _does_not_run(name, self.not_runnable.get(name, "it was not selected"))
        try:
            worker.ask(seconds)
            reply = worker.answer(seconds + ANSWER_LIMIT_S)
        except WorkerFailed as failure:
            self._drop(name, str(failure))
            raise _does_not_run(name, str(failure)) from failure
        return _measurement(name, reply)

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


def _measurement(name: str, reply: WorkerReply) -> Measurement:
    calls, rows = (np.array(column) for column in zip(*reply.calls, strict=True))
    latencies = np.repeat(calls, rows.astype(int))
    p50, p90, p95, p99, p99_9 = np.percentile(latencies, (50, 90, 95, 99, 99.9)).tolist()
    use = ProcessUse(name, reply.cpu_seconds / reply.seconds, reply.memory_mib)
    cores = len(os.sched_getaffinity(0))
    return Measurement(
        seconds=reply.seconds,
        requests=len(latencies),
        errors={},
        throughput_per_s=len(latencies) / reply.seconds,
        mean_us=float(latencies.mean()),
        p50_us=p50,
        p90_us=p90,
        p95_us=p95,
        p99_us=p99,
        p99_9_us=p99_9,
        is_stable=None,
        histogram_us=make_histogram(latencies.tolist()),
        resources=Resources(cores, machine_cpu=None, client_cpu_cores=0.0, processes=(use,)),
    )
