"""Run as a script: becomes tritonserver, tied to the life of the process that asked for it.

``python launch.py PARENT_PID EXECUTABLE ARGUMENT...``. A script of its own and not a `preexec_fn`,
which runs Python between fork and exec and may deadlock where the parent has threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: list[str]) -> None:
    """Asks the kernel to kill it when the parent dies, then replaces itself by the command."""
    # Not SIGTERM: a server that is loading models heeds it late, or never.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the kernel was asked: then no signal will ever come.
    if os.getppid() != parent_pid:
        sys.exit("triptych: the process that started this server is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
