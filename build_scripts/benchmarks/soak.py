"""Memory over many requests: does tritonserver, a Python step or /dev/shm grow?

Usage: ``python build_scripts/benchmarks/soak.py --requests 200000``.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression, median

import psutil

from benchmarks.ensemble import Ensemble
from benchmarks.model import CACHE, PIPELINE, build
from triptych.base.errors import UserError
from triptych.serving.bench import perf_analyzer
from triptych.serving.bench.resources import process_name, process_tree
from triptych.spec.traffic import read_traffic

_SHARED_MEMORY = "/dev/shm"
_MIB = 1024 * 1024
# Slower than any machine that this runs on: the bound of the whole run.
_SLOWEST_PER_S = 5.0


@dataclass(frozen=True)
class Growth:
    """How one series of bytes went.

    Attributes:
        name: the process, or /dev/shm.
        first_quartile_mib: median of the first quarter of the samples.
        last_quartile_mib: median of the last quarter.
        highest_mib: of all samples.
        slope_kib_per_1000: least-squares slope, in KiB for 1,000 requests.
    """

    name: str
    first_quartile_mib: float
    last_quartile_mib: float
    highest_mib: float
    slope_kib_per_1000: float


def main() -> int:
    """Serve, load, sample, print the growth of each process, write the samples."""
    options = _parse()
    texts = [row.inputs["text"] for row in read_traffic(PIPELINE, ("text",))]
    texts = [text for text in texts if len(text) <= options.longest]
    repository = options.repository or build(CACHE / "packed")
    outcome: list[perf_analyzer.LoadResult | UserError] = []

    with Ensemble("soak", repository, options.model) as server:

        def load() -> None:
            try:
                outcome.append(
                    perf_analyzer.run(
                        server.grpc_url,
                        options.model,
                        texts,
                        concurrency=options.clients,
                        request_count=options.requests,
                        timeout_s=600 + options.requests / _SLOWEST_PER_S,
                    )
                )
            except UserError as error:
                outcome.append(error)

        server.load(texts, clients=options.clients, seconds=options.warm_up)
        runner = threading.Thread(target=load)
        runner.start()
        samples: list[dict[str, float]] = []
        began = time.monotonic()
        while runner.is_alive():
            samples.append({"seconds": time.monotonic() - began, **sample(server.pid)})
            runner.join(options.every)
    (result,) = outcome
    if isinstance(result, UserError):
        print(f"the load failed after {samples[-1]['seconds']:.0f} s: {result}", file=sys.stderr)
        return 1
    growths = growths_of(samples, result.requests)
    print(
        f"{result.requests} requests, {result.throughput_per_s:.0f}/s, "
        f"p99 {result.p99_us / 1e3:.0f} ms"
    )
    print(table_of(growths))
    report = {
        "load": result.as_dict(),
        "growth": [asdict(growth) for growth in growths],
        "samples": samples,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written: {options.output}", file=sys.stderr)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument(
        "--longest", type=int, default=sys.maxsize, help="leave out texts of more characters"
    )
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds of load before")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two samples")
    parser.add_argument("--repository", type=Path, help="built by default from the pipeline")
    parser.add_argument("--model", default=PIPELINE.name)
    parser.add_argument("--output", type=Path, default=CACHE / "soak.json")
    return parser.parse_args()


def sample(server: int) -> dict[str, float]:
    """Bytes: resident memory of each process by name, and the shared memory that they map."""
    found: dict[str, float] = {}
    regions: set[str] = set()
    for process in process_tree(server):
        try:
            name = process_name(process, server)
            memory = process.memory_info()
            mapped = [one.path for one in process.memory_maps(grouped=False)]
        except psutil.Error:  # ended between the listing and the reading
            continue
        found[f"{name} resident"] = float(memory.rss)
        found[f"{name} private"] = float(memory.rss - memory.shared)
        regions |= {path for path in mapped if path.startswith(f"{_SHARED_MEMORY}/")}
    paths = [Path(region) for region in regions]
    found[_SHARED_MEMORY] = sum(path.stat().st_blocks * 512.0 for path in paths if path.exists())
    return found


def growths_of(samples: Sequence[dict[str, float]], requests: int) -> list[Growth]:
    """How each series went, over so many requests."""
    duration = samples[-1]["seconds"] or 1.0
    names = [name for name in samples[-1] if name != "seconds"]
    growths = []
    for name in names:
        points = [(one["seconds"], one[name]) for one in samples if name in one]
        values = [value for _, value in points]
        quarter = max(1, len(values) // 4)
        slope = linear_regression(*zip(*points, strict=True)).slope if len(points) > 2 else 0.0
        growths.append(
            Growth(
                name=name,
                first_quartile_mib=median(values[:quarter]) / _MIB,
                last_quartile_mib=median(values[-quarter:]) / _MIB,
                highest_mib=max(values) / _MIB,
                slope_kib_per_1000=slope * duration / requests * 1000 / 1024,
            )
        )
    return growths


def table_of(growths: Sequence[Growth]) -> str:
    """A line for each series of bytes."""
    lines = [
        "| memory | first quartile MiB | last quartile MiB | highest MiB | KiB per 1,000 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in growths:
        cells = [one.name, f"{one.first_quartile_mib:.1f}", f"{one.last_quartile_mib:.1f}"]
        cells += [f"{one.highest_mib:.1f}", f"{one.slope_kib_per_1000:+.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
