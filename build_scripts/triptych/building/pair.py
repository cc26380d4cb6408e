"""The two sides of a model of texts and images, in two pipelines with one vector space.

A build compares the similarities of its rows and those of its pair with the original model's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from triptych.base.errors import Progress, UserError, no_progress
from triptych.base.onnx_graph import MODEL_FILE
from triptych.building.stages import BuildOptions
from triptych.core.gate.cached import coarsest_of, overrides_of
from triptych.core.gate.check import failure_messages, judge_metrics
from triptych.core.gate.reference import reference_of
from triptych.core.gate.runs import RunBatch, open_core, run_rows
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.precision.stage import CheckedCore
from triptych.core.requests import rows_of
from triptych.repository.config import space_of
from triptych.repository.manifest import CompiledManifest, find_manifest
from triptych.repository.records import ProbeResult
from triptych.spec.model_fields import is_own
from triptych.spec.spec import load_spec
from triptych.tasks.accuracy import above_rounding, thresholds
from triptych.tasks.compare import Floats
from triptych.tasks.metrics_vectors import compare_across

ROWS = 32
"""Maximum number of rows of the traffic of each side."""


def read_pair(inputs: PipelineInputs, options: BuildOptions) -> PipelineInputs | None:
    """Return the inputs of the pair of a pipeline; None without a pair or without its folder.

    Raises:
        UserError: The model has one side alone, or the pair has another vector space.
    """
    spec = inputs.plan.spec
    if is_own(spec) or spec.pair_with is None:
        return None
    pair, space, folder = None, space_of(inputs.plan), spec.folder.parent / spec.pair_with
    if not space:
        raise UserError(
            "pair_with",
            "is only supported for the sides of a model of texts and images",
            given=inputs.plan.info.architecture,
            remedy="Remove it, or choose a model such as CLIP or SigLIP",
        )
    if folder.is_dir():
        pair = read_inputs(load_spec(folder), no_progress)
        if (other := space_of(pair.plan)) != space:
            raise UserError(
                "pair_with",
                "names a pipeline with another vector space",
                given=f"{other or 'none'} in {folder.name}, here {space}",
                remedy="Set model.source, pair_with and parameters.dimensions alike in both",
            )
    built = find_manifest(options.repository, spec.pair_with, CompiledManifest)
    later = options.built_after is None or spec.pair_with in options.built_after
    if built is not None and built.space != space and not later:
        raise UserError(
            spec.name,
            "must have the vector space of its pair in the repository",
            given=f"{built.space or 'none'} in {spec.pair_with}, here {space}",
            remedy=f"Run `triptych build {spec.name} {spec.pair_with}`",
        )
    return pair


def compare_with_pair(
    core: CheckedCore, pair: PipelineInputs, options: BuildOptions
) -> CheckedCore:
    """Return a core with the result of the similarities of its rows and those of its pair.

    The vectors of the pair are those of its core in the repository, if that is of the same vector
    space, else those of the original model.

    Raises:
        GateFailure: The similarities differ from those of the original model, and that is not
            accepted.
    """
    name, gate, inputs = pair.plan.spec.name, core.gate, core.inputs
    built = find_manifest(options.repository, name, CompiledManifest)
    file = options.repository / pair.plan.step("core") / "1" / MODEL_FILE
    precision, run = gate.precision, None
    if built is not None and built.space == space_of(core.plan) and file.is_file():
        precision = coarsest_of([precision, built.gate.precision])
        run = open_core(file, pair.replanned(built.plan.layout).plan, built.gate.precision)
    own = _vectors(inputs, open_core(core.file, core.plan, gate.precision), options.progress)
    others = _vectors(pair, run, options.progress)
    overrides = overrides_of(inputs)
    limits = thresholds(core.plan.task, precision, overrides)
    limits = above_rounding(limits, gate.rounding, overrides)
    verdicts = judge_metrics(compare_across(own, others), limits, complete=True)
    failures = [f"with {name}: {failure}" for failure in failure_messages(verdicts, {})]
    figures = ", ".join(f"{verdict.metric} {verdict.value:.4g}" for verdict in verdicts)
    whose = "the original model" if run is None else "the core"
    options.progress(
        "gate",
        f"{len(own[0])} x {len(others[0])} similarities with {whose} of {name}: {figures}",
    )
    result = ProbeResult(len(others[0]), verdicts)
    gate = replace(gate, pair=result, failures=(*gate.failures, *failures))
    return replace(core, gate=gate).accepted(options.accept)


def _vectors(
    inputs: PipelineInputs, run: RunBatch | None, progress: Progress
) -> tuple[Floats, Floats]:
    """Return the vectors of rows of the traffic, by an artifact and by the original model.

    Without an artifact both are the original model's, ``[rows, size]``.
    """
    rows = rows_of([request for request in inputs.requests if not request.edge][:ROWS])
    expected = reference_of(inputs, rows, progress)
    wanted = np.stack([results[0] for results in expected]).astype(np.float64)
    if run is None:
        return wanted, wanted
    outputs = run_rows(run, rows, range(len(rows)), inputs.plan.max_batch_size)
    name = inputs.plan.core.outputs[0].name
    return np.stack([outputs[place][name] for place in range(len(rows))]), wanted
