"""Triptych against its peers: one command, interleaved rounds, a table of medians and a JSON file.

Usage: ``python build_scripts/benchmarks/compare.py --rounds 3 --seconds 8 --precision auto``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from benchmarks import bounds, tutorial
from benchmarks.ensemble import Ensemble
from benchmarks.http_server import HttpServer
from benchmarks.infinity import Infinity
from benchmarks.litserve_peer import LitServe
from benchmarks.measurement import Measurement, Summary, summarize
from benchmarks.mlserver_peer import MLServer
from benchmarks.model import CACHE, PIPELINE, build, cosines, reference
from triptych.repository.manifest import read_manifest
from triptych.serving.doctor import processor
from triptych.spec.tasks import TASKS
from triptych.spec.tasks.accuracy import TOLERANCES, thresholds
from triptych.spec.traffic import read_traffic

_NAME = PIPELINE.name
_CHECKED_TEXTS = 96
BATCH_SIZE = 32
_LOWEST_COSINE = 0.9999
_PACKAGES = ("nvidia-pytriton", "onnxruntime", "torch", "transformers", "tokenizers", "numpy")


@dataclass(frozen=True)
class Contender:
    """A server of embeddings.

    Attributes:
        server: not started yet.
        clients: the numbers of clients that it is measured with.
        mean_cosine: what its vectors' mean cosine with the reference's must reach; None where each
            single one must exceed `_LOWEST_COSINE`, as in fp32.
    """

    server: Ensemble | HttpServer
    clients: tuple[int, ...]
    mean_cosine: float | None = None


def main() -> int:
    """Build what is compared, check that the vectors agree, measure, print, write."""
    options = _parse()
    texts = [row.inputs["text"] for row in read_traffic(PIPELINE, ("text",))]
    contenders = _contenders(options)
    if not options.skip_check:
        _check_vectors(contenders, texts)
    measurements: list[Measurement] = []
    for number in range(options.rounds):
        turns = _turns(contenders, texts, options)
        # Each round starts elsewhere, so that what warms up or drifts does not favor one place.
        shift = number * len(turns) // max(1, options.rounds)
        for turn in turns[shift:] + turns[:shift]:
            for one in turn():
                measurements.append(one)
                _say(f"round {number + 1}/{options.rounds}  {_line(one)}")
    summaries = summarize(sorted(measurements, key=lambda one: _place(one, contenders)))
    print(_table(summaries))
    _write(options.output, options, len(texts), measurements, summaries)
    _say(f"written: {options.output}")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="each contender once a round")
    parser.add_argument("--seconds", type=float, default=8.0, help="of load for a measurement")
    parser.add_argument("--bucketed", action="store_true", help="measure the bucketed layout too")
    parser.add_argument(
        "--precision",
        nargs="*",
        choices=[*TOLERANCES, "auto"],
        default=["auto"],
        help="measure the packed layout in these precisions too",
    )
    parser.add_argument(
        "--per-core", action="store_true", help="measure one instance of one thread a core, too"
    )
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names to measure")
    parser.add_argument("--skip-check", action="store_true", help="do not compare the vectors")
    parser.add_argument("--output", type=Path, default=CACHE / "compare.json")
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds < 1:
        parser.error("--rounds and --seconds must be at least 1")
    return options


def _contenders(options: argparse.Namespace) -> list[Contender]:
    """Everything that answers texts with vectors, its repositories built."""
    _say("building the repositories")
    packed = build(CACHE / "packed")
    contenders = [Contender(Ensemble("triptych, packed", packed, _NAME), (32, 256, 1))]
    contenders += [
        _lowered(precision)
        for precision in options.precision
        if _is_wanted(f"triptych, {precision}", options)
    ]
    if options.per_core:
        contenders += [_lowered(each, per_core=True) for each in ("fp32", *options.precision)]
    if options.bucketed:
        bucketed = build(CACHE / "bucketed", "core.layout=bucketed")
        contenders.append(Contender(Ensemble("triptych, bucketed", bucketed, _NAME), (32, 1)))
    ensemble = Ensemble("tutorial ensemble", CACHE / "tutorial", tutorial.ENSEMBLE)
    if _is_wanted(ensemble.name, options):
        tutorial.write_repository(CACHE / "tutorial")
    others: tuple[Ensemble | HttpServer, ...] = (
        ensemble,
        Infinity("infinity-emb"),
        LitServe("litserve"),
        LitServe("litserve, batches", batch_size=BATCH_SIZE),
        MLServer("mlserver"),
        MLServer("mlserver, batches", batch_size=BATCH_SIZE),
    )
    contenders += [Contender(server, (32, 1)) for server in others]
    return [one for one in contenders if _is_wanted(one.server.name, options)]


def _lowered(precision: str, *, per_core: bool = False) -> Contender:
    """Build the packed layout in another precision; of ``auto``, the name tells what it chose.

    With `per_core` the core has an instance of one thread for each processor core.
    """
    overrides = [f"core.precision={precision}"]
    if per_core:
        cores = len(os.sched_getaffinity(0))
        overrides += [f"serving.instances.core={cores}", "core.threads=1"]
    folder = f"packed-{precision}" + ("-per-core" if per_core else "")
    repository = build(CACHE / folder, *overrides)
    lock = read_manifest(repository, _NAME)
    built = lock.gate.precision
    name = f"triptych, {precision}" + (f": {built}" if built != precision else "")
    name += ", an instance a core" if per_core else ""
    limit = None
    if built != "fp32":
        limit = thresholds(TASKS["text-embedding"], built, {})["mean_cosine"]
    return Contender(Ensemble(name, repository, _NAME), (32, 1), limit)


def _check_vectors(contenders: Sequence[Contender], texts: Sequence[str]) -> None:
    """End the program unless every contender gives the vectors of the reference."""
    checked = texts[:_CHECKED_TEXTS]
    expected = reference(checked)
    for contender in contenders:
        with contender.server as server:
            found = cosines(server.embed(checked), expected)
        lowest, mean, limit = float(found.min()), float(found.mean()), contender.mean_cosine
        _say(
            f"check  {contender.server.name}: cosine of {len(checked)} texts"
            f" {lowest:.7f} at least, {mean:.7f} on average"
        )
        if not (lowest > _LOWEST_COSINE if limit is None else mean >= limit):
            raise SystemExit(f"{contender.server.name} does not give the reference's vectors")


def _turns(
    contenders: Sequence[Contender], texts: Sequence[str], options: argparse.Namespace
) -> list[Callable[[], list[Measurement]]]:
    seconds = options.seconds

    def loads(contender: Contender) -> Callable[[], list[Measurement]]:
        def turn() -> list[Measurement]:
            with contender.server as server:
                return [server.load(texts, clients=n, seconds=seconds) for n in contender.clients]

        return turn

    def in_process() -> list[Measurement]:
        core = CACHE / "packed" / f"{_NAME}_core" / "1" / "model.onnx"
        return bounds.measure(core, texts, seconds=seconds)

    turns = [loads(contender) for contender in contenders]
    packed = CACHE / "packed"
    if _is_wanted("onnxruntime", options):
        if not packed.is_dir():
            build(packed)
        turns.append(in_process)
    return turns


def _is_wanted(name: str, options: argparse.Namespace) -> bool:
    return not options.only or any(part in name for part in options.only)


def _place(one: Measurement, contenders: Sequence[Contender]) -> int:
    names = [contender.server.name for contender in contenders]
    return names.index(one.contender) if one.contender in names else len(names)


def _line(one: Measurement) -> str:
    return (
        f"{one.contender} x{one.clients}: {one.throughput_per_s:.0f}/s, "
        f"p50 {one.p50_ms:.1f} ms, p99 {one.p99_ms:.1f} ms"
    )


def _table(summaries: Sequence[Summary]) -> str:
    """Markdown: medians, with the lowest and the highest round."""
    lines = [
        "| contender | clients | texts/s | lowest-highest | p50 ms | p99 ms |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in summaries:
        spread = f"{one.throughput_lowest_per_s:.0f}-{one.throughput_highest_per_s:.0f}"
        cells = [one.contender, str(one.clients or "in process"), f"{one.throughput_per_s:.0f}"]
        cells += [spread, f"{one.p50_ms:.1f}", f"{one.p99_ms:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _write(
    path: Path,
    options: argparse.Namespace,
    texts: int,
    measurements: Sequence[Measurement],
    summaries: Sequence[Summary],
) -> None:
    report = {
        "rounds": options.rounds,
        "seconds": options.seconds,
        "texts": texts,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "cpu": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg(),
            "python": platform.python_version(),
            "packages": {name: metadata.version(name) for name in _PACKAGES},
        },
        "medians": [asdict(one) for one in summaries],
        "measurements": [asdict(one) for one in measurements],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
