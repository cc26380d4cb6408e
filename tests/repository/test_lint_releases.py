"""Lint names the defects and changes of a release of Triton that a repository meets."""

from pathlib import Path
from typing import get_args

import pytest

from lint_repositories import PLAIN_PY, edit, write_repository
from triptych.base.errors import Finding, UserError
from triptych.base.release_changes import CHANGES, KNOWN_DEFECTS, Feature
from triptych.base.releases import OLDEST, TRITON_VERSIONS
from triptych.repository.lint import run_checks

STEP = "minilm_preprocess"
NEWEST = str(max(TRITON_VERSIONS))


def of(check: str, findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.id == check]


def test_each_entry_has_a_known_release_a_feature_and_a_source() -> None:
    features = set(get_args(Feature))
    for defect in KNOWN_DEFECTS:
        assert defect.feature in features
        assert defect.source
        assert defect.fixed is None or OLDEST < defect.fixed <= max(TRITON_VERSIONS), defect
    for change in CHANGES:
        assert change.feature in features
        assert change.source
        assert OLDEST < change.release <= max(TRITON_VERSIONS), change
    assert [change.release for change in CHANGES] == sorted(change.release for change in CHANGES)


def test_an_exact_release_has_its_defects_and_the_oldest_supported_one_none(tmp_path: Path) -> None:
    root = write_repository(tmp_path, "packed")
    assert of("known-defect", run_checks(root)) == []
    old, new = (of("known-defect", run_checks(root, triton=name)) for name in ("24.10", NEWEST))
    assert {finding.rule for finding in new} < {finding.rule for finding in old}
    crash = next(finding for finding in old if "gRPC clients cancel" in finding.rule)
    assert crash.severity == "warning"
    assert crash.given == "Triton 24.10: any server"
    assert crash.remedy.startswith("Use Triton 25.04 or later.")
    assert "7840" in crash.remedy


CACHE = "response_cache { enable: true }"
DECOUPLED = "model_transaction_policy { decoupled: true }"
ARCHIVE = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "env.tar.gz" } }'


@pytest.mark.parametrize(
    ("setting", "release", "words"),
    [
        (CACHE, "25.08", "cached responses"),
        (DECOUPLED, "26.10", "a stream whose client has left"),
        (ARCHIVE, "26.05", "an archive in EXECUTION_ENV_PATH"),
    ],
)
def test_a_defect_is_named_only_where_the_repository_meets_it(
    setting: str, release: str, words: str, tmp_path: Path
) -> None:
    def said(root: Path, triton: str) -> list[Finding]:
        findings = of("known-defect", run_checks(root, triton=triton))
        return [finding for finding in findings if words in finding.rule]

    plain = write_repository(tmp_path / "plain", "packed")
    edited = write_repository(tmp_path / "edited", "packed", edit("append", STEP, setting))
    (finding,) = said(edited, release)
    assert STEP in finding.given
    assert said(plain, release) == []
    assert said(edited, NEWEST) == []


def test_a_step_with_metrics_of_its_own_is_found_by_its_source(tmp_path: Path) -> None:
    code = PLAIN_PY + "\nimport triton_python_backend_utils as pb\nKIND = pb.MetricFamily\n"
    metrics = edit("write", f"{STEP}/1/model.py", code)
    root = write_repository(tmp_path, "packed", metrics)
    found = of("known-defect", run_checks(root, triton="26.08"))
    (finding,) = [finding for finding in found if "when the server stops" in finding.rule]
    assert STEP in finding.given
    assert "minilm_postprocess" not in finding.given


def test_an_upgrade_lists_what_is_mended_and_what_changes(tmp_path: Path) -> None:
    root = write_repository(tmp_path, "packed")
    findings = of("changed-behavior", run_checks(root, triton="26.05", upgrade_from="25.03"))
    assert {finding.severity for finding in findings} == {"info"}
    rules = " ".join(finding.rule for finding in findings)
    assert "gRPC clients cancel" in rules
    assert "steps of an ensemble may receive requests in another order" in rules
    assert "shared memory unless --allow-client-shm" in rules
    assert "Python 3.12 instead of 3.10" not in rules  # 25.03 has it already
    assert "TensorRT 11" not in rules
    assert of("changed-behavior", run_checks(root, triton="26.05")) == []


def test_an_upgrade_to_an_older_release_is_refused(tmp_path: Path) -> None:
    for before in ("26.05", "26.08"):
        with pytest.raises(UserError, match="must be older than the release") as refused:
            run_checks(tmp_path, triton="26.05", upgrade_from=before)
        assert refused.value.given == before
