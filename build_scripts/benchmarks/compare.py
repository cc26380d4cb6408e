"""Compare embedding servers: Triptych, infinity-emb, LitServe, MLServer, a tutorial's ensemble.

Usage: ``python build_scripts/benchmarks/compare.py --rounds 3 --seconds 8 --precision auto``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks import onnxruntime_alone, tutorial
from benchmarks.ensemble import Ensemble
from benchmarks.harness import (
    Metrics,
    Series,
    Turn,
    add_only,
    finish,
    is_wanted,
    make_parser,
    run_rounds,
    say,
)
from benchmarks.http_server import HttpServer, Infinity, LitServe, MLServer
from benchmarks.model import CACHE, PIPELINE, build, cosines, reference, traffic_texts
from benchmarks.results import Table
from triptych.repository.manifest import EncoderManifest, read_manifest
from triptych.serving.bench.perf_analyzer import LoadError
from triptych.spec.tasks import TASKS
from triptych.spec.tasks.accuracy import TOLERANCES, thresholds

_NAME = PIPELINE.name
_CHECKED_TEXTS = 96
_BATCH_SIZE = 32
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
    turns = [
        Turn(one.server.name, lambda one=one: one.measure(texts, options.seconds, failures))  # type: ignore[misc]
        for one in systems
    ]
    if is_wanted("onnxruntime", options):
        packed = CACHE / "packed"
        core = (packed if packed.is_dir() else build(packed)) / f"{_NAME}_core/1/model.onnx"
        turns.append(
            Turn("onnxruntime", lambda: onnxruntime_alone.measure(core, texts, options.seconds))
        )
    found = run_rounds([turns], options.rounds, max_minutes=options.max_minutes)
    table = _make_table(found)
    note = f"{options.rounds} rounds of {options.seconds:g} s, {len(texts)} texts of the traffic"
    finish(
        options, "compare", "Embedding servers (`make compare`)", [table], found, [note, *failures]
    )
    return 0


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__, "compare", rounds=3, seconds=8.0)
    add_only(parser)
    parser.add_argument("--bucketed", action="store_true", help="measure the bucketed layout too")
    parser.add_argument(
        "--precision",
        nargs="*",
        choices=[*TOLERANCES, "auto"],
        default=["auto"],
        help="measure the packed layout in these precisions too",
    )
    parser.add_argument(
        "--per-core",
        action="store_true",
        help="also measure one core instance with one thread for each processor core",
    )
    parser.add_argument("--skip-check", action="store_true", help="do not compare the vectors")
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
    others: tuple[Ensemble | HttpServer, ...] = (
        ensemble,
        Infinity("infinity-emb"),
        LitServe("litserve"),
        LitServe("litserve, batches", batch_size=_BATCH_SIZE),
        MLServer("mlserver"),
        MLServer("mlserver, batches", batch_size=_BATCH_SIZE),
    )
    systems += [System(server) for server in others]
    return [one for one in systems if is_wanted(one.server.name, options)]


def _build_precision(precision: str, *, per_core: bool = False) -> System:
    """Build the packed layout in a precision; the name says which one ``auto`` chose."""
    overrides = [f"core.precision={precision}"]
    if per_core:
        cores = len(os.sched_getaffinity(0))
        overrides += [f"serving.instances.core={cores}", "core.threads=1"]
    folder = f"packed-{precision}" + ("-per-core" if per_core else "")
    repository = build(CACHE / folder, *overrides)
    built = read_manifest(repository, _NAME, EncoderManifest).gate.precision
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


def _make_table(found: Sequence[Series]) -> Table:
    head = ("system", "clients", "texts/s", "lowest-highest", "p50 ms", "p99 ms")
    return Table(
        "Closed loops with one text a request",
        head,
        [
            (
                one.system if one.load.isdecimal() else f"{one.system}, {one.load}",
                one.load if one.load.isdecimal() else "in process",
                one.text("rate_per_s"),
                one.range("rate_per_s"),
                one.text("p50_ms", 1),
                one.text("p99_ms", 1),
            )
            for one in found
        ],
    )


if __name__ == "__main__":
    raise SystemExit(main())
