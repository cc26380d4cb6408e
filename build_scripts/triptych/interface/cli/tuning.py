"""Verbs that measure: bench, tune."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from triptych.base.errors import UserError
from triptych.interface.cli.options import (
    EXIT_FINDINGS,
    PIPELINES,
    REPORTS,
    REPOSITORY,
    Json,
    Name,
    Overrides,
    Pipelines,
    Repository,
    app,
    fail,
    output,
    print_json,
    progress,
    report_into,
    status,
)
from triptych.interface.cli.serving import stoppable

MinThroughput = Annotated[
    float | None, typer.Option("--min-throughput", metavar="N", help="Requests a second promised.")
]
Budget = Annotated[str, typer.Option("--budget", metavar="TIME", help="As 90s, 15m or 1h.")]
PricePerHour = Annotated[
    float | None, typer.Option("--price-per-hour", help="Of one device: tells the cost.")
]
Currency = Annotated[str, typer.Option(help="Of the price.")]
DailyRequests = Annotated[
    float | None, typer.Option("--daily-requests", help="Tells the monthly cost, with a price.")
]
PeakRate = Annotated[
    float | None, typer.Option("--peak-rate", help="Requests a second: tells the machines needed.")
]
Headroom = Annotated[float, typer.Option(help="Share of a machine's rate that is kept free.")]
Slos = Annotated[
    list[str] | None,
    typer.Option(
        "--slo", metavar="P=TIME", help="p99=50ms or, of text, ttft_p99=500ms; else the spec's."
    ),
]
Reports = Annotated[Path, typer.Option("--reports", help="Folder of the reports.")]


@app.command()
def bench(
    name: Annotated[str | None, typer.Argument(help="Pipeline: the name of its folder.")] = None,
    url: Annotated[
        str | None,
        typer.Option(help="gRPC endpoint of a server; without it one is started and stopped."),
    ] = None,
    metrics_url: Annotated[
        str | None, typer.Option(help="Address of that server's metrics page: tells of its GPUs.")
    ] = None,
    pipelines: Pipelines = PIPELINES,
    repository: Repository = REPOSITORY,
    concurrency: Annotated[
        list[int] | None,
        typer.Option("--concurrency", "-c", help="Clients of a closed loop; may be repeated."),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option("--rate", help="Requests a second of an open loop; may be repeated."),
    ] = None,
    arrivals: Annotated[
        str, typer.Option(help="Of an open loop: poisson, constant or burst.")
    ] = "poisson",
    burst: Annotated[int, typer.Option(help="Requests sent at once, where they burst.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Each load once a round.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.3, help="Of each measurement.")] = 3.0,
    budget: Budget = "10m",
    slo: Slos = None,
    min_throughput: MinThroughput = None,
    find_rate: Annotated[
        bool, typer.Option("--find-rate", help="Search the highest rate that holds the SLO.")
    ] = False,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Measure PyTorch and ONNX Runtime in turns, too.")
    ] = False,
    price_per_hour: PricePerHour = None,
    currency: Currency = "USD",
    daily_requests: DailyRequests = None,
    peak_rate: PeakRate = None,
    headroom: Headroom = 0.3,
    reports: Reports = REPORTS,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="Two bench.json: what changed, and noise."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure rates, latencies, where time goes and cost.

    The load is the pipeline's own traffic.
    """
    if compare is not None:
        _compare(*compare, as_json=as_json)
        return
    from triptych.building.kinds import STEPS
    from triptych.interface.cli.measured_tables import print_bench
    from triptych.interface.report.load import write_bench_report, write_figures
    from triptych.serving.bench.bench import CONCURRENCY, Bench, parse_loads, price_of
    from triptych.serving.bench.results import to_json, verdict_of
    from triptych.spec.any_spec import load_any_spec, parse_any_slo

    if name is None:
        raise UserError("NAME", "must be given", remedy="Name a pipeline, or use --compare A B")
    closed = concurrency or ([] if rate else list(CONCURRENCY))
    loads = parse_loads(closed, rate or (), arrivals, burst)
    price = price_of(
        price_per_hour,
        currency=currency,
        daily_requests=daily_requests,
        peak_per_s=peak_rate,
        headroom=headroom,
    )
    spec = load_any_spec(pipelines / name)
    steps = STEPS[spec.kind]
    promised = parse_any_slo(spec, slo or (), min_throughput)
    wanted = Bench(
        loads=loads,
        rounds=rounds,
        seconds=seconds,
        budget_s=seconds_of("--budget", budget),
        slo=promised,
        find_rate=find_rate,
        baselines=baseline,
        price=price,
    )
    with stoppable():
        result = steps.bench(
            steps.read(spec, progress),
            repository,
            wanted,
            progress,
            url=url,
            metrics_url=metrics_url,
        )
    report_into(lambda folder: write_bench_report(result, folder), reports / name / "bench")
    if url is None:
        progress("card", write_figures(result, repository))
    if as_json:
        print_json(to_json(result))
    else:
        print_bench(output, result)
    raise typer.Exit(EXIT_FINDINGS if verdict_of(result).kind == "not met" else 0)


