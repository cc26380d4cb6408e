"""The truth that `triptych tune` is held to: a whole grid, and what tuning makes of the same model.

Every setting of the grid is built, served and measured; then `tune` runs, twice for each promise;
then its winners meet the grid's best ones in turns, round after round.

Usage: ``python build_scripts/benchmarks/grid.py --slo p99=100ms --rounds 5``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.model import CACHE, PIPELINE
from triptych.base.errors import UserError
from triptych.base.files import parse_yaml
from triptych.operate.tune.encoding import Encoding
from triptych.operate.tune.kind import Setting
from triptych.operate.tune.objective import LoadFailed, Objective
from triptych.operate.tune.results import TuneResult, describe
from triptych.operate.tune.trial_servers import Slot, trial_servers
from triptych.operate.tune.tune import Tuning, tune_pipeline
from triptych.serving.bench.results import Measurement
from triptych.spec.slo import Slo, parse_slo
from triptych.spec.spec import SPEC_FILE
from triptych.spec.tuned import TUNED_FILE

PACKED: Mapping[str, Sequence[Any]] = {
    "serving.queue.max_delay_us": (0, 1000, 4000),
    "serving.instances.preprocess": (1, 2),
    "serving.instances.core": (1, 2),
    "core.threads": (None, 1),
}
BUCKETED: Mapping[str, Sequence[Any]] = {
    "core.layout": ("bucketed",),
    "serving.queue.max_delay_us": (0, 1000, 4000),
    "serving.instances.preprocess": (1, 2),
    "serving.instances.core": (1, 2),
    "core.bucket_count": (3, 6),
}
"""Every value of every field with every other: two layouts have different fields."""

CLIENTS = 32
REPOSITORY = CACHE / "grid" / "repository"
FINAL_S = 3.0


@dataclass
class Cell:
    """A setting of the grid: its score for each objective."""

    setting: Setting
    scores: dict[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Run:
    """A run of tune: its winner with all that it began with, trials, and how long it took."""

    winner: dict[str, Any]
    trials: int
    seconds: float

    @classmethod
    def of(cls, result: TuneResult, start: Setting) -> Run:
        """What it came to."""
        winner = {**start.overrides, **result.winner.overrides}
        return cls(winner, len(result.trials), result.seconds)


def main() -> int:
    """Measure the grid, tune, compare, print, write."""
    options = _parse()
    folder = CACHE / "grid" / PIPELINE.name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(PIPELINE, folder)
    (folder / TUNED_FILE).unlink(missing_ok=True)
    path = CACHE / "grid.json"
    objectives = {
        "throughput": Objective(Slo(), CLIENTS),
        "latency": Objective(parse_slo(options.slo, None, Slo()), CLIENTS),
    }
    began = time.monotonic()
    cells = _read(path) if options.again else _grid(folder, objectives, options)
    grid_s = time.monotonic() - began
    start = Setting(dict(_pair(text) for text in options.start))
    _begin_at(folder / SPEC_FILE, start)
    tuned: dict[str, list[Run]] = {name: [] for name in objectives}
    for _ in range(options.tunes):
        for name, objective in objectives.items():
            (folder / TUNED_FILE).unlink(missing_ok=True)
            tuning = Tuning(objective.slo, options.budget * 60, CLIENTS)
            tuned[name].append(Run.of(tune_pipeline(folder, REPOSITORY, tuning, _say), start))
    (folder / TUNED_FILE).unlink(missing_ok=True)
    if not options.tunes:
        tuned = _read_runs(path)
    finals = {
        name: _final(folder, name, objective, cells, tuned[name], start, options.rounds)
        for name, objective in objectives.items()
    }
    print(_table(cells, grid_s, tuned, finals))
    report = {
        "cells": [vars(cell) | {"setting": dict(cell.setting.overrides)} for cell in cells],
        "grid_s": grid_s,
        "tuned": {name: [asdict(run) for run in runs] for name, runs in tuned.items()},
        "finals": finals,
    }
    target = CACHE / "grid-again.json" if options.again else path
    target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slo", nargs="+", default=["p99=100ms"], help="of the latency objective")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a measurement of the grid")
    parser.add_argument("--tunes", type=int, default=2, help="runs of tune for each objective")
    parser.add_argument("--budget", type=float, default=8.0, help="minutes of a run of tune")
    parser.add_argument("--rounds", type=int, default=5, help="of the last comparison")
    parser.add_argument(
        "--start", nargs="*", default=[], metavar="KEY=VALUE", help="what tune begins with"
    )
    parser.add_argument("--again", action="store_true", help="take the grid as measured before")
    parser.add_argument("--few", action="store_true", help="a grid of four, to try the program")
    return parser.parse_args()


def _pair(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, parse_yaml(value)


def _begin_at(path: Path, start: Setting) -> None:
    """Write the numbers that tuning begins with into the copy of the spec."""
    document = parse_yaml(path.read_text(encoding="utf-8"))
    for key, value in start.overrides.items():
        node = document
        *parents, last = key.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    path.write_text(json.dumps(document), encoding="utf-8")  # JSON is YAML


def _read(path: Path) -> list[Cell]:
    """The grid as it was measured before."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [Cell(Setting(cell["setting"]), cell["scores"], cell["error"]) for cell in cells]


