"""Verbs around a server: serve, verify, doctor.

A server that a verb runs until it is interrupted, and what it tells on the way.

The verb `dev`: a pipeline built, served, watched, and exchanged at each change.

The verb `ui`: a page in the browser that asks a pipeline.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from triptych.base.errors import UserError
from triptych.interface.cli.options import (
    EXIT_FINDINGS,
    PIPELINES,
    REPOSITORY,
    SAMPLES,
    Json,
    LoadTimeout,
    Name,
    Overrides,
    Pipelines,
    Port,
    Repository,
    app,
    output,
    print_json,
    progress,
    status,
)
from triptych.interface.cli.tables import (
    print_built,
    print_failed_gate,
    print_finding,
    tell_verdict,
)
from triptych.runtime.sample_files import FOLDER_VARIABLE

if TYPE_CHECKING:
    from triptych.building.dev import Round
    from triptych.serving.fleet.mirrored import Mirrored
    from triptych.serving.server import Server
    from triptych.spec.any_spec import AnySpec


def run(
    server: Server, announce: Callable[[], None], *, timeout_s: float, meanwhile: Callable[[], None]
) -> None:
    """Serve until interrupted.

    Args:
        server: not started yet.
        announce: called whenever the server is ready.
        timeout_s: that the models may take to load.
        meanwhile: called now and then while it serves.

    Raises:
        UserError: the server does not become ready.
    """
    from triptych.serving.endpoint import serve_until_asked

    asked = serve_until_asked(
        server,
        timeout_s=timeout_s,
        on_progress=lambda line: progress("load", line),
        on_ready=announce,
        on_death=lambda line: status.print(f"error: {line}", style="red", markup=False),
        meanwhile=meanwhile,
    )
    status.print(f"stopped ({asked})", markup=False)


def warn(line: str) -> None:
    """Tell what did not go well and ended nothing."""
    status.print(f"warning: {line}", style="yellow", markup=False)


@contextmanager
def stoppable() -> Iterator[None]:
    """A SIGTERM ends the verb as Ctrl-C does: servers stopped, nothing left behind."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@app.command()
def dev(
    name: Name,
    pipelines: Pipelines = PIPELINES,
    repository: Repository = REPOSITORY,
    overrides: Overrides = None,
    grpc_port: Port = 8001,
    http_port: Port = 8000,
    metrics_port: Port = 8002,
    timeout_s: LoadTimeout = 120.0,
    as_json: Json = False,
) -> None:
    """Serve a pipeline, and exchange it whenever its files change.

    A change with a mistake is told, and what was there before goes on serving. Ctrl-C ends it.
    """
    from triptych.building.dev import Watch, rebuild
    from triptych.serving.exchange import Exchange
    from triptych.serving.server import Server

    folder = pipelines / name
    watch = Watch(folder)

    def work(changed: list[str]) -> bool:
        found = rebuild(folder, repository, overrides or (), progress)
        _tell_round(found, as_json=as_json, changed=changed)
        return found.built is not None

    if not work([]):
        raise typer.Exit(EXIT_FINDINGS)
    server = Server(
        repository,
        grpc_port=grpc_port,
        http_port=http_port,
        metrics_port=metrics_port,
        models=[name],
    )
    exchange = Exchange(
        server,
        only=name,
        on_exchange=lambda line: progress("serve", line),
        on_problem=warn,
    )

    def look() -> None:
        changed = watch.changed()
        if changed:
            work(changed)
        exchange.look()

    def announce() -> None:
        if as_json:
            print(json.dumps({"grpc": server.grpc_url, "pid": server.pid}), flush=True)
            return
        output.print(
            f"{name} is ready at {server.grpc_url}; edit {folder}, or stop with Ctrl-C",
            style="green",
            markup=False,
        )

    run(server, announce, timeout_s=timeout_s, meanwhile=look)


