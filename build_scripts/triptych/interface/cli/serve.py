"""Verbs that run a server: serve, dev, ui, verify; and doctor."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from triptych.base.errors import UserError
from triptych.base.extras import imports_of_extra
from triptych.interface.cli.command import verb
from triptych.interface.cli.gateway import GatewayOptions, GatewayProcess, check_access
from triptych.interface.cli.options import (
    EXIT_FINDINGS,
    REPOSITORY,
    SAMPLES,
    BackendDirectory,
    Folders,
    Json,
    LoadTimeout,
    Name,
    Overrides,
    PlannedMachine,
    Ports,
    Samples,
    Url,
    output,
    print_json,
    progress,
    say,
    sigterm_as_interrupt,
    status,
    warn,
)
from triptych.interface.cli.tables import (
    exit_with_verdict,
    print_built,
    print_failed_gate,
    print_finding,
)
from triptych.runtime.sampling import FOLDER_VARIABLE

if TYPE_CHECKING:
    from triptych.building.dev import Round
    from triptych.interface.demo_page import PagePipeline
    from triptych.serving.server import Server
    from triptych.spec.any_spec import AnySpec


def run(
    server: Server,
    announce: Callable[[], None],
    *,
    timeout_s: float,
    meanwhile: Callable[[], object],
    before_stop: Callable[[], None] = lambda: None,
) -> None:
    """Run a server until it is interrupted.

    Args:
        server: Server, not started yet.
        announce: Called each time the server is ready.
        timeout_s: Maximum time to load the models, in seconds.
        meanwhile: Called regularly while the server runs; returns whether it loaded another build.
        before_stop: Called before the server stops.

    Raises:
        UserError: The server does not become ready.
    """
    from triptych.serving.endpoint import serve_until_signal

    asked = serve_until_signal(
        server,
        timeout_s=timeout_s,
        on_progress=lambda line: progress("load", line),
        on_ready=announce,
        on_crash=lambda line: status.print(f"error: {line}", style="red", markup=False),
        meanwhile=meanwhile,
        before_stop=before_stop,
    )
    status.print(f"stopped ({asked})", markup=False)


@verb()
def dev(
    name: Name,
    folders: Folders,
    ports: Ports,
    overrides: Overrides = None,
    timeout_s: LoadTimeout = 120.0,
    as_json: Json = False,
) -> None:
    """Serve a pipeline, and rebuild it when its files change.

    A pipeline that is built already is served at once, and built again in the background. An edit
    of hooks.py is served after a short check, and marked as unchecked until the accuracy gate has
    run. A failed build is reported, and the server keeps the previous one. Ctrl-C ends the server.
    """
    from triptych.building.dev import DevBuilds, rebuild
    from triptych.repository.store import recover
    from triptych.serving.hot_reload import HotReload
    from triptych.serving.server import Server, ServerAddress
    from triptych.spec.spec import SPEC_FILE, check_folder

    folder = folders.pipelines / name
    check_folder(folder, folder / SPEC_FILE)

    def build(changed: list[str]) -> Round:
        return rebuild(folder, folders.repository, overrides or (), progress, changed)

    def show(changed: list[str], done: Round) -> None:
        _print_round(done, as_json=as_json, changed=changed)

    builds = DevBuilds(folder, build, show)
    recover(folders.repository)
    outdated = _is_built(folders.repository, name)
    if not outdated:
        done = build([])
        show([], done)
        if done.built is None:
            raise typer.Exit(EXIT_FINDINGS)
    server = Server(folders.repository, models=[name], address=ServerAddress(**vars(ports)))
    exchange = HotReload(
        server,
        only=name,
        on_reload=lambda line: progress("serve", line),
        on_problem=warn,
    )

    def check_files() -> bool:
        builds.poll()
        return exchange.poll()

    def announce() -> None:
        nonlocal outdated
        if outdated:  # at the first start
            outdated = False
            progress("build", "an earlier build is served; the files are built behind it")
            builds.start()
        if as_json:
            print(json.dumps({"grpc": server.grpc_url, "pid": server.pid}), flush=True)
            return
        output.print(
            f"{name} is ready at {server.grpc_url}; edit {folder}, or stop with Ctrl-C",
            style="green",
            markup=False,
        )

    run(server, announce, timeout_s=timeout_s, meanwhile=check_files)
    if builds.is_busy:  # the interpreter cannot end a thread that computes
        status.print("the build in progress is dropped", markup=False)
        sys.stdout.flush()
        os._exit(0)


def _is_built(repository: Path, name: str) -> bool:
    """Return whether a build of the pipeline can be served as it is."""
    from triptych.serving.endpoint import check_built

    try:
        check_built(repository, name)
    except UserError:
        return False
    return True


def _print_round(done: Round, *, as_json: bool, changed: list[str]) -> None:
    """Print the results of a rebuild in the format of the verbs `test` and `build`."""
    from triptych.core.engine.stage import EngineFailure
    from triptych.core.gate.cached import GateFailure
    from triptych.repository.lint.checks import LintFailure

    failure = done.failure
    for check in done.problems:
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
        message = failure.message if isinstance(failure, UserError) else str(failure)
        why = message if known else f"{type(failure).__name__}: {message}"
        status.print(f"error: {why}", style="red", markup=False)
    if done.built is not None:
        print_built(status, done.built)
    elif not why:
        why = "; ".join(c.note for c in done.problems if c.severity == "error")
    what = f"{', '.join(changed)} changed: " if changed else ""
    outcome = "built" if done.built is not None else "not built, nothing was written"
    status.print(f"{what}{outcome} ({done.seconds:.1f} s)", style="bold", markup=False)
    if as_json:
        models = [] if done.built is None else list(done.built.changed)
        result = {"changed": changed, "models": models, "error": why, "seconds": done.seconds}
        print(json.dumps(result), flush=True)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `serve`."""

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    timeout_s: LoadTimeout = 120.0
    log_file: Annotated[
        Path | None, typer.Option(help="File for the server's log. Default: a temporary file.")
    ] = None
    profile: Annotated[
        Literal["development", "production"],
        typer.Option(
            help="Settings of the server. production: flags, startup check and TRIPTYCH_* "
            "variables of the serving image."
        ),
    ] = "development"
    client_shm: Annotated[
        bool,
        typer.Option(
            "--client-shm",
            help="Let clients on this machine pass tensors in shared memory, as perf_analyzer "
            "--shared-memory=system does. They can then read the memory of the steps. Only for the "
            "development profile.",
        ),
    ] = False
    backend_directory: BackendDirectory = None
    http_api: Annotated[
        int | None,
        typer.Option(
            "--http-api",
            metavar="PORT",
            min=0,
            max=65535,
            help="Port of a gateway with the HTTP APIs of OpenAI, Cohere, Jina and TEI, in a "
            "process of its own; 0 picks a free port. Default: no gateway.",
        ),
    ] = None
    machine: PlannedMachine = None
    samples: Samples = SAMPLES
    as_json: Json = False

    @property
    def production(self) -> bool:
        """Whether the server runs as it does in the serving image."""
        return self.profile == "production"


