"""Static lint of a whole Triton model repository: no server, no GPU, every fault at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path

from triptych.errors import Finding
from triptych.repository import (
    lint_batching,
    lint_config,
    lint_core,
    lint_ensemble,
    lint_files,
    lint_lock,
    lint_python,
    lint_warmup,
)
from triptych.repository.flaw import Flaw
from triptych.repository.snapshot import Repository, read_repository
from triptych.repository.versions import parse_release

Check = Callable[[Repository], Iterator[Flaw]]

# A new check is a generator of flaws and a line here. What most often causes the rest comes first.
CHECKS: tuple[tuple[str, Check], ...] = (
    ("repository-readable", lint_files.repository_readable),
    ("config-readable", lint_files.config_readable),
    ("model-name", lint_files.model_name),
    ("version-folder", lint_files.version_folder),
    ("version-policy", lint_files.version_policy),
    ("model-file", lint_files.model_file),
    ("referenced-file", lint_files.referenced_file),
    ("lock-readable", lint_lock.lock_readable),
    ("lock-files", lint_lock.lock_files),
    ("traffic", lint_lock.traffic),
    ("triton-version", lint_config.triton_version),
    ("backend-known", lint_config.backend_known),
    ("tensor-valid", lint_config.tensor_valid),
    ("ensemble-fields", lint_config.ensemble_fields),
    ("ensemble-steps", lint_ensemble.ensemble_steps),
    ("ensemble-closes", lint_ensemble.ensemble_closes),
    ("ensemble-tensors", lint_ensemble.ensemble_tensors),
    ("ensemble-batch", lint_ensemble.ensemble_batch),
    ("onnx-readable", lint_core.onnx_readable),
    ("onnx-data", lint_core.onnx_data),
    ("onnx-tensors", lint_core.onnx_tensors),
    ("batch-input", lint_core.batch_input),
    ("batch-shapes", lint_batching.batch_shapes),
    ("dynamic-batching", lint_batching.dynamic_batching),
    ("preferred-batch-size", lint_batching.preferred_batch_size),
    ("priority-levels", lint_batching.priority_levels),
    ("preserve-ordering", lint_batching.preserve_ordering),
    ("queue-policy", lint_batching.queue_policy),
    ("queue-limit", lint_batching.queue_limit),
    ("instance-group", lint_config.instance_group),
    ("response-cache", lint_config.response_cache),
    ("int64-tensor", lint_config.int64_tensor),
    ("warmup", lint_warmup.warmup),
    ("graph-spec", lint_warmup.graph_spec),
    ("python-model", lint_python.python_model),
    ("python-import", lint_python.python_import),
    ("python-kind", lint_python.python_kind),
)

_SEVERITIES = ("error", "warning", "info")


def run_checks(repository: Path, *, triton: str = "24.10") -> list[Finding]:
    """Every finding on the model repository at `repository`, errors first.

    Broken input is a finding, never an exception; files are relative to `repository`.

    Args:
        repository: the folder with one folder for each model, ours or hand-made.
        triton: the release that will serve it (``24.10``, or an image tag ``26.08-py3``).

    Raises:
        UserError: `triton` is not a release.
    """
    snapshot = read_repository(repository, parse_release(triton))
    findings = [Finding(name, *astuple(flaw)) for name, check in CHECKS for flaw in check(snapshot)]
    return sorted(findings, key=lambda finding: _SEVERITIES.index(finding.severity))
