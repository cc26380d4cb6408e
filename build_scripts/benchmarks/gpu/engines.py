"""Pipelines built to ONNX, then to engines, and the engines' parity with PyTorch fp32."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.feeds import feeds_of
from benchmarks.gpu.subjects import Subject, write_pipeline
from triptych.base.errors import Progress
from triptych.base.onnx_graph import MODEL_FILE
from triptych.base.tensors import TokenRow
from triptych.building.build import build
from triptych.core.engine.runner import EngineRunner
from triptych.core.engine.stage import EngineFailure
from triptych.core.engine.stage import build_engine as engine_stage
from triptych.core.feeds import Sample
from triptych.core.gate.cached import decoding_of, limits_of
from triptych.core.gate.check import check
from triptych.core.gate.reference import load, reference_of, save
from triptych.core.gate.runs import RowOutputs, RunBatch
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.samples import rows_of
from triptych.repository.manifest import PLAN_FILE, find_manifest, read_manifest
from triptych.repository.records import plain_record
from triptych.spec.plan import Plan
from triptych.spec.spec import load_spec
from triptych.spec.tasks.accuracy import metrics_of

ACCEPTED = "measured only, never served"
"""Why a graph that fails its gate is built all the same: the table says that it failed."""


@dataclass
class Built:
    """A pipeline of the test and what became of it.

    Attributes:
        subject: what it is.
        inputs: its plan and rows, in the layout that it was built in.
        repository: it is in.
        graph_failures: of the gate of the ONNX graph on the CPU.
        engine: the lock's record of the engine; None until it is built.
        parity: the gate's result of the engine; None until it was checked.
    """

    subject: Subject
    inputs: PipelineInputs
    repository: Path
    graph_failures: tuple[str, ...]
    engine: dict[str, Any] | None = None
    parity: dict[str, Any] | None = None

    @property
    def plan(self) -> Plan:
        """Of the pipeline."""
        return self.inputs.plan

    @property
    def graph(self) -> Path:
        """Its ``model.onnx``."""
        return self.repository / self.plan.step("core") / "1" / MODEL_FILE

    @property
    def expected(self) -> Path:
        """What PyTorch in fp32 makes of the rows: a Python without PyTorch needs only this."""
        return self.repository.parent / "expected" / f"{self.subject.name}.npz"

    @property
    def rows(self) -> list[TokenRow]:
        """Rows of the traffic."""
        real = [request for request in self.inputs.requests if not request.edge]
        return [row for row in rows_of(real) if isinstance(row, TokenRow)]


def build_graph(subject: Subject, home: Path, progress: Progress, *, reuse: bool) -> Built:
    """The pipeline in the repository below `home`; with its engine where one can be built.

    Args:
        subject: what to build.
        home: folder of models, pipelines and repository.
        progress: told each stage.
        reuse: take what another machine has built, and only read it.

    Raises:
        UserError: it cannot be built.
        LookupError: nothing, or something of another model, is there to be reused.
    """
    repository = home / "repository"
    folder = write_pipeline(subject, home)
    inputs = read_inputs(load_spec(folder), progress)
    if not reuse:
        with suppress(EngineFailure):  # the graph is there then, and `build_engine` tells
            build(inputs, repository, progress, accept=ACCEPTED)
    lock = find_manifest(repository, subject.name)
    if lock is None:
        raise LookupError(f"{repository} has no {subject.name}")
    if lock.model_sha256 != inputs.plan.facts.sha256:
        raise LookupError(f"{subject.name} in {repository} was built of other weights")
    built = Built(subject, inputs.as_built(repository), repository, lock.gate.failures)
    if not reuse:
        built.expected.parent.mkdir(exist_ok=True)
        requests = built.inputs.requests
        save(built.expected, reference_of(built.inputs, rows_of(requests), lambda *_: None))
    return built


def build_engine(built: Built, progress: Progress) -> None:
    """Build the engine as `triptych engine` does, unless it is there; note what it came to.

    Raises:
        UserError: TensorRT refuses it.
        EngineFailure: it computes something else than its graph.
    """
    built.engine = plain_record(engine_stage(built.repository, built.subject.name, progress).record)


def open_runner(built: Built, *, graphs: bool) -> EngineRunner:
    """The engine ready to run.

    Args:
        built: with an engine.
        graphs: with its CUDA graphs.

    Raises:
        EngineError: the GPU refuses it.
    """
    plan = read_manifest(built.repository, built.subject.name).plan.engine
    if plan is None:
        raise ValueError(f"{built.subject.name} has a core without an engine")
    file = built.repository / built.plan.step("core") / "1" / PLAN_FILE
    return EngineRunner(
        file.read_bytes(),
        graphs=plan.graph_specs if graphs else (),
        packed=built.plan.packed,
        host_code=bool(plan.options["version_compatible"]),
    )


def check_parity(built: Built) -> None:
    """Hold the engine to the gate's limits against PyTorch fp32, through the GPU.

    Raises:
        EngineError: the GPU refuses the engine.
    """
    inputs, plan = built.inputs, built.plan
    precision = built.subject.precision
    with open_runner(built, graphs=True) as runner:
        result = check(
            run_batch(runner, plan),
            inputs.requests,
            load(built.expected),
            plan.core,
            limits_of(inputs, precision),
            metrics=metrics_of(plan.task),
            precision=precision,
            batch_size=plan.max_batch_size,
            decoding=decoding_of(inputs),
        )
    built.parity = result.as_dict()


def run_batch(runner: EngineRunner, plan: Plan) -> RunBatch:
    """A function from a batch of rows to what the engine makes of each, in their order."""
    names = [tensor.name for tensor in plan.core.outputs]

    def run(samples: Sequence[Sample]) -> list[RowOutputs]:
        rows = [sample for sample in samples if isinstance(sample, TokenRow)]
        found: dict[int, RowOutputs] = {}
        for places, feed in feeds_of(rows, plan):
            outputs = runner.run(feed)
            for index, place in enumerate(places):
                found[place] = {name: outputs[name][index] for name in names}
        return [found[place] for place in range(len(rows))]

    return run
