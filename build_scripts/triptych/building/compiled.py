"""Stages of a pipeline whose core is a compiled graph: an encoder, or the user's own model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from triptych.base.cache import versions_of
from triptych.base.errors import Progress
from triptych.base.onnx_graph import open_session
from triptych.building.auto import check_possible, choose
from triptych.building.build import write_repository
from triptych.building.device_rows import keep_passed_gate, write_device_rows
from triptych.building.own_checks import check_own_pipeline
from triptych.building.pair import compare_with_pair, read_pair
from triptych.building.pipeline_checks import Check, check_pipeline
from triptych.building.stages import BuildOptions
from triptych.container.device_check import ROWS_FILE
from triptych.container.processor import find_instruction_sets, sets_for
from triptych.core.engine.dry_run import run_dry_build
from triptych.core.engine.stage import (
    build_engine_here,
    find_reusable_engine,
    missing_for_engines,
    write_engine_samples,
)
from triptych.core.export.own_graph import run_session
from triptych.core.export.to_onnx import LIBRARIES
from triptych.core.gate.answers import check_hooks
from triptych.core.gate.cached import coarsest_of, join_gates
from triptych.core.gate.ranges import find_ranges
from triptych.core.gate.runs import write_warm_ups
from triptych.core.gate.verify import LiveOptions, verify_pipeline
from triptych.core.gate_rows import measure_diversity
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.own_inputs import read_own_inputs
from triptych.core.precision.stage import CheckedCore, full_precision, lower_precision, shared_core
from triptych.models.source import read_license
from triptych.repository.card import CARD_FILE, render_card
from triptych.repository.config import space_of
from triptych.repository.manifest import (
    MANIFEST_FILE,
    CompiledManifest,
    CoreRecord,
    find_manifest,
    planned_engine,
    record_plan,
    record_traffic,
    with_time_of,
)
from triptych.repository.python_env import make_python_env
from triptych.repository.records import DryRun, GateResult
from triptych.repository.render import CoreFiles, Rendered, StepFiles, render
from triptych.repository.sharing import check_sharers, owner_of_core
from triptych.repository.store import hash_files
from triptych.serving.bench.bench import BenchOptions, bench_pipeline
from triptych.serving.bench.results import BenchResult
from triptych.spec.model_fields import CompiledSpec, is_own


class CompiledStages:
    """Stages of an encoder or an own model; see `stages.BuildStages`."""

    def check_files(self, spec: CompiledSpec) -> Sequence[Check]:
        return check_own_pipeline(spec) if is_own(spec) else check_pipeline(spec)

    def read(self, spec: CompiledSpec, progress: Progress) -> PipelineInputs:
        return read_compiled(spec, progress)

    def make_model(self, inputs: PipelineInputs, options: BuildOptions) -> CheckedCore:
        """Return the checked core of the spec: a new core, or the core of another pipeline.

        Raises:
            GateFailure: The core differs from the original model, and that is not accepted.
            UserError: A hook fails on the traffic, or the model cannot be exported or converted.
        """
        check_hooks(inputs, options.progress)
        pair = read_pair(inputs, options)
        core = self._make_core(inputs, options)
        if pair is not None:
            core = compare_with_pair(core, pair, options)
        if inputs.others:
            core = self._make_others(core, options)
        if options.built_after is not None:
            keys = {
                each.spec.core_name: each.key
                for each in core.cores or (core,)
                if each.spec.core.shared_from is None
            }
            check_sharers(options.repository, core.spec.name, keys, options.built_after)
        return core

    def _make_others(self, core: CheckedCore, options: BuildOptions) -> CheckedCore:
        """Return the first core with those of the other models, and with the pipeline's gate."""
        cores = [core]
        for inputs in core.inputs.others:
            behind = inputs.run_behind(
                {each.plan.model: run_session(open_session(each.file)) for each in cores},
                {each.plan.model: each.files for each in cores},
                coarsest_of([each.gate.precision for each in cores]),
            )
            cores.append(self._make_core(behind, options))
        return replace(core, cores=tuple(cores), gate=join_gates([each.gate for each in cores]))

    def _make_core(self, inputs: PipelineInputs, options: BuildOptions) -> CheckedCore:
        wanted, repository = inputs.spec.core, options.repository
        progress, accept = options.progress, options.accept
        if wanted.shared_from is not None:
            owner = owner_of_core(repository, inputs.spec)
            core = full_precision(inputs.replanned(owner.layout), progress, accept)
            return shared_core(core, owner, repository, progress, accept)
        check_possible(wanted)
        core = full_precision(inputs, progress, accept)
        if wanted.precision == "auto":
            return choose(core, repository, partial(self._write_candidate, progress), progress)
        if wanted.precision == core.gate.precision and not core.plan.backend.runs_gate:
            return core
        return lower_precision(core, wanted.precision, progress, accept)

    def _write_candidate(self, progress: Progress, core: CheckedCore, folder: Path) -> None:
        write_repository(self, core, BuildOptions(repository=folder, progress=progress))

    def render(self, model: CheckedCore, options: BuildOptions) -> Rendered:
        """Return the files of the pipeline, with its manifest and the engine of an equal build.

        Raises:
            UserError: NVIDIA's parser or builder refuses the graph.
        """
        plan, name = model.plan, model.spec.name
        repository, progress = options.repository, options.progress
        cores = model.cores or (model,)
        files = render(
            plan,
            [CoreFiles(each.plan, each.file, _warm_ups(each, progress)) for each in cores],
            StepFiles(
                tokenizer=model.inputs.tokenizer_file,
                hooks=model.inputs.hooks,
                python_env=make_python_env(plan, progress)
                if plan.spec.serving.python_env
                else None,
                ranges=find_ranges(model.inputs, progress),
            ),
            question=model.inputs.shortest_row,
            samples=write_engine_samples(model.inputs, progress),
        )
        if (rows := write_device_rows(model, progress)) is not None:
            files[f"{name}/{ROWS_FILE}"] = rows
        license = read_license(model.inputs.model_folder)
        files[f"{name}/{CARD_FILE}"] = render_card(
            plan, model.gate, license=license, unpacked=model.not_packed_reason
        )
        previous = find_manifest(repository, name, CompiledManifest)
        # The hashes are of the graph that the gate ran: `serve` rejects a file changed since then.
        graph = {
            f"{each.plan.step('core')}/1/{part}": digest
            for each in cores
            for part, digest in each.files.items()
        }
        hashes = hash_files(files, graph)
        engine = find_reusable_engine(
            repository, plan, previous, hashes, planned_engine(plan, model.gate)
        )
        if engine is not None:
            files[engine.path] = engine.file
            hashes[engine.path] = engine.record.plan_sha256
        dry_run = None
        if options.engine_dry_run and engine is None:
            dry_run = _dry_run(model, previous, progress)
        variety = measure_diversity(model.inputs.requests)
        manifest = with_time_of(
            CompiledManifest(
                spec=plan.spec,
                model_sha256=plan.info.sha256,
                architecture=plan.info.architecture,
                versions=versions_of(*LIBRARIES),
                core_key=model.key,
                source_key=model.source_key,
                plan=record_plan(plan, model.gate, model.not_packed_reason),
                engine=None if engine is None else engine.record,
                dry_run=dry_run,
                instruction_sets=_instruction_sets(model),
                attention=model.attention,
                space=space_of(plan),
                traffic=record_traffic(plan.lengths, {} if variety is None else asdict(variety)),
                gate=model.gate,
                files=hashes,
                cores={
                    each.plan.model: CoreRecord(each.key, each.source_key, each.gate.precision)
                    for each in model.cores
                },
            ),
            previous,
        )
        files[f"{name}/{MANIFEST_FILE}"] = manifest.as_bytes()
        keep_passed_gate(manifest, progress)
        shared = [each for each in plan.cores if each.spec.core.shared_from is not None]
        return Rendered(files, [repository / each.step("core") for each in shared])

    def build_engine(self, model: CheckedCore, options: BuildOptions) -> Sequence[str]:
        """Build the engine of a written pipeline if possible; return the names of changed models.

        Raises:
            EngineFailure: The engine differs from the graph.
        """
        if not model.plan.builds_engine:
            return ()
        return build_engine_here(options.repository, model.spec.name, options.progress)

    def verify(self, inputs: PipelineInputs, options: LiveOptions) -> GateResult:
        return verify_pipeline(inputs, options)

    def bench(self, inputs: PipelineInputs, options: BenchOptions) -> BenchResult:
        return bench_pipeline(inputs, options)


