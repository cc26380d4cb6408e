"""`triptych build`: source -> export -> gate -> render -> lint -> write, each stage cached."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triptych.build.cache import cached_stage, code_hash, versions_of
from triptych.build.lock import LOCK_FILE, make_lock, print_lock, read_lock
from triptych.build.source import locate, read_facts, read_tokenizer
from triptych.errors import Finding, UserError
from triptych.model_facts import ModelFacts
from triptych.plan import Plan, make_plan, max_length_of
from triptych.repository.lint import run_checks
from triptych.repository.render import render
from triptych.repository.store import hash_files, write_models
from triptych.spec import PipelineSpec
from triptych.tasks import find_task
from triptych.traffic import Lengths, read_traffic

GATE_ROWS = 64
EDGE_TEXTS = ("", " ", "a", "é 漢字 العربية 🙂", "\x00", "word " * 5000)
"""Rows the gate adds to the traffic's own: empty, blank, tiny, other scripts, over the limit."""

BUILD_LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "tokenizers")
Progress = Callable[[str, str], None]
"""Called with a stage's name and what became of it."""


class GateFailure(Exception):
    """The artifact is not right: nothing was written."""

    def __init__(self, pipeline: str, failures: Sequence[str]) -> None:
        self.failures = tuple(failures)
        super().__init__(f"{pipeline} failed the accuracy gate: {'; '.join(failures)}")


