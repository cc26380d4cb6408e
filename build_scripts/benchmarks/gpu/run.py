"""The GPU test, model by model: engines, their parity, their speed, the served ensemble."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.gpu import engine_speed, engines, report, served, systems, targets
from benchmarks.gpu.engines import BuiltPipeline
from benchmarks.gpu.feeds import BATCHES, make_loads
from benchmarks.gpu.ledger import Budget, Ledger
from benchmarks.gpu.machine import PARTS, Machine, Seams, describe, read_machine
from benchmarks.gpu.pipelines import HOME, LAYOUTS, MODELS, PRECISIONS, GpuModel, list_pipelines
from benchmarks.gpu.report import GpuResults
from benchmarks.gpu.systems import EngineSystem, TorchType
from benchmarks.harness import add_measuring_options, say
from benchmarks.model import CACHE
from benchmarks.results import publish
from triptych.base.errors import UserError
from triptych.serving.bench.perf_analyzer import find_perf_analyzer
from triptych.spec.fields import Precision

TORCH_TYPES: tuple[TorchType, ...] = ("fp32", "fp16")
BUILD_RATIO = 0.5
"""Ratio of a model's time after which no graph or engine is begun."""
SPEED_RATIO = 0.5
"""Ratio of the remaining time for measurements in process, if pipelines are served, too."""


