"""Build stages of an encoder: its core, files, build manifest and engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from triptych.base.cache import versions_of
from triptych.base.errors import Progress
from triptych.building.auto import WriteRepository, check_possible, choose
from triptych.building.device_rows import keep_passed_gate, write_device_rows
from triptych.container.device_check import ROWS_FILE
from triptych.container.processor import find_instruction_sets, sets_for
from triptych.core.engine.dry_run import run_dry_build
from triptych.core.engine.stage import (
    build_engine_here,
    find_reusable_engine,
    missing_for_engines,
    write_engine_samples,
)
from triptych.core.export.to_onnx import LIBRARIES
from triptych.core.gate.cached import coarsest_of, join_gates
from triptych.core.gate.ranges import find_ranges
from triptych.core.gate.runs import write_warm_ups
from triptych.core.gate_rows import measure_diversity
from triptych.core.inputs import PipelineInputs
from triptych.core.own_chain import open_artifact
from triptych.core.precision.stage import CheckedCore, full_precision, lower_precision, shared_core
from triptych.models.source import read_license
from triptych.repository.card import CARD_FILE, render_card
from triptych.repository.manifest import (
    MANIFEST_FILE,
    CoreRecord,
    EncoderManifest,
    find_manifest,
    make_manifest,
    planned_engine,
)
from triptych.repository.python_env import make_python_env
from triptych.repository.records import DryRun
from triptych.repository.render import CoreFiles, Rendered, render
from triptych.repository.sharing import check_sharers, owner_of_core
from triptych.repository.store import hash_files


def make_encoder_core(
    inputs: PipelineInputs,
    repository: Path,
    progress: Progress,
    accept: str,
    built_after: Sequence[str] | None,
    write: WriteRepository,
) -> CheckedCore:
    """Return the checked core of the spec: a new core, or the core of another pipeline.

    Args:
        inputs: Inputs of the pipeline.
        repository: Folder of the models; nothing is written into it.
        progress: Receives each stage and its result.
        accept: Reason why a failed gate is accepted; empty if it is not.
        built_after: Names of the pipelines that are built right after this one; None to skip the
            check of pipelines that share this core.
        write: Writes the repository of a candidate that ``core.precision: auto`` measures.

    Raises:
        GateFailure: The core differs from the original model, and `accept` is empty.
        UserError: The model cannot be exported or converted.
    """
    core = _make_core(inputs, repository, progress, accept, write)
    if inputs.others:
        core = _make_others(core, repository, progress, accept, write)
    if built_after is not None:
        keys = {
            each.plan.spec.core_name: each.key
            for each in core.cores or (core,)
            if each.plan.spec.core.shared_from is None
        }
        check_sharers(repository, inputs.plan.spec.name, keys, built_after)
    return core


def _make_others(
    core: CheckedCore,
    repository: Path,
    progress: Progress,
    accept: str,
    write: WriteRepository,
) -> CheckedCore:
    """Return the first core with those of the other models, and with the gate of the pipeline."""
    cores = [core]
    for inputs in core.inputs.others:
        behind = inputs.run_behind(
            {each.plan.model: open_artifact(each.file) for each in cores},
            {each.plan.model: each.files for each in cores},
            coarsest_of([each.gate.precision for each in cores]),
        )
        cores.append(_make_core(behind, repository, progress, accept, write))
    return replace(core, cores=tuple(cores), gate=join_gates([each.gate for each in cores]))


def _make_core(
    inputs: PipelineInputs,
    repository: Path,
    progress: Progress,
    accept: str,
    write: WriteRepository,
) -> CheckedCore:
    wanted = inputs.plan.spec.core
    if wanted.shared_from is not None:
        owner = owner_of_core(repository, inputs.plan.spec)
        core = full_precision(inputs.replanned(owner.layout), progress, accept)
        return shared_core(core, owner, repository, progress, accept)
    check_possible(wanted)
    core = full_precision(inputs, progress, accept)
    if wanted.precision == "auto":
        return choose(core, repository, write, progress)
    if wanted.precision == core.gate.precision and not core.plan.backend.runs_gate:
        return core
    return lower_precision(core, wanted.precision, progress, accept)


def render_encoder(
    core: CheckedCore, repository: Path, progress: Progress, engine_dry_run: bool
) -> Rendered:
    """Return the files of the pipeline, with its build manifest and the engine of an equal build.

    Raises:
        UserError: NVIDIA's parser or builder refuses the graph.
    """
    plan, name = core.plan, core.plan.spec.name
    others = [CoreFiles(each.plan, each.file, _warm_ups(each, progress)) for each in core.cores[1:]]
    files = render(
        plan,
        core_file=core.file,
        tokenizer_file=core.inputs.tokenizer_file,
        hooks=core.inputs.hooks,
        question=core.inputs.shortest_row,
        warm_ups=_warm_ups(core, progress),
        others=others,
        samples=write_engine_samples(core.inputs, progress),
        python_env=make_python_env(plan, progress) if plan.spec.serving.python_env else None,
        ranges=find_ranges(core.inputs, progress),
    )
    if (rows := write_device_rows(core, progress)) is not None:
        files[f"{name}/{ROWS_FILE}"] = rows
    license = read_license(core.inputs.model_folder)
    files[f"{name}/{CARD_FILE}"] = render_card(
        plan, core.gate, license=license, unpacked=core.not_packed_reason
    )
    previous = find_manifest(repository, name, EncoderManifest)
    # The hashes are of the graph that the gate ran, so `serve` rejects a file changed since then.
    graph = {
        f"{each.plan.step('core')}/1/{part}": digest
        for each in core.cores or (core,)
        for part, digest in each.files.items()
    }
    hashes = hash_files(files, graph)
    engine = find_reusable_engine(
        repository, plan, previous, hashes, planned_engine(plan, core.gate)
    )
    if engine is not None:
        files[engine.path] = engine.file
        hashes[engine.path] = engine.record.plan_sha256
    dry_run = None
    if engine_dry_run and engine is None:
        dry_run = _dry_run(core, previous, progress)
    variety = measure_diversity(core.inputs.requests)
    manifest = make_manifest(
        plan,
        hashes,
        core_key=core.key,
        source_key=core.source_key,
        not_packed_reason=core.not_packed_reason,
        versions=versions_of(*LIBRARIES),
        gate=core.gate,
        engine=None if engine is None else engine.record,
        dry_run=dry_run,
        variety={} if variety is None else asdict(variety),
        previous=previous,
        cores={
            each.plan.model: CoreRecord(each.key, each.source_key, each.gate.precision)
            for each in core.cores
        },
        instruction_sets=_instruction_sets(core),
        attention=core.attention,
    )
    files[f"{name}/{MANIFEST_FILE}"] = manifest.as_bytes()
    keep_passed_gate(manifest, progress)
    shared = [each for each in plan.cores if each.spec.core.shared_from is not None]
    return Rendered(files, [repository / each.step("core") for each in shared])


def _warm_ups(core: CheckedCore, progress: Progress) -> Path | None:
    """Return the folder with the data of a core's warm-ups; None if it is another pipeline's."""
    if core.plan.spec.core.shared_from is not None:
        return None
    return write_warm_ups(core.inputs, core.file, core.files, progress)


def _instruction_sets(core: CheckedCore) -> tuple[str, ...]:
    """Return the instruction sets on which the choice of the core's precision depends."""
    chosen_here = core.gate.candidates or core.plan.backend.runs_gate
    if core.plan.spec.core.device != "cpu" or not chosen_here:
        return ()
    return sets_for(core.gate.precision, find_instruction_sets())


def _dry_run(
    core: CheckedCore, previous: EncoderManifest | None, progress: Progress
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


def build_encoder_engine(core: CheckedCore, repository: Path, progress: Progress) -> Sequence[str]:
    """Build the engine of a written pipeline if possible; return the names of changed models.

    Raises:
        EngineFailure: The engine differs from the graph.
    """
    if not core.plan.builds_engine:
        return ()
    return tuple(build_engine_here(repository, core.plan.spec.name, progress))
