"""The verb `dev`: a pipeline built, served, watched, and exchanged at each change."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from triptych.interface.cli.options import (
    EXIT_FINDINGS,
    PIPELINES,
    REPOSITORY,
    Json,
    LoadTimeout,
    Name,
    Overrides,
    Pipelines,
    Port,
    Repository,
    app,
    output,
    progress,
    status,
)
from triptych.interface.cli.running import run, warn
from triptych.interface.cli.shown import print_built, print_failed_gate, print_finding

if TYPE_CHECKING:
    from triptych.building.rebuild import Round


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
    from triptych.building.dev import Watch
    from triptych.building.rebuild import rebuild
    from triptych.serving.exchange import Exchange
    from triptych.serving.server import Server

    folder = pipelines / name
    watch = Watch(folder)

    def work(changed: list[str]) -> bool:
        found = rebuild(folder, repository, overrides or (), progress)
        _tell(found, as_json=as_json, changed=changed)
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


def _tell(found: Round, *, as_json: bool, changed: list[str]) -> None:
    """One round, as the verbs `test` and `build` would tell it."""
    from triptych.base.errors import UserError
    from triptych.core.engine.stage import EngineFailure
    from triptych.core.gate.cached import GateFailure
    from triptych.repository.lint.rendered import LintFailure

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
