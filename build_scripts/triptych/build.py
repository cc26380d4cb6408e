"""`triptych build`: source -> export -> gate -> render -> lint -> write, each stage cached."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from triptych.cache import cached_stage, code_hash, key_of, versions_of
from triptych.engine.reuse import kept_engine, samples_of
from triptych.engine.stage import build_engine_here
from triptych.errors import Finding, Progress, UserError
from triptych.export.to_onnx import export_onnx
from triptych.gate.cached import Gate
from triptych.graph.files import MODEL_FILE
from triptych.lint import run_checks
from triptych.pipeline.precisions import Precision, check_runs
from triptych.plan.plan import Plan
from triptych.precision.keep_layers import lower
from triptych.repository.lock import LOCK_FILE, make_lock, planned_engine, print_lock, read_lock
from triptych.repository.records import GateResult, read_record
from triptych.repository.render import render
from triptych.repository.store import hash_files, write_models
from triptych.requests.prepare import Prepared

BUILD_LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "tokenizers")
EXPORT_CODE = ("export/*.py", "model/*.py", "graph/files.py")
REFUSAL_FILE = "cannot_pack.txt"


class GateFailure(Exception):
    """The artifact is not right: nothing was written."""

    def __init__(self, plan: Plan, gate: Mapping[str, Any]) -> None:
        self.plan = plan
        self.gate = gate
        self.failures = tuple(gate["failures"])
        super().__init__(f"{plan.spec.name} failed the accuracy gate: {'; '.join(self.failures)}")


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

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "pipeline": self.plan.spec.name,
            "changed": self.changed,
            "layout": self.plan.layout,
            "unpacked": self.unpacked,
            "gate": self.gate,
            "findings": [finding.as_dict() for finding in self.findings],
        }


@dataclass(frozen=True)
class _Core:
    """An artifact that may ship, and the hashes of all that decided it and the fp32 one before."""

    prepared: Prepared
    file: Path
    key: str
    source_key: str
    gate: dict[str, Any]
    unpacked: str


def build(
    prepared: Prepared,
    repository: Path,
    progress: Progress,
    *,
    together: Sequence[str] = (),
    accept: str = "",
    precision: Precision | None = None,
    candidates: Sequence[Mapping[str, Any]] = (),
) -> Built:
    """Export, convert, check and write the pipeline; nothing is written unless everything passed.

    A model whose rows cannot be packed is built bucketed, and `Built.unpacked` says why.

    Args:
        prepared: what to build.
        repository: folder of the models.
        progress: told what becomes of each stage.
        together: pipelines that are built right after this one.
        accept: why a failed gate does not matter; goes into the lock. Empty: it does matter.
        precision: of the core, where the spec leaves it open (``auto``).
        candidates: what `precision` was chosen from; goes into the lock.

    Raises:
        EngineFailure: the engine differs from the graph, which is written without it.
        GateFailure: the artifact differs from the reference, and that is not accepted.
        LintFailure: the repository would not serve.
        UserError: the model cannot be exported, or another build is running.
    """
    name, owner = prepared.plan.spec.name, prepared.plan.spec.core.share
    shared = None if owner is None else _shared_lock(repository, name, owner)
    if shared is not None:
        prepared = prepared.replanned(shared["plan"]["layout"])
    named = prepared.plan.spec.core.precision
    wanted = named if precision is None else precision
    if wanted == "auto":
        raise ValueError("`choose` builds what leaves its precision open")
    check_runs(wanted, prepared.plan.spec.core.backend, prepared.plan.spec.core.device)
    core = _core(prepared, progress, accept)
    if shared is not None:
        core = _share(core, shared, repository, progress, accept)
    elif wanted != "fp32":
        core = _lowered(core, wanted, progress, accept)
    if candidates:
        core = replace(core, gate={**core.gate, "candidates": list(candidates)})
    plan = core.prepared.plan
    _check_sharers(repository, name, core.key if shared is None else None, together)
    files = render(
        plan,
        core_file=core.file,
        tokenizer_file=prepared.tokenizer_file,
        hooks=prepared.hooks,
        samples=samples_of(core.prepared),
    )
    previous = read_lock(repository, name)
    hashes = hash_files(files)
    engine = kept_engine(repository, plan, previous, hashes, planned_engine(plan, core.gate))
    if engine is not None:
        files[engine.path] = engine.file
        hashes |= hash_files({engine.path: engine.file})
    lock = make_lock(
        plan,
        hashes,
        core_key=core.key,
        source_key=core.source_key,
        unpacked=core.unpacked,
        versions=versions_of(*BUILD_LIBRARIES),
        gate=core.gate,
        engine=None if engine is None else engine.record,
        previous=previous,
    )
    files[f"{name}/{LOCK_FILE}"] = print_lock(lock)
    findings = _lint(files, repository, plan)
    before = (previous or {}).get("files", {})
    retired = {path.partition("/")[0] for path in before} - {p.partition("/")[0] for p in files}
    changed = write_models(repository, files, retired=sorted(retired))
    state = ", ".join(changed) if changed else "up to date"
    progress("write", f"{repository}: {state}")
    if plan.builds_engine:
        changed = sorted({*changed, *build_engine_here(repository, name, progress)})
    return Built(plan, tuple(changed), core.gate, tuple(findings), core.unpacked)


def _core(prepared: Prepared, progress: Progress, accept: str) -> _Core:
    """The fp32 core in the planned layout, or bucketed where rows cannot be packed."""
    plan = prepared.plan
    file, key, refusal = _export(prepared, progress)
    gate: dict[str, Any] = {}
    if not refusal:
        gate = Gate(prepared, "fp32", progress).run(file, key)
        if not gate["failures"]:
            return _Core(prepared, file, key, key, gate, "")
        if not plan.packed:
            return _accepted(_Core(prepared, file, key, key, gate, ""), accept)
        refusal = f"packed rows differ from the reference: {'; '.join(gate['failures'])}"
    if plan.spec.core.share is not None:
        raise UserError("core.share", "must name a pipeline with a core that fits", given=refusal)
    progress("layout", f"bucketed instead of packed: {refusal}")
    fallen = _core(prepared.replanned("bucketed"), progress, accept)
    if fallen.gate["failures"] and gate and _rows_are_apart(gate):
        return _accepted(_Core(prepared, file, key, key, gate, ""), accept)
    return replace(fallen, unpacked=refusal)


def _lowered(core: _Core, precision: Precision, progress: Progress, accept: str) -> _Core:
    """The core in lower precision, with what the conversion did in the gate's result."""
    lowered = lower(
        core.prepared, core.file, core.key, Gate(core.prepared, precision, progress), progress
    )
    gate = {**lowered.gate, "conversion": lowered.conversion}
    found = replace(core, file=lowered.file, key=lowered.key, gate=gate)
    return _accepted(found, accept) if gate["failures"] else found


