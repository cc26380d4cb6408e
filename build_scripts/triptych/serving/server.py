"""Start a real tritonserver on a model repository, wait until it is ready, and stop it.

Usage: ``with Server(repository) as server: client = Client(server.grpc_url)``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from triptych.base.errors import UserError
from triptych.base.releases import flags_newer_than
from triptych.container.entrypoint import (
    PLAIN,
    check_model_names,
    describe_loader,
    flags_for,
    is_plain,
    server_variables,
    warn_of,
)
from triptych.container.flags import (
    ALLOW_CLIENT_SHM,
    CLOSED,
    FREE_REQUESTS,
    KEEP_ALIVE,
    RATE_LIMIT,
    RESTRICTED_HEADER,
    SHARED_MEMORY,
    absolute_paths,
    restricted_flags,
    uses_rate_limiter,
)
from triptych.container.health import HealthCheck
from triptych.container.lock_check import enforce
from triptych.container.machine import read_machine
from triptych.container.manifests import (
    check_readable,
    core_variables,
    find_pipelines,
    remove_byte_code,
)
from triptych.container.serving_machine import choose_variant, find_machine
from triptych.container.settings import read_settings
from triptych.container.supervisor import (
    EndlessLoad,
    conceal_keys,
    count_memory_kills,
    dead_steps,
    describe_memory_kills,
    drain,
    step_processes,
    warn_of_limits,
)
from triptych.serving.embedded import (
    EMBEDDED_RELEASE,
    Installation,
    find_installation,
    find_release,
)
from triptych.serving.orphan_cleanup import new_process_tag
from triptych.serving.ports import reserve_ports
from triptych.serving.process import ServerProcess
from triptych.serving.readiness import (
    LoadState,
    ServerError,
    find_exit_reason,
    is_cpu_starved,
    read_load_state,
    responds_ok,
)


def list_models(repository: Path) -> list[str]:
    """Return the sorted names of the repository's models: every visible folder is a model."""
    return sorted(
        path.name
        for path in repository.iterdir()
        if path.is_dir() and not path.name.startswith(".")
    )


def check_models(repository: Path, wanted: Sequence[str]) -> None:
    """Check that the repository can be served and has the `wanted` models; raise `UserError`."""
    if not repository.is_dir():
        raise UserError(
            "repository",
            "must be a folder",
            given=repository,
            remedy="Run `triptych build NAME` first",
        )
    check_readable(repository)
    models = list_models(repository)
    if not models:
        raise UserError(
            "repository",
            "must hold at least one model",
            given=repository,
            remedy="Run `triptych build NAME` first",
        )
    check_model_names(repository)
    for name in wanted:
        if name not in models:
            raise UserError(
                "models",
                "must be models of the repository",
                given=name,
                remedy=f"The repository has: {', '.join(models)}",
            )


def new_shell_safe_dir() -> Path:
    """Return a new temporary folder whose path needs no shell quoting, wherever TMPDIR is."""
    try:
        parent = next(parent for parent in (tempfile.gettempdir(), "/tmp") if is_plain(parent))
        return Path(tempfile.mkdtemp(prefix="triptych-server-", dir=parent))
    except OSError as error:
        raise UserError(
            "TMPDIR",
            f"must be a writable folder whose path consists of {PLAIN}",
            given=error,
            remedy="Set TMPDIR to such a folder",
        ) from error


def check_and_make_flags(
    repository: Path,
    *,
    production: bool,
    backend_directory: Path | None = None,
) -> list[str]:
    """Check the repository's files, and return the flags of the serving image's entry point.

    The image's environment variables apply, except host, ports, server and repository.

    Args:
        repository: Folder of the models.
        production: Whether to use the production profile. Without it, no flags are returned and
            the server checks the engines itself.
        backend_directory: Folder with the caller's backends, as for `Server`.

    Raises:
        UserError: A setting is wrong, or a pipeline cannot be served here. The reasons were printed
            on standard error.
    """
    settings = read_settings(os.environ, repository=str(repository))
    machine = read_machine(os.environ) if production else None
    if not enforce(settings, machine):
        raise UserError(
            "repository",
            "contains pipelines that failed the startup check",
            given=repository,
            remedy="Fix the errors above, or set TRIPTYCH_LOCK_CHECK=warn",
        )
    warn_of_limits()
    if machine is None:
        return []
    release = find_release(own_backends=backend_directory)
    warn_of(release)
    return flags_for(repository, settings.options, machine, release)


