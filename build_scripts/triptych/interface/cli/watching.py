"""Verbs that read what servers sampled: watch, shadow, traffic.

What `watch --apply` does with a look's proposal, and what it tells of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from triptych.base.errors import UserError
from triptych.interface.cli.options import (
    EXIT_FINDINGS,
    PIPELINES,
    REPORTS,
    REPOSITORY,
    SAMPLES,
    Json,
    Name,
    Pipelines,
    Repository,
    app,
    output,
    print_json,
    progress,
    report_into,
    status,
)
from triptych.interface.cli.serving import stoppable, warn
from triptych.interface.cli.tables import print_built, print_failed_gate, tell_verdict
from triptych.interface.cli.tuning import seconds_of
from triptych.runtime.sample_files import FOLDER_VARIABLE

if TYPE_CHECKING:
    from triptych.operate.monitor.metrics import RunCollector
    from triptych.operate.monitor.results import MonitorRun
    from triptych.spec.spec import PipelineSpec


def apply_look(
    look: MonitorRun,
    samples: Path,
    pipelines: Path,
    repository: Path,
    watched: Path,
    *,
    most: int,
    as_json: bool,
) -> dict[str, Any] | None:
    """Build what a look proposes and put it in place; None where it proposes nothing.

    Args:
        look: just taken.
        samples: folder of what servers sampled.
        pipelines: folder of the pipelines.
        repository: folder of the models.
        watched: folder of the pipeline's timeline.
        most: rows of the new traffic.
        as_json: whether standard output is for the result alone.

    Returns:
        ``build``, ``replaced`` and more of what is in place, or ``failure``: why all is as it was.
    """
    from triptych.core.engine.stage import EngineFailure
    from triptych.core.gate.cached import GateFailure
    from triptych.core.inputs import read_inputs
    from triptych.operate.monitor.apply import apply_blocker, apply_proposal, format_applied
    from triptych.operate.monitor.sample import read_files
    from triptych.operate.monitor.timeline import read_timeline
    from triptych.repository.lint.checks import LintFailure
    from triptych.spec.spec import load_spec

    if look.drift is None or look.drift.proposal is None:
        return None
    inputs = read_inputs(load_spec(pipelines / look.pipeline), progress).as_built(repository)
    last = read_files(samples, look.pipeline, read_timeline(watched).last)
    rows = [row for row in last.rows if row.build == look.build]
    failure = apply_blocker(inputs, look, rows, repository)
    if not failure:
        try:
            with stoppable():
                done = apply_proposal(inputs, look, rows, repository, progress, max_rows=most)
        except (GateFailure, EngineFailure) as error:
            print_failed_gate(status, error.gate)
            failure = str(error)
        except LintFailure as error:
            failure = str(error)
        except UserError as error:
            failure = error.message
        else:
            print_built(status, done.built)
            for line in format_applied(done):
                (status if as_json else output).print(line, markup=False)
            return done.as_dict()
    status.print(f"not applied, all is as it was: {failure}", style="red", markup=False)
    return {"failure": failure}


Samples = Annotated[
    Path,
    typer.Option("--samples", envvar=FOLDER_VARIABLE, help="Folder of what servers sampled."),
]


@app.command()
def watch(
    name: Name,
    samples: Samples = SAMPLES,
    every: Annotated[
        str | None, typer.Option("--every", help="Look again and again: 15m, 1h; until stopped.")
    ] = None,
    pipelines: Pipelines = PIPELINES,
    repository: Repository = REPOSITORY,
    rows: Annotated[
        int, typer.Option("--rows", min=1, help="Most rows of a look that are compared.")
    ] = 2000,
    reports: Annotated[
        Path, typer.Option("--reports", help="Folder of the reports, one for each pipeline.")
    ] = REPORTS,
    textfile: Annotated[
        Path | None, typer.Option("--textfile", help="File of gauges for Prometheus, *.prom.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Page of gauges, with --every; 0 takes any."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address of that page.")] = "127.0.0.1",
    servers: Annotated[
        int | None, typer.Option("--servers", min=1, help="That sampled: tells the rate of each.")
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Build what is proposed and put it in place.")
    ] = False,
    show_texts: Annotated[
        bool, typer.Option("--show-texts", help="Show texts and answers of the worst rows.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Hold live answers, as sampled, to the gate's limits.

    Rows are compared with the original model once; what all looks at a build tell is one test,
    which may be looked at as often as one likes. Drift of the requests is told, and what would
    suit them: with --apply that is built with the sampled rows, gated and put in place.
    """
    pause_s = None if every is None else seconds_of("--every", every)
    if port is not None and pause_s is None:
        raise UserError("--port", "must come with --every: a page needs somebody who stays")

    def look(page: RunCollector | None) -> bool:
        """Whether all is well, or was put right."""
        found = _look(
            name, samples, pipelines, repository, rows, reports, servers, show_texts=show_texts
        )
        if textfile is not None:
            _write_gauges(found, textfile)
        if page is not None:
            _show_gauges(found, page)
        if not as_json:
            _print(found)
        applied = None
        if apply:
            from triptych.operate.monitor.timeline import RUN_FOLDER

            watched = reports / name / RUN_FOLDER
            applied = apply_look(
                found, samples, pipelines, repository, watched, most=rows, as_json=as_json
            )
        if as_json:
            print_json(found.as_dict() | ({"applied": applied} if apply else {}))
        return found.passed or (applied is not None and "failure" not in applied)

    if pause_s is None:
        raise typer.Exit(0 if look(None) else EXIT_FINDINGS)
    with stoppable(), _page(host, port) as page:
        (samples / name).mkdir(0o700, parents=True, exist_ok=True)  # servers may come later
        look(page)
        _go_on(lambda: look(page), pause_s)