class LintFailure(Exception):
    """The rendered repository breaks a rule: nothing was written."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("; ".join(f"{f.file}: {f.rule}" for f in findings))


@dataclass(frozen=True)
class Prepared:
    """What is known before anything is exported.

    Attributes:
        plan: the derived numbers.
        model_folder: local folder of the model's files.
        tokenizer_json: text of the runtime's tokenizer.
        sample_rows: token ids of the gate's samples.
    """

    plan: Plan
    model_folder: Path
    tokenizer_json: str
    sample_rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Built:
    """What a build did.

    Attributes:
        plan: what was built.
        changed: models written, empty when everything was up to date.
        gate: the gate's result.
        findings: warnings and notes of lint.
    """

    plan: Plan
    changed: tuple[str, ...]
    gate: Mapping[str, Any]
    findings: tuple[Finding, ...]


def prepare(spec: PipelineSpec, progress: Progress) -> Prepared:
    """Resolve the model, tokenize the traffic and derive the plan. Writes only to the cache.

    Raises:
        UserError: in the spec, the model or the traffic.
    """
    task = find_task(spec.task)
    fields = [tensor.name for tensor in task.inputs]
    traffic = read_traffic(spec.folder, fields)
    folder = locate(spec.model, spec.folder)
    facts = read_facts(folder)
    progress("source", f"{facts.architecture}, {facts.hidden_size} wide, from {spec.model.source}")
    _check_max_length(spec, facts)
    stage = {
        "model": facts.sha256,
        "versions": versions_of("transformers", "tokenizers"),
        "code": code_hash("build/source.py"),
    }
    cache, _ = cached_stage("tokenizer", stage, lambda target: _write_tokenizer(folder, target))
    tokenizer_json = (cache / "tokenizer.json").read_text(encoding="utf-8")
    texts = [row[fields[0]] for row in traffic]
    max_length = max_length_of(spec, facts)
    token_rows = _tokenize(tokenizer_json, facts, texts)
    lengths = Lengths.of([len(row) for row in token_rows], max_length=max_length)
    progress(
        "traffic",
        f"{lengths.rows} rows, {lengths.mean:.1f} tokens on average, "
        f"{lengths.truncated_share:.1%} over the limit of {max_length}",
    )
    step = max(1, len(texts) // GATE_ROWS)
    samples = _tokenize(
        tokenizer_json, facts, [*EDGE_TEXTS, *texts[::step][:GATE_ROWS]], max_length
    )
    return Prepared(
        plan=make_plan(spec, facts, lengths),
        model_folder=folder,
        tokenizer_json=tokenizer_json,
        sample_rows=tuple(tuple(row) for row in samples if row),
    )


def build(prepared: Prepared, repository: Path, progress: Progress) -> Built:
    """Export, check and write the pipeline; nothing is written unless everything passed.

    Raises:
        GateFailure: the artifact differs from the reference.
        LintFailure: the repository would not serve.
        UserError: the model cannot be exported, or another build is running.
    """
    plan, spec = prepared.plan, prepared.plan.spec
    artifact, export_key = _export(prepared, progress)
    gate = _gate(prepared, artifact, export_key, progress)
    if gate["failures"]:
        raise GateFailure(spec.name, gate["failures"])
    files = render(plan, core_file=artifact, tokenizer_json=prepared.tokenizer_json)
    lock = make_lock(
        plan,
        hash_files(files),
        versions=versions_of(*BUILD_LIBRARIES),
        gate=gate,
        previous=read_lock(repository, spec.name),
    )
    files[f"{spec.name}/{LOCK_FILE}"] = print_lock(lock)
    findings = _lint(files, spec.serving.triton)
    changed = write_models(repository, files)
    state = ", ".join(changed) if changed else "up to date"
    progress("write", f"{repository}: {state}")
    return Built(plan, tuple(changed), gate, tuple(findings))


def _check_max_length(spec: PipelineSpec, facts: ModelFacts) -> None:
    wanted = spec.tokenizer.max_length
    if wanted is not None and wanted > facts.max_length:
        raise UserError(
            "tokenizer.max_length",
            f"must be at most the model's own limit of {facts.max_length}",
            given=wanted,
            remedy="Lower it, or leave it out to use the model's limit",
        )


def _write_tokenizer(folder: Path, target: Path) -> None:
    (target / "tokenizer.json").write_text(read_tokenizer(folder), encoding="utf-8")


def _tokenize(
    tokenizer_json: str, facts: ModelFacts, texts: Sequence[str], max_length: int | None = None
) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    if max_length is not None:
        tokenizer.enable_truncation(max_length)
    prompt = facts.prompts.get(facts.default_prompt or "", "")
    prepared = [prompt + text for text in texts]
    if facts.lowercase:
        prepared = [text.lower() for text in prepared]
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(prepared)]


def _export(prepared: Prepared, progress: Progress) -> tuple[Path, dict[str, object]]:
    plan = prepared.plan
    output = plan.core_outputs[0].name
    key: dict[str, object] = {
        "model": plan.facts.sha256,
        "layout": plan.spec.core.layout,
        "output": output,
        "versions": versions_of(*BUILD_LIBRARIES),
        "code": code_hash("build/export.py", "build/packing.py"),
    }

    def work(target: Path) -> None:
        from triptych.build.export import export_onnx

        progress("export", f"{plan.facts.architecture} to ONNX, {plan.spec.core.layout} ...")
        export_onnx(
            prepared.model_folder, plan.facts, packed=plan.packed, output=output, target=target
        )

    folder, cached = cached_stage("export", key, work)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    progress("export", f"model.onnx, {size:.1f} MB{' (cached)' if cached else ''}")
    return folder / "model.onnx", key


def _gate(
    prepared: Prepared, artifact: Path, export_key: Mapping[str, object], progress: Progress
) -> dict[str, Any]:
    plan, accuracy = prepared.plan, prepared.plan.spec.accuracy
    overrides = {k: v for k, v in accuracy.model_dump().items() if v is not None}
    thresholds = replace(plan.task.thresholds, **overrides)
    key = {
        "artifact": export_key,
        "rows": prepared.sample_rows,
        "thresholds": [thresholds.min_cosine, thresholds.max_difference],
        "batch_size": plan.spec.core.max_batch_size,
        "onnxruntime": versions_of("onnxruntime"),
        "code": code_hash("quality/gate.py", "quality/reference.py", "quality/artifact.py"),
    }

    def work(target: Path) -> None:
        from triptych.quality.artifact import open_onnx
        from triptych.quality.gate import check_embeddings
        from triptych.quality.reference import embed_reference

        progress("gate", f"{len(prepared.sample_rows)} rows against PyTorch fp32 ...")
        result = check_embeddings(
            open_onnx(artifact, packed=plan.packed, pad_token_id=plan.facts.pad_token_id),
            prepared.sample_rows,
            embed_reference(prepared.model_folder, plan.facts, prepared.sample_rows),
            thresholds,
            batch_size=plan.spec.core.max_batch_size,
        )
        (target / "gate.json").write_text(json.dumps(result.as_dict()), encoding="utf-8")

    folder, cached = cached_stage("gate", key, work)
    gate: dict[str, Any] = json.loads((folder / "gate.json").read_text(encoding="utf-8"))
    progress(
        "gate",
        f"{'FAILED' if gate['failures'] else 'passed'}: max difference "
        f"{gate['max_difference']:.1e}, min cosine {gate['min_cosine']:.7f}, neighbour effect "
        f"{gate['max_neighbour_effect']:.1e}{' (cached)' if cached else ''}",
    )
    return gate


def _lint(files: Mapping[str, Any], triton: str) -> list[Finding]:
    """Lint the files as they would lie in a repository of their own; errors stop the build."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="triptych-lint-") as scratch:
        for path, content in files.items():
            target = Path(scratch, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                target.symlink_to(content)
            else:
                target.write_bytes(content)
        findings = run_checks(Path(scratch), triton=triton)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise LintFailure(errors)
    return findings