# Longer than any grace period, because `stop` limits how long requests in flight may take.
_EXIT_TIMEOUT_S = 3600
# While models load, no request is in flight and the server ignores SIGTERM.
_LOADING_GRACE_S = 2.0
_POLL_S, _WATCH_S, _DYING_S = 0.05, 0.2, 1.0
_MAX_STARTS = 3


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """Address that a server listens on."""

    host: str = "127.0.0.1"  # Address of the machine; ``0.0.0.0`` listens on every address
    grpc_port: int = 0  # Port of gRPC; 0 picks a free one
    http_port: int = 0  # Port of HTTP; 0 picks a free one
    metrics_port: int = 0  # Port of the metrics page; 0 picks a free one


@dataclass(frozen=True, kw_only=True)
class ServerProfile:
    """Options of a server that depend on its use."""

    # Flags of the production profile. Without them, the services of `CLOSED` require
    # `Server.operator_headers`.
    production_flags: Sequence[str] = ()
    # Whether models can be reloaded while it serves; not in the production profile.
    exchanges: bool = False
    # Whether clients may register shared memory, with which they can also read that of the steps;
    # not in the production profile.
    client_shm: bool = False
    # Machine whose plan the server uses, such as ``cpu8``; empty for this machine, None for
    # `config.pbtxt`. `wait_ready` reports which one it is.
    machine: str | None = None


_ANY_ADDRESS, _DEVELOPMENT = ServerAddress(), ServerProfile()