def _go_on(look: Callable[[], bool], pause_s: float) -> NoReturn:
    while True:
        time.sleep(pause_s)
        try:
            look()
        except UserError as error:  # may be over by the next look
            warn(error.message)


@contextmanager
def _page(host: str, port: int | None) -> Iterator[RunCollector | None]:
    if port is None:
        yield None
        return
    from triptych.operate.monitor.metrics import PATH, metrics_page

    with metrics_page(host, port) as page:
        progress("watch", f"gauges at http://{host}:{page.port}{PATH}")
        yield page


def _look(
    name: str,
    samples: Path,
    pipelines: Path,
    repository: Path,
    rows: int,
    reports: Path,
    servers: int | None,
    *,
    show_texts: bool,
) -> MonitorRun:
    from triptych.core.inputs import read_inputs
    from triptych.interface.report.watch import write_watch_report
    from triptych.operate.monitor.run import run_monitor
    from triptych.operate.monitor.sample import read_files, read_sample
    from triptych.operate.monitor.timeline import RUN_FOLDER, read_timeline
    from triptych.operate.tune.proposal import measured_in
    from triptych.repository.manifest import build_id
    from triptych.spec.spec import load_spec

    spec = load_spec(pipelines / name)
    inputs = read_inputs(spec, progress).as_built(repository)
    folder = reports / name / RUN_FOLDER
    timeline = read_timeline(folder)
    sample = read_sample(
        samples, name, keep_hours=_keep_hours(spec), known=frozenset(timeline.files)
    )
    look = run_monitor(
        inputs,
        repository,
        sample,
        progress,
        evidence=timeline.evidence_about(build_id(repository, name)),
        max_rows=rows,
        last=None if sample.rows else read_files(samples, name, timeline.last),
        measured=measured_in(reports / name),
        servers=servers,
        show_texts=show_texts,
    )
    timeline = timeline.after(look, sample.known)
    report_into(lambda target: write_watch_report(look, timeline, target), folder)
    return look


def _keep_hours(spec: PipelineSpec) -> float:
    """How long the pipeline's samples may be kept.

    Raises:
        UserError: it samples nothing.
    """
    if spec.serving.sample is None:
        raise UserError(
            "serving.sample",
            "must be given, so that the server keeps what it answers",
            given="nothing",
            remedy="Write `sample: {rate: 0.001}` below serving, build and serve",
        )
    return spec.serving.sample.keep_hours


def _write_gauges(look: MonitorRun, path: Path) -> None:
    from triptych.base.files import told_to_user, write_files
    from triptych.operate.monitor.metrics import metrics_text

    with told_to_user(path.parent):
        write_files(path.parent, {path.name: metrics_text(look)})


def _show_gauges(look: MonitorRun, page: RunCollector) -> None:
    page.run = look


def _print(look: MonitorRun) -> None:
    from triptych.operate.monitor.results import format_run

    for line, style in format_run(look):
        output.print(line, style=style, markup=False)