def read_compiled(spec: CompiledSpec, progress: Progress) -> PipelineInputs:
    """Read the inputs of a pipeline whose core is a compiled graph; see `core.inputs.read_inputs`.

    Raises:
        UserError: The spec, the model, the hooks or the traffic has a mistake.
    """
    if is_own(spec):
        return read_own_inputs(spec, progress)
    return read_inputs(spec, progress)


def _warm_ups(core: CheckedCore, progress: Progress) -> Path | None:
    """Return the folder with the data of a core's warm-ups; None if it is another pipeline's."""
    if core.spec.core.shared_from is not None:
        return None
    return write_warm_ups(core.inputs, core.file, core.files, progress)


def _instruction_sets(core: CheckedCore) -> tuple[str, ...]:
    """Return the instruction sets on which the choice of the core's precision depends."""
    chosen_here = core.gate.candidates or core.plan.backend.runs_gate
    if core.spec.core.device != "cpu" or not chosen_here:
        return ()
    return sets_for(core.gate.precision, find_instruction_sets())


def _dry_run(
    core: CheckedCore, previous: CompiledManifest | None, progress: Progress
) -> DryRun | None:
    """Build the engine in a dry run, for the GPU of the previous build.

    Returns None if a real engine can be built, or if the pipeline has no engine.

    Raises:
        UserError: NVIDIA's parser or builder refuses the graph.
    """
    planned = planned_engine(core.plan, core.gate)
    if planned is None or not missing_for_engines():
        return None
    conversion = core.gate.conversion
    earlier = None if previous is None else previous.engine
    return run_dry_build(
        core.file,
        core.files,
        planned,
        progress,
        fp32_products=() if conversion is None else conversion.fp32_products,
        gpu="" if earlier is None else earlier.compute_capability,
    )