def _tell_round(found: Round, *, as_json: bool, changed: list[str]) -> None:
    """One round, as the verbs `test` and `build` would tell it."""
    from triptych.base.errors import UserError
    from triptych.core.engine.stage import EngineFailure
    from triptych.core.gate.cached import GateFailure
    from triptych.repository.lint.checks import LintFailure

    failure = found.failure
    for check in found.problems:
        style = "red" if check.severity == "error" else "yellow"
        status.print(f"{check.severity}: {check.name}: {check.note}", style=style, markup=False)
    if isinstance(failure, GateFailure | EngineFailure):
        print_failed_gate(status, failure.gate)
    if isinstance(failure, LintFailure):
        for finding in failure.findings:
            print_finding(status, finding.as_dict())
    why = ""
    if failure is not None:
        known = isinstance(failure, UserError | GateFailure | EngineFailure | LintFailure)
        said = failure.message if isinstance(failure, UserError) else str(failure)
        why = said if known else f"{type(failure).__name__}: {said}"
        status.print(f"error: {why}", style="red", markup=False)
    if found.built is not None:
        print_built(status, found.built)
    elif not why:
        why = "; ".join(c.note for c in found.problems if c.severity == "error")
    what = f"{', '.join(changed)} changed: " if changed else ""
    done = "built" if found.built is not None else "not built, nothing was written"
    status.print(f"{what}{done} ({found.seconds:.1f} s)", style="bold", markup=False)
    if as_json:
        models = [] if found.built is None else list(found.built.changed)
        result = {"changed": changed, "models": models, "error": why, "seconds": found.seconds}
        print(json.dumps(result), flush=True)


@app.command()
def serve(
    repository: Annotated[
        Path, typer.Argument(help="Folder of the model repository, or one pipeline of it alone.")
    ] = REPOSITORY,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    grpc_port: Port = 8001,
    http_port: Port = 8000,
    metrics_port: Port = 8002,
    timeout_s: LoadTimeout = 120.0,
    log_file: Annotated[Path | None, typer.Option(help="Where the server's log goes.")] = None,
    profile: Annotated[
        Literal["development", "production"],
        typer.Option(help="production takes the serving image's flags, check and TRIPTYCH_*."),
    ] = "development",
    replicas: Annotated[
        int | None, typer.Option(help="So many servers, behind Envoy; 1 unless there are --gpus.")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="One replica on each, such as 0,1: numbers or UUIDs.")
    ] = None,
    mirror: Annotated[
        str | None,
        typer.Option(
            metavar="REPOSITORY:SHARE", help="Build beside them that gets copies of requests."
        ),
    ] = None,
    samples: Annotated[
        Path,
        typer.Option(
            envvar=FOLDER_VARIABLE, help="Where rows are kept of pipelines that sample them."
        ),
    ] = SAMPLES,
    as_json: Json = False,
) -> None:
    """Run a real tritonserver on what is built, until interrupted.

    With --replicas or --gpus several of them, behind Envoy, which takes their ports. What a build
    of --mirror answers nobody gets: it is sampled, in .candidate of the samples.
    """
    from triptych.container.machine import find_gpus
    from triptych.repository.store import recover
    from triptych.serving.fleet.mirrored import FOLDER, check_alike, mirrored_of
    from triptych.serving.fleet.serve import check_gpus, count_replicas
    from triptych.serving.ports import is_loopback
    from triptych.serving.server import check_and_make_flags

    repository, models = _what_to_serve(repository)
    named = gpus.split(",") if gpus is not None else []
    count = count_replicas(replicas, named)
    mirrored = None if mirror is None else mirrored_of(mirror)
    if mirrored is not None:
        if count == 1:
            raise UserError("--mirror", "must come with --replicas of 2 or more: Envoy mirrors")
        check_alike(repository, mirrored.repository)
        recover(mirrored.repository)
    if named:
        check_gpus(named, len(find_gpus()))
    if not is_loopback(host):
        warn(
            f"{host} is reached from other machines, and Triton asks nobody who they are: "
            "keep it behind a gateway that does (docker/README.md)"
        )
    recover(repository)
    production = profile == "production"
    order = _Order(
        repository,
        models,
        host,
        grpc_port,
        http_port,
        metrics_port,
        log_file,
        check_and_make_flags(repository, production=production, one_gpu=bool(named)),
        timeout_s,
        production,
        named,
        {FOLDER_VARIABLE: str(samples.absolute())},
        mirrored,
        {FOLDER_VARIABLE: str(samples.absolute() / FOLDER)},
        as_json,
    )
    if count == 1:
        _serve_one(order)
    else:
        _serve_fleet(order, count)