def _accepted(core: _Core, reason: str) -> _Core:
    """The core although it failed the gate, with the reason on record.

    Raises:
        GateFailure: there is no reason.
    """
    if not reason:
        raise GateFailure(core.prepared.plan, core.gate)
    return replace(core, gate={**core.gate, "accepted": reason})


def _rows_are_apart(gate: Mapping[str, Any]) -> bool:
    """Whether packing is not what failed: both layouts are off, and neighbours change nothing."""
    verdicts = {verdict["metric"]: verdict["passed"] for verdict in gate["verdicts"]}
    return bool(gate["finite"]) and verdicts.get("neighbour_effect", False)


def _export(prepared: Prepared, progress: Progress) -> tuple[Path, str, str]:
    """The artifact, the hash of all that decides it, and why it could not be packed if so."""
    plan = prepared.plan
    key: dict[str, object] = {
        "facts": plan.facts.of_core,
        "layout": plan.layout,
        "core": asdict(plan.core),
        "inputs": [tensor.name for tensor in plan.core_inputs],
        "versions": versions_of(*BUILD_LIBRARIES),
        "code": code_hash(*EXPORT_CODE),
    }

    def work(target: Path) -> None:
        from triptych.export.packing import CannotPack

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
        return folder / MODEL_FILE, "", note.read_text(encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    progress("export", f"{MODEL_FILE}, {size:.1f} MB{' (cached)' if cached else ''}")
    return folder / MODEL_FILE, key_of("export", key), ""


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


def _share(
    core: _Core, lock: Mapping[str, Any], repository: Path, progress: Progress, accept: str
) -> _Core:
    """The owner's core in place of this pipeline's own, if it is right for this one, too."""
    plan = core.prepared.plan
    owner, own = lock["spec"]["core"], plan.spec.core
    if lock["source_key"] != core.source_key:
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
    precision = lock["gate"]["precision"]
    if own.precision not in ("fp32", precision):
        raise UserError(
            "core.precision",
            f"must be that of the shared core, {precision}",
            given=own.precision,
            remedy="Leave it out, or remove core.share",
        )
    file = repository / plan.step("core") / "1" / MODEL_FILE
    gate = Gate(core.prepared, precision, progress).run(file, lock["core_key"])
    found = replace(core, file=file, key=lock["core_key"], gate=gate)
    return _accepted(found, accept) if gate["failures"] else found


def report(plan: Plan, gate: Mapping[str, Any], folder: Path, progress: Progress) -> Path:
    """Write a gate's report, ``report.html`` and ``gate.json``, into ``folder/<pipeline>``.

    Returns:
        The page.

    Raises:
        UserError: nothing can be written there.
    """
    from triptych.report.gate_write import About, write_report

    about = About(
        pipeline=plan.spec.name,
        task=plan.task.name,
        architecture=plan.facts.architecture,
        layout=plan.layout,
        versions=versions_of(*BUILD_LIBRARIES, "onnxruntime"),
    )
    target = folder / plan.spec.name
    try:
        write_report(read_record(GateResult, gate), about, target)
    except OSError as error:
        raise UserError(
            "--reports",
            "must be a folder that can be written to",
            given=error,
            remedy="Name another one",
        ) from error
    page = target / "report.html"
    progress("report", str(page))
    return page


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
        findings = run_checks(Path(scratch), triton=plan.spec.serving.triton, with_engines=False)
    # The engine is built of what is written now, here or in the image that will serve it.
    findings = [finding for finding in findings if finding.id != "engine-built"]
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise LintFailure(errors)
    return findings
