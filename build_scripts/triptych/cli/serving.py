"""Verbs around a server: serve, infer, verify, doctor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from triptych.cli.options import (
    EXIT_FINDINGS,
    PIPELINES,
    REPOSITORY,
    Json,
    Name,
    Overrides,
    Pipelines,
    Repository,
    RepositoryArgument,
    app,
    output,
    print_json,
    progress,
    status,
)
from triptych.cli.shown import print_finding
from triptych.errors import UserError


@app.command()
def serve(
    repository: RepositoryArgument = REPOSITORY,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free port.")] = 8001,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free port.")] = 8000,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 picks a free port.")
    ] = 8002,
    timeout_s: Annotated[float, typer.Option(help="Time the models may take to load.")] = 120.0,
    log_file: Annotated[Path | None, typer.Option(help="Where the server's log goes.")] = None,
    profile: Annotated[
        Literal["development", "production"],
        typer.Option(help="production takes the serving image's flags, check and TRIPTYCH_*."),
    ] = "development",
    as_json: Json = False,
) -> None:
    """Serve a model repository with a real tritonserver until interrupted."""
    from triptych.repository.store import locked
    from triptych.server.production import check_and_make_flags
    from triptych.server.server import Server
    from triptych.server.wait import serve_until_asked

    if not repository.is_dir() or not any(repository.glob("*/config.pbtxt")):
        raise UserError(
            "repository",
            "must be a folder with models",
            given=repository,
            remedy="Run `triptych build NAME` first",
        )
    with locked(repository):  # completes what a killed build left
        pass
    server = Server(
        repository,
        host=host,
        grpc_port=grpc_port,
        http_port=http_port,
        metrics_port=metrics_port,
        log_file=log_file,
        extra_args=check_and_make_flags(repository) if profile == "production" else (),
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

    name = serve_until_asked(
        server,
        timeout_s=timeout_s,
        on_progress=lambda line: progress("load", line),
        on_ready=announce,
    )
    status.print(f"stopped ({name})", markup=False)


@app.command()
def infer(
    name: Name,
    text: Annotated[
        list[str] | None, typer.Option("--text", "-t", help="A text; may be repeated.")
    ] = None,
    text_pair: Annotated[
        list[str] | None,
        typer.Option(
            "--text-pair", help="What goes with the text: a context, a passage; may be repeated."
        ),
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option("--image", help="An image file; may be repeated.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", help="A file with one text a line, or .jsonl with the inputs by name."
        ),
    ] = None,
    url: Annotated[str, typer.Option(help="gRPC endpoint.")] = "127.0.0.1:8001",
    parameters: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", metavar="KEY=VALUE", help="For the request."),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Deadline.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Send texts or images to a served pipeline and print what comes back.

    Of --text and --text-pair one may be given once: it then goes with each of the other.
    """
    from triptych.client.infer import ask, describe_answer, parse_parameters, read_questions

    questions = read_questions(text or (), text_pair or (), image or (), file)
    asked = parse_parameters(parameters or ())
    answers = ask(name, questions, url=url, parameters=asked, timeout_s=timeout_s)
    if as_json:
        print_json(answers)
        return
    for question, answer in zip(questions, answers, strict=True):
        output.print(f"{question.shown!r:.70}", style="bold", markup=False)
        for line in describe_answer(answer):
            output.print(f"  {line}", markup=False)


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
    """Run the accuracy gate again, through the served pipeline, on any Triton."""
    from triptych.gate.verify import describe_verification, verify_pipeline
    from triptych.pipeline.spec import load_spec
    from triptych.requests.inputs import read_inputs
    from triptych.server.endpoint import check_built, served

    if url is None:
        check_built(repository, name)
    prepared = read_inputs(load_spec(pipelines / name, overrides or ()), progress)
    result = verify_pipeline(
        prepared,
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
    """Say what works on this machine, what does not, and what to do about it."""
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