@verb()
def serve(
    repository: Annotated[
        Path, typer.Argument(help="Folder of the model repository, or the name of one pipeline.")
    ] = REPOSITORY,
    *,
    options: ServeOptions,
    api: GatewayOptions,
    ports: Ports,
) -> None:
    """Serve built pipelines with tritonserver until interrupted."""
    from triptych.container.settings import read_settings
    from triptych.repository.store import recover
    from triptych.serving.device import check_device
    from triptych.serving.embedded import list_backends
    from triptych.serving.hot_reload import HotReload
    from triptych.serving.ports import is_loopback
    from triptych.serving.server import (
        Server,
        ServerAddress,
        ServerProfile,
        check_and_make_flags,
    )

    repository, models = resolve_repository(repository)
    if options.client_shm and (options.production or not is_loopback(options.host)):
        raise UserError(
            "--client-shm",
            "is only supported for the development profile on a loopback address",
            given=f"profile {options.profile}, {options.host}",
            remedy="Leave it out; in a container, set TRIPTYCH_CLIENT_SHM=1",
        )
    host = check_access(options.host, api, has_http_api=options.http_api is not None)
    recover(repository)
    if (backends := options.backend_directory) is not None:
        progress("load", f"backends of {backends}: {', '.join(list_backends(backends))}")
    flags = check_and_make_flags(
        repository, production=options.production, backend_directory=backends
    )
    beside = GatewayProcess(options.http_api, options.host, repository, models, api)
    server = Server(
        repository,
        models=models,
        address=ServerAddress(host=host, **vars(ports)),
        profile=ServerProfile(
            production_flags=flags,
            exchanges=not options.production,
            client_shm=options.client_shm,
            machine=options.machine or read_settings().machine,
        ),
        environment={FOLDER_VARIABLE: str(options.samples.absolute())},
        log_file=options.log_file,
        backend_directory=backends,
    )
    exchange = HotReload(
        server,
        on_reload=lambda line: status.print(line, style="green", markup=False),
        on_problem=warn,
        production=options.production,
    )

    def announce() -> None:
        check_device(
            server.repository,
            server.served_models,
            server,
            lambda line: progress("gate", line),
        )
        endpoints = {
            "grpc": server.grpc_url,
            "http": server.http_url,
            "metrics": server.metrics_url,
            **beside.start(server.grpc_url),
        }
        _announce(endpoints, server.pid, as_json=options.as_json)

    def poll() -> bool:
        beside.poll()
        return exchange.poll()

    run(server, announce, timeout_s=options.timeout_s, meanwhile=poll, before_stop=beside.end)


