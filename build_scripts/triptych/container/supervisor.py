"""Supervision of a server: hide its keys, watch its Python steps, drain it before it stops.

Triton 24.10 never restarts a step whose process has died, and still reports that it is ready.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from triptych.base.errors import print_line
from triptych.container.lock_check import EXIT_REFUSED
from triptych.container.periodic import REPLACED_AFTER, PeriodicCheck
from triptych.runtime.in_flight import InFlight

_KEY = re.compile(rb"(?<=-restricted-)(protocol|api)([=\0][^=\0]*=)([^\0]+)")
_ARGUMENTS_START = 45  # of what follows the program's name in /proc/PID/stat
_HIDE_POLL_S = 0.005


def conceal_keys(pid: int, timeout_s: float = 30.0) -> bool:
    """Overwrite the keys in the command line of a starting server, which all users can read.

    Triton takes its keys only as flags and copies them before it starts its first thread.
    Afterwards a process that may trace the server can overwrite the command line.

    Returns:
        False if the server is gone or the kernel does not allow it.
    """
    process = Path(f"/proc/{pid}")
    deadline = time.monotonic() + timeout_s
    try:
        while len(list((process / "task").iterdir())) == 1:
            if time.monotonic() > deadline:
                return False
            time.sleep(_HIDE_POLL_S)
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


STUB = "triton_python_backend_stub"
"""Program that runs a Python step."""

STARVED = (
    "a Python step did not run for a second: it got no CPU, which before 25.08 happens most of all "
    "while it loads, or it was stopped or killed, or the clock was set forward; if the CPUs are "
    "busy, give the steps more of them"
)
"""Explanation for a server that ended or never finishes loading for this reason."""

_DRAIN_POLL_S = 0.02
# The last response must still be written after it was computed, by processes that may wait for a
# CPU. These times are much longer than the write itself.
_QUIET_S = 0.2
_LAST_WRITE_S = 2.0
_ASK_S = 0.5
_FAILED_BY_CORE = 3  # with several cores, one may still compute what came before
_LOOK_S = 1.0
# A step ends within this time after its signal, also on a busy machine.
_MAX_END_S = 15.0
_WAIT4 = {"x86_64": "61", "aarch64": "260"}


def step_processes(server: int) -> dict[int, str]:
    """Return the model of each living step of a server by process id."""
    found = {}
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
        if not _is_child(pid, server):
            continue
        with suppress(OSError):  # gone meanwhile
            words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
            if Path(words[0]).name == STUB:
                found[pid] = Path(words[1]).parts[-3]  # MODEL/VERSION/FILE
    return found


def dead_steps(server: int, steps: Mapping[int, str]) -> dict[int, str]:
    """Return the steps of `step_processes` whose process has ended."""
    return {pid: model for pid, model in steps.items() if not _is_child(pid, server)}


_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_MEMORY_FILES = {False: "memory.events", True: "memory.oom_control"}
"""File with the number of kills, by whether the hierarchy is that of one controller (cgroup v1)."""


def count_memory_kills() -> int:
    """Return how many processes of this container the kernel has killed for lack of memory.

    It is 0 where the system does not tell. Only the death of a container's first process shows in
    the container's state.
    """
    with suppress(OSError):
        for line in _OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = _CGROUPS / "memory" if controllers else _CGROUPS
            # A container may have the path of the machine, and yet see its own group as the root.
            for folder in (root / path.lstrip("/"), root):
                with suppress(OSError):
                    text = (folder / _MEMORY_FILES[bool(controllers)]).read_text()
                    return sum(map(int, re.findall(r"(?m)^oom_kill (\d+)$", text)))
    return 0


def describe_memory_kills(before: int) -> str:
    """Return text about the kills since `count_memory_kills` was `before`; empty without any."""
    killed = count_memory_kills() - before
    return f"; killed here by the kernel for lack of memory: {killed}" if killed > 0 else ""


class EndlessLoad:
    """Detector of a server that waits forever for the end of a step while models load.

    Triton takes a step that loads for dead where it got no CPU for a second, and waits for the end
    of its process without having asked for it (`StubLauncher::WaitForStubProcess`, seen in 24.10).
    Nothing is detected if the system does not show the system calls of threads.
    """

    def __init__(self) -> None:
        self._awaited: dict[int, float] = {}
        self._looked_at = -_LOOK_S

    def steps(self, server: int) -> dict[int, str]:
        """Return the model of each step that the server waits for, by process id.

        Must be called repeatedly while models load; it checks once per second.
        """
        now = time.monotonic()
        if now < self._looked_at + _LOOK_S:
            return {}
        self._looked_at = now
        awaited = _awaited_children(server)
        self._awaited = {pid: self._awaited.get(pid, now) for pid in awaited}
        endless = {pid for pid, since in self._awaited.items() if now - since > _MAX_END_S}
        living = step_processes(server) if endless else {}
        return {pid: model for pid, model in living.items() if pid in endless}

    def describe(self, server: int) -> str:
        """Return a message about a server with such steps, else an empty text."""
        models = list(self.steps(server).values())
        return f"{models[0]} never finishes loading ({STARVED})" if models else ""


def _awaited_children(pid: int) -> set[int]:
    """Return the children for whose end threads of a process wait, from their system calls."""
    wanted = _WAIT4.get(platform.machine())
    found = set()
    with suppress(OSError):  # gone meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # ended meanwhile, or not to be seen
                number, *arguments = (thread / "syscall").read_text().split()
                if number == wanted:
                    found.add(int(arguments[0], 16))
    return found


def _is_child(pid: int, parent: int) -> bool:
    """Whether the process is alive and `parent` is its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] != "Z" and int(fields[1]) == parent


