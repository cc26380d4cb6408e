"""Verbs that read sampled rows: monitor, shadow, traffic."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.base.errors import UserError
from triptych.base.files import check_writable, os_errors_as_user_errors, write_files
from triptych.interface.cli.command import verb
from triptych.interface.cli.options import (
    EXIT_FINDINGS,
    REPORTS,
    SAMPLES,
    Folders,
    Json,
    Name,
    Reports,
    Samples,
    output,
    parse_seconds,
    print_json,
    progress,
    show_progress,
    sigterm_as_interrupt,
    warn,
    write_report,
)
from triptych.interface.cli.tables import (
    exit_with_verdict,
    print_lines,
)

if TYPE_CHECKING:
    from triptych.operate.monitor.metrics import RunCollector
    from triptych.operate.monitor.results import MonitorRun
    from triptych.spec.model_fields import CompiledSpec


@dataclass(frozen=True, kw_only=True)
class MonitorOptions:
    """Options of one run of the monitoring."""

    samples: Samples = SAMPLES
    max_rows: Annotated[
        int,
        typer.Option(min=1, help="Maximum number of rows compared in one run."),
    ] = 2000
    reports: Reports = REPORTS
    show_texts: Annotated[
        bool,
        typer.Option(
            "--show-texts", help="Show texts and answers of the rows with the largest errors."
        ),
    ] = False


@verb()
def monitor(
    name: Name,
    folders: Folders,
    options: MonitorOptions,
    interval: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Time between two runs, such as 15m or 1h. Default: a single run."
        ),
    ] = None,
    textfile: Annotated[
        Path | None,
        typer.Option(help="File *.prom for gauges in Prometheus format. Default: none."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port of a page with gauges, with --interval; 0 picks a free port. "
            "Default: no page.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address that the page with gauges listens on.")
    ] = "127.0.0.1",
    as_json: Json = False,
) -> None:
    """Compare sampled responses with the original model and detect drift.

    Each new row is compared once. The results accumulate in one sequential test per build, so
    that frequent runs cause no false alarms. The exit code is 1 on an alarm or a drift.
    """
    from triptych.operate.monitor.results import format_run

    pause_s = None if interval is None else parse_seconds("--interval", interval)
    if port is not None and pause_s is None:
        raise UserError(
            "--port",
            "is only supported with --interval",
            given=port,
            remedy="Add --interval 1h, because a single run ends before its page is read",
        )

    def run(page: RunCollector | None) -> bool:
        """Return whether there is no alarm and no drift."""
        result = _run_once(name, folders, options)
        if textfile is not None:
            _write_gauges(result, textfile)
        if page is not None:
            page.run = result
        if as_json:
            print_json(result.as_dict())
        else:
            print_lines(format_run(result))
        return result.passed

    if pause_s is None:
        raise typer.Exit(0 if run(None) else EXIT_FINDINGS)
    with sigterm_as_interrupt(), _page(host, port) as page:
        # The servers may start after the monitoring.
        (options.samples / name).mkdir(0o700, parents=True, exist_ok=True)
        run(page)
        while True:
            time.sleep(pause_s)
            try:
                run(page)
            except UserError as error:  # The cause may be gone at the next run.
                warn(error.message)


@contextmanager
def _page(host: str, port: int | None) -> Iterator[RunCollector | None]:
    if port is None:
        yield None
        return
    from triptych.operate.monitor.metrics import PATH, metrics_page

    with metrics_page(host, port) as page:
        progress("monitor", f"gauges at http://{host}:{page.port}{PATH}")
        yield page


def _run_once(name: str, folders: Folders, options: MonitorOptions) -> MonitorRun:
    from triptych.building.compiled import read_compiled
    from triptych.interface.report.monitor import write_monitor_report
    from triptych.operate.monitor.results import RUN_FOLDER, read_timeline
    from triptych.operate.monitor.run import run_monitor
    from triptych.operate.monitor.sample import read_files, read_sample
    from triptych.repository.manifest import build_id
    from triptych.spec.any_spec import load_compiled

    began_s = time.process_time()
    spec = load_compiled(folders.pipelines / name)
    folder = options.reports / name / RUN_FOLDER
    check_writable(folder, "--reports")
    timeline = read_timeline(folder)
    known = frozenset(timeline.files)
    sample = read_sample(options.samples, name, progress, keep_hours=_keep_hours(spec), known=known)
    with show_progress("monitor", f"comparing rows of {name}"):
        result = run_monitor(
            read_compiled(spec, progress).with_built_layout(folders.repository),
            folders.repository,
            sample,
            progress,
            evidence=timeline.evidence_about(build_id(folders.repository, name)),
            max_rows=options.max_rows,
            last=None if sample.rows else read_files(options.samples, name, timeline.last),
            show_texts=options.show_texts,
        )
    if result.rows:
        spent_s = time.process_time() - began_s
        progress(
            "cost",
            f"{spent_s:.1f} s of processor time on this machine, {1e3 * spent_s / result.rows:.0f} "
            "ms a row, most of it in the original model",
        )
    timeline = timeline.after(result, sample.known)
    write_report(lambda target: write_monitor_report(result, timeline, target), folder)
    return result


def _keep_hours(spec: CompiledSpec) -> float:
    """Return the retention time of the pipeline's samples, in hours.

    Raises:
        UserError: The pipeline has no sampling.
    """
    if spec.serving.sample is None:
        raise UserError(
            "serving.sample",
            "is missing, so servers sample no rows",
            remedy="Write `sample: {rate: 0.001}` below serving in pipeline.yaml, build and serve",
        )
    return spec.serving.sample.retention_hours


def _write_gauges(result: MonitorRun, path: Path) -> None:
    from triptych.operate.monitor.metrics import metrics_text

    with os_errors_as_user_errors(path.parent):
        write_files(path.parent, {path.name: metrics_text(result)})


@dataclass(frozen=True, kw_only=True)
class ReplayedLoad:
    """Rows that `shadow` replays, and their load."""

    samples: Samples = SAMPLES
    from_traffic: Annotated[
        bool, typer.Option("--traffic", help="Replay traffic.jsonl instead of the sampled rows.")
    ] = False
    max_rows: Annotated[
        int,
        typer.Option(min=1, help="Maximum number of rows that are replayed."),
    ] = 2000
    clients: Annotated[int, typer.Option(min=1, max=128, help="Number of requests in flight.")] = 8
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests/s sent without waiting for responses. Default: the load of --clients."
        ),
    ] = None
    max_rounds: Annotated[
        int,
        typer.Option(
            min=0,
            max=1000,
            help="Maximum number of rounds under load on each build. They end with a "
            "verdict that 95 % confidence allows; 0 compares the answers only.",
        ),
    ] = 30
    window_seconds: Annotated[
        float,
        typer.Option(min=0.3, help="Duration of each measurement, in seconds."),
    ] = 3.0


@verb()
def shadow(
    name: Name,
    candidate: Annotated[
        str,
        typer.Argument(help="Repository with the other build, or the ID of a replaced build."),
    ],
    folders: Folders,
    replay: ReplayedLoad,
    reports: Reports = REPORTS,
    as_json: Json = False,
) -> None:
    """Compare two builds on replayed traffic.

    Sampled rows, or traffic.jsonl if nothing is sampled, are sent to the active build and to the
    candidate, each on its own server. The verdict covers answers, latency and cost.
    The exit code is 0 only for the verdict `promote`.
    """
    from triptych.building.compiled import read_compiled
    from triptych.interface.report.monitor import write_shadow_report
    from triptych.operate.monitor.sample import read_sample
    from triptych.operate.monitor.shadow import ReplayOptions, compare_candidate
    from triptych.operate.monitor.shadow_verdict import format_comparison
    from triptych.serving.bench.bench import parse_loads
    from triptych.spec.any_spec import load_compiled

    check_writable(reports / name / "shadow", "--reports")
    closed, rates = ([replay.clients], []) if replay.rate is None else ([], [replay.rate])
    (load,) = parse_loads(closed, rates, "poisson", 1)
    spec = load_compiled(folders.pipelines / name)
    inputs = read_compiled(spec, progress).with_built_layout(folders.repository)
    sample = None
    if not replay.from_traffic and spec.serving.sample is not None:
        keep_hours = spec.serving.sample.retention_hours
        sample = read_sample(replay.samples, name, progress, keep_hours=keep_hours)
    options = ReplayOptions(
        max_rows=replay.max_rows,
        clients=replay.clients,
        load=load,
        rounds=replay.max_rounds,
        seconds=replay.window_seconds,
    )
    minutes = 2 * replay.max_rounds * replay.window_seconds / 60
    progress("shadow", f"about {minutes:.2g} min of measurements at most (--max-rounds)")
    with sigterm_as_interrupt(), _candidate(name, folders.repository, candidate) as other:
        found = compare_candidate(inputs, folders.repository, other, sample, options, progress)
    write_report(lambda target: write_shadow_report(found, target), reports / name / "shadow")
    lines = format_comparison(found)
    exit_with_verdict(found.as_dict(), lines, passed=found.passed, as_json=as_json)


@contextmanager
def _candidate(name: str, repository: Path, candidate: str) -> Iterator[Path]:
    """Yield the repository of the candidate: a folder, or links to a replaced build."""
    from triptych.repository.manifest import CompiledManifest, read_manifest
    from triptych.repository.store import find_build, list_history, sibling_work_dir

    kept = find_build(list_history(repository, name), candidate)
    if kept is None or Path(candidate).is_dir():
        yield Path(candidate)
        return
    with sibling_work_dir(repository, "shadow") as folder:
        kept.lay_out(folder)
        try:
            read_manifest(folder, name, CompiledManifest)
        except UserError as error:
            raise UserError(
                f"replaced build {kept.build[:12]}",
                "was made by another release of triptych and cannot be compared",
                given=error.given,
                remedy=f"Choose a later build of `triptych history {name}`",
            ) from error
        yield folder


@verb()
def traffic(
    name: Name,
    folders: Folders,
    replace: Annotated[
        bool, typer.Option("--replace", help="Remove the present rows of traffic.jsonl.")
    ] = False,
    max_rows: Annotated[
        int, typer.Option(min=1, help="Maximum number of rows that are added.")
    ] = 2000,
    samples: Samples = SAMPLES,
    as_json: Json = False,
) -> None:
    """Add sampled requests to traffic.jsonl."""
    from triptych.building.compiled import read_compiled
    from triptych.operate.monitor.sample import read_sample
    from triptych.operate.monitor.traffic import format_change, take_rows
    from triptych.spec.any_spec import load_compiled

    spec = load_compiled(folders.pipelines / name)
    sample = read_sample(samples, name, progress, keep_hours=_keep_hours(spec))
    inputs = read_compiled(spec, progress).with_built_layout(folders.repository)
    change = take_rows(inputs, sample, replace=replace, max_rows=max_rows)
    if as_json:
        print_json(change.as_dict())
        return
    for line in format_change(change):
        output.print(line, markup=False)