@app.command()
def shadow(
    name: Name,
    candidate: Annotated[
        str,
        typer.Option("--candidate", help="Repository with the other build, or a kept one's id."),
    ],
    repository: Repository = REPOSITORY,
    pipelines: Pipelines = PIPELINES,
    samples: Samples = SAMPLES,
    from_traffic: Annotated[
        bool, typer.Option("--traffic", help="Replay traffic.jsonl, not the sample.")
    ] = False,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Most rows that are replayed.")] = 2000,
    clients: Annotated[
        int, typer.Option("--clients", min=1, max=128, help="Requests under way at once.")
    ] = 8,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Load of requests a second, not of clients.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=0, max=100, help="Of load, in turns; 0 compares answers alone.")
    ] = 5,
    seconds: Annotated[float, typer.Option(min=0.3, help="Of each measurement.")] = 3.0,
    reports: Annotated[
        Path, typer.Option("--reports", help="Folder of the reports, one for each pipeline.")
    ] = REPORTS,
    as_json: Json = False,
) -> None:
    """Replay live requests on two builds: is the other better?

    Rows of the sample, or of traffic.jsonl where nothing is sampled, go to the build in place and
    to the candidate, each on a server of its own: answers, latency and cost, and one verdict.
    """
    from triptych.core.inputs import read_inputs
    from triptych.interface.report.watch import write_shadow_report
    from triptych.operate.monitor.sample import read_sample
    from triptych.operate.monitor.shadow import ReplayOptions, compare_candidate
    from triptych.operate.monitor.verdict import format_comparison
    from triptych.serving.bench.bench import parse_loads
    from triptych.spec.spec import load_spec

    closed, rates = ([clients], []) if rate is None else ([], [rate])
    (load,) = parse_loads(closed, rates, "poisson", 1)
    spec = load_spec(pipelines / name)
    inputs = read_inputs(spec, progress).as_built(repository)
    sample = None
    if not from_traffic and spec.serving.sample is not None:
        sample = read_sample(samples, name, keep_hours=spec.serving.sample.keep_hours)
    how = ReplayOptions(max_rows=rows, clients=clients, load=load, rounds=rounds, seconds=seconds)
    with stoppable(), _candidate(name, repository, candidate) as other:
        found = compare_candidate(inputs, repository, other, sample, how, progress)
    report_into(lambda target: write_shadow_report(found, target), reports / name / "shadow")
    lines = format_comparison(found)
    tell_verdict(found.as_dict(), lines, passed=found.passed, as_json=as_json)


@contextmanager
def _candidate(name: str, repository: Path, candidate: str) -> Iterator[Path]:
    """The repository of the candidate: a folder, or links to a build that is kept."""
    from triptych.repository.store import choose_build, kept_builds, sibling_work_dir

    kept = choose_build(kept_builds(repository, name), candidate)
    if kept is None or Path(candidate).is_dir():
        yield Path(candidate)
        return
    with sibling_work_dir(repository, "shadow") as folder:
        kept.lay_out(folder)
        yield folder


@app.command()
def traffic(
    name: Name,
    from_sample: Annotated[
        bool, typer.Option("--from-sample", help="Take rows that the server sampled.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Leave the rows out that are there now.")
    ] = False,
    most: Annotated[int, typer.Option("--rows", min=1, help="Most rows that are added.")] = 2000,
    samples: Samples = SAMPLES,
    pipelines: Pipelines = PIPELINES,
    repository: Repository = REPOSITORY,
    as_json: Json = False,
) -> None:
    """Put sampled requests into traffic.jsonl; says what follows."""
    from triptych.core.inputs import read_inputs
    from triptych.operate.monitor.apply import format_change, take_rows
    from triptych.operate.monitor.sample import read_sample
    from triptych.operate.tune.drift import format_drift
    from triptych.spec.spec import load_spec

    if not from_sample:
        raise UserError("--from-sample", "must be given: there is no other source of rows")
    spec = load_spec(pipelines / name)
    inputs = read_inputs(spec, progress).as_built(repository)
    sample = read_sample(samples, name, keep_hours=_keep_hours(spec))
    change = take_rows(inputs, sample, replace=replace, max_rows=most)
    if as_json:
        print_json(change.as_dict())
        return
    for line in format_change(change):
        output.print(line, markup=False)
    if change.drift is not None:
        for line, style in format_drift(change.drift):
            output.print(line, style=style, markup=False)
