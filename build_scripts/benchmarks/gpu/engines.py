"""Pipelines built to ONNX, then to engines, and the engines' parity with PyTorch fp32."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.feeds import make_feeds
from benchmarks.gpu.pipelines import GpuPipeline, write_pipeline
from triptych.base.errors import Progress
from triptych.base.onnx_graph import MODEL_FILE
from triptych.base.tensors import TokenRow
from triptych.building.build import build
from triptych.core.engine.runner import EngineRunner
from triptych.core.engine.stage import EngineFailure
from triptych.core.engine.stage import build_engine as engine_stage
from triptych.core.gate.cached import decoding_of, limits_of
from triptych.core.gate.check import check
from triptych.core.gate.reference import load, reference_of, save
from triptych.core.gate.runs import RowOutputs, RunBatch
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.requests import Sample, rows_of
from triptych.repository.manifest import PLAN_FILE, EncoderManifest, find_manifest, read_manifest
from triptych.repository.records import plain_record
from triptych.spec.plan import Plan
from triptych.spec.spec import load_spec
from triptych.spec.tasks.accuracy import metrics_of

ACCEPTED = "measured only, never served"
"""Reason to build a graph that fails its gate; the table shows the failure."""


@dataclass
class BuiltPipeline:
    """A pipeline of the test with its results.

    Attributes:
        inputs: Plan and rows, in the layout that was built.
        graph_failures: Failures of the ONNX graph in the gate on the CPU.
        engine: Record of the engine in the manifest; None until it is built.
        parity: Result of the engine in the gate; None until it is checked.
    """

    pipeline: GpuPipeline
    inputs: PipelineInputs
    repository: Path
    graph_failures: tuple[str, ...]
    engine: dict[str, Any] | None = None
    parity: dict[str, Any] | None = None

    @property
    def plan(self) -> Plan:
        """Plan of the pipeline."""
        return self.inputs.plan

    @property
    def graph(self) -> Path:
        """File ``model.onnx``."""
        return self.repository / self.plan.step("core") / "1" / MODEL_FILE

    @property
    def expected(self) -> Path:
        """File with the vectors of PyTorch fp32, for a Python without PyTorch."""
        return self.repository.parent / "expected" / f"{self.pipeline.name}.npz"

    @property
    def rows(self) -> list[TokenRow]:
        """Rows of the traffic without synthetic ones."""
        real = [request for request in self.inputs.requests if not request.edge]
        return [row for row in rows_of(real) if isinstance(row, TokenRow)]


def build_graph(
    pipeline: GpuPipeline, home: Path, progress: Progress, *, reuse: bool
) -> BuiltPipeline:
    """Build the pipeline into the repository below `home`.

    Args:
        home: Folder of models, pipelines and repository.
        reuse: Whether to read the graph that another machine has built.

    Raises:
        UserError: The pipeline cannot be built.
        LookupError: The repository has no such pipeline, or one of another model.
    """
    repository = home / "repository"
    inputs = read_inputs(load_spec(write_pipeline(pipeline, home)), progress)
    if not reuse:
        with suppress(EngineFailure):  # the graph exists then, and `build_engine` reports it
            build(inputs, repository, progress, accept=ACCEPTED)
    manifest = find_manifest(repository, pipeline.name, EncoderManifest)
    if manifest is None:
        raise LookupError(f"{repository} has no {pipeline.name}")
    if manifest.model_sha256 != inputs.plan.info.sha256:
        raise LookupError(f"{pipeline.name} in {repository} was built of other weights")
    built = BuiltPipeline(
        pipeline, inputs.with_built_layout(repository), repository, manifest.gate.failures
    )
    if not reuse:
        built.expected.parent.mkdir(exist_ok=True)
        rows = rows_of(built.inputs.requests)
        save(built.expected, reference_of(built.inputs, rows, lambda *_: None))
    return built


def build_engine(built: BuiltPipeline, progress: Progress) -> None:
    """Build the engine like `triptych engine`, unless it exists, and store its record.

    Raises:
        UserError: TensorRT refuses the graph.
        EngineFailure: The engine does not compute the same as its graph.
    """
    built.engine = plain_record(
        engine_stage(built.repository, built.pipeline.name, progress).record
    )


def open_runner(built: BuiltPipeline, *, graphs: bool) -> EngineRunner:
    """Return the engine, ready to run, with or without its CUDA graphs.

    Raises:
        EngineError: The GPU refuses the engine.
    """
    plan = read_manifest(built.repository, built.pipeline.name, EncoderManifest).plan.engine
    assert plan is not None, f"{built.pipeline.name} has a core without an engine"
    file = built.repository / built.plan.step("core") / "1" / PLAN_FILE
    return EngineRunner(
        file.read_bytes(),
        graphs=plan.graph_specs if graphs else (),
        packed=built.plan.packed,
        host_code=bool(plan.options["version_compatible"]),
    )


def check_parity(built: BuiltPipeline) -> None:
    """Compare the engine with PyTorch fp32 by the limits of the gate.

    Raises:
        EngineError: The GPU refuses the engine.
    """
    inputs, plan = built.inputs, built.plan
    precision = built.pipeline.precision
    with open_runner(built, graphs=True) as runner:
        result = check(
            _run_batches(runner, plan),
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


def _run_batches(runner: EngineRunner, plan: Plan) -> RunBatch:
    """Return a function from a batch of rows to the outputs of each row, in the same order."""
    names = [tensor.name for tensor in plan.core.outputs]

    def run(samples: Sequence[Sample]) -> list[RowOutputs]:
        rows = [sample for sample in samples if isinstance(sample, TokenRow)]
        outputs_by_row: dict[int, RowOutputs] = {}
        for indices, feed in make_feeds(rows, plan):
            outputs = runner.run(feed)
            for position, index in enumerate(indices):
                outputs_by_row[index] = {name: outputs[name][position] for name in names}
        return [outputs_by_row[index] for index in range(len(rows))]

    return run
