"""Measure what everything except the core costs: generated steps, an echo, a tutorial's ensemble.

The core is emulated: it waits as long as a core on a GPU computes. All servers run from the
beginning, and each load goes to one server after the other, in rounds.

Usage: ``python build_scripts/benchmarks/pipeline_overhead.py [--full] [--beside OTHER/packed]``;
every task with ``--tasks``, instances of preprocess with ``--preprocess 1 2``.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import batch_fill, emulated_core, step_bytes, tokenizer_alone, tutorial
from benchmarks.cost import CLIENT, TOTAL, measure_cost
from benchmarks.ensemble import Ensemble
from benchmarks.harness import (
    Series,
    Turn,
    add_only,
    finish,
    is_wanted,
    make_parser,
    progress,
    run_rounds,
)
from benchmarks.model import CACHE, PIPELINE, build, traffic_texts
from benchmarks.results import Table
from benchmarks.test_models import TEST_MODELS, make_requests, write_model, write_pipeline
from triptych.building.build import build as build_inputs
from triptych.core.inputs import read_inputs
from triptych.serving.bench.perf_analyzer import Request
from triptych.spec.spec import load_spec

_NAME = PIPELINE.name
_CORES = 16
"""Number of processor cores for which the rate is extrapolated."""
TASKS = {
    model.task: replace(model, config={**model.config, "num_hidden_layers": 1})
    for model in TEST_MODELS
    if model.architecture == "Bert"
}
"""Models with one layer for the tasks on texts, since their core is replaced."""


class Load(NamedTuple):
    """Core of the server, texts in a request, and clients with one request in flight each."""

    core: str
    texts: int
    clients: int

    def __str__(self) -> str:
        return f"{self.core}, {self.texts} a request, {self.clients} clients"


@dataclass(frozen=True)
class Source:
    """A built pipeline and its requests of one row each."""

    repository: Path
    pipeline: str
    requests: Sequence[Request]


@dataclass(frozen=True)
class System:
    """A server under test.

    Attributes:
        core_model: Model that is the core, if it is not named after the pipeline.
        trace: File for the times of all requests.
    """

    server: Ensemble
    requests: Sequence[Request]
    core_model: str | None = None
    trace: Path | None = None

    def turn(self, load: Load, seconds: float, windows: Windows) -> Turn:
        """Return the turn for one load; it adds its begin and end to `windows`."""

        def measure() -> list[tuple[str, dict[str, float]]]:
            server, began_ns = self.server, time.monotonic_ns()
            metrics = measure_cost(
                server.grpc_url,
                server.pid,
                server.model,
                self.requests,
                clients=load.clients,
                texts_per_request=load.texts,
                seconds=seconds,
                core=self.core_model,
            )
            windows[server.name][load].append((began_ns, time.monotonic_ns()))
            return [(str(load), metrics)]

        return Turn(self.server.name, measure)


Windows = dict[str, dict[Load, list[tuple[int, int]]]]
"""Begin and end of each measurement in ns, by system and load."""


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
    windows: Windows = defaultdict(lambda: defaultdict(list))
    sources = _build_sources(texts, options)
    with ExitStack() as stack:
        systems = {core: _write_systems(core, sources, texts, options) for core in options.cores}
        every = [system for each in systems.values() for system in each]
        for system in every:
            stack.enter_context(system.server)
        count = options.texts[-1]
        counted = {
            f"{one.server.name}, {count} texts": step_bytes.count_bytes(
                one.server.grpc_url, one.server.model, one.requests, count
            )
            for one in systems[options.cores[0]]
        }
        groups = [[_tokenizer_turn(texts, count, options.seconds)] for count in options.texts]
        groups += [
            [system.turn(load, options.seconds, windows) for system in systems[load.core]]
            for load in loads
        ]
        found = run_rounds(groups, options.rounds, max_minutes=options.max_minutes)
    limits, costs = found[: len(options.texts)], found[len(options.texts) :]
    notes = [
        f"tokenizer alone, {one.load}: {one.text('rate_per_s')} texts/s, "
        f"{one.text(TOTAL, 3)} core-ms for each text"
        for one in limits
    ]
    notes += _compare_instances(costs) + _read_traces(every, windows)
    tables = [_make_table(costs), step_bytes.make_table(counted)]
    data = {"series": found, "bytes": counted}
    title = "What everything except the core costs (`make compare-path`)"
    finish(options, "pipeline_overhead", title, tables, data, notes)
    return 0


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__, "pipeline_overhead", rounds=1, seconds=3.0)
    add_only(parser)
    cores = [*emulated_core.CORES]
    parser.add_argument("--full", action="store_true", help="every core, 1 to 256 clients")
    parser.add_argument("--cores", nargs="+", choices=cores, default=cores[:2])
    parser.add_argument("--texts", nargs="+", type=int, default=[1, 16], help="texts in a request")
    parser.add_argument("--joined", type=int, default=1, help="texts to join to one text")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 32])
    parser.add_argument(
        "--tasks", nargs="*", choices=[*TASKS], help="tasks to measure in place of the layouts"
    )
    parser.add_argument(
        "--preprocess", nargs="+", type=int, default=[1], help="numbers of preprocess instances"
    )
    parser.add_argument(
        "--filled", action="store_true", help="trace every request, to see how full batches are"
    )
    parser.add_argument(
        "--beside",
        nargs="+",
        type=Path,
        default=[],
        help="repositories of the same pipeline, built by another state of this tree",
    )
    if parser.parse_known_args()[0].full:
        parser.set_defaults(rounds=3, seconds=4.5, cores=cores, clients=[1, 8, 32, 256])
    return parser.parse_args()


def _tokenizer_turn(texts: Sequence[str], count: int, seconds: float) -> Turn:
    def measure() -> list[tuple[str, dict[str, float]]]:
        metrics = tokenizer_alone.measure(texts, texts_per_call=count, seconds=seconds)
        return [(f"{count} a call", metrics)]

    return Turn("tokenizer alone", measure)


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
    requests = make_requests(model, texts)
    source = write_model(model, folder / "models" / model.name)
    core = {"layout": "packed", "device": "gpu"}
    pipeline = write_pipeline(model, source, folder / "pipelines" / model.name, core, requests)
    repository = folder / "repositories" / model.name
    build_inputs(read_inputs(load_spec(pipeline), progress), repository, progress)
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
            trace = target / "trace.json" if options.filled else None
            flags = batch_fill.trace_flags(trace) if trace else []
            full_name = name if count == 1 else f"{name} x{count}"
            server = Ensemble(full_name, target, source.pipeline, flags=flags)
            systems.append(System(server, source.requests, trace=trace))
    if is_wanted("tutorial", options) and options.tasks is None:
        tutorial.write_repository(folder / "tutorial", core_time)
        server = Ensemble("tutorial", folder / "tutorial", tutorial.ENSEMBLE)
        systems.append(System(server, texts, core_model=tutorial.CORE))
    if is_wanted("echo", options) and core == options.cores[0]:
        server = Ensemble("echo", emulated_core.write_echo(folder / "echo"), emulated_core.ECHO)
        systems.append(System(server, texts))
    return systems


def _make_table(costs: Sequence[Series]) -> Table:
    rows = []
    for one in costs:
        steps = [name for name in one.rounds[0] if name.startswith(f"{TOTAL} ")]
        parts = [
            f"{name.removeprefix(f'{TOTAL} ')} {one.text(name, 3)}"
            for name in steps
            if name not in (CLIENT, f"{TOTAL} server")
        ]
        core_ms = one.median("batch_ms")
        rows.append(
            (
                one.system,
                one.load,
                one.text("rate_per_s"),
                one.text(TOTAL, 3),
                one.text(f"{TOTAL} server", 3),
                " + ".join(parts),
                one.text(CLIENT, 3),
                one.text("switches", 2),
                f"{one.median('p50_ms') - core_ms:.2f}",
                f"{one.median('p99_ms') - core_ms:.2f}",
                one.text("batch_rows", 1),
            )
        )
    head = ["system", "core, load", "texts/s", "core-ms per text", "server", "steps", "client"]
    head += ["switches per text", "p50 minus core, ms", "p99 minus core, ms", "rows per batch"]
    return Table("Processor time and latency, medians", head, rows)


def _compare_instances(costs: Sequence[Series]) -> list[str]:
    """Return what more instances of preprocess gain, a line for each load."""
    known = {(one.system, one.load): one for one in costs}
    lines = []
    for one in costs:
        single_name, _, count = one.system.rpartition(" x")
        single = known.get((single_name, one.load))
        if single is None:
            continue
        client = one.median(CLIENT)
        served_ms = one.median(TOTAL) - client
        in_preprocess = _CORES * one.median(f"{TOTAL} preprocess") / served_ms
        gain = one.median("rate_per_s") / single.median("rate_per_s")
        lines.append(
            f"{one.system}, {one.load}: {gain:.2f} times the rate of one instance, "
            f"{gain / int(count):.2f} for each; the client used {client / one.median(TOTAL):.0%} "
            f"of the processor time. Without it {_CORES} cores suffice for "
            f"{_CORES * 1e3 / served_ms:.0f} texts/s, {in_preprocess:.1f} of them in preprocess"
        )
    return lines


def _read_traces(systems: Sequence[System], windows: Windows) -> list[str]:
    """Return how full the batches of servers with a trace were, as medians over the rounds."""
    lines = []
    for system in systems:
        if system.trace is None:
            continue
        server, core = system.server, f"{system.server.model}_core"
        config = emulated_core.read_config(server.repository / core / "config.pbtxt")
        for load, spans in windows[server.name].items():
            if load.core != system.trace.parent.parent.name:
                continue
            max_requests = max(1, config.max_batch_size // load.texts)
            fill = median(batch_fill.compute_fill(system.trace, core, spans, max_requests))
            lines.append(
                f"{server.name}, {load}: batches had {fill:.2f} of the requests that waited for "
                "the core, within their limit"
            )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
