"""Measure what everything except the core costs: generated steps, an echo, a tutorial's ensemble.

Beside the packed steps, the same ensemble with steps that do nothing shows what Triton costs alone.

The core is emulated: it waits as long as a core on a GPU computes. All servers run from the
beginning, and each load goes to one server after the other, in rounds.

Usage: ``python build_scripts/benchmarks/pipeline_overhead.py [--full] [--beside OTHER/packed]``;
every task with ``--tasks``, images with ``--tasks image-classification``; instances of preprocess
with ``--preprocess 1 2``.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from benchmarks import emulated_core, step_bytes, tutorial
from benchmarks.cost import CLIENT, TOTAL, measure_cost
from benchmarks.harness import (
    Series,
    Turn,
    finish,
    is_wanted,
    make_parser,
    progress,
    run_rounds,
    tabulate,
)  # fmt: skip
from benchmarks.model import CACHE, MAX_LENGTH, PIPELINE, build, model_folder, traffic_texts
from benchmarks.servers import Ensemble
from benchmarks.test_models import (
    TEST_MODELS,
    make_images,
    make_requests,
    write_model,
    write_pipeline,
)
from triptych.building.pipeline import open_pipeline
from triptych.building.stages import BuildOptions
from triptych.serving.bench.perf_analyzer import Request
from triptych.spec.spec import load_spec

_NAME = PIPELINE.name
TASKS = {
    model.task: replace(model, config={**model.config, "num_hidden_layers": 1})
    for model in TEST_MODELS
    if model.architecture in ("Bert", "ViT")
}
"""Models with one layer, since their core is replaced."""
IMAGES = "image-classification"
Call = Callable[[Sequence[Any]], object]
"""Function that a loop calls with some rows."""


class Load(NamedTuple):
    """Core of the server, rows in a request, and clients with one request in flight each."""

    core: str
    texts: int
    clients: int

    def __str__(self) -> str:
        return f"{self.core}, {self.texts} a request, {self.clients} clients"


class Source(NamedTuple):
    """A built pipeline and its requests of one row each."""

    repository: Path
    pipeline: str
    requests: Sequence[Request]


class System(NamedTuple):
    """A server under test; `core_model` is its core, if it is not named after the pipeline."""

    server: Ensemble
    requests: Sequence[Request]
    core_model: str | None = None

    def make_turn(self, load: Load, seconds: float) -> Turn:
        """Return the turn for one load."""

        def measure() -> list[tuple[str, dict[str, float]]]:
            server = self.server
            metrics = measure_cost(
                server.grpc_url, server.pid, server.model, self.requests, clients=load.clients,
                texts_per_request=load.texts, seconds=seconds, core=self.core_model,
            )  # fmt: skip
            return [(str(load), metrics)]

        return Turn(self.server.name, measure)


def main() -> int:
    """Write the repositories, start all servers, measure in rounds."""
    options = _parse()
    plain = traffic_texts()
    texts = [" ".join(plain[i : i + options.joined]) for i in range(len(plain))]
    loads = [
        Load(core, count, clients)
        for core in options.cores
        for count in options.texts
        for clients in options.clients
    ]
    sources = _build_sources(texts, options)
    with ExitStack() as stack:
        systems = {core: _write_systems(core, sources, texts, options) for core in options.cores}
        for each in systems.values():
            for system in each:
                stack.enter_context(system.server)
        count = options.texts[-1]
        counted = {
            f"{one.server.name}, {count} texts": step_bytes.count_bytes(
                one.server.grpc_url, one.server.model, one.requests, count
            )
            for one in systems[options.cores[0]]
        }
        groups = []
        for name, loop, items in _loops(sources, texts):
            turn = partial(_loop_turn, name, loop, items, seconds=options.seconds)
            groups += [[turn(count)] for count in options.texts]
        alone = len(groups)
        groups += [
            [system.make_turn(load, options.seconds) for system in systems[load.core]]
            for load in loads
        ]
        found = run_rounds(groups, options.rounds, max_minutes=options.max_minutes)
    limits, costs = found[:alone], found[alone:]
    notes = [
        f"{one.system}, {one.load}: {one.text('rate_per_s')} rows/s, "
        f"{one.text(TOTAL, 3)} core-ms for each row"
        for one in limits
    ]
    tables = [
        tabulate(
            "Processor time and latency, medians",
            costs,
            {
                "system": lambda one: one.system,
                "core, load": lambda one: one.load,
                "rows/s": lambda one: one.text("rate_per_s"),
                "core-ms per row": lambda one: one.text(TOTAL, 3),
                "server": lambda one: one.text(f"{TOTAL} server", 3),
                "steps": _format_steps,
                "client": lambda one: one.text(CLIENT, 3),
                "switches per row": lambda one: one.text("switches", 2),
                "p50 minus core, ms": lambda one: _subtract_core(one, "p50_ms"),
                "p99 minus core, ms": lambda one: _subtract_core(one, "p99_ms"),
                "rows per batch": lambda one: one.text("batch_rows", 1),
            },
        ),
        step_bytes.make_table(counted),
    ]
    finish(options, tables, {"series": found, "bytes": counted}, notes)
    return 0


def _parse() -> argparse.Namespace:
    title = "What everything except the core costs (`make compare-path`)"
    parser = make_parser(__doc__, "pipeline_overhead", title, rounds=1, seconds=3.0, only=True)
    cores, add = [*emulated_core.CORES], parser.add_argument
    add("--full", action="store_true", help="every core, 1 to 256 clients")
    add("--cores", nargs="+", choices=cores, default=cores[:2])
    add("--texts", nargs="+", type=int, default=[1, 16], help="texts or images in a request")
    add("--joined", type=int, default=1, help="texts to join to one text")
    add("--clients", nargs="+", type=int, default=[1, 32])
    add("--tasks", nargs="*", choices=[*TASKS], help="tasks to measure in place of the layouts")
    add("--preprocess", nargs="+", type=int, default=[1], help="numbers of preprocess instances")
    beside_help = "repositories of the same pipeline, built by another state of this tree"
    add("--beside", nargs="+", type=Path, default=[], help=beside_help)
    if parser.parse_known_args()[0].full:
        parser.set_defaults(rounds=3, seconds=4.5, cores=cores, clients=[1, 8, 32, 256])
    return parser.parse_args()


def _loops(
    sources: Mapping[str, Source], texts: Sequence[str]
) -> Iterator[tuple[str, Callable[[], Call], Sequence[Any]]]:
    """Yield name, maker and rows of each loop that bounds what the preprocess steps can reach."""
    if set(sources) - {IMAGES}:
        yield "tokenizer alone", _open_tokenizer, texts
    if IMAGES in sources:
        images = [row["image"] for row in sources[IMAGES].requests if not isinstance(row, str)]
        yield "Pillow alone", _open_decoder, images


def _loop_turn(
    name: str, make: Callable[[], Call], rows: Sequence[Any], count: int, *, seconds: float
) -> Turn:
    """Return the turn of a call in a loop on every core, the upper bound of any server."""

    def measure() -> list[tuple[str, dict[str, float]]]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        cores = len(os.sched_getaffinity(0))
        with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
            loops = [pool.submit(_repeat, make, rows, count, seconds) for _ in range(cores)]
            rates, costs = zip(*(loop.result() for loop in loops), strict=True)
        return [(f"{count} a call", {"rate_per_s": sum(rates), TOTAL: mean(costs)})]

    return Turn(name, measure)


def _repeat(
    make: Callable[[], Call], rows: Sequence[Any], rows_per_call: int, seconds: float
) -> tuple[float, float]:
    """Return the rows/s of one process and its milliseconds of processor time for each row."""
    call, endless, done = make(), cycle(rows), 0
    began, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        call(list(islice(endless, rows_per_call)))
        done += rows_per_call
    rate = done / (time.perf_counter() - began)
    return rate, 1e3 * (time.process_time() - used) / done


def _open_tokenizer() -> Call:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_LENGTH)
    tokenizer.no_padding()
    return tokenizer.encode_batch_fast


def _open_decoder() -> Call:
    from PIL import Image

    def decode(files: Sequence[bytes]) -> None:
        for data in files:
            with Image.open(io.BytesIO(data)) as image:
                np.asarray(image.resize((224, 224), Image.Resampling.BILINEAR))

    return decode


def _build_sources(texts: list[str], options: argparse.Namespace) -> dict[str, Source]:
    layouts = ("packed", "bucketed") if options.tasks is None else ("packed",)
    sources = {}
    for name in layouts:
        if is_wanted(name, options):
            overrides = f"core.layout={name}", "core.device=gpu"
            sources[name] = Source(build(CACHE / f"gpu-{name}", *overrides), _NAME, texts)
    for task in TASKS if options.tasks == [] else options.tasks or ():
        if is_wanted(task, options):
            sources[task] = _build_task(task, texts)
    for path in options.beside:
        sources[f"beside {path.parent.name}/{path.name}"] = Source(path, _NAME, texts)
    return sources


def _build_task(task: str, texts: Sequence[str]) -> Source:
    model, folder = TASKS[task], CACHE / "overhead-tasks"
    requests = make_requests(model, texts, make_images(sizes=[(640, 480)]))
    source = write_model(model, folder / "models" / model.name)
    core = {"device": "gpu"} | ({} if task == IMAGES else {"layout": "packed"})
    pipeline = write_pipeline(model, source, folder / "pipelines" / model.name, core, requests)
    repository = folder / "repositories" / model.name
    options = BuildOptions(repository=repository, progress=progress)
    open_pipeline(load_spec(pipeline)).build(options)
    return Source(repository, model.name, requests)


def _write_systems(
    core: str, sources: Mapping[str, Source], texts: Sequence[str], options: argparse.Namespace
) -> list[System]:
    """Return servers that are not started; the echo has no core and goes with the first one."""
    folder, core_time = CACHE / "overhead" / core, emulated_core.CORES[core]
    systems = []
    for number, (name, source) in enumerate(sources.items()):
        for count in options.preprocess:
            target = folder / f"{number}-{count}"
            emulated_core.write_pipeline(
                source.repository, source.pipeline, target, core_time, preprocess=count
            )
            full_name = name if count == 1 else f"{name} x{count}"
            server = Ensemble(full_name, target, source.pipeline)
            systems.append(System(server, source.requests))
    if is_wanted("hops", options) and "packed" in sources:
        source = sources["packed"]
        emulated_core.write_hops(source.repository, _NAME, folder / "hops", core_time)
        systems.append(System(Ensemble("hops", folder / "hops", _NAME), texts))
    if is_wanted("tutorial", options) and options.tasks is None:
        tutorial.write_repository(folder / "tutorial", core_time)
        server = Ensemble("tutorial", folder / "tutorial", tutorial.ENSEMBLE)
        systems.append(System(server, texts, core_model=tutorial.CORE))
    if is_wanted("echo", options) and core == options.cores[0]:
        server = Ensemble("echo", emulated_core.write_echo(folder / "echo"), emulated_core.ECHO)
        systems.append(System(server, texts))
    return systems


def _format_steps(one: Series) -> str:
    """Return the processor time of each step, without the server and the client."""
    names = [name for name in one.rounds[0] if name.startswith(f"{TOTAL} ")]
    steps = [name for name in names if name not in (CLIENT, f"{TOTAL} server")]
    return " + ".join(f"{name.removeprefix(f'{TOTAL} ')} {one.text(name, 3)}" for name in steps)


def _subtract_core(one: Series, metric: str) -> str:
    return f"{one.median(metric) - one.median('batch_ms'):.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
