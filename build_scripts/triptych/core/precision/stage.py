"""Build a core that passed the accuracy gate, in the layout and precision of the spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from triptych.base.cache import sha256_of
from triptych.base.errors import Progress, UserError
from triptych.base.onnx_graph import MODEL_FILE
from triptych.core.export.own_graph import export_graph
from triptych.core.export.to_onnx import OWN_OPERATORS, PADDED, export_model
from triptych.core.gate.cached import Gate, GateFailure
from triptych.core.inputs import PipelineInputs
from triptych.core.precision.layer_exclusion import convert_with_exclusions
from triptych.core.requests import core_feed, rows_of
from triptych.repository.records import GateResult
from triptych.repository.sharing import UsedCore, check_shareable
from triptych.spec.backends import Precision
from triptych.spec.model_fields import CompiledSpec, is_own
from triptych.spec.plan import Plan


@dataclass(frozen=True)
class CheckedCore:
    """Core that passed the gate, or whose failure was accepted."""

    inputs: PipelineInputs  # Inputs of the pipeline, planned in the layout of the artifact
    file: Path  # Path of the ``model.onnx``
    key: str  # Hash of everything that decided the graph, in hex
    source_key: str  # Hash of everything that decided the fp32 graph it was made of, in hex
    gate: GateResult
    files: Mapping[str, str]  # SHA-256 hashes of the graph's files that the gate checked, by name
    # Operators that compute attention for a GPU, with the reason; empty for a CPU.
    attention: str = ""
    not_packed_reason: str = ""  # Reason for a bucketed layout instead of a packed one; else empty
    # Cores of several models, the first of which this is; else empty. `gate` is then that of the
    # pipeline.
    cores: tuple[CheckedCore, ...] = ()

    @property
    def plan(self) -> Plan:
        """Plan of the pipeline."""
        return self.inputs.plan

    @property
    def spec(self) -> CompiledSpec:
        return self.inputs.spec

    def accepted(self, reason: str) -> CheckedCore:
        """Return the core; if it failed the gate, record the reason why it may still be used.

        Raises:
            GateFailure: The core failed the gate, and `reason` is empty.
        """
        if self.gate.passed:
            return self
        if not reason:
            raise GateFailure(self.plan.spec.name, self.gate, self.plan)
        return replace(self, gate=replace(self.gate, accepted=reason))


def full_precision(inputs: PipelineInputs, progress: Progress, accept: str) -> CheckedCore:
    """Return the fp32 core in the planned layout, or bucketed if its rows cannot be packed.

    Args:
        accept: Reason to accept a failed gate; empty to fail.

    Raises:
        GateFailure: The artifact differs from the reference, and `accept` is empty.
        UserError: The model cannot be exported.
    """
    plan = inputs.plan
    if not is_own(plan.spec):
        exported = export_model(plan, inputs.model_folder, progress)
    else:
        example = core_feed(rows_of(inputs.requests)[:1], plan.core_inputs, pad_token_id=0)
        exported = export_graph(plan, plan.spec, example, progress)
    core = None
    refusal = exported.refusal
    if not refusal:
        file, key, files = exported.file, exported.key, exported.files
        result = Gate(inputs, "fp32", progress).run(file, files)
        if not result.passed and exported.attention in (PADDED, OWN_OPERATORS):
            plain = "with other operators, the core differs from the reference"
            exported = export_model(plan, inputs.model_folder, progress, plain=plain)
            file, key, files = exported.file, exported.key, exported.files
            result = Gate(inputs, "fp32", progress).run(file, files)
        core = CheckedCore(inputs, file, key, key, result, files, exported.attention)
        if result.passed or not plan.packed:
            return core.accepted(accept)
        refusal = f"packed rows differ from the reference: {'; '.join(result.failures)}"
    if plan.spec.core.shared_from is not None:
        raise UserError(
            "core.shared_from",
            "names a pipeline whose packed core this model cannot use",
            given=refusal,
            remedy="Remove core.shared_from",
        )
    progress("layout", f"bucketed instead of packed: {refusal}")
    bucketed = full_precision(inputs.replanned("bucketed"), progress, accept)
    if core is not None and not bucketed.gate.passed and _rows_are_apart(core.gate):
        return core.accepted(accept)
    return replace(bucketed, not_packed_reason=refusal)


def lower_precision(
    core: CheckedCore, precision: Precision, progress: Progress, accept: str = ""
) -> CheckedCore:
    """Return the fp32 core in the precision in which it is served, fp32 included.

    The gate's result contains the record of the conversion, if the graph was converted.

    Raises:
        GateFailure: The core differs from the reference, and `accept` is empty.
        UserError: The graph cannot be converted.
    """
    gate = Gate(core.inputs, precision, progress, served=True)
    if precision in core.plan.backend.rounded:
        return replace(core, gate=gate.run(core.file, core.files)).accepted(accept)
    lowered = convert_with_exclusions(core.inputs, core.file, core.key, gate, progress)
    result = replace(lowered.gate, conversion=lowered.conversion)
    lower_core = replace(core, file=lowered.file, key=lowered.key, gate=result, files=lowered.files)
    return lower_core.accepted(accept)


def shared_core(
    core: CheckedCore, owner: UsedCore, repository: Path, progress: Progress, accept: str
) -> CheckedCore:
    """Return the owner's core in place of this pipeline's own, if it passes this pipeline's gate.

    Raises:
        GateFailure: The core differs from this pipeline's reference, and `accept` is empty.
        UserError: The owner has another core.
    """
    precision = check_shareable(core.plan.spec, core.source_key, owner)
    file = repository / core.plan.step("core") / "1" / MODEL_FILE
    files = {part.name: sha256_of(part) for part in file.parent.glob(f"{MODEL_FILE}*")}
    gate = Gate(core.inputs, precision, progress, served=True).run(file, files)
    taken = replace(core, file=file, key=owner.record.core_key, gate=gate, files=files)
    return taken.accepted(accept)


def _rows_are_apart(gate: GateResult) -> bool:
    """Check that packing did not cause the failure: other rows in the batch change no result."""
    passed = {verdict.metric: verdict.passed for verdict in gate.verdicts}
    return gate.finite and passed.get("batch_sensitivity", False)
