"""The GPU test, model by model: engines, their parity, their speed, the served ensemble."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.gpu import engine_speed, engines, report, served, systems, targets
from benchmarks.gpu.engines import BuiltPipeline
from benchmarks.gpu.feeds import BATCHES, make_loads
from benchmarks.gpu.ledger import Budget, Ledger
from benchmarks.gpu.machine import PARTS, Machine, Substitutes, describe, read_machine
from benchmarks.gpu.pipelines import (
    HOME,
    LAYOUTS,
    MODELS,
    PRECISIONS,
    GpuModel,
    GpuPipeline,
    list_pipelines,
)  # fmt: skip
from benchmarks.gpu.report import GpuResults
from benchmarks.gpu.systems import EngineSystem, TorchType
from benchmarks.harness import make_parser, positive, say
from benchmarks.results import publish, render_page
from triptych.base.errors import UserError
from triptych.serving.bench.perf_analyzer import find_perf_analyzer

TORCH_TYPES: tuple[TorchType, ...] = ("fp32", "fp16")
BUILD_RATIO = 0.5
"""Ratio of a model's time after which no graph or engine is begun."""
SPEED_RATIO = 0.5
"""Ratio of the remaining time for measurements in process, if pipelines are served, too."""


def main() -> int:
    """Check the machine, measure, print and write the results; return the exit code."""
    options = parse_options()
    substitutes = Substitutes()
    machine = read_machine(substitutes)
    text = describe(machine)
    if options.check:
        print(text)
        return report.INCOMPLETE if machine.lacks else report.ALL_MET
    say(text)
    ledger = Ledger(say)
    save = partial(report.write, ledger=ledger, options=options)
    results = run(options, machine, substitutes, ledger, save)
    result = save(results)
    print(render_page([result]))
    say(f"written: {options.output}")
    if options.publish:
        publish(options.name, result)
    return report.exit_code(results, ledger, judged=not options.build_only)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a run; `models` are those of `MODELS`."""
    title, names = "Engines on a GPU (`make gpu-test`)", [model.name for model in MODELS]
    parser = make_parser("Test engines on a GPU.", "gpu", title, rounds=3, seconds=0.5)
    parser.prog = "benchmarks.gpu"
    add = parser.add_argument
    add("--check", action="store_true", help="report what this machine can run")
    add("--models", nargs="+", choices=names, default=names)
    add("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    add("--batches", nargs="+", type=int, default=BATCHES, help="rows in a batch, in process")
    add("--clients", nargs="+", type=int, default=served.CLIENTS, help="clients of the server")
    add("--served-seconds", type=positive, default=3.0, help="duration on a server")
    add("--minutes", type=positive, help="time after which less is measured")
    add("--build-only", action="store_true", help="build the graphs; needs no GPU")
    add("--reuse", action="store_true", help="use the graphs in --home")
    add("--home", type=Path, default=HOME, help="models, pipelines, repository")
    add("--wheels", type=Path, help="folder of pip wheels to install first")
    options = parser.parse_args(arguments)
    if options.output.suffix != ".json":
        parser.error("--output must end with .json; the page is written next to it")
    options.models = [model for model in MODELS if model.name in options.models]
    return options


def run(
    options: argparse.Namespace,
    machine: Machine,
    substitutes: Substitutes,
    ledger: Ledger,
    save: Callable[[GpuResults], object],
) -> GpuResults:
    """Measure everything that this machine can run; the ledger gets the rest.

    Args:
        substitutes: Substitutes for the GPU in tests.
        save: Receives the results after each step, so that an interrupted run leaves them.
    """
    results = GpuResults(machine, substitutes.fakes)
    total = Budget(float("inf") if options.minutes is None else options.minutes * 60)
    for part, reason in machine.lacks.items():
        if not options.build_only or part == "graphs":
            ledger.skip(f"{part} ({PARTS[part]})", reason)
    for number, model in enumerate(options.models):
        budget = total.share(1 / (len(options.models) - number))
        test = _ModelTest(options, machine, substitutes, ledger, results, partial(save, results))
        test.measure(model, budget)
    if not options.build_only:
        for model in options.models:
            results.targets += targets.judge(model.name, results.speeds, results.served)
    results.finished = True
    save(results)
    return results


@dataclass(frozen=True)
class _ModelTest:
    """The steps for one model; each uses the results of the steps before it."""

    options: argparse.Namespace
    machine: Machine
    substitutes: Substitutes
    ledger: Ledger
    results: GpuResults
    save: Callable[[], object]

    def measure(self, model: GpuModel, budget: Budget) -> None:
        """Run all steps."""
        if "graphs" in self.machine.lacks and not self.options.reuse:
            self.ledger.skip(model.name, "nothing can be measured without its graphs")
            return
        build_budget, every = budget.share(BUILD_RATIO), list[BuiltPipeline]()
        for pipeline in list_pipelines(model, self.options.precisions, self.options.layouts):
            if not build_budget.left():
                self.ledger.skip(pipeline.name, "no time left to build it")
                continue
            with self.ledger.attempt(pipeline.name):
                every += self._build(pipeline, build_budget)
        if self.options.build_only or not every:
            return
        serves = "served" not in self.machine.lacks
        self._time(model, every, budget.share(SPEED_RATIO) if serves else budget)
        if serves:
            self._serve(every, budget)

    def _build(self, pipeline: GpuPipeline, budget: Budget) -> list[BuiltPipeline]:
        """Build graph and engine of a pipeline; a graph is measured without an engine, too."""
        home, reuse = self.options.home, self.options.reuse
        try:
            built = engines.build_graph(pipeline, home, self._progress, reuse=reuse)
        except LookupError as error:
            self.ledger.skip(pipeline.name, str(error))
            return []
        if built.plan.layout != pipeline.layout:
            self.ledger.fail(pipeline.name, f"was built {built.plan.layout} instead")
            return []
        self.results.built.append(built)
        if "engines" not in self.machine.lacks and not self.options.build_only:
            self._build_engine(built, budget)
        self.save()
        return [built]

    def _build_engine(self, built: BuiltPipeline, budget: Budget) -> None:
        name = built.pipeline.name
        if not budget.left():
            self.ledger.skip(f"engine of {name}", "no time left to build it")
            return
        failures = len(self.ledger.failed)
        with self.ledger.attempt(f"engine of {name}"):
            engines.build_engine(built, self._progress)
        if len(self.ledger.failed) > failures:
            return
        with self.ledger.attempt(f"parity of {name}"):
            engines.check_parity(built)
        if found := (built.parity or {}).get("failures"):
            if built.graph_failures and built.pipeline.model.is_random:
                # An engine of a graph that is inaccurate on the CPU cannot be accurate on a GPU.
                reason = f"with random weights its graph fails the gate, too: {found[0]}"
                self.ledger.skip(f"parity of {name}", reason)
            else:
                self.ledger.fail(f"parity of {name}", "; ".join(found))

    def _time(self, model: GpuModel, built: Sequence[BuiltPipeline], budget: Budget) -> None:
        with ExitStack() as stack:
            self.results.speeds += engine_speed.measure(
                model.name,
                [*self._open_engines(built, stack), *self._open_others(model, built)],
                make_loads(built[0].rows, self.options.batches),
                rounds=self.options.rounds,
                seconds=self.options.seconds,
                budget=budget,
                ledger=self.ledger,
            )
        self.save()

    def _open_engines(self, every: Sequence[BuiltPipeline], stack: ExitStack) -> list[EngineSystem]:
        found = []
        for built in every:
            if built.engine is None:
                continue
            for graphs in (False,) if built.plan.packed else (True, False):
                name = f"engine {built.pipeline.precision} {built.plan.layout}"
                if not built.plan.packed:
                    name += ", CUDA graphs" if graphs else ", no graphs"
                what = f"{built.pipeline.model.name}, {name}"
                with self.ledger.attempt(what):
                    runner = stack.enter_context(engines.open_runner(built, graphs=graphs))
                    if graphs and not runner.captured:
                        self.ledger.fail(what, "no graph was captured")
                    else:
                        found.append(systems.open_engine(name, runner, built.plan))
        return found

    def _open_others(self, model: GpuModel, every: Sequence[BuiltPipeline]) -> list[EngineSystem]:
        """Open PyTorch in both types, eager and compiled, and ONNX Runtime on bucketed graphs."""
        found: list[EngineSystem] = []
        inputs, device = every[0].inputs, self.substitutes.device
        provider = self.substitutes.provider

        def open_part(part: str, precision: str, make: Callable[[str], EngineSystem]) -> None:
            name = f"{part} {precision}"
            if part not in self.machine.lacks:  # reported at the start
                with self.ledger.attempt(f"{model.name}, {name}"):
                    found.append(make(name))

        def open_torch(part: str, *, compiled: bool) -> None:
            make = partial(systems.open_torch, inputs=inputs, device=device, compiled=compiled)
            for precision in TORCH_TYPES:
                open_part(part, precision, partial(make, precision=precision))

        open_torch("torch eager", compiled=False)
        bucketed = {one.pipeline.precision: one for one in every if not one.plan.packed}
        for precision in ("fp16", "fp32"):
            part = "onnxruntime-gpu"
            if precision not in bucketed:
                what = f"{model.name}, {part} {precision}"
                self.ledger.skip(what, f"no bucketed {precision} graph was built")
                continue
            graph, plan = bucketed[precision].graph, bucketed[precision].plan
            make = partial(systems.open_onnxruntime, graph=graph, plan=plan, provider=provider)
            open_part(part, precision, make)
        open_torch("torch.compile", compiled=True)  # last, since compilation takes longest
        return found

    def _serve(self, every: Sequence[BuiltPipeline], budget: Budget) -> None:
        precision, model = targets.PRECISION, every[0].pipeline.model.name
        wanted = [one for one in every if one.pipeline.precision == precision and one.engine]
        if not wanted:
            self.ledger.skip(f"served {model}", f"no {precision} engine was built")
            return
        try:
            find_perf_analyzer()
        except UserError as error:
            self.ledger.skip(f"served {model}", str(error))
            return
        for number, built in enumerate(wanted):
            name = built.pipeline.name
            with self.ledger.attempt(f"served {name}"):
                result = served.measure(
                    (model, precision, built.plan.layout),
                    built.repository,
                    name,
                    built.inputs.traffic,
                    rounds=self.options.rounds,
                    seconds=self.options.served_seconds,
                    budget=budget.share(1 / (len(wanted) - number)),
                    ledger=self.ledger,
                    clients=self.options.clients,
                )
                self.results.served += [] if result is None else [result]
                self.save()

    def _progress(self, stage: str, line: str) -> None:
        self.ledger.report(f"  {stage:8} {line}")