def _compare(before: Path, after: Path, *, as_json: bool) -> None:
    from triptych.interface.cli.measured_tables import print_comparison
    from triptych.serving.bench.comparison import compare, read_bench

    comparison = compare(read_bench(before), read_bench(after))
    if as_json:
        print_json(comparison.as_dict())
    else:
        print_comparison(output, comparison)


@app.command()
def tune(
    name: Name,
    pipelines: Pipelines = PIPELINES,
    repository: Repository = REPOSITORY,
    overrides: Overrides = None,
    slo: Slos = None,
    min_throughput: MinThroughput = None,
    budget: Budget = "15m",
    clients: Annotated[
        int, typer.Option(min=1, max=128, help="Of the highest load: requests under way at once.")
    ] = 32,
    price_per_hour: PricePerHour = None,
    currency: Currency = "USD",
    daily_requests: DailyRequests = None,
    peak_rate: PeakRate = None,
    headroom: Headroom = 0.3,
    reports: Reports = REPORTS,
    check: Annotated[
        list[Path] | None,
        typer.Option(
            "--check",
            help="Do not tune: say whether the plan still fits this new traffic.jsonl, or saved "
            "page of the server's metrics; twice for an earlier and a later page.",
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="With --check: requests a second now.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the numbers that serve best and write tuned.yaml.

    Tried are the queue's delay, instances, batches and more, each under load.
    """
    from triptych.building.generation.gate import GenerationGateFailure
    from triptych.core.gate.cached import GateFailure
    from triptych.repository.lint.checks import LintFailure

    if check:
        _check(name, check, pipelines, repository, reports, rate, as_json=as_json)
    from triptych.interface.cli.measured_tables import print_tuned
    from triptych.interface.report.tuning_report import write_tune_report
    from triptych.operate.tune.tune import Tuning, tune_pipeline
    from triptych.serving.bench.bench import price_of
    from triptych.serving.bench.results import to_json
    from triptych.spec.any_spec import load_any_spec, parse_any_slo

    folder = pipelines / name
    price = price_of(
        price_per_hour,
        currency=currency,
        daily_requests=daily_requests,
        peak_per_s=peak_rate,
        headroom=headroom,
    )
    spec = load_any_spec(folder, overrides or (), untuned=True)
    tuning = Tuning(
        slo=parse_any_slo(spec, slo or (), min_throughput),
        budget_s=seconds_of("--budget", budget),
        clients=clients,
        price=price,
        overrides=tuple(overrides or ()),
    )
    try:
        with stoppable():
            result = tune_pipeline(folder, repository, tuning, progress)
    except (GateFailure, GenerationGateFailure, LintFailure) as failure:
        told = f"{failure}; `triptych build {name}` shows all of it"
        fail(as_json, {"pipeline": name, "failure": str(failure)}, told)
    report_into(lambda folder: write_tune_report(result, folder), reports / name / "tune")
    if as_json:
        print_json(to_json(result))
    else:
        print_tuned(output, result)
        if result.winner.overrides:
            status.print(f"now run `triptych build {name}`", markup=False)
    raise typer.Exit(0 if result.met else EXIT_FINDINGS)


def _check(
    name: str,
    pages: list[Path],
    pipelines: Path,
    repository: Path,
    reports: Path,
    rate_per_s: float | None,
    *,
    as_json: bool,
) -> None:
    """Hold the plan against new traffic, and end."""
    from triptych.core.inputs import read_inputs
    from triptych.operate.tune.drift import check_drift, format_drift
    from triptych.operate.tune.new_traffic import read_lengths
    from triptych.operate.tune.proposal import measured_in
    from triptych.spec.any_spec import kind_in
    from triptych.spec.kind import Kind
    from triptych.spec.spec import load_spec

    if len(pages) > 2:
        raise UserError("--check", "must be given once or twice", given=f"{len(pages)} files")
    if kind_in(pipelines / name) is Kind.TEXT_GENERATION:
        raise UserError(
            "--check",
            "must be of a pipeline that answers at once",
            given=name,
            remedy="Put the new requests into traffic.jsonl and tune again",
        )
    inputs = read_inputs(load_spec(pipelines / name), progress).as_built(repository)
    new = read_lengths(inputs, pages[-1], before=pages[0] if len(pages) > 1 else None)
    drift = check_drift(inputs, new, measured=measured_in(reports / name), rate_per_s=rate_per_s)
    if as_json:
        print_json(drift.as_dict())
    else:
        for line, style in format_drift(drift):
            output.print(line, style=style, markup=False)
    raise typer.Exit(0 if drift.action == "keep" else EXIT_FINDINGS)


def seconds_of(option: str, text: str) -> float:
    """``90s``, ``15m`` or ``1h`` in seconds.

    Raises:
        UserError: a time of another form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)", text)
    seconds = float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if seconds <= 0:
        raise UserError(
            option, "must be a time, as 90s, 15m or 1h", given=text, remedy="Add the unit"
        )
    return seconds
