"""`triptych build`, in one order for every kind of pipeline.

1. Read the spec, the model and the traffic, and plan (`BuildStages.read`, before `build`).
2. Check the pipeline's own functions on answers of the original model, then make the model:
   export it or convert its weights, run the gate, lower the precision (`BuildStages.make_model`).
3. Render the files and the build manifest (`BuildStages.render`).
4. Lint, then write all files at once.
5. Build the engine if this machine has its hardware (`BuildStages.build_engine`).

A stage with the inputs and the code of an earlier run takes its result from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.base.errors import Finding
from triptych.building.stages import BuildOptions, BuildStages, InputsT, ModelT, SpecT
from triptych.repository.lint.checks import lint_rendered
from triptych.repository.manifest import read_manifest_data
from triptych.repository.records import GateResult
from triptych.repository.store import check_target, write_models
from triptych.spec.plan import Plan


@dataclass(frozen=True)
class BuildOutcome:
    """Outcome of a build."""

    pipeline: str
    changed: tuple[str, ...]  # Names of the models written; empty when everything was up to date
    gate: GateResult  # Result of the gate
    findings: tuple[Finding, ...]  # Warnings and notes of lint
    plan: Plan | None = None  # Plan of an encoder; None for other kinds
    # Reason why the layout is not packed although the spec requests it; empty otherwise.
    not_packed_reason: str = ""
    # Operators that compute attention for a GPU, with the reason; empty for a CPU.
    attention: str = ""

    def as_dict(self) -> dict[str, object]:
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
    stages: BuildStages[SpecT, InputsT, ModelT], inputs: InputsT, options: BuildOptions
) -> BuildOutcome:
    """Build a pipeline of any kind; nothing is written unless every check passed.

    An encoder whose rows cannot be packed is built bucketed; see `not_packed_reason`.

    Raises:
        EngineFailure: The engine differs from the graph, which is written without it.
        GateFailure: The model differs from the original one, and `options.accept` is empty.
        LintFailure: A server would refuse the repository.
        UserError: The model cannot be exported or converted, a hook fails on the traffic, NVIDIA's
            parser or builder refuses the graph, another build is running, or the repository
            cannot be written.
    """
    check_target(options.repository)
    return write_repository(stages, stages.make_model(inputs, options), options)


def write_repository(
    stages: BuildStages[SpecT, InputsT, ModelT], model: ModelT, options: BuildOptions
) -> BuildOutcome:
    """Render, lint and write the pipeline of a checked model, and build its engine if possible."""
    spec, repository = model.spec, options.repository
    before = read_manifest_data(repository, spec.name).get("files") or {}
    rendered = stages.render(model, options)
    files = rendered.files
    findings = lint_rendered(files, triton=spec.serving.triton, beside=rendered.beside)
    models = {path.partition("/")[0] for path in files}
    retired = {path.partition("/")[0] for path in before} - models
    if options.before_write is not None:
        options.before_write(model)
    changed = write_models(repository, files, retired=sorted(retired))
    options.progress("write", f"{repository}: {', '.join(changed) or 'up to date'}")
    return BuildOutcome(
        pipeline=spec.name,
        changed=tuple(sorted({*changed, *stages.build_engine(model, options)})),
        gate=model.gate,
        findings=findings,
        plan=model.plan,
        not_packed_reason=model.not_packed_reason,
        attention=model.attention,
    )
