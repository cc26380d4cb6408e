"""A program that is measured beside the pipeline: started apart, and ended with all it started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_END_TIMEOUT_S = 10.0
_LONGEST_REASON = 300
_LOOK = os.WEXITED | os.WNOWAIT
"""How to look at its end: it is left for `end` to wait for."""


class ChildProcess:
    """A process and what it starts, in a session of their own: Ctrl-C does not reach them.

    Args:
        command: what to start.
        log: file for its standard error, and its standard output unless it has `pipes`.
        variables: of its environment, over those of this process.
        folder: where it is started.
        pipes: whether its standard input and output are `process.stdin` and `process.stdout`.
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
        """Of the process, and of its group."""
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has; what it started may live on until `end`."""
        return os.waitid(os.P_PID, self.pid, _LOOK | os.WNOHANG) is not None

    def ending(self) -> str:
        """Wait until it has ended; how it did, and the last line that it wrote."""
        ended = os.waitid(os.P_PID, self.pid, _LOOK)
        code = 0 if ended is None else ended.si_status
        exited = ended is None or ended.si_code == os.CLD_EXITED
        how = f"exit code {code}" if exited else f"killed by signal {code}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return f"its process ended ({how})" + (f": {said[-1][:_LONGEST_REASON]}" if said else "")

    def end(self, grace_s: float = 0.0) -> None:
        """Kill it with all that it started, and wait until it is gone.

        Args:
            grace_s: how long it may take to end by itself once it is asked to.
        """
        if grace_s:
            os.kill(self.pid, signal.SIGTERM)  # `terminate` of Popen would wait for it
            deadline = time.monotonic() + grace_s
            while not self.has_ended and time.monotonic() < deadline:
                time.sleep(0.05)
        # Nobody has waited for it until now, so its number cannot have become another's.
        os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(_END_TIMEOUT_S)
