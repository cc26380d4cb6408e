"""The truth that `triptych tune` is held to: a whole grid, and what tuning makes of the same model.

Every setting of the grid is built, served and measured; then `tune` runs, twice for each promise;
then its winners meet the grid's best ones in turns, round after round.

Usage: ``.venv/bin/python build_scripts/peers/grid.py --slo p99=100ms --rounds 5``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from peers.model import CACHE, PIPELINE
from triptych.errors import UserError
from triptych.load.points import Measurement
from triptych.slo import Slo, parse_slo
from triptych.tuned import TUNED_FILE
from triptych.tuning.arena import Arena, Setting, arena
from triptych.tuning.judge import describe
from triptych.tuning.objective import LoadFailed, Objective
from triptych.tuning.results import TuneResult
from triptych.tuning.tune import Tuning, tune_pipeline

PACKED: Mapping[str, Sequence[Any]] = {
    "serving.queue.max_delay_us": (0, 1000, 4000),
    "serving.instances.preprocess": (1, 2),
    "serving.instances.core": (1, 2),
    "core.token_budget": (64, 128, 256),
    "core.threads": (None, 2),
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


@dataclass
class Cell:
    """A setting of the grid: its score for each objective."""

    setting: Setting
    scores: dict[str, float] = field(default_factory=dict)
    error: str = ""


def main() -> int:
    """Measure the grid, tune, compare, print, write."""
    options = _parse()
    folder = CACHE / "grid" / PIPELINE.name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(PIPELINE, folder)
    (folder / TUNED_FILE).unlink(missing_ok=True)
    objectives = {
        "throughput": Objective(Slo(), CLIENTS),
        "latency": Objective(parse_slo(options.slo, None, Slo()), CLIENTS),
    }
    began = time.monotonic()
    cells = _grid(folder, objectives, options)
    grid_s = time.monotonic() - began
    tuned: dict[str, list[TuneResult]] = {name: [] for name in objectives}
    for _ in range(options.tunes):
        for name, objective in objectives.items():
            (folder / TUNED_FILE).unlink(missing_ok=True)
            tuning = Tuning(objective.slo, options.budget * 60, CLIENTS)
            tuned[name].append(tune_pipeline(folder, CACHE / "grid" / "repository", tuning, _say))
    (folder / TUNED_FILE).unlink(missing_ok=True)
    finals = {
        name: _final(folder, objective, cells, tuned[name], options.rounds)
        for name, objective in objectives.items()
    }
    print(_table(cells, grid_s, tuned, finals))
    report = {
        "cells": [vars(cell) | {"setting": dict(cell.setting.overrides)} for cell in cells],
        "grid_s": grid_s,
        "tuned": {
            name: [
                {"winner": r.winner.overrides, "trials": len(r.trials), "seconds": r.seconds}
                for r in results
            ]
            for name, results in tuned.items()
        },
        "finals": finals,
    }
    path = CACHE / "grid.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slo", nargs="+", default=["p99=100ms"], help="of the latency objective")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a measurement of the grid")
    parser.add_argument("--tunes", type=int, default=2, help="runs of tune for each objective")
    parser.add_argument("--budget", type=float, default=8.0, help="minutes of a run of tune")
    parser.add_argument("--rounds", type=int, default=5, help="of the last comparison")
    parser.add_argument("--few", action="store_true", help="a grid of four, to try the program")
    return parser.parse_args()


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
    with arena(
        folder, CACHE / "grid" / "repository", any_objective, options.seconds, _say
    ) as found:
        for number, cell in enumerate(cells, start=1):
            try:
                found.put(found.champion, cell.setting)
                _score(cell, found, objectives, options.seconds)
            except (UserError, LoadFailed) as error:
                cell.error = str(error)
            scores = ", ".join(f"{name} {score:.0f}/s" for name, score in cell.scores.items())
            _say("grid", f"{number}/{len(cells)} {dict(cell.setting.overrides)}: {scores}")
    return cells


def _score(cell: Cell, arena: Arena, objectives: Mapping[str, Objective], seconds: float) -> None:
    known: dict[int, Measurement] = {}

    def measure_at(clients: int) -> Measurement:
        if clients not in known:
            known[clients] = arena.champion.measure(clients, seconds)
        return known[clients]

    for name, objective in objectives.items():
        cell.scores[name] = objective.score(measure_at, 8).score


def _final(
    folder: Path,
    objective: Objective,
    cells: Sequence[Cell],
    tuned: Sequence[TuneResult],
    rounds: int,
) -> list[dict[str, Any]]:
    """Each winner of tune against the three best of the grid, by its own best one, in turns."""
    name = "latency" if objective.slo.limits_us else "throughput"
    ranked = sorted(cells, key=lambda cell: -cell.scores.get(name, 0.0))[:3]
    contenders = {f"grid {n}": cell.setting for n, cell in enumerate(ranked, start=1)}
    contenders["defaults"] = Setting()
    for n, result in enumerate(tuned, start=1):
        contenders[f"tune {n}"] = Setting(result.winner.overrides)
    scores: dict[str, list[float]] = {one: [] for one in contenders}
    with arena(folder, CACHE / "grid" / "repository", objective, 2.4, _say) as found:
        for number in range(rounds):
            order = list(contenders)[number % len(contenders) :]
            order += list(contenders)[: number % len(contenders)]
            for one in order:
                found.put(found.champion, contenders[one])
                scores[one].append(found.score(found.champion, 8).score)
                _say("final", f"{name}, round {number + 1}/{rounds}: {one} {scores[one][-1]:.0f}/s")
    best = max((f"grid {n}" for n in range(1, len(ranked) + 1)), key=lambda n: median(scores[n]))
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
    tuned: Mapping[str, Sequence[TuneResult]],
    finals: Mapping[str, Sequence[Mapping[str, Any]]],
) -> str:
    lines = [f"grid: {len(cells)} settings in {grid_s / 60:.0f} min"]
    for name, results in tuned.items():
        trials = ", ".join(f"{len(one.trials)} in {one.seconds / 60:.1f} min" for one in results)
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


def _say(stage: str, line: str) -> None:
    print(f"{stage:8} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
