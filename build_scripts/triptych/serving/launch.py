"""Script that becomes tritonserver and dies with its parent process.

``python launch.py PARENT_PID LIMITS EXECUTABLE ARGUMENT...``. LIMITS are soft limits, as
``NUMBER=VALUE,NUMBER=VALUE``. It is a script because `preexec_fn` runs Python between fork and
exec, which can deadlock if the parent has threads.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent_pid: int, limits: str, command: list[str]) -> None:
    """Ask the kernel to kill this process when its parent dies, then execute the command."""
    # SIGKILL, because a server that loads models handles SIGTERM late or never.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before prctl was called; then no signal arrives.
    if os.getppid() != parent_pid:
        sys.exit("triptych: the process that started this server has ended")
    for number, soft in (map(int, limit.split("=")) for limit in limits.split(",")):
        resource.setrlimit(number, (soft, resource.getrlimit(number)[1]))
    os.umask(0o077)  # shared memory contains user data, which other users must not read
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
