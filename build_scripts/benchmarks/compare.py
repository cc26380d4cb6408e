"""Compare embedding servers: Triptych, infinity-emb, LitServe, MLServer, a tutorial's ensemble.

Usage: ``python build_scripts/benchmarks/compare.py --rounds 3 --seconds 8 --precision auto``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks import tutorial
from benchmarks.baselines import ROWS_A_CALL, Baselines, turns_of
from benchmarks.harness import (
    Metrics,
    Turn,
    finish,
    is_wanted,
    make_parser,
    run_rounds,
    say,
    tabulate,
)  # fmt: skip
from benchmarks.model import CACHE, PIPELINE, build, cosines, reference, traffic_texts
from benchmarks.servers import Ensemble, HttpServer, make_http_servers
from triptych.repository.manifest import CompiledManifest, read_manifest
from triptych.serving.bench.perf_analyzer import LoadError
from triptych.tasks.accuracy import TOLERANCES, thresholds
from triptych.tasks.catalog import TASKS

_NAME = PIPELINE.name
_CHECKED_TEXTS = 96
_MIN_COSINE = 0.9999


@dataclass(frozen=True)
class System:
    """A server of embeddings under test, which is not started yet.

    Attributes:
        clients: Numbers of clients to measure with.
        min_mean_cosine: Minimum mean cosine with the reference; None where each single cosine
            must exceed 0.9999, as in fp32.
    """

    server: Ensemble | HttpServer
    clients: tuple[int, ...] = (32, 1)
    min_mean_cosine: float | None = None

    def measure(
        self, texts: Sequence[str], seconds: float, failures: list[str]
    ) -> Iterable[tuple[str, Metrics]]:
        """Start the server; yield the metrics by number of clients; append loads that failed."""
        with self.server as server:
            for clients in self.clients:
                try:
                    yield str(clients), server.load(texts, clients=clients, seconds=seconds)
                except LoadError as error:  # such as 256 clients on a machine that is too slow
                    failures.append(f"{self.server.name}, {clients} clients: {error}")
                    say(failures[-1])


def main() -> int:
    """Build the systems, check their vectors, measure in rounds."""
    options = _parse()
    texts = traffic_texts()
    systems = _make_systems(options)
    if not options.skip_check:
        _check_vectors(systems, texts)
    failures: list[str] = []
    with ExitStack() as stack:
        turns = [
            Turn(one.server.name, lambda one=one: one.measure(texts, options.seconds, failures))  # type: ignore[misc]
            for one in systems
        ]
        if names := [name for name in ROWS_A_CALL if is_wanted(name, options)]:
            baselines = Baselines(PIPELINE, build(CACHE / "packed"), names)
            turns += turns_of(stack.enter_context(baselines), options.seconds)
        found = run_rounds([turns], options.rounds, max_minutes=options.max_minutes)
    table = tabulate(
        "Closed loops with one text a request",
        found,
        {
            "system": lambda one: one.system,
            "clients": lambda one: one.load,
            "texts/s": lambda one: one.text("rate_per_s"),
            "lowest-highest": lambda one: one.range("rate_per_s"),
            "p50 ms": lambda one: one.text("p50_ms", 1),
            "p99 ms": lambda one: one.text("p99_ms", 1),
        },
    )
    note = f"{options.rounds} rounds of {options.seconds:g} s, {len(texts)} texts of the traffic"
    finish(options, [table], found, [note, *failures])
    return 0


def _parse() -> argparse.Namespace:
    title = "Embedding servers (`make compare`)"
    parser = make_parser(__doc__, "compare", title, rounds=3, seconds=8.0, only=True)
    add = parser.add_argument
    add("--bucketed", action="store_true", help="measure the bucketed layout too")
    precisions, precision_help = [*TOLERANCES, "auto"], "precisions of the packed layout"
    add("--precision", nargs="*", choices=precisions, default=["auto"], help=precision_help)
    per_core_help = "also measure one core instance with one thread for each processor core"
    add("--per-core", action="store_true", help=per_core_help)
    add("--skip-check", action="store_true", help="do not compare the vectors")
    return parser.parse_args()


def _make_systems(options: argparse.Namespace) -> list[System]:
    """Build the repositories of the systems that ``--only`` selects."""
    say("building the repositories")
    systems = []
    if is_wanted("triptych, packed", options):
        packed = Ensemble("triptych, packed", build(CACHE / "packed"), _NAME)
        systems.append(System(packed, (32, 256, 1)))
    systems += [
        _build_precision(precision)
        for precision in options.precision
        if is_wanted(f"triptych, {precision}", options)
    ]
    if options.per_core:
        systems += [_build_precision(each, per_core=True) for each in ("fp32", *options.precision)]
    if options.bucketed:
        bucketed = build(CACHE / "bucketed", "core.layout=bucketed")
        systems.append(System(Ensemble("triptych, bucketed", bucketed, _NAME)))
    ensemble = Ensemble("tutorial ensemble", CACHE / "tutorial", tutorial.ENSEMBLE)
    if is_wanted(ensemble.name, options):
        tutorial.write_repository(CACHE / "tutorial")
    systems += [System(ensemble), *map(System, make_http_servers())]
    return [one for one in systems if is_wanted(one.server.name, options)]


def _build_precision(precision: str, *, per_core: bool = False) -> System:
    """Build the packed layout in a precision; the name says which one ``auto`` chose."""
    overrides = [f"core.precision={precision}"]
    if per_core:
        cores = len(os.sched_getaffinity(0))
        overrides += [f"serving.instances.core={cores}", "core.threads=1"]
    folder = f"packed-{precision}" + ("-per-core" if per_core else "")
    repository = build(CACHE / folder, *overrides)
    built = read_manifest(repository, _NAME, CompiledManifest).gate.precision
    name = f"triptych, {precision}" + (f": {built}" if built != precision else "")
    name += ", one core instance for each processor core" if per_core else ""
    limit = None
    if built != "fp32":
        limit = thresholds(TASKS["text-embedding"], built, {})["mean_cosine"]
    return System(Ensemble(name, repository, _NAME), min_mean_cosine=limit)


def _check_vectors(systems: Sequence[System], texts: Sequence[str]) -> None:
    """End the program unless every system returns the vectors of the reference."""
    checked = texts[:_CHECKED_TEXTS]
    expected = reference(checked)
    for system in systems:
        with system.server as server:
            similarities = cosines(server.embed(checked), expected)
        lowest, mean = float(similarities.min()), float(similarities.mean())
        limit = system.min_mean_cosine
        say(f"check  {system.server.name}: minimum cosine {lowest:.7f}, mean {mean:.7f}")
        if not (lowest > _MIN_COSINE if limit is None else mean >= limit):
            raise SystemExit(f"{system.server.name} does not return the vectors of the reference.")


if __name__ == "__main__":
    raise SystemExit(main())
