"""Measure the cost of `serving.sample`: the same pipeline with and without it.

``off`` runs twice, to show which difference the measurement cannot resolve. At rate 1 every row is
sampled; a hundredth of that cost is the cost of the sampled rows at rate 0.01.

Usage: ``python build_scripts/benchmarks/sampling.py [--core zero] [--rounds 40]``.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, stdev

from benchmarks import emulated_core
from benchmarks.cost import measure_cost, server_core_ms
from benchmarks.harness import Series, Turn, finish, make_parser, run_rounds, tabulate
from benchmarks.model import CACHE, PIPELINE, build, traffic_texts
from triptych.runtime.sampling import FOLDER_VARIABLE
from triptych.serving.server import Server

_NAME = PIPELINE.name
_RATES = {"off": None, "off again": None, "rate 0.01": 0.01, "rate 1": 1.0}
CORE_MS = "served core-ms"


def main() -> int:
    """Serve all pipelines, measure in rounds, compare each with the one without sampling."""
    parser = make_parser(__doc__, "sampling", "Cost of sampling", rounds=20, seconds=3.0)
    parser.add_argument("--core", choices=["real", *emulated_core.CORES], default="real")
    parser.add_argument("--clients", type=int, default=32)
    options = parser.parse_args()
    texts = traffic_texts()
    environment = {FOLDER_VARIABLE: str(CACHE / "samples")}
    with ExitStack() as stack:
        turns = []
        for name, rate in _RATES.items():
            repository = _write_repository(name, rate, options.core)
            server = stack.enter_context(Server(repository, environment=environment))

            def measure(server: Server = server) -> list[tuple[str, dict[str, float]]]:
                load = {"clients": options.clients, "seconds": options.seconds}
                metrics = measure_cost(server.grpc_url, server.pid, _NAME, texts, **load)
                return [("", {**metrics, CORE_MS: server_core_ms(metrics)})]

            turns.append(Turn(name, measure))
        found = run_rounds([turns], options.rounds, max_minutes=options.max_minutes)
    off = found[0]
    table = tabulate(
        f"Core {options.core}, {options.clients} clients",
        found,
        {
            "sampling": lambda one: one.system,
            "core-ms per text": lambda one: one.text(CORE_MS, 3),
            "difference of core-ms": lambda one: _compare(one, off, CORE_MS),
            "texts/s": lambda one: one.text("rate_per_s"),
            "difference of texts/s": lambda one: _compare(one, off, "rate_per_s"),
        },
    )
    note = f"{options.rounds} rounds of {options.seconds:g} s; mean differences ± standard error"
    finish(options, [table], found, [note])
    return 0


def _write_repository(name: str, rate: float | None, core: str) -> Path:
    """Return the repository of the pipeline with a sampling rate and a real or emulated core."""
    if rate is None:
        built = build(CACHE / "packed")
    else:
        built = build(CACHE / f"sampled-{rate}", f"serving.sample={{rate: {rate}}}")
    if core == "real":
        return built
    target = CACHE / "sampling" / name
    return emulated_core.write_pipeline(built, _NAME, target, emulated_core.CORES[core])


def _compare(one: Series, off: Series, metric: str) -> str:
    """Return the mean difference in percent, round by round, with its standard error."""
    if one is off:
        return ""
    pairs = zip(one.values(metric), off.values(metric), strict=True)
    percent = [100 * (value / base - 1) for value, base in pairs]
    error = stdev(percent) / len(percent) ** 0.5 if len(percent) > 1 else float("nan")
    return f"{fmean(percent):+.2f} % ± {error:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
