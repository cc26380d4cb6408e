"""Taking keys out of a server's command line, where every user of the machine can read them.

Triton takes its keys as flags only. It copies them before it starts its first thread; from then on
the command line is for show, and whoever may trace the process can write over it.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

_KEY = re.compile(rb"(?<=-restricted-)(protocol|api)([=\0][^=\0]*=)([^\0]+)")
_ARGUMENTS_START = 45  # of what follows the program's name in /proc/PID/stat
_POLL_S = 0.005


def conceal_keys(pid: int, timeout_s: float = 30.0) -> bool:
    """Writes asterisks over the keys in the command line of a server that is starting.

    Returns:
        Whether that was done: not where the server is gone, or the kernel does not allow it.
    """
    process = Path(f"/proc/{pid}")
    deadline = time.monotonic() + timeout_s
    try:
        while len(list((process / "task").iterdir())) == 1:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        fields = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
        start, end = (int(field) for field in fields[_ARGUMENTS_START : _ARGUMENTS_START + 2])
        with (process / "mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            words = memory.read(end - start)
            memory.seek(start)
            memory.write(_KEY.sub(lambda found: found[1] + found[2] + b"*" * len(found[3]), words))
    except OSError:
        return False
    return True