def drain(server: int, grace_s: float, ask: Callable[[], Sequence[str]], prefix: str = "") -> bool:
    """Stop admission to the pipelines of a server and wait until all requests are answered.

    After a stop signal Triton itself rejects the next step of requests in flight.

    Args:
        server: Process id of the server.
        grace_s: Maximum wait in seconds.
        ask: Function that sends a request to each pipeline, and returns those whose core fails it.
            It is called in a thread while requests are in flight, because an answer shows which of
            them are lost. Postprocess sees no request that a core fails, so that all requests are
            taken for failed if the core fails `_FAILED_BY_CORE` in turn.
        prefix: Prefix of the server's files in shared memory, if it differs from this process.

    Returns:
        Whether no request is in flight in any pipeline.
    """
    deadline = time.monotonic() + grace_s
    pipelines = InFlight.of_server(server, prefix)
    for pipeline in pipelines:
        pipeline.stop_admitting()
    asking, failed = Thread(), Counter[str]()

    def question() -> None:
        names = ask()
        for name in failed.keys() - names:
            del failed[name]
        failed.update(names)

    quiet_until = ask_at = time.monotonic() + _QUIET_S
    while True:
        now = time.monotonic()
        awaited = [each for each in pipelines if failed[each.pipeline] < _FAILED_BY_CORE]
        if any(pipeline.requests() for pipeline in awaited):
            quiet_until = now + _LAST_WRITE_S
            if now > ask_at and not asking.is_alive():
                ask_at = now + _ASK_S
                asking = Thread(target=question, daemon=True)
                asking.start()
        elif now >= quiet_until:
            return True
        if now > deadline:
            return False
        time.sleep(_DRAIN_POLL_S)


EXIT_DEAD = 3
_POLL_S = 0.2
_CHECK_S = 5.0  # beside the checks of an orchestrator
EXIT_S = 5.0
"""Maximum seconds for Triton's exit after draining: it also waits for idle connections."""


class Limit(NamedTuple):
    """Limit of a server's process, by its name in the options of Docker and systemd.

    It is raised to `wanted` where the system allows it. With less than `enough`, `effect` happens.
    """

    name: str
    number: int
    unit: str
    wanted: int
    enough: int
    effect: str

    @property
    def rule(self) -> str:
        return f"a server should have {self.enough:,} {self.unit}: with less, {self.effect}"

    @property
    def remedy(self) -> str:
        return (
            f"Raise the hard limit: `docker run --ulimit {self.name}={self.wanted}`, or "
            f"`Limit{self.name.upper()}={self.wanted}` in a unit of systemd"
        )


_FILES_EFFECT = "as many connections, also idle ones, keep it from answering"
# Triton reads JSON by recursion: a body of 300,000 ``[`` is more than the usual 8 MiB hold. Of the
# stack, only what is used takes memory.
_STACK_EFFECT = "a body of deeply nested JSON ends it"
LIMITS = (
    Limit("nofile", resource.RLIMIT_NOFILE, "open files", 1 << 16, 10_000, _FILES_EFFECT),
    Limit("stack", resource.RLIMIT_STACK, "bytes of stack", 1 << 30, 1 << 30, _STACK_EFFECT),
)
"""Limits of the processes that serve."""


def server_limits() -> dict[Limit, tuple[int, int]]:
    """Return the soft and the hard value of each limit of a server, as the system allows."""
    values = {}
    for limit in LIMITS:
        soft, most = resource.getrlimit(limit.number)
        # More files are kept. A larger stack is not: of an unlimited one, glibc gives threads less.
        wanted = max(limit.wanted, soft) if limit.name == "nofile" else limit.wanted
        values[limit] = (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most)
    return values