def _announce(endpoints: dict[str, str], pid: int, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**endpoints, "pid": pid}), flush=True)
        return
    output.print("ready; stop with Ctrl-C", style="green")
    for kind, endpoint in endpoints.items():
        output.print(f"  {kind:8} {endpoint}", markup=False)


def resolve_repository(named: Path) -> tuple[Path, list[str]]:
    """Return the repository and the models to serve: one named pipeline, or [] for all."""
    from triptych.container.manifests import MANIFEST_FILE, check_readable
    from triptych.repository.config import CONFIG_FILE

    check_readable(named)
    if named.is_dir() and any(named.glob(f"*/{CONFIG_FILE}")):
        return named, []
    if named.name == str(named) and (REPOSITORY / named / CONFIG_FILE).is_file():
        return REPOSITORY, [named.name]
    built = sorted(path.parent.name for path in REPOSITORY.glob(f"*/{MANIFEST_FILE}"))
    raise UserError(
        "REPOSITORY",
        "must be a folder with models, or the name of a built pipeline",
        given=named,
        remedy=f"Run `triptych build NAME` first; built pipelines: {', '.join(built) or 'none'}",
    )


@verb()
def verify(
    name: Name,
    folders: Folders,
    url: Url = None,
    overrides: Overrides = None,
    clients: Annotated[
        int, typer.Option(min=1, max=256, help="Number of requests in flight.")
    ] = 16,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Timeout of each request, in seconds.")
    ] = 30.0,
    as_json: Json = False,
) -> None:
    """Run the accuracy gate against a running server."""
    from triptych.building.pipeline import open_pipeline
    from triptych.client.server_info import check_served
    from triptych.core.gate.verify import LiveOptions, describe_verification, verification_data
    from triptych.serving.endpoint import check_built, open_endpoint
    from triptych.spec.any_spec import load_any_spec

    if url is None:
        check_built(folders.repository, name)
    else:  # before the reference is computed, which takes minutes
        check_served(url, name)
    spec = load_any_spec(folders.pipelines / name, overrides or ())
    options = LiveOptions(
        repository=folders.repository,
        server=open_endpoint(folders.repository, name, url, progress),
        progress=progress,
        clients=clients,
        timeout_s=timeout_s,
    )
    result = open_pipeline(spec).verify(options)
    lines = describe_verification(result)
    exit_with_verdict(verification_data(result), lines, passed=result.passed, as_json=as_json)


_MARKS = {"info": ("note", ""), "warning": ("warning", "yellow"), "error": ("broken", "red")}
"""Mark and style of a line of `doctor`, by severity."""


@verb()
def doctor(ports: Ports, as_json: Json = False) -> None:
    """Check this machine, and print how to fix what is missing."""
    from triptych.base.formatting import amount
    from triptych.serving.doctor import examine

    findings = [finding.as_dict() for finding in examine(**vars(ports))]
    errors = sum(finding["severity"] == "error" for finding in findings)
    if as_json:
        print_json(findings)
    else:
        for finding in findings:
            mark, style = _MARKS[finding["severity"]]
            if finding["severity"] == "info" and not finding["remedy"]:
                mark, style = "ok", "green"
            say(output, f"{mark:8} {finding['id']:18} {finding['given']}", style)
            if finding["remedy"]:
                say(output, f"{'':8} {finding['rule']}")
                say(output, f"{'':8} -> {finding['remedy']}")
        output.print(amount(errors, "error") if errors else "no problems found", markup=False)
    raise typer.Exit(EXIT_FINDINGS if errors else 0)


