"""Starting a real tritonserver on a model repository, knowing when it is ready, and stopping it.

Usage: ``with Server(repository) as server: client = Client(server.grpc_url)``.

The models of a repository as tritonserver sees them: every folder is one.

A server's own folder, whose path a shell reads as it is, wherever TMPDIR may be.

Serving on this machine as the image does: the same check of the files, the same flags.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from triptych.base.errors import UserError
from triptych.container.entrypoint import (
    PLAIN,
    check_model_names,
    flags_for,
    is_plain,
    server_variables,
    warn_of,
)
from triptych.container.flags import CLOSED, FREE_REQUESTS, RESTRICTED_HEADER, restricted_flags
from triptych.container.lock_check import enforce
from triptych.container.machine import read_machine
from triptych.container.manifests import find_pipelines
from triptych.container.settings import read_settings
from triptych.container.supervisor import (
    EndlessLoad,
    conceal_keys,
    dead_steps,
    drain,
    step_processes,
)
from triptych.serving.embedded import (
    EMBEDDED_RELEASE,
    Installation,
    find_installation,
    find_release,
)
from triptych.serving.orphan_cleanup import new_process_tag
from triptych.serving.ports import release_ports, reserve_ports
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
    """The names of the repository's models, in order."""
    return sorted(
        path.name
        for path in repository.iterdir()
        if path.is_dir() and not path.name.startswith(".")
    )


def check_models(repository: Path, wanted: Sequence[str]) -> None:
    """Raises a `UserError` where the repository cannot be served, or lacks one of `wanted`."""
    if not repository.is_dir():
        raise UserError("repository", "must be a folder", given=repository)
    there = list_models(repository)
    if not there:
        raise UserError(
            "repository",
            "must hold at least one model",
            given=repository,
            remedy="Run `triptych build NAME` first",
        )
    check_model_names(repository)
    for name in wanted:
        if name not in there:
            raise UserError(
                "models",
                "must name models of the repository",
                given=name,
                remedy=f"There are: {', '.join(there)}",
            )


def new_shell_safe_dir() -> Path:
    """A folder of this server's own, whose path is plain wherever TMPDIR is; see `shell`."""
    parent = next(parent for parent in (tempfile.gettempdir(), "/tmp") if is_plain(parent))
    try:
        return Path(tempfile.mkdtemp(prefix="triptych-server-", dir=parent))
    except OSError as error:
        raise UserError(
            "TMPDIR",
            f"must be a folder that can be written to, whose path is of {PLAIN}",
            given=error,
            remedy="Set TMPDIR to one",
        ) from error


def check_and_make_flags(repository: Path, *, production: bool, one_gpu: bool = False) -> list[str]:
    """The flags of the image's entry point for the server that is here; files are checked before.

    The image's variables count, but for host, ports, server and repository. Without `production`
    there are no flags, and engines are left to the server. `one_gpu`: it will see but one of them.

    Raises:
        UserError: a setting is wrong, or a pipeline cannot be served here; which ones, and why,
            was printed on standard error.
    """
    settings = read_settings(os.environ, repository=str(repository))
    machine = read_machine(os.environ) if production else None
    if machine is not None and one_gpu:
        machine = machine._replace(gpus=machine.gpus[:1])
    if not enforce(settings, machine):
        raise UserError(
            "repository",
            "must hold pipelines that can be served as they were built",
            given=repository,
            remedy="Follow the lines above, or set TRIPTYCH_LOCK_CHECK=warn",
        )
    if machine is None:
        return []
    release = find_release()
    warn_of(release)
    return flags_for(repository, settings.options, machine, release)


# Longer than any grace: `stop` alone decides how long requests in flight may take.
_EXIT_TIMEOUT_S = 3600
# While models load no request can be in flight, and the server does not heed SIGTERM.
_LOADING_GRACE_S = 2.0
_POLL_S, _WATCH_S, _DYING_S = 0.05, 0.2, 1.0
_MAX_STARTS = 3


