"""Verbs that check pipelines and build repositories: test, inspect, build, engine, lint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.base.errors import Finding, UserError
from triptych.base.files import as_user_error, check_writable
from triptych.interface.cli.command import verb
from triptych.interface.cli.options import (
    EXIT_FINDINGS,
    EXIT_MISTAKE,
    EXIT_UNKNOWN,
    PIPELINES,
    REPORTS,
    REPOSITORY,
    Folders,
    Json,
    Name,
    Names,
    Overrides,
    Pipelines,
    Reports,
    Repository,
    fail,
    keep_traceback,
    output,
    print_json,
    print_table,
    progress,
    show_progress,
    status,
    write_report,
)
from triptych.interface.cli.tables import (
    exit_with_findings,
    print_built,
    print_failed_gate,
    print_tree,
)

if TYPE_CHECKING:
    from triptych.repository.records import GateResult
    from triptych.spec.plan import Plan


@verb()
def engine(
    names: Names,
    repository: Repository = REPOSITORY,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Build with TensorRT for RTX, without a GPU, and discard the result."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Build TensorRT engines on this GPU and check their accuracy."""
    from triptych.core.engine.stage import EngineFailure, build_engine

    if dry_run:
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


@verb()
def test(  # a verb, not a test
    name: Name,
    pipelines: Pipelines = PIPELINES,  # noqa: PT028
    as_json: Json = False,  # noqa: PT028
) -> None:
    """Check the files of a pipeline and run its tests.

    This takes seconds, because no server is started and no model is loaded.
    """
    from triptych.building.pipeline import open_pipeline
    from triptych.spec.any_spec import load_any_spec

    checks = open_pipeline(load_any_spec(pipelines / name)).check_files()
    if as_json:
        print_json([check.as_dict() for check in checks])
    else:
        for check in checks:
            style = {"error": "red", "warning": "yellow"}.get(check.severity, "")
            line = f"{check.severity:8} {check.name:18} {check.note}".rstrip()
            output.print(line, style=style, markup=False)
    failed = any(check.severity == "error" for check in checks)
    raise typer.Exit(EXIT_FINDINGS if failed else 0)


