"""Static lint of a whole Triton model repository: no server, no GPU, every fault at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path

from triptych.errors import Finding
from triptych.lint import (
    batching,
    config,
    core,
    cuda_graphs,
    engine,
    ensemble,
    files,
    lock,
    profiles,
    python_steps,
    warmup,
)
from triptych.lint.flaw import Flaw
from triptych.lint.snapshot import Repository, read_repository
from triptych.releases import parse_release

Check = Callable[[Repository], Iterator[Flaw]]

# A new check is a generator of flaws and a line here. What most often causes the rest comes first.
CHECKS: tuple[tuple[str, Check], ...] = (
    ("repository-readable", files.repository_readable),
    ("config-readable", files.config_readable),
    ("model-name", files.model_name),
    ("version-folder", files.version_folder),
    ("version-policy", files.version_policy),
    ("model-file", files.model_file),
    ("referenced-file", files.referenced_file),
    ("lock-readable", lock.lock_readable),
    ("lock-files", lock.lock_files),
    ("shared-core", lock.shared_core),
    ("traffic", lock.traffic),
    ("gate-accepted", lock.gate_accepted),
    ("triton-version", config.triton_version),
    ("backend-known", config.backend_known),
    ("tensor-valid", config.tensor_valid),
    ("ensemble-fields", config.ensemble_fields),
    ("ensemble-steps", ensemble.ensemble_steps),
    ("ensemble-closes", ensemble.ensemble_closes),
    ("ensemble-tensors", ensemble.ensemble_tensors),
    ("ensemble-batch", ensemble.ensemble_batch),
    ("onnx-readable", core.onnx_readable),
    ("onnx-data", core.onnx_data),
    ("onnx-tensors", core.onnx_tensors),
    ("engine-built", engine.engine_built),
    ("engine-version", engine.engine_version),
    ("engine-operators", engine.engine_operators),
    ("profile-batch", profiles.profile_batch),
    ("profile-names", profiles.profile_names),
    ("profile-range", profiles.profile_range),
    ("profile-switching", profiles.profile_switching),
    ("batch-input", core.batch_input),
    ("batch-shapes", batching.batch_shapes),
    ("dynamic-batching", batching.dynamic_batching),
    ("preferred-batch-size", batching.preferred_batch_size),
    ("priority-levels", batching.priority_levels),
    ("preserve-ordering", batching.preserve_ordering),
    ("queue-policy", batching.queue_policy),
    ("queue-limit", batching.queue_limit),
    ("queue-wake-up", batching.queue_wake_up),
    ("instance-group", config.instance_group),
    ("response-cache", config.response_cache),
    ("int64-tensor", config.int64_tensor),
    ("warmup", warmup.warmup),
    ("graph-spec", warmup.graph_spec),
    ("cuda-graphs", cuda_graphs.cuda_graphs),
    ("python-model", python_steps.python_model),
    ("python-import", python_steps.python_import),
    ("python-kind", python_steps.python_kind),
)

OLDEST = "24.10"
"""The release that a repository has to suit unless another one is named: the embedded server's."""

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
    snapshot = read_repository(repository, parse_release(triton), with_engines=with_engines)
    findings = [Finding(name, *astuple(flaw)) for name, check in CHECKS for flaw in check(snapshot)]
    return sorted(findings, key=lambda finding: _SEVERITIES.index(finding.severity))
