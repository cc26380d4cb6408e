"""Compare `triptych tune` with a whole grid of settings of the same model.

Every setting of the grid is built, served and measured. Then `tune` runs, twice for each objective.
At last its winners and the best settings of the grid are measured in rounds.

Usage: ``python build_scripts/benchmarks/grid.py --slo p99=100ms --rounds 5``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness import Turn, finish, make_parser, progress, quiet, run_rounds, tabulate
from benchmarks.model import CACHE, PIPELINE
from benchmarks.results import Table
from triptych.base.errors import UserError
from triptych.base.files import parse_yaml
from triptych.operate.tune.kinds import CompiledTuning, Setting
from triptych.operate.tune.objective import LoadFailed, Objective, ThroughputObjective
from triptych.operate.tune.results import format_scores
from triptych.operate.tune.trial_servers import TrialServer, trial_servers
from triptych.operate.tune.tune import Tuning, tune_pipeline
from triptych.serving.bench.results import Measurement
from triptych.spec.plan import Plan
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
"""Every combination of these values is measured; the two layouts have different fields."""

CLIENTS = 32
REPOSITORY = CACHE / "grid" / "repository"
FINAL_S = 3.0
MAX_MEASUREMENTS = 8
_SCORE = "score_per_s"


@dataclass
class Cell:
    """A setting of the grid with its score for each objective."""

    setting: Setting
    scores: dict[str, float] = field(default_factory=dict)
    error: str = ""


def main() -> int:
    """Measure the grid, tune, compare."""
    options = _parse()
    folder = CACHE / "grid" / PIPELINE.name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(PIPELINE, folder)
    tuned_file = folder / TUNED_FILE
    tuned_file.unlink(missing_ok=True)
    objectives = {
        "throughput": ThroughputObjective(Slo(), CLIENTS),
        "latency": ThroughputObjective(parse_slo(options.slo, None, Slo()), CLIENTS),
    }
    began = time.monotonic()
    before = json.loads(options.output.read_text("utf-8"))["measurements"] if options.again else {}
    if options.again:
        cells = [Cell(Setting(c["setting"]), c["scores"], c["error"]) for c in before["cells"]]
    else:
        cells = _measure_grid(folder, objectives, options)
    grid_s = time.monotonic() - began
    start = Setting(dict(_parse_pair(text) for text in options.start))
    _write_start(folder / SPEC_FILE, start)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in objectives}
    for _ in range(options.tunes):
        for name, objective in objectives.items():
            tuning = Tuning(objective.slo, options.budget * 60, CLIENTS)
            result = tune_pipeline(folder, REPOSITORY, tuning, progress)
            tuned_file.unlink(missing_ok=True)
            winner = {**start.overrides, **result.winner.overrides}
            trials, seconds = len(result.trials), result.seconds
            runs[name].append({"winner": winner, "trials": trials, "seconds": seconds})
    if not options.tunes and before:
        runs = before["tuned"]
    tables, finals = [], {}
    notes = [f"grid: {len(cells)} settings in {grid_s / 60:.0f} min"]
    for name, objective in objectives.items():
        winners = [Setting(run["winner"]) for run in runs[name]]
        table, finals[name] = _compare(folder, name, objective, cells, winners, start, options)
        tables.append(table)
        texts = [f"{run['trials']} in {run['seconds'] / 60:.1f} min" for run in runs[name]]
        notes.append(f"{name}: trials of tune: {', '.join(texts) or 'none'}")
    data = {
        "cells": [vars(cell) | {"setting": dict(cell.setting.overrides)} for cell in cells],
        "grid_s": grid_s,
        "tuned": runs,
        "finals": finals,
    }
    finish(options, tables, data, notes)
    return 0


def _parse() -> argparse.Namespace:
    title = "Tuning and a whole grid (`make grid`)"
    parser = make_parser(__doc__, "grid", title, rounds=5, seconds=1.5)
    add, start_help = parser.add_argument, "settings tune begins with"
    add("--slo", nargs="+", default=["p99=100ms"], help="SLO of the latency runs")
    add("--tunes", type=int, default=2, help="runs of tune for each objective")
    add("--budget", type=float, default=8.0, help="minutes of a run of tune")
    add("--start", nargs="*", default=[], metavar="KEY=VALUE", help=start_help)
    add("--few", action="store_true", help="measure only a few settings, to try the program")
    add("--again", action="store_true", help="use the measured grid in --output")
    return parser.parse_args()


def _parse_pair(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, parse_yaml(value)


def _write_start(path: Path, start: Setting) -> None:
    """Write the settings that tuning begins with into the copy of the spec."""
    document = parse_yaml(path.read_text(encoding="utf-8"))
    for key, value in start.overrides.items():
        node = document
        *parents, last = key.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    path.write_text(json.dumps(document), encoding="utf-8")  # JSON is YAML


def _make_settings(*, few: bool) -> Iterator[Setting]:
    for grid in [PACKED] if few else [PACKED, BUCKETED]:
        values = [*grid.values()]
        if few:
            values = [each[: 2 if index < 2 else 1] for index, each in enumerate(values)]
        for chosen in product(*values):
            yield Setting(dict(zip(grid, chosen, strict=True)))


def _measure_grid(
    folder: Path, objectives: Mapping[str, Objective], options: argparse.Namespace
) -> list[Cell]:
    cells = [Cell(setting) for setting in _make_settings(few=options.few)]
    first = next(iter(objectives.values()))
    pipeline = CompiledTuning(folder, first.slo, first.clients)
    with trial_servers(pipeline, REPOSITORY, options.seconds, progress) as servers:
        for number, cell in enumerate(cells, start=1):
            try:
                servers.put(servers.best, cell.setting)
                _score(cell, servers.best, objectives, options.seconds)
            except (UserError, LoadFailed) as error:
                cell.error = str(error)
            scores = ", ".join(f"{name} {score:.0f}/s" for name, score in cell.scores.items())
            progress("grid", f"{number}/{len(cells)} {dict(cell.setting.overrides)}: {scores}")
    return cells


def _score(
    cell: Cell, server: TrialServer[Plan], objectives: Mapping[str, Objective], seconds: float
) -> None:
    known: dict[int, Measurement] = {}

    def measure_at(clients: int) -> Measurement:
        if clients not in known:
            known[clients] = server.measure(clients, seconds)
        return known[clients]

    for name, objective in objectives.items():
        cell.scores[name] = objective.score(measure_at, MAX_MEASUREMENTS).score


def _compare(
    folder: Path,
    name: str,
    objective: Objective,
    cells: Sequence[Cell],
    winners: Sequence[Setting],
    start: Setting,
    options: argparse.Namespace,
) -> tuple[Table, list[dict[str, Any]]]:
    """Measure each winner of tune and the grid's three best, all of them served at once."""
    ranked = sorted(cells, key=lambda cell: -cell.scores.get(name, 0.0))[:3]
    named = [(f"grid {number}", cell.setting) for number, cell in enumerate(ranked, start=1)]
    named.append(("before", start))
    named += [(f"tune {number}", winner) for number, winner in enumerate(winners, start=1)]
    settings: dict[str, Setting] = {}
    for label, setting in named:  # equal settings are measured once
        same = next((known for known, other in settings.items() if other == setting), "")
        settings.pop(same, None)
        settings[f"{same}, {label}" if same else label] = setting
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=CACHE / "grid")))
        turns = []
        for number, (label, setting) in enumerate(settings.items()):
            server = TrialServer(
                scratch / str(number), CompiledTuning(folder, objective.slo, CLIENTS)
            )
            stack.callback(server.close)
            server.put(setting, progress, quiet)
            turns.append(Turn(label, partial(_measure_score, name, objective, server)))
        found = run_rounds([turns], options.rounds, max_minutes=options.max_minutes)
    best = max((one for one in found if "grid" in one.system), key=lambda one: one.median(_SCORE))
    pairs = {label: dict(setting.overrides) for label, setting in settings.items()}
    table = tabulate(
        name,
        found,
        {
            "": lambda one: one.system,
            "setting": lambda one: (
                ", ".join(f"{key}={value}" for key, value in pairs[one.system].items())
                or "defaults"
            ),
            "score/s": lambda one: f"{one.text(_SCORE)} ({one.range(_SCORE)})",
            "of grid's best": lambda one: f"{one.median(_SCORE) / best.median(_SCORE):.2f}",
        },
    )
    finals = []
    for one in found:
        scores = one.values(_SCORE)
        ratio = format_scores([*zip(best.values(_SCORE), scores, strict=True)])
        facts = {"setting": pairs[one.system], "scores": scores, "against_grid": ratio}
        finals.append({"system": one.system, **facts})
    return table, finals


def _measure_score(
    name: str, objective: Objective, server: TrialServer[Plan]
) -> list[tuple[str, dict[str, float]]]:
    measured = objective.score(partial(server.measure, seconds=FINAL_S), MAX_MEASUREMENTS)
    return [(name, {_SCORE: measured.score})]


if __name__ == "__main__":
    raise SystemExit(main())