class Server:
    """A tritonserver owned by this process; it never outlives this process.

    As a context manager it starts and waits on entry and stops on exit. It runs in its own session,
    so Ctrl-C at the terminal reaches only this process, which then stops the server once.

    Args:
        repository: Model repository.
        models: Models to serve, with the models that their ensembles need; empty serves all. With
            names, models can be reloaded while it serves.
        address: Address to listen on.
        profile: Options that depend on the use of the server.
        extra_args: Further flags of tritonserver, last on the command line.
        environment: Variables that override those of this process.
        log_file: File of the server's log. None creates a temporary file, which `stop` removes
            unless the server failed.
        backend_directory: Folder with the caller's backends, which replace those of the embedded
            server. With it, the embedded server is used even if a tritonserver is on PATH.
    """

    def __init__(
        self,
        repository: Path,
        *,
        models: Sequence[str] = (),
        address: ServerAddress = _ANY_ADDRESS,
        profile: ServerProfile = _DEVELOPMENT,
        extra_args: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log_file: Path | None = None,
        backend_directory: Path | None = None,
    ) -> None:
        self._served = self.repository = repository.resolve()  # `_served`: as the server sees it
        self.log_file = log_file
        self._keep_log = log_file is not None
        self._host = address.host
        self._wanted_ports = {
            "grpc_port": address.grpc_port,
            "http_port": address.http_port,
            "metrics_port": address.metrics_port,
        }
        self._ports: dict[str, int] = {}
        self._reserved = ExitStack()
        self._models = tuple(models)
        self._profile = profile
        self._key = secrets.token_urlsafe(32)
        opened = {SHARED_MEMORY} if profile.client_shm else set()
        closed = [service for service in CLOSED if service not in opened]
        self._profile_flags = tuple(profile.production_flags) or (
            FREE_REQUESTS,
            *KEEP_ALIVE,
            *restricted_flags(closed, self._key),
        )
        self._extra_args = tuple(extra_args)
        self.environment = dict(environment or {})
        self.plan_lines: tuple[str, ...] = ()
        self.own_backends = backend_directory
        self._process: ServerProcess | None = None
        self._own_log = log_file is not None
        self._was_ready = False
        self._tag = ""
        self._steps: dict[int, str] = {}
        self._memory_kills = 0

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def served_models(self) -> Sequence[str]:
        """Names of the models that clients may use: the wanted ones, or all of the repository."""
        return self._models or list_models(self.repository)

    @property
    def grpc_url(self) -> str:
        return self._url("grpc_port")

    @property
    def http_url(self) -> str:
        """``host:port`` of the HTTP service, without a scheme, as tritonclient takes it."""
        return self._url("http_port")

    @property
    def metrics_url(self) -> str:
        return f"http://{self._url('metrics_port')}/metrics"

    @property
    def operator_headers(self) -> dict[str, str]:
        """GRPC headers that open the restricted services; not in the production profile."""
        return {f"triton-grpc-protocol-{RESTRICTED_HEADER}": self._key}

    def __enter__(self) -> Server:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop(grace_s=_LOADING_GRACE_S)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process without waiting for it.

        Raises:
            UserError: The repository, a model, a port or the server installation is unusable.
        """
        if self._process is not None:
            raise RuntimeError("the server was started already")
        self._was_ready = False
        self._memory_kills = count_memory_kills()
        check_models(self.repository, self._models)
        if kept := remove_byte_code(self.repository):
            raise UserError(
                str(kept[0]),
                "must not exist, because Python runs its byte code in place of the step's files",
                given="a folder that cannot be removed",
                remedy="Remove it, or make it removable for this user",
            )
        reserving = reserve_ports(self._host, self._wanted_ports)
        self._ports = self._reserved.enter_context(reserving)
        tag = self._tag = new_process_tag()
        private = new_shell_safe_dir()
        try:
            # The stubs of the Python backend import from the server's working directory first.
            (private / "empty").mkdir()
            if not is_plain(self.repository):
                self._served = private / "repository"
                self._served.symlink_to(self.repository, target_is_directory=True)
            installation = find_installation(private, own_backends=self.own_backends)
            log_file = self._open_log()
            self._process = ServerProcess(
                self._command(installation, tag),
                {
                    **core_variables(self.repository),
                    **server_variables(os.environ),
                    **installation.environment,
                    **self.environment,
                },
                tag=tag,
                log_file=log_file,
                own_paths=[private],
                orphan_paths=[] if self._keep_log else [log_file],
                folder=private / "empty",
            )
        except BaseException:
            shutil.rmtree(private, ignore_errors=True)
            self._reserved.close()
            raise
        conceal_keys(self._process.pid)

    def wait_ready(
        self, timeout_s: float = 600.0, on_progress: Callable[[str], object] = lambda _: None
    ) -> None:
        """Wait until the server and all its models are ready.

        If a step got no CPU and crashed the server or is stuck, the server restarts, at most twice.

        Args:
            timeout_s: Timeout for all starts together, in seconds.
            on_progress: Called with a line for each model that is ready, and for each restart.

        Raises:
            ServerError: A model failed, the server exited, or the time ran out.
        """
        deadline = time.monotonic() + timeout_s
        for line in self.plan_lines:
            on_progress(line)
        reported: set[str] = set()
        starts, endless = 1, EndlessLoad()
        while True:
            exited = not self._started().is_running
            if starts < _MAX_STARTS and (reason := self._starved(endless)):
                starts += 1
                on_progress(f"the server starts again: {reason}")
                if self.log_file is not None and not self._own_log:
                    self.log_file.unlink()
                self.restart()
                continue
            paths = ["/v2/health/ready", *(f"/v2/models/{n}/ready" for n in self.served_models)]
            ready = not exited and all(map(self._answers, paths))
            state = self._load_state()  # read after `ready`, so that each ready model is reported
            for name in state.loaded:
                if name not in reported:
                    on_progress(f"{name} is ready")
                reported.add(name)
            if state.failures or exited:
                raise self._failed(state)
            if ready:
                self._was_ready = True
                self.living_steps()
                remove_byte_code(self.repository)
                return
            if time.monotonic() > deadline:
                raise self._late(timeout_s, state)
            time.sleep(_POLL_S)

    def find_crash(self, within_s: float) -> ServerError | None:
        """Wait `within_s` seconds for a crash of the server or a step; return its error or None."""
        deadline = time.monotonic() + within_s
        while not self._started().wait(min(_WATCH_S, max(deadline - time.monotonic(), 0.0))):
            dead = dead_steps(self.pid, self._steps)
            # Steps end with their server, and their end may be seen first.
            if dead and not self._started().wait(_DYING_S):
                pid, model = next(iter(dead.items()))
                why = describe_memory_kills(self._memory_kills)
                return self.failure("crashed", f"its process {pid} has ended{why}", model)
            if time.monotonic() >= deadline:
                return None
        return self._failed(self._load_state())

    def failure(self, rule: str, reason: str, step: str = "") -> ServerError:
        """Return an error of this server or of one of its steps; the log is retained."""
        self._keep_log = True
        return ServerError(step, rule, reason, self.log_file or Path())

    def living_steps(self) -> dict[int, str]:
        """Return living steps as models by process id; `find_crash` then monitors them."""
        self._steps = step_processes(self.pid)
        return self._steps

    def forget_steps(self, pids: Collection[int]) -> None:
        """Let `find_crash` not report the end of these processes, which the server ends itself."""
        self._steps = {pid: model for pid, model in self._steps.items() if pid not in pids}

    def restart(self) -> None:
        """Start again on the same ports; see `wait_ready`.

        Raises:
            UserError: See `start`.
        """
        log_file, own = self.log_file, self._own_log
        reserved, self._reserved = self._reserved, ExitStack()  # its ports stay reserved
        self.stop(grace_s=0.0)
        self._reserved = reserved
        self._served = self.repository
        self._wanted_ports = self._ports
        if own and log_file is not None and log_file.exists():
            log_file.replace(log_file.with_name(f"{log_file.name}.1"))
        self.log_file = log_file if own else None
        self._keep_log = own
        self.start()

    def stop(self, grace_s: float = 30.0) -> None:
        """Stop the server and remove its files, processes and shared memory.

        Pipelines first answer the requests in flight, for at most `grace_s` seconds, and reject new
        ones as unavailable. It can be called at any time and repeatedly, also after a crash.
        """
        if self._process is None:
            return
        died_before = not self._process.is_running
        is_serving = not died_before and (self._was_ready or self._answers("/v2/health/live"))
        try:
            grace_s = grace_s if is_serving else min(grace_s, _LOADING_GRACE_S)
            if is_serving and grace_s:
                health = HealthCheck(find_pipelines(self.repository))
                ask = partial(health.ask, f"http://{self.http_url}")
                drained = drain(self.pid, grace_s, ask, self._tag)
                if drained and self._holds_pipelines_only() and not self._traces():
                    grace_s = 0.0  # Triton would wait for seconds, and for idle connections longer
            self._process.end(grace_s)
        finally:
            self._process = None
            self._reserved.close()
            if self.log_file is not None and not (self._keep_log or died_before):
                self.log_file.unlink(missing_ok=True)
                self.log_file = None

    def _holds_pipelines_only(self) -> bool:
        """Whether all models are of pipelines that were built, whose configs are complete."""
        built = [p for p in find_pipelines(self.repository) if p.manifest_file.is_file()]
        return {step for p in built for step in (p.name, *p.steps)}.issuperset(
            list_models(self.repository)
        )

    def _traces(self) -> bool:
        """Whether requests are traced, which Triton writes down when it ends."""
        return any(
            flag.startswith("--trace-config") and not flag.endswith("=OFF")
            for flag in (*self._profile_flags, *self._extra_args)
        )

    def _open_log(self) -> Path:
        if self.log_file is None:
            handle, name = tempfile.mkstemp(prefix="triptych-server-", suffix=".log")
            os.close(handle)
            self.log_file = Path(name)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        # What an earlier server wrote would be taken for this one's; steps may log what users sent.
        handle = os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode=0o600)
        os.fchmod(handle, 0o600)  # the file may have existed
        os.write(handle, os.fsencode(describe_loader(os.environ)))
        os.close(handle)
        return self.log_file

    def _command(self, installation: Installation, mark: str) -> list[str]:
        command = [
            str(installation.executable),
            f"--model-repository={self._served}",
            f"--http-address={self._host}",
            f"--grpc-address={self._host}",  # the metrics service follows the HTTP address
            *(f"--{name.replace('_', '-')}={port}" for name, port in self._ports.items()),
            "--metrics-config=summary_latencies=true",
            f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
        ]
        command += [
            f"--backend-config={backend},shm-region-prefix-name={mark}"
            for backend in installation.python_backends
        ]
        if installation.backend_directory is not None:
            command.append(f"--backend-directory={installation.backend_directory}")
            command.append(f"--cache-directory={installation.executable.parents[1] / 'caches'}")
        # The embedded server has configs of its own where it lacks fields of others.
        own_configs = "" if installation.backend_directory is None else str(EMBEDDED_RELEASE)
        if config_name := self._choose_plan(own_configs) or own_configs:
            command.append(f"--model-config-name={config_name}")
        if self._holds_pipelines_only():
            # Otherwise Triton starts each step twice, first to complete its config.
            command.append("--disable-auto-complete-config")
        if self._models or self._profile.exchanges:
            command.append("--model-control-mode=explicit")
            command += [f"--load-model={name}" for name in self.served_models]
        if RATE_LIMIT not in self._profile_flags and uses_rate_limiter(self.repository):
            command.append(RATE_LIMIT)
        if self._profile.client_shm:
            release = find_release(own_backends=self.own_backends)
            command += [] if flags_newer_than([ALLOW_CLIENT_SHM], release) else [ALLOW_CLIENT_SHM]
        return [*command, *self._profile_flags, *absolute_paths(self._extra_args)]

    def _choose_plan(self, release: str) -> str:
        """Return the name of the configs that are planned for the machine, or an empty text."""
        if self._profile.machine is None:
            return ""
        found = find_machine(read_settings().cores)
        chosen = choose_variant(self.repository, found, self._profile.machine, release)
        self.plan_lines = chosen.lines
        return chosen.name

    def _started(self) -> ServerProcess:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process

    def _starved(self, endless: EndlessLoad) -> str:
        """Return text about a step that got no CPU and stopped the server; empty without one."""
        if self._started().is_running:
            return endless.describe(self.pid)
        log = self._log_text()
        return find_exit_reason(log) if is_cpu_starved(log) else ""

    def _load_state(self) -> LoadState:
        return read_load_state(self._log_text(), self._served)

    def _log_text(self) -> str:
        if self.log_file is None:
            raise RuntimeError("the server was not started")
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def _answers(self, path: str) -> bool:
        """Whether a GET is answered with 200."""
        return responds_ok(self.http_url, path)

    def _url(self, field: str) -> str:
        if not self._ports:
            raise RuntimeError("the server was not started")
        host = "127.0.0.1" if self._host == "0.0.0.0" else self._host
        return f"{host}:{self._ports[field]}"

    def _failed(self, state: LoadState) -> ServerError:
        if state.failures:
            first, *others = state.failures
            also = f"; also failed: {', '.join(f.step for f in others)}" if others else ""
            return self.failure("does not load", first.reason + also, first.step)
        why = describe_memory_kills(self._memory_kills)
        status = f"{self._started().exit_status}{why}; log: {find_exit_reason(self._log_text())}"
        return self.failure("crashed", status)

    def _late(self, timeout_s: float, state: LoadState) -> ServerError:
        return self.failure(
            f"was not ready within {timeout_s:g} s",
            f"still loading: {', '.join(state.loading)}" if state.loading else "no output",
            state.loading[0] if state.loading else "",
        )
