"""`triptych build`: source -> export -> gate -> render -> lint -> write, each stage cached."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from triptych.build.cache import cached_stage, code_hash, key_of, versions_of
from triptych.build.lock import LOCK_FILE, make_lock, print_lock, read_lock
from triptych.errors import Finding, UserError
from triptych.plan import Plan
from triptych.prepare import Prepared, Progress
from triptych.repository.lint import run_checks
from triptych.repository.render import render
from triptych.repository.store import hash_files, write_models

BUILD_LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "tokenizers")
EXPORT_CODE = ("build/*.py",)
GATE_CODE = ("quality/*.py",)
CORE_FILE = "model.onnx"
REFUSAL_FILE = "cannot_pack.txt"


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
    gate: Mapping[str, Any]
    findings: tuple[Finding, ...]
    unpacked: str


@dataclass(frozen=True)
class _Core:
    """An artifact that passed the gate, and the hash of all that decided it."""

    prepared: Prepared
    file: Path
    key: str
    gate: dict[str, Any]
    unpacked: str


def build(
    prepared: Prepared, repository: Path, progress: Progress, *, together: Sequence[str] = ()
) -> Built:
    """Export, check and write the pipeline; nothing is written unless everything passed.

    A model whose rows cannot be packed is built bucketed, and `Built.unpacked` says why.

    Args:
        prepared: what to build.
        repository: folder of the models.
        progress: told what becomes of each stage.
        together: pipelines that are built right after this one.

    Raises:
        GateFailure: the artifact differs from the reference.
        LintFailure: the repository would not serve.
        UserError: the model cannot be exported, or another build is running.
    """
    name, owner = prepared.plan.spec.name, prepared.plan.spec.core.share
    shared = None if owner is None else _shared_lock(repository, name, owner)
    if shared is not None:
        prepared = prepared.replanned(shared["plan"]["layout"])
    core = _core(prepared, progress)
    plan = core.prepared.plan
    if shared is not None:
        _check_shared(plan, shared, core.key)
    _check_sharers(repository, name, core.key if shared is None else None, together)
    files = render(
        plan, core_file=core.file, tokenizer_file=prepared.tokenizer_file, hooks=prepared.hooks
    )
    previous = read_lock(repository, name)
    lock = make_lock(
        plan,
        hash_files(files),
        core_key=core.key,
        unpacked=core.unpacked,
        versions=versions_of(*BUILD_LIBRARIES),
        gate=core.gate,
        previous=previous,
    )
    files[f"{name}/{LOCK_FILE}"] = print_lock(lock)
    findings = _lint(files, repository, plan)
    before = (previous or {}).get("files", {})
    retired = {path.partition("/")[0] for path in before} - {p.partition("/")[0] for p in files}
    changed = write_models(repository, files, retired=sorted(retired))
    state = ", ".join(changed) if changed else "up to date"
    progress("write", f"{repository}: {state}")
    return Built(plan, tuple(changed), core.gate, tuple(findings), core.unpacked)


def _core(prepared: Prepared, progress: Progress) -> _Core:
    """The core in the planned layout, or bucketed where rows cannot be packed."""
    plan = prepared.plan
    file, key, refusal = _export(prepared, progress)
    if not refusal:
        gate = _gate(prepared, file, key, progress)
        if not gate["failures"]:
            return _Core(prepared, file, key, gate, "")
        if not plan.packed:
            raise GateFailure(plan.spec.name, gate["failures"])
        refusal = f"packed rows differ from the reference: {'; '.join(gate['failures'])}"
    if plan.spec.core.share is not None:
        raise UserError("core.share", "must name a pipeline with a core that fits", given=refusal)
    progress("layout", f"bucketed instead of packed: {refusal}")
    fallen = _core(prepared.replanned("bucketed"), progress)
    return replace(fallen, unpacked=refusal)


def _export(prepared: Prepared, progress: Progress) -> tuple[Path, str, str]:
    """The artifact, the hash of all that decides it, and why it could not be packed if so."""
    plan = prepared.plan
    facts = {**asdict(plan.facts), "prompts": None, "default_prompt": None}
    key: dict[str, object] = {
        "facts": facts,
        "layout": plan.layout,
        "core": asdict(plan.core),
        "inputs": [tensor.name for tensor in plan.core_inputs],
        "versions": versions_of(*BUILD_LIBRARIES),
        "code": code_hash(*EXPORT_CODE),
    }

    def work(target: Path) -> None:
        from triptych.build.export import export_onnx
        from triptych.build.packing import CannotPack

        progress("export", f"{plan.facts.architecture} to ONNX, {plan.layout} ...")
        try:
            export_onnx(
                prepared.model_folder,
                plan.facts,
                plan.core,
                plan.core_inputs,
                packed=plan.packed,
                target=target,
            )
        except CannotPack as reason:
            (target / REFUSAL_FILE).write_text(str(reason), encoding="utf-8")
        except (IndexError, KeyError, RuntimeError, TypeError, AttributeError) as error:
            reason_text = " ".join(str(error).split())[:300]
            raise UserError(
                "model.source",
                f"must be a model that runs with this task's head ({plan.core.auto_class})",
                given=f"{plan.facts.architecture}: {type(error).__name__}: {reason_text}",
                remedy="Choose a model fine-tuned for this task",
            ) from error

    folder, cached = cached_stage("export", key, work)
    note = folder / REFUSAL_FILE
    if note.is_file():
        return folder / CORE_FILE, "", note.read_text(encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    progress("export", f"{CORE_FILE}, {size:.1f} MB{' (cached)' if cached else ''}")
    return folder / CORE_FILE, key_of("export", key), ""


def _gate(prepared: Prepared, artifact: Path, key: str, progress: Progress) -> dict[str, Any]:
    plan, accuracy = prepared.plan, prepared.plan.spec.accuracy
    overrides = {k: v for k, v in accuracy.model_dump().items() if v is not None}
    thresholds = replace(plan.task.thresholds, **overrides)
    stage = {
        "artifact": key,
        "rows": prepared.samples_hash(),
        "thresholds": asdict(thresholds),
        "batch_size": plan.spec.core.max_batch_size,
        "onnxruntime": versions_of("onnxruntime"),
        "code": code_hash(*GATE_CODE),
    }

    def work(target: Path) -> None:
        from triptych.quality.artifact import open_onnx
        from triptych.quality.gate import check
        from triptych.quality.reference import reference_outputs

        progress("gate", f"{len(prepared.samples)} rows against PyTorch fp32 ...")
        result = check(
            open_onnx(
                artifact,
                plan.core,
                plan.core_inputs,
                packed=plan.packed,
                pad_token_id=plan.facts.pad_token_id,
            ),
            prepared.samples,
            reference_outputs(prepared.model_folder, plan.facts, plan.core, prepared.samples),
            plan.core,
            thresholds,
            batch_size=plan.spec.core.max_batch_size,
        )
        (target / "gate.json").write_text(json.dumps(result.as_dict()), encoding="utf-8")

    folder, cached = cached_stage("gate", stage, work)
    gate: dict[str, Any] = json.loads((folder / "gate.json").read_text(encoding="utf-8"))
    progress("gate", _gate_line(gate) + (" (cached)" if cached else ""))
    return gate


def _gate_line(gate: Mapping[str, Any]) -> str:
    parts = [f"max difference {gate['max_difference']:.1e}"]
    if gate["min_cosine"] is not None:
        parts.append(f"min cosine {gate['min_cosine']:.7f}")
    if gate["label_agreement"] is not None:
        parts.append(f"labels agree {gate['label_agreement']:.1%}")
    parts.append(f"neighbour effect {gate['max_neighbour_effect']:.1e}")
    return f"{'FAILED' if gate['failures'] else 'passed'}: {', '.join(parts)}"


def _check_sharers(repository: Path, name: str, key: str | None, together: Sequence[str]) -> None:
    """Whoever uses the core of `name` can go on with the one of `key`; None for no core."""
    for path in sorted(repository.glob(f"*/{LOCK_FILE}")):
        other = path.parent.name
        lock = read_lock(repository, other) or {}
        spec = lock.get("spec", {})
        if spec.get("core", {}).get("share") != name or lock.get("core_key") == key:
            continue
        if key is None or other not in together:
            raise UserError(
                name,
                "must keep the core that another pipeline shares",
                given=f"{other} uses it, and it would " + ("go" if key is None else "change"),
                remedy=f"Run `triptych build {name} {other}`, or take core.share out of {other}",
            )


def _shared_lock(repository: Path, name: str, owner: str) -> dict[str, Any]:
    lock = read_lock(repository, owner) if owner != name else None
    if lock is None or "layout" not in lock.get("plan", {}):
        raise UserError(
            "core.share",
            "must name a pipeline already built into the repository",
            given=owner,
            remedy=f"Run `triptych build {owner}` first, or name both in one command",
        )
    if lock["spec"]["core"].get("share") is not None:
        raise UserError(
            "core.share",
            "must name a pipeline with a core of its own",
            given=f"{owner}, which itself uses that of {lock['spec']['core']['share']}",
            remedy="Name that one",
        )
    return lock


def _check_shared(plan: Plan, lock: Mapping[str, Any], key: str) -> None:
    owner, own = lock["spec"]["core"], plan.spec.core
    if lock["core_key"] != key:
        raise UserError(
            "core.share",
            "must name a pipeline of the same model, task head and parameters of the core",
            given=f"{own.share}: its core is another one",
            remedy="Remove core.share to give this pipeline a core of its own",
        )
    if own.max_batch_size > owner["max_batch_size"]:
        raise UserError(
            "core.max_batch_size",
            f"must be at most that of the shared core, {owner['max_batch_size']}",
            given=own.max_batch_size,
            remedy=f"Lower it, or raise it in {own.share} first",
        )


def _lint(files: Mapping[str, Any], repository: Path, plan: Plan) -> list[Finding]:
    """Lint the files as they would lie in a repository of their own; errors stop the build."""
    with tempfile.TemporaryDirectory(prefix="triptych-lint-") as scratch:
        for path, content in files.items():
            target = Path(scratch, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                target.symlink_to(content.absolute())
            else:
                target.write_bytes(content)
        if plan.spec.core.share is not None:
            core = plan.step("core")
            Path(scratch, core).symlink_to((repository / core).absolute())
        findings = run_checks(Path(scratch), triton=plan.spec.serving.triton)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise LintFailure(errors)
    return findings
