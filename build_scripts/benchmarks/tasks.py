"""Compare every task with transformers' own pipeline on the same requests: agreement and speed.

Usage: ``python build_scripts/benchmarks/tasks.py --rounds 3 --seconds 6``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import transformers

from benchmarks import transformers_pipelines
from benchmarks.harness import (
    Series,
    Turn,
    add_only,
    closed_loop,
    finish,
    is_wanted,
    make_parser,
    quiet,
    run_rounds,
    say,
)
from benchmarks.model import CACHE, traffic_texts
from benchmarks.results import Table
from benchmarks.test_models import (
    TEST_MODELS,
    TaskModel,
    make_images,
    make_requests,
    write_model,
    write_pipeline,
)
from triptych.building.build import build
from triptych.client import Client
from triptych.core.inputs import read_inputs
from triptych.serving.server import Server
from triptych.spec.spec import load_spec

CLIENTS = 16
CHECKED_REQUESTS = 64
BATCH_SIZE = 16
LAYOUTS = ("packed", "bucketed")
_FOLDER = CACHE / "tasks"
_OWN = "transformers"


def main() -> int:
    """Build, check and measure every task in rounds."""
    parser = make_parser(__doc__, "tasks", rounds=3, seconds=6.0)
    add_only(parser)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    texts, images = traffic_texts(), make_images()
    rows: list[tuple[str, ...]] = []
    data = {}
    for model in TEST_MODELS:
        if is_wanted(model.name, options):
            found, agreement = _measure(model, make_requests(model, texts, images), options)
            data[model.name] = {"agreement": agreement, "series": found}
            rows += _make_rows(model, found, agreement)
            say(" | ".join(rows[-1]))
    head = ("task", "layout", "architecture", "agreement", "served/s", "transformers/s", "ratio")
    table = Table(f"{CLIENTS} clients, batches of {BATCH_SIZE} in transformers", head, rows)
    note = f"{options.rounds} rounds of {options.seconds:g} s, medians"
    title = "Tasks and transformers' own pipelines (`make compare-tasks`)"
    finish(options, "tasks", title, [table], data, [note])
    return 0


def _measure(
    model: TaskModel, requests: Sequence[dict[str, Any]], options: argparse.Namespace
) -> tuple[list[Series], dict[str, str]]:
    """Return the series of each layout and of transformers, and the agreement of each layout."""
    source = write_model(model, _FOLDER / "models" / model.name)
    repository = _FOLDER / "repositories" / model.name
    layouts = LAYOUTS if model.architecture == "Bert" else LAYOUTS[:1]
    pipelines: dict[str, str] = {}
    for layout in ("",) if model.task == "image-classification" else layouts:
        name = f"{model.name}_{layout}" if layout else model.name
        core = {"layout": layout} if layout else {}
        folder = write_pipeline(model, source, _FOLDER / "pipelines" / name, core, requests)
        built = build(read_inputs(load_spec(folder), quiet), repository, quiet)
        pipelines[
            built.as_dict()["layout"] + (" (fell back)" if built.not_packed_reason else "")
        ] = name
    run = transformers_pipelines.load(model, source, batch_size=BATCH_SIZE)
    expected = run(requests[:CHECKED_REQUESTS])
    agreement: dict[str, str] = {}

    def serve(layout: str, name: str) -> list[tuple[str, dict[str, float]]]:
        with Server(repository, models=[name]) as server:
            if layout not in agreement:
                agreement[layout] = _compare(model, server.grpc_url, name, requests, expected)
            url, seconds = server.grpc_url, options.seconds
            return [("", closed_loop(url, name, requests, clients=CLIENTS, seconds=seconds))]

    def run_own() -> list[tuple[str, dict[str, float]]]:
        rate = transformers_pipelines.measure_rate(run, requests, seconds=options.seconds)
        return [("", {"rate_per_s": rate})]

    turns = [
        Turn(layout, lambda layout=layout, name=name: serve(layout, name))  # type: ignore[misc]
        for layout, name in pipelines.items()
    ]
    found = run_rounds([[*turns, Turn(_OWN, run_own)]], options.rounds)
    return found, agreement


def _compare(
    model: TaskModel,
    url: str,
    name: str,
    requests: Sequence[dict[str, Any]],
    expected: Sequence[Any],
) -> str:
    checked = requests[:CHECKED_REQUESTS]
    columns = {key: [request[key] for request in checked] for key in checked[0]}
    with Client(name, url, timeout_s=120) as client:
        outputs = client.infer(columns)
    same, difference = transformers_pipelines.compare(model, outputs, expected)
    return f"{same:.0%}, scores to {difference:.0e}"


def _make_rows(
    model: TaskModel, found: Sequence[Series], agreement: dict[str, str]
) -> list[tuple[str, ...]]:
    *served, own = found
    return [
        (
            model.task,
            one.system,
            model.architecture,
            agreement[one.system],
            one.text("rate_per_s"),
            own.text("rate_per_s"),
            f"{one.median('rate_per_s') / own.median('rate_per_s'):.2f}",
        )
        for one in served
    ]


if __name__ == "__main__":
    raise SystemExit(main())
