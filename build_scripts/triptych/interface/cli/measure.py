"""Verbs that measure load: bench, bench-diff and tune."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.base.errors import UserError
from triptych.base.files import check_writable
from triptych.interface.cli.command import verb
from triptych.interface.cli.options import (
    EXIT_FINDINGS,
    REPORTS,
    Folders,
    Json,
    Name,
    Overrides,
    Reports,
    Url,
    fail,
    output,
    parse_seconds,
    print_json,
    progress,
    show_progress,
    sigterm_as_interrupt,
    status,
    write_report,
)

if TYPE_CHECKING:
    from triptych.serving.bench.comparison import Price

TimeBudget = Annotated[
    str,
    typer.Option(
        "--time-budget", metavar="TIME", help="Maximum total time, such as 90s, 15m or 1h."
    ),
]


@dataclass(frozen=True, kw_only=True)
class SloOptions:
    """SLO that measurements are compared with."""

    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC=TIME",
            help="Latency limit such as p99=50ms, or ttft_p99=500ms for text generation; may be "
            "repeated. Default: serving.slo of the pipeline.",
        ),
    ] = None
    min_throughput: Annotated[
        float | None,
        typer.Option(
            help="Minimum throughput in requests/s. Default: serving.slo of the pipeline."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PriceOptions:
    """Price of the machine and the load that it is for."""

    price_per_hour: Annotated[
        float | None,
        typer.Option(help="Price of one device per hour. Default: the report has no cost."),
    ] = None
    currency: Annotated[str, typer.Option(help="Currency of the price.")] = "USD"
    daily_requests: Annotated[
        float | None,
        typer.Option(help="Number of requests per day. Default: the report has no monthly cost."),
    ] = None
    peak_rps: Annotated[
        float | None,
        typer.Option(
            help="Peak load in requests/s. Default: the report has no number of machines."
        ),
    ] = None
    headroom: Annotated[
        float,
        typer.Option(
            min=0, max=0.99, help="Share (0 to 0.99) of a machine's maximum rate that stays unused."
        ),
    ] = 0.3

    def price(self) -> Price | None:
        """Return the price, or None if none is given.

        Raises:
            UserError: An option is out of range.
        """
        if self.price_per_hour is None:
            if self.daily_requests is not None or self.peak_rps is not None:
                raise UserError(
                    "--price-per-hour",
                    "is required for the cost of a volume or a peak",
                    remedy="Give the price of one device",
                )
            return None
        from triptych.serving.bench.comparison import Price

        price = Price(
            self.price_per_hour,
            self.daily_requests,
            self.peak_rps,
            currency=self.currency,
            headroom=self.headroom,
        )
        price.cost(1.0)  # checks the numbers before minutes of measuring
        return price


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Load of `bench`."""

    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            "--concurrency",
            "-c",
            min=1,
            help="Number of clients that each wait for their response (closed loop); may be "
            "repeated. Default: 1, 2, 4, 8, 16 and 32, or none with --rate.",
        ),
    ] = None
    rate: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01,
            help="Requests/s sent without waiting for responses (open loop); may be repeated. "
            "Default: no open loop.",
        ),
    ] = None
    arrivals: Annotated[
        str, typer.Option(help="Distribution of open-loop requests: poisson, constant or burst.")
    ] = "poisson"
    burst: Annotated[
        int, typer.Option(help="Number of requests sent together with --arrivals burst.")
    ] = 8
    rounds: Annotated[
        int,
        typer.Option(
            min=1, max=100, help="Number of rounds; each load is measured once per round."
        ),
    ] = 3
    window_seconds: Annotated[
        float,
        typer.Option(min=0.3, help="Duration of each measurement, in seconds."),
    ] = 3.0
    time_budget: TimeBudget = "10m"
    find_max_rate: Annotated[
        bool,
        typer.Option("--find-max-rate", help="Search the highest rate that meets the SLO."),
    ] = False
    export_perf: Annotated[
        Path | None,
        typer.Option(
            help="File for the requests as perf_analyzer --input-data, with every option in each "
            "row. Default: none."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Running server that `bench` measures."""

    url: Url = None
    metrics_url: Annotated[
        str | None,
        typer.Option(
            help="Address of the metrics page of the server at --url, for GPU metrics. "
            "Default: no GPU metrics of that server."
        ),
    ] = None


@verb()
def bench(
    name: Name,
    folders: Folders,
    load: LoadOptions,
    slo: SloOptions,
    price: PriceOptions,
    target: TargetOptions,
    reports: Reports = REPORTS,
    as_json: Json = False,
) -> None:
    """Measure throughput, latency, cost and bottlenecks under load.

    The requests are the pipeline's own traffic.
    """
    from triptych.building.pipeline import open_pipeline
    from triptych.interface.cli.measured_tables import print_bench
    from triptych.interface.report.bench import write_bench_report, write_figures
    from triptych.serving.bench.bench import CONCURRENCY, Bench, BenchOptions, parse_loads
    from triptych.serving.bench.results import judge_slo, to_json
    from triptych.spec.any_spec import load_any_spec, parse_any_slo

    if target.metrics_url is not None and target.url is None:
        raise UserError(
            "--metrics-url",
            "is only supported with --url",
            given=target.metrics_url,
            remedy="Remove it: the metrics page of the server that bench starts is known",
        )
    closed = load.concurrency or ([] if load.rate else list(CONCURRENCY))
    loads = parse_loads(closed, load.rate or (), load.arrivals, load.burst)
    spec = load_any_spec(folders.pipelines / name)
    wanted = Bench(
        loads=loads,
        rounds=load.rounds,
        seconds=load.window_seconds,
        budget_s=parse_seconds("--time-budget", load.time_budget),
        slo=parse_any_slo(spec, slo.slo or (), slo.min_throughput),
        find_rate=load.find_max_rate,
        price=price.price(),
        export=load.export_perf,
    )
    check_writable(reports / name / "bench", "--reports")
    told = f"{len(loads) * load.rounds} measurements of {load.window_seconds:g} s or more"
    progress("bench", f"{told}, at most about {wanted.budget_s / 60:.3g} min (--time-budget)")
    with sigterm_as_interrupt(), show_progress("bench", f"measuring {name}"):
        options = BenchOptions(
            repository=folders.repository,
            progress=progress,
            bench=wanted,
            url=target.url,
            metrics_url=target.metrics_url,
        )
        result = open_pipeline(spec).bench(options)
    write_report(lambda folder: write_bench_report(result, folder), reports / name / "bench")
    if target.url is None:
        progress("card", write_figures(result, folders.repository))
    if as_json:
        print_json(to_json(result))
    else:
        print_bench(output, result)
    raise typer.Exit(0 if judge_slo(result).passed else EXIT_FINDINGS)


@verb("bench-diff")
def bench_diff(
    before: Annotated[Path, typer.Argument(help="File bench.json of the first measurement.")],
    after: Annotated[Path, typer.Argument(help="File bench.json of the second measurement.")],
    as_json: Json = False,
) -> None:
    """Compare two results of bench, and mark differences beyond noise."""
    from triptych.interface.cli.measured_tables import print_comparison
    from triptych.serving.bench.comparison import compare_results, read_bench

    comparison = compare_results(read_bench(before), read_bench(after))
    if as_json:
        print_json(comparison.as_dict())
    else:
        print_comparison(output, comparison)


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Effort of `tune`."""

    time_budget: TimeBudget = "15m"
    clients: Annotated[
        int, typer.Option(min=1, max=128, help="Number of requests in flight at the highest load.")
    ] = 32


@verb()
def tune(
    name: Name,
    folders: Folders,
    slo: SloOptions,
    price: PriceOptions,
    search: SearchOptions,
    overrides: Overrides = None,
    reports: Reports = REPORTS,
    as_json: Json = False,
) -> None:
    """Find the fastest settings that meet the SLO and write tuned.yaml.

    The settings with the highest throughput win. They include queue delay, instances and batch
    sizes.
    """
    from triptych.core.gate.cached import GateFailure
    from triptych.interface.cli.measured_tables import print_tuned
    from triptych.interface.report.tune import write_tune_report
    from triptych.operate.tune.tune import Tuning, tune_pipeline
    from triptych.repository.lint.checks import LintFailure
    from triptych.serving.bench.results import to_json
    from triptych.spec.any_spec import load_any_spec, parse_any_slo

    folder = folders.pipelines / name
    spec = load_any_spec(folder, overrides or (), untuned=True)
    tuning = Tuning(
        slo=parse_any_slo(spec, slo.slo or (), slo.min_throughput),
        budget_s=parse_seconds("--time-budget", search.time_budget),
        clients=search.clients,
        price=price.price(),
        overrides=tuple(overrides or ()),
    )
    check_writable(folder)
    check_writable(folders.repository.parent, "--repository")
    check_writable(reports / name / "tune", "--reports")
    try:
        label = f"tuning {name}, about {tuning.budget_s / 60:.3g} min after the first build"
        progress("tune", f"{label} (--time-budget); Ctrl-C keeps what is proven by then")
        with sigterm_as_interrupt(), show_progress("tune", label):
            result = tune_pipeline(folder, folders.repository, tuning, progress)
    except (GateFailure, LintFailure) as failure:
        message = f"{failure}; run `triptych build {name}` for the details"
        fail(as_json, {"pipeline": name, "failure": str(failure)}, message)
    write_report(lambda folder: write_tune_report(result, folder), reports / name / "tune")
    if as_json:
        print_json(to_json(result))
    else:
        print_tuned(output, result)
        if result.winner.overrides:
            status.print(f"now run `triptych build {name}`", markup=False)
    raise typer.Exit(0 if result.met else EXIT_FINDINGS)
