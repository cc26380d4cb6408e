"""A core that passed the gate, in the layout and the precision that the spec asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from triptych.base.cache import sha256_of
from triptych.base.errors import Progress, UserError
from triptych.base.onnx_graph import MODEL_FILE
from triptych.core.export.to_onnx import export_model
from triptych.core.gate.cached import Gate, GateFailure
from triptych.core.inputs import PipelineInputs
from triptych.core.precision.keep_layers import convert_with_exclusions
from triptych.repository.manifest import BuildManifest
from triptych.repository.records import GateResult
from triptych.repository.sharing import check_shareable
from triptych.spec.fields import Precision
from triptych.spec.plan import Plan


@dataclass(frozen=True)
class CheckedCore:
    """An artifact that may ship.

    Attributes:
        inputs: of the pipeline, planned in the layout that the artifact has.
        file: the ``model.onnx``.
        key: hash of all that decided it, in hex.
        source_key: the same of the fp32 graph that it was made of.
        gate: the gate's result.
        files: hashes of the graph's files, by name: of what the gate has seen.
        unpacked: why the layout is not packed although the spec says so; empty where it is.
    """

    inputs: PipelineInputs
    file: Path
    key: str
    source_key: str
    gate: GateResult
    files: Mapping[str, str]
    unpacked: str = ""

    @property
    def plan(self) -> Plan:
        """The derived numbers."""
        return self.inputs.plan

    def accepted(self, reason: str) -> CheckedCore:
        """The core; if it failed the gate, with the reason why it may ship all the same.

        Raises:
            GateFailure: it failed, and there is no reason.
        """
        if self.gate.passed:
            return self
        if not reason:
            raise GateFailure(self.plan, self.gate)
        return replace(self, gate=replace(self.gate, accepted=reason))


def full_precision(inputs: PipelineInputs, progress: Progress, accept: str) -> CheckedCore:
    """The fp32 core in the planned layout, or bucketed where rows cannot be packed.

    Args:
        inputs: of the pipeline.
        progress: told what becomes of each stage.
        accept: why a failed gate does not matter; empty where it does.

    Raises:
        GateFailure: the artifact differs from the reference, and that is not accepted.
        UserError: the model cannot be exported.
    """
    plan = inputs.plan
    exported = export_model(plan, inputs.model_folder, progress)
    core = None
    refusal = exported.refusal
    if not refusal:
        file, key, files = exported.file, exported.key, exported.files
        result = Gate(inputs, "fp32", progress).run(file, files)
        core = CheckedCore(inputs, file, key, key, result, files)
        if result.passed or not plan.packed:
            return core.accepted(accept)
        refusal = f"packed rows differ from the reference: {'; '.join(result.failures)}"
    if plan.spec.core.share is not None:
        raise UserError("core.share", "must name a pipeline with a core that fits", given=refusal)
    progress("layout", f"bucketed instead of packed: {refusal}")
    bucketed = full_precision(inputs.replanned("bucketed"), progress, accept)
    if core is not None and not bucketed.gate.passed and _rows_are_apart(core.gate):
        return core.accepted(accept)
    return replace(bucketed, unpacked=refusal)


def lower_precision(
    core: CheckedCore, precision: Precision, progress: Progress, accept: str = ""
) -> CheckedCore:
    """The fp32 core in another precision, with what the conversion did in the gate's result.

    Raises:
        GateFailure: it differs from the reference, and that is not accepted.
        UserError: the graph cannot be converted.
    """
    gate = Gate(core.inputs, precision, progress)
    lowered = convert_with_exclusions(core.inputs, core.file, core.key, gate, progress)
    result = replace(lowered.gate, conversion=lowered.conversion)
    lower_core = replace(core, file=lowered.file, key=lowered.key, gate=result, files=lowered.files)
    return lower_core.accepted(accept)


def shared_core(
    core: CheckedCore, owner: BuildManifest, repository: Path, progress: Progress, accept: str
) -> CheckedCore:
    """The owner's core in place of this pipeline's own, if it is right for this one, too.

    Raises:
        GateFailure: it is not, and that is not accepted.
        UserError: it is another core.
    """
    precision = check_shareable(core.plan.spec, core.source_key, owner)
    file = repository / core.plan.step("core") / "1" / MODEL_FILE
    files = {part.name: sha256_of(part) for part in file.parent.glob(f"{MODEL_FILE}*")}
    gate = Gate(core.inputs, precision, progress).run(file, files)
    taken = replace(core, file=file, key=owner.core_key, gate=gate, files=files)
    return taken.accepted(accept)


def _rows_are_apart(gate: GateResult) -> bool:
    """Whether packing is not what failed: both layouts are off, and neighbors change nothing."""
    passed = {verdict.metric: verdict.passed for verdict in gate.verdicts}
    return gate.finite and passed.get("neighbour_effect", False)