@dataclass(frozen=True)
class GpuOptions:
    """Options of a run.

    Attributes:
        seconds: Duration of one measurement in process.
        served_seconds: Duration of one measurement on a server.
        minutes: Duration of the run; None for no limit.
        build_only: Whether to build the graphs and end, which needs no GPU.
        reuse: Whether to use the graphs that another machine has built.
        home: Folder of models, pipelines and repository.
        clients: Numbers of clients of closed loops.
    """

    models: Sequence[GpuModel] = MODELS
    precisions: Sequence[Precision] = PRECISIONS
    layouts: Sequence[str] = LAYOUTS
    rounds: int = 3
    seconds: float = 0.5
    served_seconds: float = 3.0
    minutes: float | None = None
    build_only: bool = False
    reuse: bool = False
    home: Path = HOME
    batches: Sequence[int] = BATCHES
    clients: Sequence[int] = served.CLIENTS


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the machine, measure, print and write the results; return the exit code."""
    given = _parse(arguments)
    seams = Seams()
    machine = read_machine(seams)
    if given.check:
        print(describe(machine, seams.fakes))
        return report.INCOMPLETE if machine.lacks else report.ALL_MET
    say(describe(machine, seams.fakes))
    ledger = Ledger(say)
    fields = GpuOptions.__dataclass_fields__
    options = GpuOptions(**{name: value for name, value in vars(given).items() if name in fields})
    save = partial(report.write, ledger=ledger, path=given.output)
    results = run(options, machine, seams, ledger, save)
    print(report.make_page(results, ledger))
    say(f"written: {given.output}")
    if given.publish:
        title = "Engines on a GPU (`make gpu-test`)"
        publish("gpu", title, report.make_tables(results), ledger.notes)
    return report.exit_code(results, ledger, judged=not given.build_only)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description="Test engines on a GPU.")
    names = [model.name for model in MODELS]
    parser.add_argument("--check", action="store_true", help="report what this machine can run")
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    add_measuring_options(parser, CACHE / "gpu.json", GpuOptions.rounds, GpuOptions.seconds)
    parser.add_argument("--served-seconds", type=float, default=GpuOptions.served_seconds)
    parser.add_argument("--minutes", type=float, help="time after which less is measured")
    parser.add_argument("--build-only", action="store_true", help="build the graphs; needs no GPU")
    parser.add_argument("--reuse", action="store_true", help="use the graphs in --home")
    parser.add_argument("--home", type=Path, default=HOME, help="models, pipelines, repository")
    parser.add_argument("--wheels", type=Path, help="folder of pip wheels to install first")
    given = parser.parse_args(arguments)
    if given.served_seconds <= 0 or (given.minutes is not None and given.minutes <= 0):
        parser.error("--served-seconds and --minutes must be above 0")
    given.models = [model for model in MODELS if model.name in given.models]
    if given.output.suffix != ".json":
        parser.error("--output must end with .json; the page is written next to it")
    return given


def run(
    options: GpuOptions,
    machine: Machine,
    seams: Seams,
    ledger: Ledger,
    save: Callable[[GpuResults], None],
) -> GpuResults:
    """Measure everything that this machine can run; the ledger gets the rest.

    Args:
        seams: Substitutes for the GPU in tests.
        save: Receives the results after each step, so that an interrupted run leaves them.
    """
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    results = GpuResults(machine, seams.fakes, started)
    total = Budget(float("inf") if options.minutes is None else options.minutes * 60)
    for part, reason in machine.lacks.items():
        if not options.build_only or part == "graphs":
            ledger.skip(f"{part} ({PARTS[part]})", reason)
    for number, model in enumerate(options.models):
        budget = total.share(1 / (len(options.models) - number))
        test = _ModelTest(options, machine, seams, ledger, results, partial(save, results))
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

    options: GpuOptions
    machine: Machine
    seams: Seams
    ledger: Ledger
    results: GpuResults
    save: Callable[[], None]

    def measure(self, model: GpuModel, budget: Budget) -> None:
        """Run all steps."""
        if "graphs" in self.machine.lacks and not self.options.reuse:
            self.ledger.skip(model.name, "nothing can be measured without its graphs")
            return
        built = self._build(model, budget.share(BUILD_RATIO))
        if self.options.build_only or not built:
            return
        serves = "served" not in self.machine.lacks
        self._time(model, built, budget.share(SPEED_RATIO) if serves else budget)
        if serves:
            self._serve(built, budget)

    def _build(self, model: GpuModel, budget: Budget) -> list[BuiltPipeline]:
        """Build graph and engine of each pipeline; graphs are measured without engines, too."""
        every: list[BuiltPipeline] = []
        has_engines = "engines" not in self.machine.lacks and not self.options.build_only
        for pipeline in list_pipelines(model, self.options.precisions, self.options.layouts):
            if not budget.left():
                self.ledger.skip(pipeline.name, "no time left to build it")
                continue
            try:
                built = engines.build_graph(
                    pipeline, self.options.home, self._progress, reuse=self.options.reuse
                )
            except LookupError as error:
                self.ledger.skip(pipeline.name, str(error))
                continue
            except Exception as error:
                self.ledger.fail(pipeline.name, error)
                continue
            if built.plan.layout != pipeline.layout:
                self.ledger.fail(pipeline.name, f"was built {built.plan.layout} instead")
                continue
            every.append(built)
            self.results.built.append(built)
            if has_engines:
                self._build_engine(built, budget)
            self.save()
        return every

    def _build_engine(self, built: BuiltPipeline, budget: Budget) -> None:
        name = built.pipeline.name
        if not budget.left():
            self.ledger.skip(f"engine of {name}", "no time left to build it")
            return
        try:
            engines.build_engine(built, self._progress)
        except Exception as error:
            self.ledger.fail(f"engine of {name}", error)
            return
        try:
            engines.check_parity(built)
        except Exception as error:
            self.ledger.fail(f"parity of {name}", error)
            return
        failures = (built.parity or {})["failures"]
        if not failures:
            return
        if built.graph_failures and built.pipeline.model.is_random:
            # An engine of a graph that is inaccurate on the CPU cannot be accurate on a GPU.
            reason = f"with random weights its graph fails the gate, too: {failures[0]}"
            self.ledger.skip(f"parity of {name}", reason)
        else:
            self.ledger.fail(f"parity of {name}", "; ".join(failures))

    def _time(self, model: GpuModel, built: Sequence[BuiltPipeline], budget: Budget) -> None:
        with ExitStack() as stack:
            entries = [*self._open_engines(built, stack), *self._open_others(model, built)]
            self.results.speeds += engine_speed.measure(
                model.name,
                entries,
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
                try:
                    runner = stack.enter_context(engines.open_runner(built, graphs=graphs))
                except Exception as error:
                    self.ledger.fail(what, str(error))
                    continue
                if graphs and not runner.captured:
                    self.ledger.fail(what, "no graph was captured")
                    continue
                found.append(systems.open_engine(name, runner, built.plan))
        return found

    def _open_others(self, model: GpuModel, every: Sequence[BuiltPipeline]) -> list[EngineSystem]:
        """Open PyTorch in both types, eager and compiled, and ONNX Runtime on bucketed graphs."""
        inputs, device = every[0].inputs, self.seams.device

        def open_torch(kind: str, *, compiled: bool) -> list[EngineSystem]:
            opened: list[EngineSystem] = []
            for precision in TORCH_TYPES:
                name = f"{kind} {precision}"
                make = partial(systems.open_torch, name, inputs, device=device, compiled=compiled)
                what = f"{model.name}, {name}"
                opened += self._open(kind, what, partial(make, precision=precision))
            return opened

        found = open_torch("torch eager", compiled=False)
        bucketed = {b.pipeline.precision: b for b in every if not b.plan.packed}
        provider = self.seams.provider
        for precision in ("fp16", "fp32"):
            name = f"onnxruntime-gpu {precision}"
            what = f"{model.name}, {name}"
            if precision not in bucketed:
                self.ledger.skip(what, f"no bucketed {precision} graph was built")
                continue
            one = bucketed[precision]
            make = partial(systems.open_onnxruntime, name, one.graph, one.plan, provider=provider)
            found += self._open("onnxruntime-gpu", what, make)
        # Compilation takes longest, so it comes last.
        return found + open_torch("torch.compile", compiled=True)

    def _open(self, part: str, what: str, make: Callable[[], EngineSystem]) -> list[EngineSystem]:
        if part in self.machine.lacks:  # reported at the start
            return []
        try:
            return [make()]
        except Exception as error:
            self.ledger.fail(what, error)
            return []

    def _serve(self, every: Sequence[BuiltPipeline], budget: Budget) -> None:
        precision = targets.PRECISION
        wanted = [one for one in every if one.pipeline.precision == precision and one.engine]
        what = f"served {every[0].pipeline.model.name}"
        if not wanted:
            self.ledger.skip(what, f"no {precision} engine was built")
            return
        try:
            find_perf_analyzer()
        except UserError as error:
            self.ledger.skip(what, str(error))
            return
        for number, built in enumerate(wanted):
            pipeline = built.pipeline
            names = {"model": pipeline.model.name, "precision": pipeline.precision}
            try:
                result = served.measure(
                    {**names, "layout": built.plan.layout},
                    built.repository,
                    pipeline.name,
                    built.inputs.traffic,
                    rounds=self.options.rounds,
                    seconds=self.options.served_seconds,
                    budget=budget.share(1 / (len(wanted) - number)),
                    ledger=self.ledger,
                    clients=self.options.clients,
                )
            except Exception as error:
                self.ledger.fail(f"served {pipeline.name}", error)
                continue
            self.results.served += [] if result is None else [result]
            self.save()

    def _progress(self, stage: str, line: str) -> None:
        self.ledger.report(f"  {stage:8} {line}")
