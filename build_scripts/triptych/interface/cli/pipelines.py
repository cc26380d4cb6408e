"""Verbs that make and check pipelines and repositories: new, test, inspect, build, lint.

The verb that runs where TensorRT is: `engine`.

Pipelines that generate text, as `build` makes them and shows what it did.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from triptych.base.errors import UserError
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
from triptych.interface.cli.tables import (
    print_built,
    print_failed_gate,
    print_finding,
    print_tree,
    tell_findings,
)
from triptych.spec.scaffold import tasks

if TYPE_CHECKING:
    from triptych.repository.records import GateResult
    from triptych.spec.generation_fields import GenerationSpec, Text2TextSpec
    from triptych.spec.plan import Plan


@app.command()
def engine(
    names: Names,
    repository: Repository = REPOSITORY,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Only try them, with TensorRT for RTX and without a GPU."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Build TensorRT engines on this GPU, checked before they count."""
    from triptych.core.engine.stage import EngineFailure, build_engine

    if rehearse:
        _dry_run(names, repository, as_json=as_json)
        return
    results = []
    for name in names:
        status.print(name, style="bold", markup=False)
        try:
            built = build_engine(repository, name, progress)
        except EngineFailure as failure:
            print_failed_gate(status, failure.gate)
            fail(as_json, {"pipeline": name, "gate": failure.gate.as_dict()}, str(failure))
        results.append(built.as_dict())
        if not as_json:
            record = built.record
            made = f"TensorRT {record.tensorrt}, {record.gpu}, {record.precision}"
            state = "written" if built.changed else "up to date"
            output.print(f"{built.owner}_core: {made}: {state}", markup=False)
    if as_json:
        print_json(results)


def _dry_run(names: list[str], repository: Path, *, as_json: bool) -> None:
    from triptych.core.engine.dry_run import describe
    from triptych.core.engine.stage import dry_run_engine

    results = []
    for name in names:
        status.print(name, style="bold", markup=False)
        done = dry_run_engine(repository, name, progress)
        results.append(done.as_dict())
        if not as_json:
            output.print(f"{done.owner}_core: {describe(done.record)}", markup=False)
    if as_json:
        print_json(results)


def build_and_show(
    spec: GenerationSpec | Text2TextSpec, repository: Path, *, accept: str, as_json: bool
) -> dict[str, Any]:
    """Build a pipeline and print what a user should know of it; the result as plain data.

    Raises:
        UserError: see `build_generation`.
    """
    from triptych.building.generation.build import build_generation
    from triptych.building.generation.gate import GenerationGateFailure
    from triptych.building.kinds import STEPS
    from triptych.repository.lint.checks import LintFailure

    try:
        built = build_generation(
            STEPS[spec.kind].read(spec, progress), repository, progress, accept=accept
        )
    except GenerationGateFailure as failure:
        print_failed_gate(status, failure.gate)
        fail(as_json, {"pipeline": spec.name, "gate": failure.gate.as_dict()}, str(failure))
    except LintFailure as failure:
        findings = [finding.as_dict() for finding in failure.findings]
        fail(as_json, {"pipeline": spec.name, "findings": findings}, str(failure))
    if built.gate is not None and built.gate.accepted:
        print_failed_gate(status, built.gate)
    for finding in built.findings:
        if finding.severity == "warning":
            print_finding(status, finding.as_dict())
    return {**built.as_dict(), "repository": str(repository)}


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
    from triptych.building.kinds import STEPS
    from triptych.spec.any_spec import kind_in

    folder = pipelines / name
    checks = STEPS[kind_in(folder)].check_folder(folder)
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
    from triptych.building.kinds import STEPS
    from triptych.interface.kinds import FACES
    from triptych.spec.any_spec import load_any_spec

    spec = load_any_spec(pipelines / name, overrides or ())
    inputs = STEPS[spec.kind].read(spec, progress)
    _show(FACES[spec.kind].describe(inputs, repository), as_json)


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
    from triptych.repository.lint.checks import LintFailure
    from triptych.spec.any_spec import load_any_spec
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
                engine_dry_run=not no_rehearsal,
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
    from triptych.core.export.to_onnx import LIBRARIES
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
