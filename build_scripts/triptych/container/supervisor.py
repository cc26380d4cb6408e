"""A server in a container: it ends with the first of its steps, and loses nothing that it took."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from triptych.container.conceal import conceal_keys
from triptych.container.steps import EndlessLoad, dead_steps, drain, step_processes

EXIT_DEAD = 3
_POLL_S = 0.2
EXIT_S = 5.0
"""Of what Triton waits for once nothing is under way: it would wait for idle connections, too."""
STACK_BYTES = 1 << 30
"""Stack of the server's threads. Triton reads JSON by recursion: a body of 300,000 ``[`` is more
than the usual 8 MiB hold, and ends the server. Only what is used takes memory."""


def stack_limits() -> tuple[int, int]:
    """The soft and the hard limit of a server's stack, in bytes, as far as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    return STACK_BYTES if most == resource.RLIM_INFINITY else min(STACK_BYTES, most), most


def supervise(
    command: Sequence[str],
    variables: Mapping[str, str],
    *,
    is_ready: Callable[[], bool],
    grace_s: float,
) -> int:
    """Run a server until SIGTERM, SIGINT or the first death of the server or one of its steps.

    Args:
        command: of tritonserver.
        variables: its environment.
        is_ready: whether it has loaded all of its models.
        grace_s: how long an orderly stop may take.

    Returns:
        The exit code: 0 after an orderly stop, never 0 after a death.
    """
    resource.setrlimit(resource.RLIMIT_STACK, stack_limits())
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: asked.append(number))
    # A session of its own: what a terminal sends reaches this process, which passes it on in order.
    server = subprocess.Popen(command, env=variables, start_new_session=True)
    conceal_keys(server.pid)
    steps: dict[int, str] = {}
    endless = EndlessLoad()
    while not asked:
        code = server.poll()
        if code is not None:
            _say(f"error: tritonserver ended by itself: {_how(code)}")
            return code if code > 0 else EXIT_DEAD
        if not steps and is_ready():
            steps = step_processes(server.pid)
        dead = dead_steps(server.pid, steps)
        if dead:
            named = ", ".join(f"{model} (process {pid})" for pid, model in dead.items())
            _say(f"error: a step has died: {named}. The server cannot answer without it")
            _kill(server)
            return EXIT_DEAD
        if not steps and (told := endless.told(server.pid)):
            _say(f"error: {told}")
            _kill(server)
            return EXIT_DEAD
        time.sleep(_POLL_S)
    return _stop(server, grace_s)


def _kill(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.wait()


def _stop(server: subprocess.Popen[bytes], grace_s: float) -> int:
    deadline = time.monotonic() + grace_s
    drained = drain(server.pid, grace_s)
    server.terminate()
    left_s = max(deadline - time.monotonic(), EXIT_S)
    try:
        code = server.wait(min(left_s, EXIT_S) if drained else left_s)
    except subprocess.TimeoutExpired:
        _kill(server)
        code = 0 if drained else EXIT_DEAD
    return code if code >= 0 else 0 if drained else EXIT_DEAD


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