@verb()
def inspect(
    name: Name,
    folders: Folders,
    overrides: Overrides = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Machine to plan for, such as h200x16, l4x8 or cpu8. Default: serving.machine of "
            "the pipeline.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the plan of a build (models, shapes, limits) with reasons."""
    from triptych.base.cache import cache_root
    from triptych.interface.cli.plan_text import describe_pipeline
    from triptych.spec.any_spec import load_any_spec

    named = [] if machine is None else [f"serving.machine={machine}"]
    spec = load_any_spec(folders.pipelines / name, [*(overrides or ()), *named])
    description = describe_pipeline(spec, folders.repository, progress)
    if as_json:
        print_json({**description, "cache": str(cache_root())})
    else:
        print_tree(output, description)


@verb()
def build(
    names: Names,
    folders: Folders,
    overrides: Overrides = None,
    reports: Reports = REPORTS,
    accept: Annotated[
        str | None,
        typer.Option(
            "--accept-failed-gate",
            metavar="REASON",
            help="Build even if the accuracy gate fails, and record the reason. "
            "Default: a failed gate ends the build.",
        ),
    ] = None,
    no_dry_run: Annotated[
        bool,
        typer.Option(
            "--no-dry-run",
            help="Skip the dry run of the TensorRT engine on machines that cannot build engines.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Export a model, check its accuracy and write the repository.

    Nothing of a pipeline is written unless every check passes. A pipeline that fails does not keep
    the others from being built.
    """
    from triptych.building.pipeline import open_pipeline
    from triptych.building.stages import BuildOptions, CheckedModel
    from triptych.repository.card import CARD_FILE
    from triptych.spec.any_spec import load_any_spec

    if accept is not None and not accept.strip():
        raise UserError(
            "--accept-failed-gate",
            "needs a reason",
            given="an empty text",
            remedy="State why the failed gate is acceptable",
        )
    reason = (accept or "").strip()
    if reports == REPORTS and folders.repository.name != REPOSITORY.name:
        reports = REPORTS / folders.repository.name  # not over the report of the current build
    builds = _Builds(len(names) == 1, reports, as_json)
    specs = []
    # Every spec is read before the first build: a typo in the last one is reported at once.
    for name in names:
        with builds.of(name):
            spec = load_any_spec(folders.pipelines / name, overrides or ())
            check_writable(reports / name, "--reports")
            specs.append(spec)
    for number, spec in enumerate(specs):
        status.print(f"{spec.name}", style="bold", markup=False)
        following = [later.name for later in specs[number + 1 :]]
        report: dict[str, str] = {}

        def write(model: CheckedModel, report: dict[str, str] = report) -> None:
            report |= _report(model.plan, model.gate, reports)

        options = BuildOptions(
            repository=folders.repository,
            progress=progress,
            accept=reason,
            built_after=following,
            engine_dry_run=not no_dry_run,
            before_write=write,
        )
        with builds.of(spec.name):
            with show_progress("build", f"building {spec.name}"):
                built = open_pipeline(spec).build(options)
            if built.plan is not None:
                card = folders.repository / spec.name / CARD_FILE
                report["card"] = str(card)
                progress("card", f"{card}: calls with curl, tritonclient and Python")
            print_built(status, built)
            builds.results.append(
                {**built.as_dict(), "repository": str(folders.repository), **report}
            )
    builds.end()


class _Builds:
    """Results of `build`, in which a pipeline that fails does not end the others.

    Args:
        is_single: Whether there is one pipeline, whose failure ends the verb.
        reports: Folder of the reports.
        as_json: Whether the results are printed as JSON.
    """

    def __init__(self, is_single: bool, reports: Path, as_json: bool) -> None:
        self.results: list[dict[str, object]] = []
        self._is_single = is_single
        self._reports = reports
        self._as_json = as_json
        self._failed: dict[str, str] = {}
        self._code = 0

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Note an error of the block as that of a pipeline."""
        from triptych.core.engine.stage import EngineFailure
        from triptych.core.gate.cached import GateFailure
        from triptych.repository.lint.checks import LintFailure

        try:
            yield
        except (GateFailure, EngineFailure) as failure:
            plan = failure.plan if isinstance(failure, GateFailure) else None
            report = _report(plan, failure.gate, self._reports)
            print_failed_gate(status, failure.gate)
            self._note(name, str(failure), EXIT_FINDINGS, gate=failure.gate.as_dict(), **report)
        except LintFailure as failure:
            findings = [finding.as_dict() for finding in failure.findings]
            self._note(name, str(failure), EXIT_FINDINGS, findings=findings)
        except Exception as caught:
            if self._is_single:
                raise
            known = as_user_error(caught)
            error = known or keep_traceback(caught)
            code = EXIT_MISTAKE if known else EXIT_UNKNOWN
            self._note(name, error.message, code, error=error.as_dict())

    def _note(self, name: str, message: str, code: int, **result: object) -> None:
        result = {"pipeline": name, **result}
        if self._is_single:
            fail(self._as_json, result, message)
        status.print(f"failed: {message}", style="red", markup=False)
        self.results.append(result)
        self._failed[name], self._code = message, self._code or code

    def end(self) -> None:
        """Print the results and a table of what failed, and exit with the code of the first."""
        if self._as_json:
            print_json(self.results)
        heads = ("pipeline", "reason")
        print_table(status, "Not built", heads, self._failed.items(), text_columns=range(2))
        if self._failed:
            raise typer.Exit(self._code)


def _report(plan: Plan | None, gate: GateResult, folder: Path) -> dict[str, str]:
    """Write the report of an encoder's gate into ``folder/<pipeline>``; return its path, if any."""
    if plan is None:
        return {}
    from triptych.base.cache import versions_of
    from triptych.core.export.to_onnx import LIBRARIES
    from triptych.interface.report.gate import GateHeader, write_gate_report

    about = GateHeader(
        pipeline=plan.spec.name,
        task=plan.task.name,
        architecture=plan.info.architecture,
        layout=plan.layout,
        versions=versions_of(*LIBRARIES, "onnxruntime"),
    )
    page = write_report(
        lambda target: write_gate_report(gate, about, target), folder / plan.spec.name
    )
    return {"report": str(page)}


@verb()
def lint(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a model repository, or of manifests.")
    ] = REPOSITORY,
    name: Annotated[
        str | None,
        typer.Argument(
            help="Pipeline whose build and measurements the manifests are compared with; not "
            "for a model repository. Default: no comparison."
        ),
    ] = None,
    triton: Annotated[
        str | None,
        typer.Option(
            metavar="YY.MM",
            help="Triton release that must load the repository and its engines. "
            "Default: the oldest supported release; engines and known defects are not checked.",
        ),
    ] = None,
    upgrade_from: Annotated[
        str | None,
        typer.Option(
            metavar="YY.MM",
            help="Release that serves the repository now: lists what changes with the release of "
            "--triton. Default: nothing is compared.",
        ),
    ] = None,
    repository: Repository = REPOSITORY,
    reports: Reports = REPORTS,
    as_json: Json = False,
) -> None:
    """Check a model repository or manifests, without a server.

    Manifests are checked if FOLDER holds them and no model; they can be those of another project.
    A server says by itself which model or field does not exist, and which tensors do not fit.
    """
    from triptych.repository.config import CONFIG_FILE
    from triptych.repository.lint import run_checks

    if not folder.is_dir():
        raise UserError(
            "FOLDER", "must be an existing folder", given=folder, remedy="Correct the path"
        )
    holds_models = any(folder.glob(f"*/{CONFIG_FILE}"))
    if name is not None and holds_models:
        raise UserError(
            "NAME",
            "is only supported for a folder of manifests",
            given=f"{name}, and models in {folder}",
            remedy=f"Run `triptych lint {folder}`, which checks all of its models",
        )
    if name is not None or (not holds_models and any(folder.rglob("*.y*ml"))):
        if upgrade_from is not None:
            raise UserError(
                "--upgrade-from",
                "is only supported for a model repository",
                given=f"{upgrade_from}, and manifests in {folder}",
                remedy="Name the repository that the manifests deploy, or omit the option",
            )
        exit_with_findings(_lint_manifests(folder, name, triton, repository, reports), as_json)
    if upgrade_from is not None and triton is None:
        raise UserError(
            "--upgrade-from",
            "is only supported with --triton",
            given=upgrade_from,
            remedy="Name the next release with --triton",
        )
    exit_with_findings(run_checks(folder, triton=triton, upgrade_from=upgrade_from), as_json)


def _lint_manifests(
    folder: Path, name: str | None, triton: str | None, repository: Path, reports: Path
) -> Sequence[Finding]:
    """Return the findings of manifests, compared with the pipeline `name` if one is given."""
    from triptych.base.releases import parse_release
    from triptych.deploy.checks import check_manifests
    from triptych.deploy.targets import read_build_info

    build = None if name is None else read_build_info(repository, name, reports / name)
    release = None if triton is None else parse_release(triton)
    return check_manifests(folder, release=release, build=build)