class _Order(NamedTuple):
    """What `serve` was asked for, checked."""

    repository: Path
    models: list[str]
    host: str
    grpc_port: int
    http_port: int
    metrics_port: int
    log_file: Path | None
    flags: list[str]
    timeout_s: float
    production: bool
    gpus: list[str]
    environment: dict[str, str]
    mirrored: Mirrored | None
    candidate_environment: dict[str, str]
    as_json: bool


def _serve_one(order: _Order) -> None:
    from triptych.serving.exchange import Exchange
    from triptych.serving.fleet.serve import variables_of
    from triptych.serving.server import Server

    server = Server(
        order.repository,
        models=order.models,
        host=order.host,
        grpc_port=order.grpc_port,
        http_port=order.http_port,
        metrics_port=order.metrics_port,
        log_file=order.log_file,
        exchanges=not order.production,
        production_flags=order.flags,
        environment={**order.environment, **variables_of(order.gpus, 0)},
    )
    exchange = Exchange(server, on_exchange=_tell, on_problem=warn, production=order.production)

    def announce() -> None:
        endpoints = {
            "grpc": server.grpc_url,
            "http": server.http_url,
            "metrics": server.metrics_url,
        }
        _announce(endpoints, {"pid": server.pid}, as_json=order.as_json)

    run(server, announce, timeout_s=order.timeout_s, meanwhile=exchange.look)


def _serve_fleet(order: _Order, replicas: int) -> None:
    from triptych.serving.fleet.serve import find_crowding, new_fleet, serve_until_asked

    with new_fleet(
        order.repository,
        replicas=replicas,
        gpus=order.gpus,
        host=order.host,
        grpc_port=order.grpc_port,
        http_port=order.http_port,
        metrics_port=order.metrics_port,
        models=order.models,
        production_flags=order.flags,
        environment=order.environment,
        mirrored=order.mirrored,
        candidate_environment=order.candidate_environment,
        exchanges=not order.production,
        log_file=order.log_file,
        load_s=order.timeout_s,
        on_change=_tell,
        on_problem=warn,
    ) as fleet:

        def announce() -> None:
            replicas = fleet.described()
            for line in find_crowding(replica["pid"] for replica in replicas):
                warn(line)
            _announce(fleet.endpoints, {"replicas": replicas}, as_json=order.as_json)

        asked = serve_until_asked(fleet, announce)
    status.print(f"stopped ({asked})", markup=False)


def _tell(line: str) -> None:
    status.print(line, style="green", markup=False)


def _announce(endpoints: dict[str, str], more: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**endpoints, **more}), flush=True)
        return
    output.print("ready; stop with Ctrl-C", style="green")
    for kind, endpoint in endpoints.items():
        output.print(f"  {kind:8} {endpoint}", markup=False)


def _what_to_serve(named: Path) -> tuple[Path, list[str]]:
    """The repository and, where a pipeline of it was named, that one's name."""
    from triptych.repository.config import CONFIG_FILE
    from triptych.repository.manifest import MANIFEST_FILE

    if named.is_dir() and any(named.glob(f"*/{CONFIG_FILE}")):
        return named, []
    if named.name == str(named) and (REPOSITORY / named / CONFIG_FILE).is_file():
        return REPOSITORY, [named.name]
    built = sorted(path.parent.name for path in REPOSITORY.glob(f"*/{MANIFEST_FILE}"))
    raise UserError(
        "repository",
        "must be a folder with models, or a pipeline that is built",
        given=named,
        remedy=f"Run `triptych build NAME` first; built are: {', '.join(built) or 'none'}",
    )