def raise_limits() -> None:
    """Raise the limits of this process and of those that it starts."""
    for limit, values in server_limits().items():
        resource.setrlimit(limit.number, values)


def warn_of_limits() -> None:
    """Print the limits of this system that are too low for a server."""
    for limit, (value, _) in server_limits().items():
        if value < limit.enough:
            print_line(f"warning: {limit.rule}. Here: {value:,}. {limit.remedy}")


def supervise(
    command: Sequence[str],
    variables: Mapping[str, str],
    *,
    is_ready: Callable[[], bool],
    find_fault: Callable[[], str | None],
    ask: Callable[[], Sequence[str]],
    grace_s: float,
    is_refused: Callable[[], bool] = lambda: False,
) -> int:
    """Run a server until SIGTERM, SIGINT or the first death of the server or one of its steps.

    A server that was healthy and then fails its health check `REPLACED_AFTER` times in a row ends,
    too: Docker does not restart a container for its health check.

    Args:
        command: Command line of tritonserver.
        variables: Environment of the server.
        is_ready: Whether the server has loaded all of its models.
        find_fault: The health check of a server that is ready.
        ask: Function that sends a request to each pipeline; see `drain`.
        grace_s: Maximum time of an orderly stop, in seconds.
        is_refused: Whether the server must not serve. It is killed then.

    Returns:
        The exit code: 0 after an orderly stop, `EXIT_REFUSED` of a server that must not serve,
        never 0 after a death.
    """
    warn_of_limits()
    raise_limits()
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: asked.append(number))
    # In a separate session, signals of a terminal reach only this process, which forwards them.
    # The stubs of the Python backend import from the server's working directory first.
    server = subprocess.Popen(command, env=variables, start_new_session=True, cwd="/")
    try:
        code = _watch(server, asked, is_ready, find_fault, is_refused)
        return _stop(server, grace_s, ask) if code is None else code
    finally:
        # The steps of a server that was killed, and the processes of their engines, may live on.
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


class _Steps:
    """Steps of a server from its start on, so that the death of one as it gets ready is noticed.

    Attributes:
        watched: Model of each step by process id; empty until the server is ready.
    """

    def __init__(self) -> None:
        self.watched: dict[int, str] = {}
        self._seen: dict[int, str] = {}
        self._most = Counter[str]()

    def dead(self, server: int, is_ready: Callable[[], bool]) -> dict[int, str]:
        """Return the model of each step that died, by process id; must be called repeatedly."""
        if self.watched:
            return dead_steps(server, self.watched)
        ready, living = is_ready(), step_processes(server)
        self._seen |= living
        self._most |= Counter(living.values())
        if not ready:
            return {}
        self.watched = living
        # A process that only read a model's config has ended, too, but others took its place.
        lost = self._most - Counter(living.values())
        ended = self._seen.items() - living.items()
        return {pid: model for pid, model in ended if model in lost}


def _watch(
    server: subprocess.Popen[bytes],
    asked: Sequence[int],
    is_ready: Callable[[], bool],
    find_fault: Callable[[], str | None],
    is_refused: Callable[[], bool],
) -> int | None:
    """Return the exit code after a death; None once `asked` has a signal."""
    conceal_keys(server.pid)
    steps, endless, kills = _Steps(), EndlessLoad(), count_memory_kills()
    health = PeriodicCheck(ThreadPoolExecutor(1), find_fault, _CHECK_S)
    was_healthy = False
    while not asked:
        code = server.poll()
        if code is not None:
            print_line(
                f"error: tritonserver ended by itself: {_how(code)}{describe_memory_kills(kills)}"
            )
            return code if code > 0 else EXIT_DEAD
        if dead := steps.dead(server.pid, is_ready):
            named = ", ".join(f"{model} (process {pid})" for pid, model in dead.items())
            why = describe_memory_kills(kills)
            print_line(f"error: a step has died: {named}{why}. The server cannot answer without it")
            _kill(server)
            return EXIT_DEAD
        if is_refused():
            _kill(server)
            return EXIT_REFUSED
        if not steps.watched and (message := endless.describe(server.pid)):
            print_line(f"error: {message}")
            _kill(server)
            return EXIT_DEAD
        if steps.watched and health.has_result():
            was_healthy |= not health.failures
            if was_healthy and health.failures >= REPLACED_AFTER:
                print_line(f"error: the server fails its health check: {health.fault}")
                _kill(server)
                return EXIT_DEAD
        time.sleep(_POLL_S)
    return None


def _kill(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.wait()


def _stop(server: subprocess.Popen[bytes], grace_s: float, ask: Callable[[], Sequence[str]]) -> int:
    deadline = time.monotonic() + grace_s
    drained = drain(server.pid, grace_s, ask)
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
