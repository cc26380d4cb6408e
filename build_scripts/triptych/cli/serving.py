"""Verbs around a server: serve, verify, doctor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from triptych.cli.options import (
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
from triptych.cli.running import run, warn
from triptych.cli.shown import print_finding
from triptych.errors import UserError
from triptych.runtime.sample_files import FOLDER_VARIABLE


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
    samples: Annotated[
        Path,
        typer.Option(
            envvar=FOLDER_VARIABLE, help="Where rows are kept of pipelines that sample them."
        ),
    ] = SAMPLES,
    as_json: Json = False,
) -> None:
    """Run a real tritonserver on what is built, until interrupted."""
    from triptych.repository.store import complete
    from triptych.server.exchange import Exchange
    from triptych.server.ports import is_loopback
    from triptych.server.production import check_and_make_flags
    from triptych.server.server import Server

    repository, models = _what_to_serve(repository)
    if not is_loopback(host):
        warn(
            f"{host} is reached from other machines, and Triton asks nobody who they are: "
            "keep it behind a gateway that does (docker/README.md)"
        )
    complete(repository)
    server = Server(
        repository,
        models=models,
        host=host,
        grpc_port=grpc_port,
        http_port=http_port,
        metrics_port=metrics_port,
        log_file=log_file,
        environment={FOLDER_VARIABLE: str(samples.absolute())},
        exchanges=profile == "development",
        production_flags=check_and_make_flags(repository, production=profile == "production"),
    )
    exchange = Exchange(
        server,
        on_exchange=lambda line: status.print(line, style="green", markup=False),
        on_problem=warn,
        production=profile == "production",
    )

    def announce() -> None:
        endpoints = {
            "grpc": server.grpc_url,
            "http": server.http_url,
            "metrics": server.metrics_url,
        }
        if as_json:
            print(json.dumps({**endpoints, "pid": server.pid}), flush=True)
            return
        output.print("ready; stop with Ctrl-C", style="green")
        for kind, endpoint in endpoints.items():
            output.print(f"  {kind:8} {endpoint}", markup=False)

    run(server, announce, timeout_s=timeout_s, meanwhile=exchange.look)


def _what_to_serve(named: Path) -> tuple[Path, list[str]]:
    """The repository and, where a pipeline of it was named, that one's name."""
    from triptych.repository.config import CONFIG_FILE
    from triptych.repository.lock import LOCK_FILE

    if named.is_dir() and any(named.glob(f"*/{CONFIG_FILE}")):
        return named, []
    if named.name == str(named) and (REPOSITORY / named / CONFIG_FILE).is_file():
        return REPOSITORY, [named.name]
    built = sorted(path.parent.name for path in REPOSITORY.glob(f"*/{LOCK_FILE}"))
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
    from triptych.gate.verify import describe_verification, verify_pipeline
    from triptych.pipeline.spec import load_spec
    from triptych.requests.inputs import read_inputs
    from triptych.server.endpoint import check_built, served

    if url is None:
        check_built(repository, name)
    inputs = read_inputs(load_spec(pipelines / name, overrides or ()), progress)
    result = verify_pipeline(
        inputs,
        repository,
        served(repository, name, url, progress),
        progress,
        clients=clients,
        timeout_s=timeout_s,
    )
    if as_json:
        print_json(result.as_dict())
    else:
        for line, style in describe_verification(result):
            output.print(line, style=style, markup=False)
    raise typer.Exit(0 if result.passed else EXIT_FINDINGS)


@app.command()
def doctor(
    grpc_port: Annotated[int, typer.Option(help="Port that serve will use.")] = 8001,
    http_port: Annotated[int, typer.Option(help="Port that serve will use.")] = 8000,
    metrics_port: Annotated[int, typer.Option(help="Port that serve will use.")] = 8002,
    as_json: Json = False,
) -> None:
    """Say what works on this machine, and how to mend the rest."""
    from triptych.server.doctor import examine

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
