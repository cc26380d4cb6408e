"""The GPU test: parts of at most nine minutes, one process each, whose results are kept."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.gpu import report
from benchmarks.gpu.machine import CUDA, PROVIDERS, Machine, one_line, read_machine
from benchmarks.gpu.parts import DONE, FAILED, INTERRUPTED, Part, Result, list_parts, read_result
from benchmarks.gpu.peers import PEERS
from benchmarks.gpu.pipelines import LAYOUTS, MODELS, PRECISIONS
from benchmarks.harness import is_wanted, make_parser, positive, say
from benchmarks.model import CACHE
from benchmarks.results import publish, render_page

LOADS = ("1x1", "64x1", "256x1", "16x16", "16x32")
MIN_PART_S = 20.0
"""Time below which no part is begun."""
_GRACE_S = 20.0


def main() -> int:
    """Run the parts that have no result yet, write the tables; return the exit code."""
    options = parse_options()
    every = list_parts(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # parts and servers are stopped
    if options.run_part:
        return run_here(next(p for p in every if p.name == options.run_part), options)
    machine = read_machine(options)
    for name, text in {**machine.found, **machine.missing}.items():
        say(f"{name:22} {'' if name in machine.found else 'cannot be used: '}{text or 'yes'}")
    outcomes = run(every, machine, options, lambda so_far: report.write(options, so_far, machine))
    if options.check:
        print("\n".join(report.make_notes(outcomes, machine)))
        return report.INCOMPLETE if machine.missing else report.ALL_MET
    result = report.write(options, outcomes, machine)
    print(render_page([result]))
    say(f"written: {options.output}")
    if options.publish:
        publish(options.name, result)
    return report.exit_code(outcomes, is_trial=options.device != CUDA)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a run; `models` are those of `MODELS`."""
    title, names = "A repository on a GPU (`make gpu-test`)", [model.name for model in MODELS]
    parser = make_parser("Test a GPU.", "gpu", title, seconds=1.0, only=True)
    parser.prog = "benchmarks.gpu"
    add = parser.add_argument
    add("--backend-directory", type=Path, help="folder with Triton's own backends")
    add("--check", action="store_true", help="list the parts and what each lacks; run none")
    add("--skip", nargs="+", default=[], help="parts of the names not to run")
    add("--again", nargs="+", default=[], help="parts of the names to run again")
    add("--minutes", type=positive, default=float("inf"), help="time after which no part begins")
    add("--part-minutes", type=positive, default=9.0, help="time after which a part is ended")
    add("--models", nargs="+", choices=names, default=names[:1])
    add("--precisions", nargs="+", choices=PRECISIONS, default=[*PRECISIONS[:2]])
    add("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS])
    add("--batches", nargs="+", type=int, default=[1, 8, 32, 128, 512], help="rows, in process")
    add("--loads", nargs="+", type=_load, default=[*map(_load, LOADS)], metavar="CLIENTSxROWS")
    add("--served-seconds", type=positive, default=3.0, help="duration on a server")
    add("--peers", nargs="+", type=_peer, default=[], metavar="NAME=PYTHON",
        help=f"Python of another server ({', '.join(PEERS)})")  # fmt: skip
    add("--device", choices=[*PROVIDERS], default=CUDA, help="cpu: try the command without a GPU")
    add("--home", type=Path, help="folder of models, repository and results of parts")
    add("--wheels", type=Path, help="folder of pip wheels to install first")
    add("--run-part", help=argparse.SUPPRESS)
    add("--run-on", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.output.suffix != ".json":
        parser.error("--output must end with .json; the page is written next to it")
    if options.home is None:
        options.home = CACHE / ("gpu" if options.device == CUDA else "gpu_test_on_cpu")
    options.models = [model for model in MODELS if model.name in options.models]
    options.peers = dict(options.peers)
    return options


def _load(text: str) -> tuple[int, int]:
    clients, rows = map(int, text.split("x"))
    return clients, rows


def _peer(text: str) -> tuple[str, Path]:
    name, python = text.split("=", 1)
    return name, Path(python)


def run(
    every: Sequence[Part],
    machine: Machine,
    options: argparse.Namespace,
    save: Callable[[Sequence[Result]], object],
) -> list[Result]:
    """Run each part that has no result yet; return all results, with the reasons of the rest.

    `save` gets the results after each part.
    """
    began, known, renewed = time.monotonic(), dict[str, Result](), set[str]()
    for number, part in enumerate(every, start=1):
        result = known[part.name] = read_result(options.home, part, str(machine))
        if renewed.intersection(part.after):  # its figures are of other files
            result.file.unlink(missing_ok=True)
            result = known[part.name] = read_result(options.home, part, str(machine))
        again = any(text in part.name for text in options.again)
        left_s = 60 * options.minutes - (time.monotonic() - began)
        if result.status == DONE and not again:
            continue
        if reason := find_reason(part, machine, options, known, left_s):
            # What was measured before the interruption stays in the file and in the tables.
            result.status, result.reason = report.NOT_RUN, reason
            continue
        say(f"part {number} of {len(every)}: {part.name}")
        renewed.add(part.name)
        if again:
            result.file.unlink(missing_ok=True)
        limit_s = min(60 * options.part_minutes, left_s)
        ended = run_apart(part, str(machine), limit_s)
        result = known[part.name] = read_result(options.home, part, str(machine))
        if result.status == INTERRUPTED:
            result.status, result.reason = ended
            result.save()
        save([*known.values()])
        say(f"  {result.status}{result.reason and f': {result.reason}'}")
    return [*known.values()]


def find_reason(
    part: Part,
    machine: Machine,
    options: argparse.Namespace,
    known: dict[str, Result],
    left_s: float,
) -> str:
    """Return the reason why a part is not run; empty if it can be run."""
    if not is_wanted(part.name, options):
        return "not of --only"
    if any(text in part.name for text in options.skip):
        return "of --skip"
    if lacking := [name for name in part.needs if name in machine.missing]:
        return f"{lacking[0]}: {machine.missing[lacking[0]]}"
    if options.check:
        return "would run (--check)"
    if missing := [name for name in part.after if known[name].status != DONE]:
        return f"needs the part `{missing[0].partition(' ')[0]}`, which has no result"
    return f"less than {MIN_PART_S:.0f} s left of --minutes" if left_s < MIN_PART_S else ""


def run_apart(part: Part, machine: str, limit_s: float) -> tuple[str, str]:
    """Run a part in a process of its own for at most `limit_s` seconds.

    Returns:
        Status and reason of a result that is still interrupted.
    """
    command = [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:]]
    command += ["--run-part", part.name, "--run-on", machine]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return INTERRUPTED, f"ended after {limit_s:.0f} s; its figures are kept, and it can go on"
    finally:  # also at Ctrl-C: nothing of the part stays
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
    return FAILED, f"its process ended with status {status}"


def run_here(part: Part, options: argparse.Namespace) -> int:
    """Run a part in this process; keep its result."""
    result = read_result(options.home, part, options.run_on)
    result.status, result.reason = INTERRUPTED, ""
    result.save()
    try:
        part.measure(result)
        result.status = DONE
    except Exception as error:
        result.status, result.reason = FAILED, one_line(f"{type(error).__name__}: {error}")
    result.save()
    return 0 if result.status == DONE else 1
