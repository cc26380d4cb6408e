"""What users of Triton and TensorRT trip over most often: each is found before a server starts.

Numbers are those of the issue trackers' most frequent themes, as far as a repository shows them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lint_broken_engines import BROKEN_ENGINES
from lint_broken_models import BROKEN_MODELS
from lint_broken_wires import BROKEN_WIRES
from lint_cases import Broken
from lint_repositories import write_repository
from triptych.repository.lint import run_checks

BROKEN = BROKEN_MODELS + BROKEN_WIRES + BROKEN_ENGINES


def cases(**checks: str) -> pytest.MarkDecorator:
    """Cases by check (dashes as underscores), each with a part of what it gives."""
    found = [
        case
        for check, given in checks.items()
        for case in BROKEN
        if case.check == check.replace("_", "-") and given in case.given
    ]
    assert len({case.check for case in found}) == len(checks)
    return pytest.mark.parametrize("case", found, ids=lambda case: f"{case.check}-{case.given}")


def is_found(case: Broken, folder: Path) -> bool:
    findings = run_checks(write_repository(folder, case.layout, *case.edits), triton=case.triton)
    return any(finding.id == case.check and case.given in finding.given for finding in findings)


@cases(ensemble_batch="", ensemble_tensors="[]", onnx_tensors="[1, 384]", tensor_valid="-1, 3")
def test_pain_3_batch_dimensions_that_disagree(case: Broken, tmp_path: Path) -> None:
    assert is_found(case, tmp_path)


@cases(engine_version="", engine_built="")
def test_pain_4_an_engine_of_another_tensorrt(case: Broken, tmp_path: Path) -> None:
    assert is_found(case, tmp_path)


@cases(profile_batch="")
def test_pain_8_max_batch_size_and_profiles_that_disagree(case: Broken, tmp_path: Path) -> None:
    assert is_found(case, tmp_path)


@cases(profile_range="", profile_names="not named")
def test_pain_9_sequences_outside_of_every_profile(case: Broken, tmp_path: Path) -> None:
    assert is_found(case, tmp_path)


@cases(profile_switching="", instance_group="0, 1")
def test_pain_10_many_profiles(case: Broken, tmp_path: Path) -> None:
    assert is_found(case, tmp_path)


@cases(cuda_graphs="", graph_spec="")
def test_pain_11_cuda_graphs_that_never_engage(case: Broken, tmp_path: Path) -> None:
    assert is_found(case, tmp_path)


@cases(ensemble_tensors="INT64", onnx_tensors="TYPE_INT32", warmup="INT64")
def test_pain_12_int64_where_int32_is_read(case: Broken, tmp_path: Path) -> None:
    assert is_found(case, tmp_path)
