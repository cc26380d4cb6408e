"""The GPU test's options, and what becomes of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import report
from benchmarks.gpu.ledger import Ledger
from benchmarks.gpu.machine import Seams, describe, read_machine
from benchmarks.gpu.run import Options, run
from benchmarks.gpu.subjects import HOME, LAYOUTS, MODELS, PRECISIONS
from benchmarks.model import CACHE


def main(arguments: Sequence[str] | None = None) -> int:
    """Look, measure, print, write; returns the exit code."""
    given = _parse(arguments)
    seams = Seams()
    machine = read_machine(seams)
    if given.check:
        print(describe(machine, seams.fakes))
        return report.INCOMPLETE if machine.lacks else report.ALL_MET
    print(describe(machine, seams.fakes), file=sys.stderr, flush=True)
    ledger = Ledger(_tell)
    options = Options(
        models=[model for model in MODELS if model.name in given.models],
        precisions=given.precisions,
        layouts=given.layouts,
        rounds=given.rounds,
        seconds=given.seconds,
        served_seconds=given.served_seconds,
        minutes=given.minutes,
        build_only=given.build_only,
        reuse=given.reuse,
        home=given.home,
    )
    found = run(
        options, machine, seams, ledger, lambda so_far: report.write(so_far, ledger, given.output)
    )
    print(report.page(found, ledger))
    _tell(f"written: {given.output}")
    return report.exit_code(found, ledger, judged=not given.build_only)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description="What only a GPU can tell.")
    names = [model.name for model in MODELS]
    parser.add_argument("--check", action="store_true", help="say what is here, measure nothing")
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=Options.rounds, help="of each measurement")
    parser.add_argument(
        "--seconds", type=float, default=Options.seconds, help="of a measurement in process"
    )
    parser.add_argument(
        "--served-seconds", type=float, default=Options.served_seconds, help="of one on a server"
    )
    parser.add_argument(
        "--minutes", type=float, help="of all: rounds, then contenders are dropped to keep it"
    )
    parser.add_argument("--build-only", action="store_true", help="build the graphs; needs no GPU")
    parser.add_argument(
        "--reuse", action="store_true", help="take the graphs in --home as they are"
    )
    parser.add_argument("--home", type=Path, default=HOME, help="models, pipelines, repository")
    parser.add_argument("--output", type=Path, default=CACHE / "gpu.json")
    given = parser.parse_args(arguments)
    lengths = (given.seconds, given.served_seconds, given.minutes)
    if given.rounds < 1 or any(length is not None and length <= 0 for length in lengths):
        parser.error("--rounds must be at least 1, --seconds and --minutes above 0")
    if given.output.suffix != ".json":
        parser.error("--output must end with .json: the page is written beside it")
    return given


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
