"""The whole GPU test, model by model: engines, their parity, their speed, the served ensemble."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.gpu import contenders, engine_speed, engines, served, targets
from benchmarks.gpu.contenders import Contender, TorchType
from benchmarks.gpu.engines import Built
from benchmarks.gpu.feeds import BATCHES, loads_of
from benchmarks.gpu.ledger import Budget, Ledger
from benchmarks.gpu.machine import PARTS, Machine, Seams
from benchmarks.gpu.report import Findings
from benchmarks.gpu.subjects import HOME, LAYOUTS, MODELS, PRECISIONS, Model, subjects_of
from triptych.base.errors import UserError
from triptych.serving.bench.perf_analyzer import find_perf_analyzer
from triptych.spec.fields import Precision

TORCH_TYPES: tuple[TorchType, ...] = ("fp32", "fp16")
BUILD_SHARE = 0.5
"""Of a model's time: after it, no graph or engine is begun."""

SPEED_SHARE = 0.5
"""Of what is left then, where pipelines are served, too."""


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        models: one after the other.
        precisions: the most important first.
        layouts: the same.
        rounds: of every measurement, in turns.
        seconds: of one measurement in process; a served one takes `served_seconds`.
        served_seconds: see `seconds`.
        minutes: of all together; None for no limit.
        build_only: build the graphs and end: needs no GPU.
        reuse: take the graphs that another machine has built.
        home: folder of models, pipelines and repository.
        batches: rows of a batch.
        clients: of closed loops.
    """

    models: Sequence[Model] = MODELS
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


def run(
    options: Options,
    machine: Machine,
    seams: Seams,
    ledger: Ledger,
    save: Callable[[Findings], None],
) -> Findings:
    """Measure all that can be measured here; the ledger gets the rest.

    Args:
        options: what to measure.
        machine: what is there.
        seams: what stands in for the GPU.
        ledger: learns what did not run, and what failed.
        save: called with what there is after each step, so that a run cut short leaves it.
    """
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    found = Findings(machine, seams.fakes, started)
    whole = Budget(float("inf") if options.minutes is None else options.minutes * 60)
    for part, reason in machine.lacks.items():
        if not options.build_only or part == "graphs":
            ledger.skip(f"{part} ({PARTS[part]})", reason)
    for number, model in enumerate(options.models):
        budget = whole.share(1 / (len(options.models) - number))
        bench = _Bench(options, machine, seams, ledger, found, partial(save, found))
        bench.measure(model, budget)
    if not options.build_only:
        for model in options.models:
            found.targets += targets.judge(model.name, found.speeds, found.served)
    found.finished = True
    save(found)
    return found


@dataclass(frozen=True)
class _Bench:
    """The steps for one model, each with what the steps before it have left."""

    options: Options
    machine: Machine
    seams: Seams
    ledger: Ledger
    found: Findings
    save: Callable[[], None]

    def measure(self, model: Model, budget: Budget) -> None:
        """All of one model."""
        if "graphs" in self.machine.lacks and not self.options.reuse:
            self.ledger.skip(model.name, "without its graphs nothing of it can be measured")
            return
        built = self._build(model, budget.share(BUILD_SHARE))
        if self.options.build_only or not built:
            return
        serves = "served" not in self.machine.lacks
        self._time(model, built, budget.share(SPEED_SHARE) if serves else budget)
        if serves:
            self._serve(built, budget)

    def _build(self, model: Model, budget: Budget) -> list[Built]:
        """Graph and engine of each pipeline; the graphs are measured even where engines cannot."""
        every: list[Built] = []
        has_engines = "engines" not in self.machine.lacks and not self.options.build_only
        for subject in subjects_of(model, self.options.precisions, self.options.layouts):
            if not budget.left():
                self.ledger.skip(subject.name, "no time left to build it")
                continue
            try:
                built = engines.build_graph(
                    subject, self.options.home, self._progress, reuse=self.options.reuse
                )
            except LookupError as error:
                self.ledger.skip(subject.name, str(error))
                continue
            except Exception as error:
                self.ledger.fail(subject.name, f"{type(error).__name__}: {error}")
                continue
            if built.plan.layout != subject.layout:
                self.ledger.fail(subject.name, f"was built {built.plan.layout} instead")
                continue
            every.append(built)
            self.found.built.append(built)
            if has_engines:
                self._engine(built, budget)
            self.save()
        return every

    def _engine(self, built: Built, budget: Budget) -> None:
        name = built.subject.name
        if not budget.left():
            self.ledger.skip(f"engine of {name}", "no time left to build it")
            return
        try:
            engines.build_engine(built, self._progress)
        except Exception as error:
            self.ledger.fail(f"engine of {name}", f"{type(error).__name__}: {error}")
            return
        try:
            engines.check_parity(built)
        except Exception as error:
            self.ledger.fail(f"parity of {name}", f"{type(error).__name__}: {error}")
            return
        failures = (built.parity or {})["failures"]
        if not failures:
            return
        if built.graph_failures and built.subject.model.is_random:
            # A graph that is off on the CPU cannot be right on a GPU.
            self.ledger.skip(
                f"parity of {name}",
                f"its graph fails the gate on the CPU, too, with random weights: {failures[0]}",
            )
        else:
            self.ledger.fail(f"parity of {name}", "; ".join(failures))

    def _time(self, model: Model, built: Sequence[Built], budget: Budget) -> None:
        with ExitStack() as owned:
            entries = [*self._engines(built, owned), *self._others(model, built)]
            self.found.speeds += engine_speed.measure(
                model.name,
                entries,
                loads_of(built[0].rows, self.options.batches),
                rounds=self.options.rounds,
                seconds=self.options.seconds,
                budget=budget,
                ledger=self.ledger,
            )
        self.save()

    def _engines(self, every: Sequence[Built], owned: ExitStack) -> list[Contender]:
        found = []
        for built in every:
            if built.engine is None:
                continue
            for graphs in (False,) if built.plan.packed else (True, False):
                name = f"engine {built.subject.precision} {built.plan.layout}"
                if not built.plan.packed:
                    name += ", CUDA graphs" if graphs else ", no graphs"
                try:
                    runner = owned.enter_context(engines.open_runner(built, graphs=graphs))
                except Exception as error:
                    self.ledger.fail(f"{built.subject.model.name}, {name}", str(error))
                    continue
                if graphs and not runner.captured:
                    self.ledger.fail(f"{built.subject.model.name}, {name}", "none was captured")
                    continue
                found.append(contenders.engine(name, runner, built.plan))
        return found

    def _others(self, model: Model, every: Sequence[Built]) -> list[Contender]:
        """PyTorch in both types, eager and compiled, and ONNX Runtime on the bucketed graphs."""
        inputs = every[0].inputs

        def in_torch(kind: str, *, compiled: bool) -> list[Contender]:
            opened: list[Contender] = []
            for precision in TORCH_TYPES:
                name = f"{kind} {precision}"
                make = partial(
                    contenders.torch_model,
                    name,
                    inputs,
                    device=self.seams.device,
                    precision=precision,
                    compiled=compiled,
                )
                opened += self._opened(kind, f"{model.name}, {name}", make)
            return opened

        found = in_torch("torch eager", compiled=False)
        bucketed = {b.subject.precision: b for b in every if not b.plan.packed}
        for precision in ("fp16", "fp32"):
            name = f"onnxruntime-gpu {precision}"
            if precision not in bucketed:
                self.ledger.skip(
                    f"{model.name}, {name}", f"no bucketed {precision} graph was built"
                )
                continue
            one = bucketed[precision]
            open_session = partial(
                contenders.onnxruntime, name, one.graph, one.plan, provider=self.seams.provider
            )
            found += self._opened("onnxruntime-gpu", f"{model.name}, {name}", open_session)
        # Last, because it takes longest until it is ready.
        return found + in_torch("torch.compile", compiled=True)

    def _opened(self, part: str, what: str, make: Callable[[], Contender]) -> list[Contender]:
        if part in self.machine.lacks:  # told at the start
            return []
        try:
            return [make()]
        except Exception as error:
            self.ledger.fail(what, f"{type(error).__name__}: {error}")
            return []

    def _serve(self, every: Sequence[Built], budget: Budget) -> None:
        wanted = [one for one in every if one.subject.precision == targets.PRECISION and one.engine]
        if not wanted:
            self.ledger.skip(
                f"served {every[0].subject.model.name}", f"no {targets.PRECISION} engine was built"
            )
            return
        try:
            find_perf_analyzer()
        except UserError as error:
            self.ledger.skip(f"served {every[0].subject.model.name}", str(error))
            return
        for number, built in enumerate(wanted):
            subject = built.subject
            names = {
                "model": subject.model.name,
                "precision": subject.precision,
                "layout": built.plan.layout,
            }
            try:
                result = served.measure(
                    names,
                    built.repository,
                    subject.name,
                    built.inputs.traffic,
                    rounds=self.options.rounds,
                    seconds=self.options.served_seconds,
                    budget=budget.share(1 / (len(wanted) - number)),
                    ledger=self.ledger,
                    clients=self.options.clients,
                )
            except Exception as error:
                self.ledger.fail(f"served {subject.name}", f"{type(error).__name__}: {error}")
                continue
            self.found.served += [] if result is None else [result]
            self.save()

    def _progress(self, stage: str, line: str) -> None:
        self.ledger.tell(f"  {stage:8} {line}")