def _read_runs(path: Path) -> dict[str, list[Run]]:
    """The runs of tune as they went before."""
    tuned = json.loads(path.read_text(encoding="utf-8"))["tuned"]
    return {name: [Run(**run) for run in runs] for name, runs in tuned.items()}


def _settings(*, few: bool) -> Iterator[Setting]:
    grids = [PACKED] if few else [PACKED, BUCKETED]
    for grid in grids:
        values = [
            each[:2] if few and n < 2 else each[:1] if few else each
            for n, each in enumerate(grid.values())
        ]
        for chosen in product(*values):
            yield Setting(dict(zip(grid, chosen, strict=True)))


def _grid(
    folder: Path, objectives: Mapping[str, Objective], options: argparse.Namespace
) -> list[Cell]:
    cells = [Cell(setting) for setting in _settings(few=options.few)]
    any_objective = next(iter(objectives.values()))
    kind = Encoding(folder, any_objective.slo)
    with trial_servers(kind, REPOSITORY, any_objective, options.seconds, _say) as servers:
        for number, cell in enumerate(cells, start=1):
            try:
                servers.put(servers.best_slot, cell.setting)
                _score(cell, servers.best_slot, objectives, options.seconds)
            except (UserError, LoadFailed) as error:
                cell.error = str(error)
            scores = ", ".join(f"{name} {score:.0f}/s" for name, score in cell.scores.items())
            _say("grid", f"{number}/{len(cells)} {dict(cell.setting.overrides)}: {scores}")
    return cells


def _score(cell: Cell, slot: Slot, objectives: Mapping[str, Objective], seconds: float) -> None:
    known: dict[int, Measurement] = {}

    def measure_at(clients: int) -> Measurement:
        if clients not in known:
            known[clients] = slot.measure(clients, seconds)
        return known[clients]

    for name, objective in objectives.items():
        cell.scores[name] = objective.score(measure_at, 8).score


def _final(
    folder: Path,
    name: str,
    objective: Objective,
    cells: Sequence[Cell],
    runs: Sequence[Run],
    start: Setting,
    rounds: int,
) -> list[dict[str, Any]]:
    """Each winner of tune against the grid's three best, in turns, all servers up all the while."""
    ranked = sorted(cells, key=lambda cell: -cell.scores.get(name, 0.0))[:3]
    named = [(f"grid {n}", cell.setting) for n, cell in enumerate(ranked, start=1)]
    named.append(("before", start))
    named += [(f"tune {n}", Setting(run.winner)) for n, run in enumerate(runs, start=1)]
    contenders: dict[str, Setting] = {}
    for one, setting in named:  # equal settings are one contender
        same = next((known for known, other in contenders.items() if other == setting), "")
        contenders.pop(same, None)
        contenders[f"{same}, {one}" if same else one] = setting
    scores: dict[str, list[float]] = {one: [] for one in contenders}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=CACHE / "grid")))
        slots = {}
        for number, (one, setting) in enumerate(contenders.items()):
            slots[one] = Slot(scratch / str(number), Encoding(folder, objective.slo))
            stack.callback(slots[one].close)
            slots[one].put(setting, _say, _quiet)
        for number in range(rounds):
            order = [*contenders][number % len(contenders) :]
            order += [*contenders][: number % len(contenders)]
            for one in order:
                measured = objective.score(partial(slots[one].measure, seconds=FINAL_S), 8)
                scores[one].append(measured.score)
                _say("final", f"{name}, round {number + 1}/{rounds}: {one} {scores[one][-1]:.0f}/s")
    best = max((one for one in contenders if "grid" in one), key=lambda one: median(scores[one]))
    return [
        {
            "contender": one,
            "setting": dict(contenders[one].overrides),
            "scores": scores[one],
            "median": median(scores[one]),
            "of_grid": median(scores[one]) / median(scores[best]),
            "against_grid": describe(list(zip(scores[best], scores[one], strict=True))),
        }
        for one in contenders
    ]


def _table(
    cells: Sequence[Cell],
    grid_s: float,
    tuned: Mapping[str, Sequence[Run]],
    finals: Mapping[str, Sequence[Mapping[str, Any]]],
) -> str:
    lines = [f"grid: {len(cells)} settings in {grid_s / 60:.0f} min"]
    for name, runs in tuned.items():
        trials = ", ".join(f"{one.trials} in {one.seconds / 60:.1f} min" for one in runs)
        lines += [
            f"\n{name}: trials of tune: {trials}",
            "",
            "| | setting | score/s | of grid's best |",
        ]
        lines.append("| --- | --- | --- | --- |")
        for row in finals[name]:
            setting = ", ".join(f"{k}={v}" for k, v in row["setting"].items()) or "as they come"
            low, high = min(row["scores"]), max(row["scores"])
            lines.append(
                f"| {row['contender']} | {setting} | {row['median']:.0f} ({low:.0f}-{high:.0f}) "
                f"| {row['of_grid']:.2f} |"
            )
    return "\n".join(lines)


def _quiet(_stage: str, _line: str) -> None:
    """A progress that is told nothing."""


def _say(stage: str, line: str) -> None:
    print(f"{stage:8} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
