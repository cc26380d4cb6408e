"""Static lint of a whole Triton model repository: no server, no GPU, every fault at once.

Lint of a repository before it is written: its files as they would lie there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from triptych.base import releases
from triptych.base.errors import Finding
from triptych.base.files import scratch_folder
from triptych.repository.lint import config, core, ensemble, files, profiles, python_steps
from triptych.repository.lint.engine import (
    engine_built,
    engine_cores,
    engine_operators,
    engine_version,
)
from triptych.repository.lint.ensemble import wirings
from triptych.repository.lint.snapshot import Flaw, Repository, read_repository
from triptych.repository.render import Content


class Check(NamedTuple):
    """A row of the table: `flaws` looks at one subject after the other.

    A flaw without a file is of the subject's `config_file`.
    """

    id: str
    subjects: Callable[[Repository], Iterable[Any]]
    flaws: Callable[[Any], Iterator[Flaw]]


# A new check is a generator of flaws and a line here. What most often causes the rest comes first.
CHECKS = (
    Check("repository-readable", Repository.itself, files.repository_readable),
    Check("config-readable", Repository.folders, files.config_readable),
    Check("model-name", Repository.configured, files.model_name),
    Check("version-folder", Repository.folders, files.version_folder),
    Check("version-policy", Repository.configured, files.version_policy),
    Check("model-file", Repository.executed, files.model_file),
    Check("referenced-file", Repository.configured, files.referenced_file),
    Check("lock-readable", Repository.folders, files.lock_readable),
    Check("lock-files", Repository.folders, files.lock_files),
    Check("shared-core", Repository.folders, files.shared_core),
    Check("traffic", Repository.folders, files.traffic),
    Check("gate-accepted", Repository.folders, files.gate_accepted),
    Check("triton-version", Repository.configured, config.triton_version),
    Check("backend-known", Repository.configured, config.backend_known),
    Check("tensor-valid", Repository.configured, config.tensor_valid),
    Check("ensemble-fields", Repository.ensembles, config.ensemble_fields),
    Check("ensemble-steps", wirings, ensemble.ensemble_steps),
    Check("ensemble-closes", wirings, ensemble.ensemble_closes),
    Check("ensemble-tensors", wirings, ensemble.ensemble_tensors),
    Check("ensemble-batch", wirings, ensemble.ensemble_batch),
    Check("onnx-readable", Repository.itself, core.onnx_readable),
    Check("onnx-data", Repository.executed, core.onnx_data),
    Check("onnx-tensors", Repository.executed, core.onnx_tensors),
    Check("engine-built", engine_cores, engine_built),
    Check("engine-version", engine_cores, engine_version),
    Check("engine-operators", engine_cores, engine_operators),
    Check("profile-batch", engine_cores, profiles.profile_batch),
    Check("profile-names", engine_cores, profiles.profile_names),
    Check("profile-range", engine_cores, profiles.profile_range),
    Check("profile-switching", engine_cores, profiles.profile_switching),
    Check("batch-input", Repository.executed, core.batch_input),
    Check("batch-shapes", Repository.executed, config.batch_shapes),
    Check("dynamic-batching", Repository.executed, config.dynamic_batching),
    Check("preferred-batch-size", Repository.configured, config.preferred_batch_size),
    Check("priority-levels", Repository.configured, config.priority_levels),
    Check("preserve-ordering", Repository.configured, config.preserve_ordering),
    Check("queue-policy", Repository.executed, config.queue_policy),
    Check("queue-limit", wirings, config.queue_limit),
    Check("queue-wake-up", Repository.executed, config.queue_wake_up),
    Check("instance-group", Repository.executed, config.instance_group),
    Check("engine-gpus", Repository.executed, core.engine_gpus),
    Check("precision-gpus", Repository.executed, core.precision_gpus),
    Check("kv-cache", Repository.executed, core.kv_cache),
    Check("doubled-beginning", Repository.executed, core.doubled_beginning),
    Check("response-cache", Repository.configured, config.response_cache),
    Check("warmup", Repository.executed, config.warmup),
    Check("graph-spec", Repository.executed, config.graph_spec),
    Check("cuda-graphs", Repository.executed, profiles.cuda_graphs),
    Check("python-model", Repository.executed, python_steps.python_model),
    Check("python-import", Repository.executed, python_steps.python_import),
    Check("python-kind", Repository.executed, python_steps.python_kind),
)

OLDEST = str(releases.OLDEST)
"""The release that a repository has to suit unless another one is named."""

_SEVERITIES = ("error", "warning", "info")


def run_checks(
    repository: Path, *, triton: str = OLDEST, with_engines: bool = True
) -> list[Finding]:
    """Every finding on the model repository at `repository`, errors first.

    Broken input is a finding, never an exception; files are relative to `repository`.

    Args:
        repository: the folder with one folder for each model, ours or hand-made.
        triton: the release that will serve it (``24.10``, or an image tag ``26.08-py3``).
        with_engines: it must also load the engines. No where `triton` is but the oldest release
            that the rest has to suit: an engine is of one release, whose image checks it.

    Raises:
        UserError: `triton` is not a release.
    """
    snapshot = read_repository(
        repository, releases.parse_release(triton), with_engines=with_engines
    )
    findings = [
        Finding(check.id, **{**vars(flaw), "file": flaw.file or subject.config_file})
        for check in CHECKS
        for subject in check.subjects(snapshot)
        for flaw in check.flaws(subject)
    ]
    return sorted(findings, key=lambda finding: _SEVERITIES.index(finding.severity))


class LintFailure(Exception):
    """The rendered repository breaks a rule: nothing was written."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("; ".join(f"{f.file}: {f.rule}" for f in findings))


def lint_rendered(
    files: Mapping[str, Content], *, triton: str, beside: Sequence[Path] = ()
) -> tuple[Finding, ...]:
    """The findings that are no errors.

    Args:
        files: path relative to the repository -> content.
        triton: the oldest release that must load it.
        beside: folders of models that are there already and that `files` refer to.

    Raises:
        LintFailure: an error.
    """
    with scratch_folder("triptych-lint-") as scratch:
        for path, content in files.items():
            target = scratch / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                target.symlink_to(content.absolute())
            else:
                target.write_bytes(content)
        for model in beside:
            (scratch / model.name).symlink_to(model.absolute())
        findings = run_checks(scratch, triton=triton, with_engines=False)
    # The engine is built of what is written now, here or in the image that will serve it.
    findings = [finding for finding in findings if finding.id != "engine-built"]
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise LintFailure(errors)
    return tuple(findings)
