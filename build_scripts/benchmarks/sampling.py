"""What `serving.sample` costs: the same pipeline with and without it, loaded in turns.

Pairs of short rounds, so that what disturbs the machine disturbs both. ``off`` runs twice: how far
the two are apart is what the measurement cannot tell. At rate 1 every row is sampled: a hundredth
of what that costs is what 0.01 costs for its rows.

Usage: ``python build_scripts/benchmarks/sampling.py [--core zero] [--rounds 40]``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, stdev

from benchmarks import hops, path_cost
from benchmarks.model import CACHE, PIPELINE, build
from benchmarks.path_cost import CLIENT, Cost
from triptych.runtime.sample_files import FOLDER_VARIABLE
from triptych.serving.server import Server
from triptych.spec.traffic import read_traffic

_NAME = PIPELINE.name
_OFF = "off"
_RATES = {_OFF: None, "off again": None, "rate 0.01": 0.01, "rate 1": 1.0}


@dataclass(frozen=True)
class Difference:
    """How a contender differs from `_OFF`, in percent of it, round by round.

    Attributes:
        core_ms: of processor time a text, all but the client's.
        core_ms_error: standard error of the mean.
        throughput: texts a second.
        throughput_error: likewise.
    """

    core_ms: float
    core_ms_error: float
    throughput: float
    throughput_error: float


def main() -> int:
    """Serve all, measure in turns, print medians and differences, write every measurement."""
    options = _parse()
    texts = [row.inputs["text"] for row in read_traffic(PIPELINE, ("text",))]
    samples = CACHE / "samples"
    costs: dict[str, list[Cost]] = {name: [] for name in _RATES}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                Server(
                    _repository(rate, options.core, name),
                    environment={FOLDER_VARIABLE: str(samples)},
                )
            )
            for name, rate in _RATES.items()
        }
        names = [*servers]
        for number in range(options.rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                server = servers[name]
                cost = path_cost.measure(
                    server.grpc_url,
                    server.pid,
                    _NAME,
                    texts,
                    clients=options.clients,
                    texts_a_request=1,
                    seconds=options.seconds,
                )
                costs[name].append(cost)
            load = os.getloadavg()[0]
            print(f"round {number + 1}/{options.rounds}, load {load:.1f}", file=sys.stderr)
    print(_table(costs))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    found = {name: [asdict(cost) for cost in each] for name, each in costs.items()}
    options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--core", choices=["real", *hops.CORES], default="real")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement")
    parser.add_argument("--output", type=Path, default=CACHE / "sampling.json")
    return parser.parse_args()


def _repository(rate: float | None, core: str, name: str) -> Path:
    """The pipeline that samples so many rows, its core as asked."""
    if rate is None:
        built = build(CACHE / "packed")
    else:
        built = build(CACHE / f"sampled-{rate}", f"serving.sample={{rate: {rate}}}")
    if core == "real":
        return built
    return hops.write_pipeline(built, _NAME, CACHE / "sampling" / name, hops.CORES[core])


def _core_ms(cost: Cost) -> float:
    return sum(taken for process, taken in cost.core_ms.items() if process != CLIENT)


def _difference(found: Sequence[Cost], off: Sequence[Cost]) -> Difference:
    def percent(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
        more = [100 * (one / other - 1) for one, other in zip(values, others, strict=True)]
        return fmean(more), stdev(more) / len(more) ** 0.5 if len(more) > 1 else float("nan")

    times = [_core_ms(cost) for cost in found], [_core_ms(cost) for cost in off]
    rates = [cost.texts_per_s for cost in found], [cost.texts_per_s for cost in off]
    return Difference(*percent(*times), *percent(*rates))


def _table(costs: Mapping[str, Sequence[Cost]]) -> str:
    lines = [
        "| | core-ms a text | more | texts/s | more |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, found in costs.items():
        cells = [
            name,
            f"{median(map(_core_ms, found)):.3f}",
            "",
            f"{median(cost.texts_per_s for cost in found):.0f}",
            "",
        ]
        if name != _OFF:
            more = _difference(found, costs[_OFF])
            cells[2] = f"{more.core_ms:+.2f} % ± {more.core_ms_error:.2f}"
            cells[4] = f"{more.throughput:+.2f} % ± {more.throughput_error:.2f}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