@app.command()
def verify(
    name: Name,
    url: Annotated[
        str | None,
        typer.Option(help="gRPC endpoint of a server; without it one is started and stopped."),
    ] = None,
    pipelines: Pipelines = PIPELINES,
    repository: Repository = REPOSITORY,
    overrides: Overrides = None,
    clients: Annotated[int, typer.Option(min=1, max=256, help="Requests under way at once.")] = 16,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Deadline of each request.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Run the accuracy gate again, through any server."""
    from triptych.building.kinds import STEPS
    from triptych.serving.endpoint import check_built, served
    from triptych.spec.any_spec import load_any_spec

    if url is None:
        check_built(repository, name)
    spec = load_any_spec(pipelines / name, overrides or ())
    steps = STEPS[spec.kind]
    inputs = steps.read(spec, progress)
    server = served(repository, name, url, progress)
    result = steps.verify(
        inputs, repository, server, progress, clients=clients, timeout_s=timeout_s
    )
    lines = steps.describe_verification(result)
    tell_verdict(result.as_dict(), lines, passed=result.passed, as_json=as_json)


@app.command()
def doctor(
    grpc_port: Annotated[int, typer.Option(help="Port that serve will use.")] = 8001,
    http_port: Annotated[int, typer.Option(help="Port that serve will use.")] = 8000,
    metrics_port: Annotated[int, typer.Option(help="Port that serve will use.")] = 8002,
    as_json: Json = False,
) -> None:
    """Say what works on this machine, and how to mend the rest."""
    from triptych.serving.doctor import examine

    findings = [
        finding.as_dict()
        for finding in examine(grpc_port=grpc_port, http_port=http_port, metrics_port=metrics_port)
    ]
    errors = sum(finding["severity"] == "error" for finding in findings)
    if as_json:
        print_json(findings)
    else:
        for finding in findings:
            print_finding(output, finding)
        output.print(f"{errors} errors" if errors else "nothing stops you", markup=False)
    raise typer.Exit(EXIT_FINDINGS if errors else 0)


@app.command()
def ui(
    name: Name,
    url: Annotated[
        str | None,
        typer.Option(help="gRPC endpoint of a server; without it one is started and stopped."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address that the page listens on.")] = "127.0.0.1",
    port: Port = 7860,
    pipelines: Pipelines = PIPELINES,
    repository: Repository = REPOSITORY,
    timeout_s: LoadTimeout = 120.0,
    request_timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Deadline of each request.")
    ] = 30.0,
    as_json: Json = False,
) -> None:
    """Open a page in the browser to try a pipeline on.

    It shows answers as the task has them, and where their time went. Ctrl-C ends it.
    """
    from triptych.interface.kinds import FACES
    from triptych.repository.store import recover
    from triptych.serving.endpoint import check_built
    from triptych.serving.exchange import Exchange
    from triptych.serving.ports import claim_ports, is_loopback
    from triptych.serving.server import Server, check_and_make_flags

    if url is None:
        check_built(repository, name)
        recover(repository)
        check_and_make_flags(repository, production=False)
    port = claim_ports(host, {"--port": port})["--port"]  # before a server is started for nothing
    spec = _built_or_written(name, repository, pipelines)
    if not is_loopback(host):
        warn(f"{host} is reached from other machines, and the page asks nobody who they are")
    with ExitStack() as opened:

        def open_page(grpc_url: str, pid: int | None) -> None:
            made = FACES[spec.kind].open_page(
                spec, pipelines / name, grpc_url, host, port, request_timeout_s
            )
            page = opened.enter_context(made)
            if as_json:
                print(json.dumps({"page": page.url, "grpc": grpc_url, "pid": pid}), flush=True)
            else:
                output.print(f"open {page.url} to try {name}; stop with Ctrl-C", style="green")

        if url is not None:
            with stoppable():
                open_page(url, None)
                try:
                    signal.pause()
                except KeyboardInterrupt:
                    status.print("stopped", markup=False)
            return
        server = Server(repository, models=[name])
        exchange = Exchange(
            server, only=name, on_exchange=lambda line: progress("serve", line), on_problem=warn
        )
        pages: list[str] = []

        def announce() -> None:
            if not pages:  # a server that died comes back at the same address
                pages.append(server.grpc_url)
                open_page(server.grpc_url, server.pid)

        run(server, announce, timeout_s=timeout_s, meanwhile=exchange.look)


def _built_or_written(name: str, repository: Path, pipelines: Path) -> AnySpec:
    """The spec of what is built; where that is elsewhere, what the pipeline's folder says."""
    from triptych.repository.manifest import find_built_spec
    from triptych.spec.any_spec import load_any_spec

    return find_built_spec(repository, name) or load_any_spec(pipelines / name)
