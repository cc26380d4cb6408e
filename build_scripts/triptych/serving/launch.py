"""Run as a script: becomes tritonserver, tied to the life of the process that asked for it.

``python launch.py PARENT_PID STACK_BYTES EXECUTABLE ARGUMENT...``. A script of its own and not a
`preexec_fn`, which runs Python between fork and exec and may deadlock where the parent has threads.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent_pid: int, stack_bytes: int, command: list[str]) -> None:
    """Asks the kernel to kill it when the parent dies, then replaces itself by the command."""
    # Not SIGTERM: a server that is loading models heeds it late, or never.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the kernel was asked: then no signal will ever come.
    if os.getppid() != parent_pid:
        sys.exit("triptych: the process that started this server is gone")
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, most))
    os.umask(0o077)  # what users sent lies in shared memory: nobody else may read it
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
