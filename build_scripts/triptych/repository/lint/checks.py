"""Static checks of a whole model repository: no server, no GPU, all findings at once.

`lint_rendered` checks the files of a build before they are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from triptych.base import releases
from triptych.base.errors import Finding, UserError
from triptych.base.files import scratch_folder
from triptych.container.manifests import find_pipelines
from triptych.repository.bundle import Link
from triptych.repository.lint import (
    accelerators,
    config,
    core,
    device,
    ensemble,
    files,
    openvino,
    profiles,
)
from triptych.repository.lint.engine import (
    engine_built,
    engine_cores,
    engine_operators,
    engine_version,
)
from triptych.repository.lint.ensemble import wirings
from triptych.repository.lint.releases import changed_behavior, known_defects
from triptych.repository.lint.snapshot import (
    SEVERITIES,
    LintCheck,
    Repository,
    find_flaws,
    read_repository,
    with_variants,
)
from triptych.repository.render import Content

_KNOWN_DEFECT = LintCheck("known-defect", Repository.itself, known_defects)

# A new check is a generator of flaws and a line here. Frequent causes of other findings come first.
CHECKS = (
    LintCheck("repository-readable", Repository.itself, files.repository_readable),
    LintCheck("config-readable", Repository.folders, files.config_readable),
    LintCheck("version-folder", Repository.folders, files.version_folder),
    LintCheck("version-policy", Repository.configured, files.version_policy),
    LintCheck("model-file", Repository.executed, files.model_file),
    LintCheck("referenced-file", Repository.configured, files.referenced_file),
    LintCheck("lock-readable", Repository.folders, files.manifest_readable),
    LintCheck("lock-files", Repository.folders, files.manifest_files),
    LintCheck("shared-core", Repository.folders, files.shared_core),
    LintCheck("step-settings", Repository.executed, files.step_settings),
    LintCheck("traffic", Repository.folders, files.traffic),
    LintCheck("gate-accepted", Repository.folders, files.gate_accepted),
    LintCheck("device-check", Repository.folders, device.device_checked),
    LintCheck("triton-version", Repository.configured, config.triton_version),
    LintCheck("ensemble-wiring", wirings, ensemble.ensemble_wiring),
    LintCheck("ensemble-batch", wirings, ensemble.ensemble_batch),
    LintCheck("onnx-readable", Repository.itself, core.onnx_readable),
    LintCheck("onnx-data", Repository.executed, core.onnx_data),
    LintCheck("onnx-tensors", Repository.executed, core.onnx_tensors),
    LintCheck("engine-built", engine_cores, engine_built),
    LintCheck("engine-version", engine_cores, engine_version),
    LintCheck("engine-operators", engine_cores, engine_operators),
    LintCheck("profile-batch", engine_cores, profiles.profile_batch),
    LintCheck("profile-names", engine_cores, profiles.profile_names),
    LintCheck("profile-range", engine_cores, profiles.profile_range),
    LintCheck("profile-switching", engine_cores, profiles.profile_switching),
    LintCheck("accelerators", Repository.executed, accelerators.execution_accelerators),
    LintCheck("openvino-parameters", openvino.openvino_models, openvino.openvino_parameters),
    LintCheck("openvino-tensors", openvino.openvino_models, openvino.openvino_tensors),
    LintCheck("openvino-batches", openvino.openvino_models, openvino.openvino_batches),
    LintCheck("openvino-precision", openvino.openvino_models, openvino.openvino_precision),
    LintCheck("batch-input", Repository.executed, core.batch_input),
    LintCheck("batch-shapes", Repository.executed, config.batch_shapes),
    LintCheck("dynamic-batching", Repository.executed, config.dynamic_batching),
    LintCheck("priority-levels", Repository.configured, config.priority_levels),
    LintCheck("preserve-ordering", Repository.configured, config.preserve_ordering),
    LintCheck("queue-policy", Repository.executed, config.queue_policy),
    LintCheck("python-shapes", Repository.configured, config.python_shapes),
    LintCheck("queue-limit", wirings, config.queue_limit),
    LintCheck("queue-wake-up", Repository.executed, config.queue_wake_up),
    LintCheck("instance-group", Repository.executed, config.instance_group),
    LintCheck("engine-gpus", Repository.executed, core.engine_gpus),
    LintCheck("precision-gpus", Repository.executed, core.precision_gpus),
    LintCheck("kv-cache", Repository.executed, core.kv_cache),
    LintCheck("duplicate-bos-token", Repository.executed, core.duplicate_bos_token),
    LintCheck("response-cache", Repository.configured, config.response_cache),
    LintCheck("warmup", Repository.executed, config.warmup),
    LintCheck("graph-spec", Repository.executed, config.graph_spec),
    LintCheck("cuda-graphs", Repository.executed, profiles.cuda_graphs),
    LintCheck("python-model", Repository.executed, files.python_model),
    LintCheck("python-import", Repository.executed, files.python_import),
    LintCheck("python-kind", Repository.executed, files.python_kind),
    _KNOWN_DEFECT,
    LintCheck("changed-behavior", Repository.itself, changed_behavior),
)


def run_checks(
    repository: Path,
    *,
    triton: str | None = None,
    is_exact: bool = True,
    upgrade_from: str | None = None,
) -> list[Finding]:
    """Return every finding on the model repository at `repository`, errors first.

    Broken input is a finding, never an exception; files are relative to `repository`.

    Args:
        repository: Folder with one folder per model, built by Triptych or by hand.
        triton: Release that will serve it (``24.10``, or an image tag ``26.08-py3``). None takes
            the oldest supported one, which is not exact.
        is_exact: Whether `triton` is the release that serves, and not only the oldest that may.
            Engines and known defects are only checked for an exact release.
        upgrade_from: Release that serves it now: what changes is listed with severity ``info``.

    Raises:
        UserError: `triton` or `upgrade_from` is not a release, or the latter is not older.
    """
    release = releases.OLDEST if triton is None else releases.parse_release(triton)
    is_exact = is_exact and triton is not None
    before = None if upgrade_from is None else releases.parse_release(upgrade_from)
    if before is not None and before >= release:
        raise UserError(
            "--upgrade-from",
            f"must be older than the release of --triton ({release})",
            given=upgrade_from,
            remedy="Name the release that serves now, and with --triton the next one",
        )
    snapshot = read_repository(repository, release, is_exact=is_exact, upgraded_from=before)
    findings: list[Finding] = []
    known: set[tuple[str, ...]] = set()
    new: set[tuple[str, ...]] = set()
    for each in with_variants(snapshot):
        for finding in find_flaws(CHECKS, each):
            # A finding that every machine has is reported once.
            if (key := (finding.id, finding.rule, finding.given)) not in known:
                where = f"; on {each.variant}" if each.variant else ""
                findings.append(replace(finding, given=finding.given + where))
                new.add(key)
        known |= new
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def find_known_defects(repository: Path, pipeline: str, triton: str) -> list[Finding]:
    """Return the findings on known defects of the release that will serve a pipeline.

    Raises:
        UserError: `triton` is not a release.
    """
    release = releases.parse_release(triton)
    snapshot = read_repository(repository, release, is_exact=True, with_graphs=False)
    steps = {served.name: served.steps for served in find_pipelines(repository)}[pipeline]
    for other in snapshot.models.keys() - {pipeline, *steps}:
        del snapshot.models[other]
    return find_flaws([_KNOWN_DEFECT], snapshot)


class LintFailure(Exception):
    """Raised if the rendered repository breaks a rule; nothing was written."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("; ".join(f"{f.file}: {f.rule}" for f in findings))


def lint_rendered(
    files: Mapping[str, Content], *, triton: str, beside: Sequence[Path] = ()
) -> tuple[Finding, ...]:
    """Return the findings that are not errors, on files that are not written yet.

    Args:
        files: Content of each file, by path relative to the repository.
        triton: Oldest release that must load it.
        beside: Folders of existing models that `files` refer to.

    Raises:
        LintFailure: There is an error.
    """
    with scratch_folder("triptych-lint-") as scratch:
        for path, content in files.items():
            target = scratch / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                target.symlink_to(content.absolute())
            elif isinstance(content, Link):
                target.symlink_to(content.target)
            else:
                target.write_bytes(content)
        for model in beside:
            (scratch / model.name).symlink_to(model.absolute())
        findings = run_checks(scratch, triton=triton, is_exact=False)
    # The engine is built later, from the files that are written now.
    findings = [finding for finding in findings if finding.id != "engine-built"]
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise LintFailure(errors)
    return tuple(findings)