class Server:
    """A tritonserver of this process's own; it never outlives this process.

    As a context manager it starts and waits on entry, and stops on exit. It runs in a session of
    its own, so Ctrl-C at the terminal reaches only this process, which then stops it once.

    Args:
        repository: the model repository.
        host: the address to listen on; loopback by default. ``0.0.0.0`` listens on every address.
        grpc_port: 0 picks a free one, as for the other two.
        http_port: see `grpc_port`.
        metrics_port: see `grpc_port`.
        models: serve these only (and what their ensembles need); empty serves all.
        exchanges: whether models may be exchanged while it serves, as with `models`; not in the
            production profile.
        production_flags: those of the production profile; without them the services of `CLOSED` are
            open to `operator_headers` only.
        extra_args: more flags of tritonserver's own, last on its command line.
        environment: variables to set over those of this process.
        log_file: where the server's log goes. None makes a file in the temporary folder, which
            `stop` removes unless the server failed.
        backend_directory: backends of the caller's, a folder each, laid over those of the embedded
            server; asks for the embedded server even where a tritonserver is on PATH.
    """

    def __init__(
        self,
        repository: Path,
        *,
        host: str = "127.0.0.1",
        grpc_port: int = 0,
        http_port: int = 0,
        metrics_port: int = 0,
        models: Sequence[str] = (),
        exchanges: bool = False,
        production_flags: Sequence[str] = (),
        extra_args: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log_file: Path | None = None,
        backend_directory: Path | None = None,
    ) -> None:
        self._served = self.repository = repository.resolve()  # `_served`: as the server sees it
        self.log_file = log_file
        self._keep_log = log_file is not None
        self._host = host
        self._wanted_ports = {"grpc_port": grpc_port, "http_port": http_port}
        self._wanted_ports["metrics_port"] = metrics_port
        self._ports: dict[str, int] = {}
        self._picked: list[int] = []
        self._models = tuple(models)
        self._exchanges = exchanges
        self._key = secrets.token_urlsafe(32)
        self._profile_flags = tuple(production_flags) or (
            FREE_REQUESTS,
            *restricted_flags(CLOSED, self._key),
        )
        self._extra_args = tuple(extra_args)
        self.environment = dict(environment or {})
        self._own_backends = backend_directory
        self._process: ServerProcess | None = None
        self._own_log = log_file is not None
        self._mark = ""
        self._steps: dict[int, str] = {}

    @property
    def pid(self) -> int:
        return self._started().pid

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
        """Over gRPC they open what is shut, but in the production profile: that has its own key."""
        return {f"triton-grpc-protocol-{RESTRICTED_HEADER}": self._key}

    def __enter__(self) -> Server:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop(grace_s=_LOADING_GRACE_S)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the process and returns at once.

        Raises:
            UserError: no repository, an unknown model, a busy port, or no server to start.
        """
        if self._process is not None:
            raise RuntimeError("the server was started already")
        check_models(self.repository, self._models)
        self._ports = reserve_ports(self._host, self._wanted_ports)
        self._picked += [self._ports[name] for name, port in self._wanted_ports.items() if not port]
        mark = self._mark = new_process_tag()
        private = new_shell_safe_dir()
        try:
            if not is_plain(self.repository):
                self._served = private / "repository"
                self._served.symlink_to(self.repository, target_is_directory=True)
            installation = find_installation(private, own_backends=self._own_backends)
            log_file = self._open_log()
            self._process = ServerProcess(
                self._command(installation, mark),
                {
                    **server_variables(os.environ),
                    **installation.environment,
                    **self.environment,
                },
                mark=mark,
                log_file=log_file,
                own_paths=[private],
                orphan_paths=[] if self._keep_log else [log_file],
            )
        except BaseException:
            shutil.rmtree(private, ignore_errors=True)
            self._release_ports()
            raise
        conceal_keys(self._process.pid)

    def wait_ready(
        self, timeout_s: float = 600.0, on_progress: Callable[[str], None] | None = None
    ) -> None:
        """Returns once the server and every model that it was asked to serve are ready.

        One that a step without CPU ended, or lets wait for ever, is started again, twice at most.

        Args:
            timeout_s: for all of it.
            on_progress: called with one line for each model that became ready, and each such end.

        Raises:
            ServerError: a model died (it says which, and why), the server exited, or time ran out.
        """
        deadline = time.monotonic() + timeout_s
        told: set[str] = set()
        starts, endless = 1, EndlessLoad()
        while True:
            exited = not self._started().is_running
            if starts < _MAX_STARTS and (reason := self._starved(endless)):
                starts += 1
                if on_progress is not None:
                    on_progress(f"the server starts again: {reason}")
                if self.log_file is not None and not self._own_log:
                    self.log_file.unlink()
                self.restart()
                continue
            ready = not exited and self._answers("/v2/health/ready") and not self._waiting_for()
            state = self._load_state()  # of no earlier moment: all that is ready is told
            for name in state.loaded:
                if name not in told and on_progress is not None:
                    on_progress(f"{name} is ready")
                told.add(name)
            if state.failures or exited:
                raise self._failed(state)
            if ready:
                self.living_steps()
                return
            if time.monotonic() > deadline:
                raise self._late(timeout_s, state)
            time.sleep(_POLL_S)

    def find_crash(self, within_s: float) -> ServerError | None:
        """Why the server or one of its steps died by itself, if one does within some seconds."""
        deadline = time.monotonic() + within_s
        while not self._started().wait(min(_WATCH_S, max(deadline - time.monotonic(), 0.0))):
            dead = dead_steps(self.pid, self._steps)
            # Steps end with their server, and may be seen dead before it is.
            if dead and not self._started().wait(_DYING_S):
                self._keep_log = True
                pid, model = next(iter(dead.items()))
                reason = f"its process {pid} is gone"
                return ServerError(model, "must stay up", reason, self.log_file or Path())
            if time.monotonic() >= deadline:
                return None
        return self._failed(self._load_state())

    def living_steps(self) -> dict[int, str]:
        """Return living steps as models by process id; `find_crash` then watches them."""
        self._steps = step_processes(self.pid)
        return self._steps

    def restart(self, repository: Path | None = None) -> None:
        """Start anew on the same ports, if named on another repository; `wait_ready` waits for it.

        Raises:
            UserError: see `start`.
        """
        log_file, own = self.log_file, self._own_log
        picked, self._picked = self._picked, []  # its own all the time
        self.stop(grace_s=0.0)
        self._picked = picked
        self.repository = self._served = (repository or self.repository).resolve()
        self._wanted_ports = self._ports
        if own and log_file is not None and log_file.exists():
            log_file.replace(log_file.with_name(f"{log_file.name}.1"))
        self.log_file = log_file if own else None
        self._keep_log = own
        self.start()

    def stop(self, grace_s: float = 30.0) -> None:
        """Ends the server and removes everything that it made on this machine.

        Pipelines answer the requests in flight first, for `grace_s` at most, and refuse new ones as
        unavailable. May be called at any time and more than once, also when the server is dead.
        """
        if self._process is None:
            return
        died_before = not self._process.is_running
        is_serving = not died_before and self._answers("/v2/health/live")
        try:
            grace_s = grace_s if is_serving else min(grace_s, _LOADING_GRACE_S)
            if is_serving and grace_s:
                drained = drain(self.pid, grace_s, self._mark)
                if drained and self._holds_pipelines_only() and not self._traces():
                    grace_s = 0.0  # Triton would wait for seconds, and for idle connections longer
            self._process.end(grace_s)
        finally:
            self._process = None
            self._release_ports()
            if self.log_file is not None and not (self._keep_log or died_before):
                self.log_file.unlink(missing_ok=True)
                self.log_file = None

    def _release_ports(self) -> None:
        picked, self._picked = self._picked, []
        release_ports(picked)

    def _holds_pipelines_only(self) -> bool:
        """Whether all models are of pipelines that were built, whose configs are complete."""
        built = [p for p in find_pipelines(self.repository) if p.lock_file.is_file()]
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
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.close(os.open(self.log_file, flags, mode=0o600))
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
            # Configs with fields that it lacks have one for it beside them.
            command.append(f"--model-config-name={EMBEDDED_RELEASE}")
        if self._holds_pipelines_only():
            # Else each step is started twice, to be asked for its config first.
            command.append("--disable-auto-complete-config")
        if self._models or self._exchanges:
            command.append("--model-control-mode=explicit")
            command += [f"--load-model={name}" for name in self._wanted_models()]
        return [*command, *self._profile_flags, *self._extra_args]

    def _started(self) -> ServerProcess:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process

    def _starved(self, endless: EndlessLoad) -> str:
        """What a step that got no CPU while it loads did to the server; nothing gives no text."""
        if self._started().is_running:
            return endless.told(self.pid)
        log = self._log_text()
        return find_exit_reason(log) if is_cpu_starved(log) else ""

    def _load_state(self) -> LoadState:
        return read_load_state(self._log_text(), self._served)

    def _log_text(self) -> str:
        if self.log_file is None:
            raise RuntimeError("the server was not started")
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def _waiting_for(self) -> list[str]:
        names = self._wanted_models()
        return [name for name in names if not self._answers(f"/v2/models/{name}/ready")]

    def _wanted_models(self) -> Sequence[str]:
        return self._models or list_models(self.repository)

    def _answers(self, path: str) -> bool:
        """Whether a GET is answered with 200."""
        return responds_ok(self.http_url, path)

    def _url(self, field: str) -> str:
        if not self._ports:
            raise RuntimeError("the server was not started")
        host = "127.0.0.1" if self._host == "0.0.0.0" else self._host
        return f"{host}:{self._ports[field]}"

    def _failed(self, state: LoadState) -> ServerError:
        self._keep_log = True
        log_file = self.log_file or Path()
        if state.failures:
            first, *others = state.failures
            also = f"; these died too: {', '.join(f.step for f in others)}" if others else ""
            return ServerError(first.step, "must load", first.reason + also, log_file)
        said = f"{self._started().exit_status}; it said: {find_exit_reason(self._log_text())}"
        return ServerError("", "must stay up", said, log_file)

    def _late(self, timeout_s: float, state: LoadState) -> ServerError:
        self._keep_log = True
        return ServerError(
            state.loading[0] if state.loading else "",
            f"must be ready within {timeout_s:g} s",
            f"still loading: {', '.join(state.loading)}" if state.loading else "no sign of life",
            self.log_file or Path(),
        )
