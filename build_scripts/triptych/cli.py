"""The command line: parse, call, print, exit code. No domain logic lives here.

Exit codes: 0 done, 1 findings or a failed gate, 2 a mistake of the user's; anything else is a bug.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from triptych.errors import UserError
from triptych.shown import print_built, print_failed_gate, print_finding, print_tree

EXIT_FINDINGS = 1
EXIT_MISTAKE = 2

app = typer.Typer(
    help="Turn a Hugging Face model into a Triton ensemble that tokenizes, infers and decodes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Progress and errors go to stderr, results to stdout: `--json` output stays parseable.
status = Console(stderr=True, highlight=False, soft_wrap=True)
output = Console(highlight=False, soft_wrap=True)

Name = Annotated[str, typer.Argument(help="Pipeline: the name of its folder.")]
Names = Annotated[list[str], typer.Argument(help="Pipelines: the names of their folders.")]
Pipelines = Annotated[Path, typer.Option("--pipelines", help="Folder of the pipelines.")]
Repository = Annotated[
    Path, typer.Option("--repository", "-r", help="Folder of the model repository.")
]
RepositoryArgument = Annotated[Path, typer.Argument(help="Folder of the model repository.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a field of the spec."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
PIPELINES = Path("pipelines")
REPOSITORY = Path("model_repository")
REPORTS = Path("reports")


def main() -> None:
    """Entry point of the ``triptych`` command."""
    try:
        app()
    except UserError as error:
        if "--json" in sys.argv:
            print(json.dumps({"error": error.as_dict()}, ensure_ascii=False))
        status.print(f"error: {error.message}", style="red", markup=False)
        sys.exit(EXIT_MISTAKE)


@app.command()
def new(
    name: Name,
    task: Annotated[str, typer.Option("--task", help="What the pipeline does.")],
    model: Annotated[
        str | None, typer.Option("--model", help="Hub id, package:… or folder; else an example.")
    ] = None,
    hooks: Annotated[
        bool, typer.Option("--hooks", help="Add hooks.py and its tests: functions of your own.")
    ] = False,
    pipelines: Pipelines = PIPELINES,
    as_json: Json = False,
) -> None:
    """Write the folder of a new pipeline, ready to edit. Never overwrites."""
    from triptych.scaffold import scaffold

    made = scaffold(name, task=task, model=model, with_hooks=hooks, pipelines=pipelines)
    if as_json:
        _print_json(made.as_dict())
        return
    output.print(made.folder, style="bold", markup=False)
    for file in made.files:
        output.print(f"  {file}", markup=False)
    output.print("Edit pipeline.yaml and traffic.jsonl, then:")
    for command in made.commands:
        output.print(f"  {command}", markup=False)


@app.command()
def test(  # a verb, not a test
    name: Name,
    pipelines: Pipelines = PIPELINES,  # noqa: PT028
    as_json: Json = False,  # noqa: PT028
) -> None:
    """Check a pipeline's spec, traffic and hooks, and run its tests: no server, no model."""
    from triptych.hook_tests import check_pipeline

    checks = check_pipeline(pipelines / name)
    if as_json:
        _print_json([check.as_dict() for check in checks])
    else:
        for check in checks:
            style = {"error": "red", "warning": "yellow"}.get(check.severity, "")
            line = f"{check.severity:8} {check.name:18} {check.note}".rstrip()
            output.print(line, style=style, markup=False)
    failed = any(check.severity == "error" for check in checks)
    raise typer.Exit(EXIT_FINDINGS if failed else 0)


@app.command()
def inspect(
    name: Name, pipelines: Pipelines = PIPELINES, overrides: Overrides = None, as_json: Json = False
) -> None:
    """Print the plan of a pipeline: models, shapes, limits and why. Writes nothing."""
    from triptych.build.cache import cache_root
    from triptych.describe import describe_plan
    from triptych.prepare import prepare
    from triptych.spec import load_spec

    plan = prepare(load_spec(pipelines / name, overrides or ()), _progress).plan
    description = describe_plan(plan)
    if as_json:
        _print_json({**description, "cache": str(cache_root())})
        return
    print_tree(output, description)


