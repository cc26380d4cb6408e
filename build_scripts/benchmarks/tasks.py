"""Compare every task with transformers' own pipeline on the same requests: agreement and speed.

Usage: ``python build_scripts/benchmarks/tasks.py --rounds 3 --seconds 6``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import transformers

from benchmarks import transformers_pipelines
from benchmarks.baselines import Baselines
from benchmarks.harness import (
    Series,
    Turn,
    closed_loop,
    finish,
    is_wanted,
    make_parser,
    quiet,
    run_rounds,
    say,
    tabulate,
)  # fmt: skip
from benchmarks.model import CACHE, traffic_texts
from benchmarks.test_models import (
    TEST_MODELS,
    TaskModel,
    make_images,
    make_requests,
    write_model,
    write_pipeline,
)  # fmt: skip
from benchmarks.transformers_pipelines import measure_rate
from triptych.building.build import build
from triptych.building.compiled import CompiledStages
from triptych.building.stages import BuildOptions
from triptych.client import Client
from triptych.core.inputs import read_inputs
from triptych.serving.server import Server
from triptych.spec.spec import load_spec

CLIENTS = 16
CHECKED_REQUESTS = 64
BATCH_SIZE = 16
LAYOUTS = ("packed", "bucketed")
_FOLDER = CACHE / "tasks"
_OWN, _BATCHED = "transformers", "torch batched"


class Row(NamedTuple):
    """A layout of a task, its series, and the series of transformers."""

    model: TaskModel
    served: Series
    own: Series
    agreement: str


def main() -> int:
    """Build, check and measure every task in rounds."""
    title = "Tasks and transformers' own pipelines (`make compare-tasks`)"
    parser = make_parser(__doc__, "tasks", title, rounds=3, seconds=6.0, only=True)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    texts, images = traffic_texts(), make_images()
    data = {}
    rows: list[Row] = []
    for model in TEST_MODELS:
        if is_wanted(model.name, options):
            found, agreement = _measure(model, make_requests(model, texts, images), options)
            data[model.name] = {"agreement": agreement, "series": found}
            *served, own = found
            rows += [Row(model, one, own, agreement[one.system]) for one in served]
            say(f"{model.name}: {agreement}")
    table = tabulate(
        f"{CLIENTS} clients, batches of {BATCH_SIZE} in transformers",
        rows,
        {
            "task": lambda row: row.model.task,
            "layout": lambda row: row.served.system,
            "architecture": lambda row: row.model.architecture,
            "agreement": lambda row: row.agreement,
            "served/s": lambda row: row.served.text("rate_per_s"),
            "transformers/s": lambda row: row.own.text("rate_per_s"),
            "ratio": lambda row: (
                f"{row.served.median('rate_per_s') / row.own.median('rate_per_s'):.2f}"
            ),
        },
    )
    finish(options, [table], data, [f"{options.rounds} rounds of {options.seconds:g} s, medians"])
    return 0


def _measure(
    model: TaskModel, requests: Sequence[dict[str, Any]], options: argparse.Namespace
) -> tuple[list[Series], dict[str, str]]:
    """Return the series of each layout and of the other system, and the agreement of each layout.

    transformers 5 has no pipeline of question answering. That task is compared with the baseline
    ``torch batched`` (`baselines`), which does not decode, so that nothing can agree.
    """
    source = write_model(model, _FOLDER / "models" / model.name)
    repository, seconds = _FOLDER / "repositories" / model.name, options.seconds
    layouts = LAYOUTS if model.architecture == "Bert" else LAYOUTS[:1]
    pipelines: dict[str, str] = {}
    for layout in ("",) if model.task == "image-classification" else layouts:
        name = f"{model.name}_{layout}" if layout else model.name
        core = {"layout": layout} if layout else {}
        folder = write_pipeline(model, source, _FOLDER / "pipelines" / name, core, requests)
        inputs = read_inputs(load_spec(folder), quiet)
        built = build(CompiledStages(), inputs, BuildOptions(repository=repository, progress=quiet))
        fell_back = " (fell back)" if built.not_packed_reason else ""
        pipelines[f"{built.as_dict()['layout']}{fell_back}"] = name
    agreement = dict.fromkeys(pipelines, "")
    with ExitStack() as stack:
        if model.task == "question-answering":
            agreement = dict.fromkeys(pipelines, f"not compared; speed of {_BATCHED}")
            baselines = stack.enter_context(Baselines(folder, repository, (_BATCHED,)))

            def measure_own() -> float:
                return baselines.measure(_BATCHED, seconds)["rate_per_s"]

        else:
            run = transformers_pipelines.load(model, source, batch_size=BATCH_SIZE)
            expected = run(requests[:CHECKED_REQUESTS])

            def measure_own() -> float:
                return measure_rate(run, requests, seconds=seconds)

        def serve(layout: str, name: str) -> list[tuple[str, dict[str, float]]]:
            with Server(repository, models=[name]) as server:
                url = server.grpc_url
                agreement[layout] = agreement[layout] or _compare(
                    model, url, name, requests, expected
                )
                return [("", closed_loop(url, name, requests, clients=CLIENTS, seconds=seconds))]

        turns = [Turn(layout, partial(serve, layout, name)) for layout, name in pipelines.items()]
        turns.append(Turn(_OWN, lambda: [("", {"rate_per_s": measure_own()})]))
        return run_rounds([turns], options.rounds, max_minutes=options.max_minutes), agreement


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


if __name__ == "__main__":
    raise SystemExit(main())
