"""Verbs that make and check pipelines and repositories: new, test, inspect, build, lint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.base.errors import UserError
from triptych.interface.cli.generating import build_and_show, load_any_spec, read_generating
from triptych.interface.cli.options import (
    EXIT_FINDINGS,
    PIPELINES,
    REPORTS,
    REPOSITORY,
    Json,
    Name,
    Names,
    Overrides,
    Pipelines,
    Repository,
    RepositoryArgument,
    app,
    fail,
    output,
    print_json,
    progress,
    report_into,
    status,
)
from triptych.interface.cli.shown import print_built, print_failed_gate, print_tree, tell_findings
from triptych.spec.scaffold import tasks

if TYPE_CHECKING:
    from triptych.repository.records import GateResult
    from triptych.spec.plan import Plan


@app.command()
def new(
    name: Name,
    task: Annotated[
        str | None, typer.Option("--task", help=f"What the pipeline does: {', '.join(tasks())}.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Hub id, package:… or folder; else an example.")
    ] = None,
    hooks: Annotated[
        bool, typer.Option("--hooks", help="Add hooks.py and its tests: functions of your own.")
    ] = False,
    pipelines: Pipelines = PIPELINES,
    as_json: Json = False,
) -> None:
    """Write a new pipeline's folder, ready to edit; never overwrites."""
    from triptych.spec.scaffold import scaffold

    made = scaffold(name, task=task, model=model, with_hooks=hooks, pipelines=pipelines)
    if as_json:
        print_json(made.as_dict())
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
    """Check spec, traffic and hooks, and run its tests.

    It takes seconds: no server is started, no model is read.
    """
    from triptych.building.generation.checks import check_folder
    from triptych.building.hook_tests import check_pipeline
    from triptych.spec.spec import GENERATING, task_of

    folder = pipelines / name
    checks = check_folder(folder) if task_of(folder) in GENERATING else check_pipeline(folder)
    if as_json:
        print_json([check.as_dict() for check in checks])
    else:
        for check in checks:
            style = {"error": "red", "warning": "yellow"}.get(check.severity, "")
            line = f"{check.severity:8} {check.name:18} {check.note}".rstrip()
            output.print(line, style=style, markup=False)
    failed = any(check.severity == "error" for check in checks)
    raise typer.Exit(EXIT_FINDINGS if failed else 0)


@app.command()
def inspect(
    name: Name,
    pipelines: Pipelines = PIPELINES,
    repository: Repository = REPOSITORY,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Print the plan: models, shapes, limits and why; writes nothing."""
    from triptych.building.generation.describe import describe_inputs
    from triptych.core.inputs import read_inputs
    from triptych.interface.cli.describe import describe_plan
    from triptych.interface.cli.describe_gpu import describe_rehearsal
    from triptych.repository.lock import find_lock
    from triptych.spec.spec import PipelineSpec

    spec = load_any_spec(pipelines / name, overrides or ())
    if not isinstance(spec, PipelineSpec):
        _show(describe_inputs(read_generating(spec)), as_json)
        return
    plan = read_inputs(spec, progress).plan
    description = describe_plan(plan)
    if plan.builds_engine:
        rehearsed = describe_rehearsal(plan, find_lock(repository, plan.spec.core.share or name))
        description["gpu"]["rehearsal"] = rehearsed
    _show(description, as_json)


def _show(description: Mapping[str, object], as_json: bool) -> None:
    from triptych.base.cache import cache_root

    if as_json:
        print_json({**description, "cache": str(cache_root())})
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
    no_rehearsal: Annotated[
        bool,
        typer.Option(
            "--no-rehearsal",
            help="Do not let TensorRT for RTX try the engine where none can be built.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Export, check against the original model, write the repository.

    Nothing is written unless every check passed.
    """
    from triptych.building.build import build as build_pipeline
    from triptych.core.engine.stage import EngineFailure
    from triptych.core.gate.cached import GateFailure
    from triptych.core.inputs import read_inputs
    from triptych.repository.lint.rendered import LintFailure
    from triptych.spec.spec import PipelineSpec

    if accept is not None and not accept.strip():
        raise UserError(
            "--accept-failed-gate", "must give a reason", remedy="Say why the model may ship"
        )
    # Every spec is read before the first build: a typo in the last one costs no time.
    specs = [load_any_spec(pipelines / name, overrides or ()) for name in names]
    reason = (accept or "").strip()
    results = []
    for number, spec in enumerate(specs):
        status.print(f"{spec.name}", style="bold", markup=False)
        if not isinstance(spec, PipelineSpec):
            results.append(build_and_show(spec, repository, accept=reason, as_json=as_json))
            continue
        following = [later.name for later in specs[number + 1 :]]
        try:
            built = build_pipeline(
                read_inputs(spec, progress),
                repository,
                progress,
                together=following,
                accept=reason,
                rehearsal=not no_rehearsal,
            )
        except GateFailure as failure:
            report = _report(failure.plan, failure.gate, reports)
            print_failed_gate(status, failure.gate)
            result = {
                "pipeline": spec.name,
                "gate": failure.gate.as_dict(),
                "report": str(report),
            }
            fail(as_json, result, str(failure))
        except EngineFailure as failure:
            print_failed_gate(status, failure.gate)
            fail(as_json, {"pipeline": spec.name, "gate": failure.gate.as_dict()}, str(failure))
        except LintFailure as failure:
            findings = [finding.as_dict() for finding in failure.findings]
            fail(as_json, {"pipeline": spec.name, "findings": findings}, str(failure))
        report = _report(built.plan, built.gate, reports)
        print_built(status, built)
        results.append({**built.as_dict(), "repository": str(repository), "report": str(report)})
    if as_json:
        print_json(results)


def _report(plan: Plan, gate: GateResult, folder: Path) -> Path:
    """Write a gate's report into ``folder/<pipeline>``; the page."""
    from triptych.base.cache import versions_of
    from triptych.core.export.stage import LIBRARIES
    from triptych.interface.report.gate_write import About, write_report

    about = About(
        pipeline=plan.spec.name,
        task=plan.task.name,
        architecture=plan.facts.architecture,
        layout=plan.layout,
        versions=versions_of(*LIBRARIES, "onnxruntime"),
    )
    return report_into(lambda target: write_report(gate, about, target), folder / plan.spec.name)


@app.command()
def lint(
    repository: RepositoryArgument = REPOSITORY,
    triton: Annotated[
        str | None,
        typer.Option("--triton", metavar="YY.MM", help="Release that must load it, engines too."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a repository without a server: wiring, shapes, versions."""
    from triptych.repository.lint import OLDEST, run_checks

    if not repository.is_dir():
        raise UserError(
            "repository", "must be a folder", given=repository, remedy="Run `triptych build NAME`"
        )
    found = run_checks(repository, triton=triton or OLDEST, with_engines=triton is not None)
    tell_findings(found, as_json)
