"""`triptych build`, in one order for every kind of pipeline.

1. Read the spec, the model and the traffic, and plan (`kinds.Steps.read`, before `build`).
2. Check the pipeline's own functions on answers of the original model.
3. Make the model: export it or convert its weights, run the gate, lower the precision.
4. Render the files and the build manifest.
5. Lint, then write all files at once.
6. Build the engine if this machine has its hardware.

A stage with the inputs and the code of an earlier run takes its result from the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from triptych.base.errors import Finding, Progress
from triptych.building.kinds import STEPS
from triptych.core.inputs import PipelineInputs
from triptych.core.precision.stage import CheckedCore
from triptych.repository.lint.checks import lint_rendered
from triptych.repository.manifest import read_manifest_data
from triptych.repository.records import GateResult
from triptych.repository.store import check_target, write_models
from triptych.spec.kind import Kind
from triptych.spec.plan import Plan


@dataclass(frozen=True)
class BuildOutcome:
    """Outcome of a build.

    Attributes:
        changed: Names of the models written; empty when everything was up to date.
        gate: Result of the gate.
        findings: Warnings and notes of lint.
        plan: Plan of an encoder; None for other kinds.
        not_packed_reason: Reason why the layout is not packed although the spec requests it;
            empty otherwise.
        attention: Operators that compute attention for a GPU, with the reason; empty for a CPU.
    """

    pipeline: str
    changed: tuple[str, ...]
    gate: GateResult
    findings: tuple[Finding, ...]
    plan: Plan | None = None
    not_packed_reason: str = ""
    attention: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome as plain data, for ``--json``."""
        plan = self.plan
        layout = (
            {}
            if plan is None
            else {"layout": plan.layout, "not_packed_reason": self.not_packed_reason}
        )
        return {
            "pipeline": self.pipeline,
            "changed": self.changed,
            **layout,
            **({"attention": self.attention} if self.attention else {}),
            "gate": self.gate.as_dict(),
            "findings": [finding.as_dict() for finding in self.findings],
        }


def build(
    inputs: Any,
    repository: Path,
    progress: Progress,
    *,
    built_after: Sequence[str] = (),
    accept: str = "",
    engine_dry_run: bool = True,
    before_write: Callable[[Any], object] | None = None,
) -> BuildOutcome:
    """Build a pipeline of any kind; nothing is written unless every check passed.

    An encoder whose rows cannot be packed is built bucketed; see `not_packed_reason`.

    Args:
        inputs: Inputs of the pipeline, from `kinds.Steps.read`.
        repository: Folder of the models.
        progress: Receives each stage and its result.
        built_after: Names of the pipelines that are built right after this one.
        accept: Reason why a failed gate is accepted, for the build manifest; empty to fail instead.
        engine_dry_run: Whether an engine that cannot be built here is built in a dry run, see
            `core.engine.dry_run`.
        before_write: Called with the checked model just before the files are written; an error of
            it leaves the repository as it was.

    Raises:
        EngineFailure: The engine differs from the graph, which is written without it.
        GateFailure: The model differs from the original one, and `accept` is empty.
        LintFailure: A server would refuse the repository.
        UserError: The model cannot be exported or converted, a hook fails on the traffic, NVIDIA's
            parser or builder refuses the graph, another build is running, or the repository
            cannot be written.
    """
    check_target(repository)
    steps = STEPS[inputs.spec.kind]
    steps.check(inputs, progress)
    write = partial(write_repository, progress=progress)
    core = steps.make_core(inputs, repository, progress, accept, built_after, write)
    return write_repository(
        core, repository, progress, engine_dry_run=engine_dry_run, before_write=before_write
    )


def write_repository(
    core: Any,
    repository: Path,
    progress: Progress,
    *,
    engine_dry_run: bool = True,
    before_write: Callable[[Any], object] | None = None,
) -> BuildOutcome:
    """Render, lint and write the pipeline of a checked model, and build its engine if possible.

    `core` is the result of `kinds.Steps.make_core`. See `build` for the other arguments.
    """
    spec = core.inputs.spec
    steps = STEPS[spec.kind]
    before = read_manifest_data(repository, spec.name).get("files") or {}
    rendered = steps.render(core, repository, progress, engine_dry_run)
    files = rendered.files
    findings = lint_rendered(files, triton=spec.serving.triton, beside=rendered.beside)
    models = {path.partition("/")[0] for path in files}
    retired = {path.partition("/")[0] for path in before} - models
    if before_write is not None:
        before_write(core)
    changed = write_models(repository, files, retired=sorted(retired))
    progress("write", f"{repository}: {', '.join(changed) or 'up to date'}")
    changed = sorted({*changed, *steps.build_engine(core, repository, progress)})
    return BuildOutcome(
        spec.name,
        tuple(changed),
        core.gate,
        findings,
        core.plan,
        core.not_packed_reason,
        core.attention,
    )


def build_checked_core(
    inputs: PipelineInputs, repository: Path, progress: Progress, *, accept: str = ""
) -> CheckedCore:
    """Return the checked core of an encoder; nothing is written into the repository.

    See `build` for the arguments and errors.
    """
    write = partial(write_repository, progress=progress)
    core: CheckedCore = STEPS[Kind.ENCODER].make_core(
        inputs, repository, progress, accept, None, write
    )
    return core
