"""The worker's process from outside: started, asked, waited for with a limit, ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_END_TIMEOUT_S = 10.0


class WorkerFailed(Exception):
    """Why a worker gives no answer."""


class WorkerProcess:
    """A worker and what it starts, in a session of their own: Ctrl-C does not reach them.

    Args:
        work_file: as `write_work` wrote it.
        name: of the baseline.
        scratch: a folder of its own: its standard error, and what a compiler leaves.
    """

    def __init__(self, work_file: Path, name: str, scratch: Path) -> None:
        self._log = scratch / "stderr.txt"
        variables = {
            # A thread of torch that waits for another spins up to 15 ms by default: where the
            # other has lost its core to a neighbour, that takes one core more. Spinning for a
            # tenth of a millisecond loses nothing on a quiet machine.
            "GOMP_SPINCOUNT": "3000",
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(scratch),
            # No pool of compilers beside it, idle while others are measured.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "triptych.bench.baseline_worker", str(work_file), name],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the worker, and of its process group."""
        return self._process.pid

    def ask(self, order: dict[str, Any]) -> None:
        """Send an order.

        Raises:
            WorkerFailed: the worker has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerFailed(self._ending()) from error

    def answer(self, limit_s: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            WorkerFailed: there is none within `limit_s`, the worker says why, or it has ended.
        """
        try:
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            raise WorkerFailed(f"no answer within {limit_s:g} s") from None
        if not line:
            raise WorkerFailed(self._ending())
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise WorkerFailed(answer["failed"])
        return answer

    def end(self) -> None:
        """Kill it with all that it started, and wait until it is gone."""
        # Nobody has waited for it until now, so its number cannot have become another's.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_END_TIMEOUT_S)
        self._reader.join(_END_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # an order that never reached it
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(b"")

    def _ending(self) -> str:
        # It is left for `end` to wait for.
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        code = 0 if ended is None else ended.si_status
        exited = ended is None or ended.si_code == os.CLD_EXITED
        how = f"exit code {code}" if exited else f"killed by signal {code}"
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return f"its process ended ({how})" + (f": {said[-1][:300]}" if said else "")