@app.command()
def build(
    names: Names,
    pipelines: Pipelines = PIPELINES,
    repository: Repository = REPOSITORY,
    overrides: Overrides = None,
    reports: Annotated[
        Path, typer.Option("--reports", help="Folder of the reports, one for each pipeline.")
    ] = REPORTS,
    accept: Annotated[
        str | None,
        typer.Option(
            "--accept-failed-gate",
            metavar="REASON",
            help="Build although the accuracy gate fails; the reason is put on record.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Build pipelines into the model repository; nothing is written unless every check passed."""
    from triptych import assemble, choose
    from triptych.prepare import prepare
    from triptych.spec import load_spec

    if accept is not None and not accept.strip():
        raise UserError(
            "--accept-failed-gate", "must give a reason", remedy="Say why the model may ship"
        )
    # Every spec is read before the first build: a typo in the last one costs no time.
    specs = [load_spec(pipelines / name, overrides or ()) for name in names]
    results = []
    for number, spec in enumerate(specs):
        status.print(f"{spec.name}", style="bold", markup=False)
        following = [later.name for later in specs[number + 1 :]]
        try:
            built = choose.build(
                prepare(spec, _progress),
                repository,
                _progress,
                together=following,
                accept=(accept or "").strip(),
            )
        except assemble.GateFailure as failure:
            report = assemble.report(failure.plan, failure.gate, reports, _progress)
            print_failed_gate(status, failure.gate)
            result = {"pipeline": spec.name, "gate": failure.gate, "report": str(report)}
            _fail(as_json, result, str(failure))
        except assemble.LintFailure as failure:
            findings = [finding.as_dict() for finding in failure.findings]
            _fail(as_json, {"pipeline": spec.name, "findings": findings}, str(failure))
        report = assemble.report(built.plan, built.gate, reports, _progress)
        print_built(status, built)
        results.append({**built.as_dict(), "repository": str(repository), "report": str(report)})
    if as_json:
        _print_json(results)


@app.command()
def lint(
    repository: RepositoryArgument = REPOSITORY,
    triton: Annotated[
        str, typer.Option("--triton", metavar="YY.MM", help="Oldest release it must load on.")
    ] = "24.10",
    as_json: Json = False,
) -> None:
    """Check a model repository without a server: wiring, shapes, files, versions."""
    from triptych.repository.lint import run_checks

    if not repository.is_dir():
        raise UserError(
            "repository", "must be a folder", given=repository, remedy="Run `triptych build NAME`"
        )
    findings = [finding.as_dict() for finding in run_checks(repository, triton=triton)]
    errors = sum(finding["severity"] == "error" for finding in findings)
    if as_json:
        _print_json(findings)
    else:
        for finding in findings:
            print_finding(output, finding)
        output.print(f"{errors} errors, {len(findings) - errors} other findings", markup=False)
    raise typer.Exit(EXIT_FINDINGS if errors else 0)


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
    as_json: Json = False,
) -> None:
    """Serve a model repository with a real tritonserver until interrupted."""
    from triptych.repository.store import locked
    from triptych.serving.server import Server
    from triptych.serving.wait import serve_until_asked

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
        on_progress=lambda line: _progress("load", line),
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
    from triptych.serving.ask import ask, describe_answer, parse_parameters, read_questions

    questions = read_questions(text or (), text_pair or (), image or (), file)
    asked = parse_parameters(parameters or ())
    answers = ask(name, questions, url=url, parameters=asked, timeout_s=timeout_s)
    if as_json:
        _print_json(answers)
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
    from triptych.prepare import prepare
    from triptych.spec import load_spec
    from triptych.verify import describe_verification, verify_pipeline

    prepared = prepare(load_spec(pipelines / name, overrides or ()), _progress)
    result = verify_pipeline(
        prepared,
        repository,
        _progress,
        url=url,
        clients=clients,
        timeout_s=timeout_s,
    )
    if as_json:
        _print_json(result.as_dict())
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
    from triptych.serving.doctor import examine

    findings = [
        finding.as_dict()
        for finding in examine(grpc_port=grpc_port, http_port=http_port, metrics_port=metrics_port)
    ]
    errors = sum(finding["severity"] == "error" for finding in findings)
    if as_json:
        _print_json(findings)
    else:
        for finding in findings:
            print_finding(output, finding)
        output.print(f"{errors} errors" if errors else "nothing stops you", markup=False)
    raise typer.Exit(EXIT_FINDINGS if errors else 0)


def _progress(stage: str, line: str) -> None:
    status.print(f"  {stage:8} {line}", markup=False)


def _fail(as_json: bool, result: dict[str, Any], message: str) -> None:
    if as_json:
        _print_json(result)
    status.print(f"failed: {message}", style="red", markup=False)
    raise typer.Exit(EXIT_FINDINGS)


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=2))


if __name__ == "__main__":
    main()