@verb()
def ui(
    name: Name,
    folders: Folders,
    url: Url = None,
    host: Annotated[str, typer.Option(help="Address that the page listens on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the page; 0 picks a free port.")
    ] = 7860,
    timeout_s: LoadTimeout = 120.0,
    request_timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Timeout of each request, in seconds.")
    ] = 30.0,
    as_json: Json = False,
) -> None:
    """Serve a demo page for a pipeline until interrupted.

    The page shows the answers in the form of the task, and the time of each step.
    """
    from triptych.client.server_info import check_served
    from triptych.repository.store import read_build, recover
    from triptych.serving.endpoint import check_built
    from triptych.serving.hot_reload import HotReload
    from triptych.serving.ports import is_loopback, reserve_ports
    from triptych.serving.server import Server, check_and_make_flags

    if url is None:
        check_built(folders.repository, name)
        recover(folders.repository)
        check_and_make_flags(folders.repository, production=False)
    else:
        check_served(url, name)
    spec = load_active_spec(name, folders)
    if not is_loopback(host):
        warn(f"{host} can be reached from other machines, and the page does not authenticate users")
    with ExitStack() as opened:
        # Both fail before a server starts.
        with imports_of_extra("page", "triptych ui"):
            from triptych.interface.demo_page import open_page
        port = opened.enter_context(reserve_ports(host, {"--port": port}))["--port"]

        def show_page(grpc_url: str, pid: int | None) -> None:
            pipeline = describe_page(spec, folders, grpc_url, request_timeout_s)
            page = opened.enter_context(open_page(pipeline, host, port))
            if as_json:
                print(json.dumps({"page": page, "grpc": grpc_url, "pid": pid}), flush=True)
            else:
                output.print(f"open {page} to try {name}; stop with Ctrl-C", style="green")

        if url is not None:
            with sigterm_as_interrupt():
                try:
                    show_page(url, None)
                    while True:  # `signal.pause` would miss a signal that comes just before it
                        time.sleep(1.0)
                except KeyboardInterrupt:
                    status.print("stopped", markup=False)
            return
        build = read_build(folders.repository, name)
        pair = build.pair_with if build else ""
        models = [each for each in (name, pair) if each and (folders.repository / each).is_dir()]
        server = Server(folders.repository, models=models)
        exchange = HotReload(
            server, only=name, on_reload=lambda line: progress("serve", line), on_problem=warn
        )
        pages: list[str] = []

        def announce() -> None:
            if not pages:  # a restarted server has the same address
                pages.append(server.grpc_url)
                show_page(server.grpc_url, server.pid)

        run(server, announce, timeout_s=timeout_s, meanwhile=exchange.poll)


def describe_page(spec: AnySpec, folders: Folders, grpc_url: str, timeout_s: float) -> PagePipeline:
    """Return what the demo page shows of a pipeline.

    Raises:
        UserError: The traffic of the pipeline cannot be read.
    """
    from triptych.core.inputs import task_of
    from triptych.interface.demo_page import MAX_EXAMPLES, PagePipeline
    from triptych.models.fields import name_of_source
    from triptych.repository.manifest import find_settings
    from triptych.spec.generation_fields import GenerationSpec, Text2TextSpec
    from triptych.spec.kind import GENERATION
    from triptych.spec.model_fields import ModelSpec
    from triptych.spec.spec import EncoderSpec
    from triptych.spec.traffic import TRAFFIC_FILE, read_lines
    from triptych.tasks.task import Task

    task: Task | None = None
    match spec:
        case EncoderSpec() | ModelSpec():
            task, settings = task_of(spec), find_settings(folders.repository, spec.name)
        case GenerationSpec() | Text2TextSpec():
            settings = {"parameters": spec.parameters}
    folder = folders.pipelines / spec.name
    traffic = folder / TRAFFIC_FILE
    rows = (row for _, _, row in read_lines(traffic) if row) if traffic.is_file() else ()
    return PagePipeline(
        name=spec.name,
        about=f"{spec.task}, {name_of_source(spec.model.source)}",
        url=grpc_url,
        timeout_s=timeout_s,
        task=task,
        is_chat=spec.task == GENERATION,
        rules=settings.get("request_parameters", {}),
        defaults=settings.get("parameters", {}),
        folder=folder,
        rows=tuple(islice(rows, MAX_EXAMPLES)),
        step=folders.repository / f"{spec.name}_preprocess/1",
    )


def load_active_spec(name: str, folders: Folders) -> AnySpec:
    """Return the spec of the active build, or of the pipeline's folder if it is not built here."""
    from triptych.repository.manifest import BuildManifest, find_manifest
    from triptych.spec.any_spec import load_any_spec

    built = find_manifest(folders.repository, name, BuildManifest)
    return built.spec if built else load_any_spec(folders.pipelines / name)
