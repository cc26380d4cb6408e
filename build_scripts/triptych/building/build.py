"""`triptych build`: hooks, export, gate, precision, dry run, render, lint, write, lock, engine.

All of it is cached.

Reading comes before: `requests.inputs.read_inputs` resolves the model, reads the requests and
derives the plan. Each stage below is one function of the room that owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from triptych.base.cache import versions_of
from triptych.base.errors import Finding, Progress
from triptych.building.auto import check_possible, choose
from triptych.core.engine.dry_run import run_dry_build
from triptych.core.engine.stage import (
    build_engine_here,
    find_reusable_engine,
    missing_for_engines,
    write_engine_samples,
)
from triptych.core.export.to_onnx import LIBRARIES
from triptych.core.gate.answers import check_hooks
from triptych.core.gate.runs import write_warm_ups
from triptych.core.inputs import PipelineInputs
from triptych.core.precision.stage import CheckedCore, full_precision, lower_precision, shared_core
from triptych.core.variety import measure_diversity
from triptych.repository.card import CARD_FILE, render_card
from triptych.repository.lint.checks import lint_rendered
from triptych.repository.manifest import (
    MANIFEST_FILE,
    BuildManifest,
    find_manifest,
    make_manifest,
    planned_engine,
)
from triptych.repository.records import DryRun, GateResult
from triptych.repository.render import render
from triptych.repository.sharing import check_sharers, owner_of_core
from triptych.repository.store import hash_files, write_models
from triptych.spec.model_source import read_license
from triptych.spec.plan import Plan


@dataclass(frozen=True)
class Built:
    """What a build did.

    Attributes:
        plan: what was built.
        changed: models written, empty when everything was up to date.
        gate: the gate's result.
        findings: warnings and notes of lint.
        unpacked: why the layout is not packed although the spec says so; empty where it is.
    """

    plan: Plan
    changed: tuple[str, ...]
    gate: GateResult
    findings: tuple[Finding, ...]
    unpacked: str

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "pipeline": self.plan.spec.name,
            "changed": self.changed,
            "layout": self.plan.layout,
            "unpacked": self.unpacked,
            "gate": self.gate.as_dict(),
            "findings": [finding.as_dict() for finding in self.findings],
        }


def build(
    inputs: PipelineInputs,
    repository: Path,
    progress: Progress,
    *,
    together: Sequence[str] = (),
    accept: str = "",
    engine_dry_run: bool = True,
) -> Built:
    """Export, check, convert and write the pipeline; nothing is written unless everything passed.

    A model whose rows cannot be packed is built bucketed, and `Built.unpacked` says why.

    Args:
        inputs: of the pipeline.
        repository: folder of the models.
        progress: told what becomes of each stage.
        together: pipelines that are built right after this one.
        accept: why a failed gate does not matter; goes into the lock. Empty: it does matter.
        engine_dry_run: Whether to try an engine build without a GPU if no engine can be built here;
            see `engine.dry_run`.

    Raises:
        EngineFailure: the engine differs from the graph, which is written without it.
        GateFailure: the artifact differs from the reference, and that is not accepted.
        LintFailure: the repository would not serve.
        UserError: the model cannot be exported, a hook fails on what it makes of the traffic,
            NVIDIA's parser or builder refuses the graph, or another build is running.
    """
    spec = inputs.plan.spec
    check_hooks(inputs, progress)
    core = make_core(inputs, repository, progress, accept=accept)
    own_key = core.key if spec.core.shared_from is None else None
    check_sharers(repository, spec.name, own_key, together)
    return _write(core, repository, progress, engine_dry_run=engine_dry_run)


def make_core(
    inputs: PipelineInputs, repository: Path, progress: Progress, *, accept: str = ""
) -> CheckedCore:
    """The core that the spec asks for, checked: its own, or that of another pipeline.

    For arguments and errors see `build`; nothing is written into the repository.
    """
    asked = inputs.plan.spec.core
    if asked.shared_from is not None:
        owner = owner_of_core(repository, inputs.plan.spec)
        core = full_precision(inputs.replanned(owner.plan.layout), progress, accept)
        return shared_core(core, owner, repository, progress, accept)
    check_possible(asked)
    core = full_precision(inputs, progress, accept)
    if asked.precision == "auto":
        return choose(core, repository, partial(_write, progress=progress), progress)
    if asked.precision == core.gate.precision:
        return core
    return lower_precision(core, asked.precision, progress, accept)


def _write(
    core: CheckedCore, repository: Path, progress: Progress, *, engine_dry_run: bool = True
) -> Built:
    """Render, lint and write the pipeline around its core, and build the engine where one can."""
    plan, name = core.plan, core.plan.spec.name
    shared = plan.spec.core.shared_from is not None
    files = render(
        plan,
        core_file=core.file,
        tokenizer_file=core.inputs.tokenizer_file,
        hooks=core.inputs.hooks,
        question=core.inputs.shortest_row,
        warm_ups=None if shared else write_warm_ups(core.inputs, core.file, core.files, progress),
        samples=write_engine_samples(core.inputs, progress),
    )
    license = read_license(core.inputs.model_folder)
    files[f"{name}/{CARD_FILE}"] = render_card(
        plan, core.gate, license=license, unpacked=core.unpacked
    )
    previous = find_manifest(repository, name)
    # Of the graph that the gate has seen: another one on the disk by now is refused by `serve`.
    graph = {f"{plan.step('core')}/1/{part}": digest for part, digest in core.files.items()}
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
    lock = make_manifest(
        plan,
        hashes,
        core_key=core.key,
        source_key=core.source_key,
        unpacked=core.unpacked,
        versions=versions_of(*LIBRARIES),
        gate=core.gate,
        engine=None if engine is None else engine.record,
        dry_run=dry_run,
        variety={} if variety is None else asdict(variety),
        previous=previous,
    )
    files[f"{name}/{MANIFEST_FILE}"] = lock.as_bytes()
    beside = [repository / plan.step("core")] if shared else []
    findings = lint_rendered(files, triton=plan.spec.serving.triton, beside=beside)
    before = {} if previous is None else previous.files
    retired = {path.partition("/")[0] for path in before} - {p.partition("/")[0] for p in files}
    changed = write_models(repository, files, retired=sorted(retired))
    state = ", ".join(changed) if changed else "up to date"
    progress("write", f"{repository}: {state}")
    if plan.builds_engine:
        changed = sorted({*changed, *build_engine_here(repository, name, progress)})
    return Built(plan, tuple(changed), core.gate, findings, core.unpacked)


def _dry_run(
    core: CheckedCore, previous: BuildManifest | None, progress: Progress
) -> DryRun | None:
    """Try the engine build for the GPU of the previous engine; None if no engine is needed.

    Raises:
        UserError: what will build the engine refuses the graph.
    """
    planned = planned_engine(core.plan, core.gate)
    if planned is None or not missing_for_engines():
        return None
    conversion = core.gate.conversion
    there = None if previous is None else previous.engine
    return run_dry_build(
        core.file,
        core.files,
        planned,
        progress,
        fp32_products=() if conversion is None else conversion.fp32_products,
        gpu="" if there is None else there.compute_capability,
    )
