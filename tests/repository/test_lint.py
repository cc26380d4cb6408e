"""Lint finds every planted fault with its own check, what a release has, and no more."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.lint_repositories import (
    LAYOUTS,
    PLAIN_PY,
    edit,
    good_files,
    read_faults,
    read_fine,
    write_repository,
)
from tests.support.mistakes import refusal
from triptych.base.errors import Finding
from triptych.base.release_changes import CHANGES, KNOWN_DEFECTS
from triptych.base.releases import OLDEST, TRITON_VERSIONS
from triptych.repository.lint import CHECKS, run_checks
from triptych.serving.server import Server

BROKEN = read_faults()
OF_RELEASES = {"known-defect", "changed-behavior"}
"""Checks whose findings are about a release of Triton."""
STEP = "minilm_preprocess"
NEWEST = str(max(TRITON_VERSIONS))


def about_repository(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.id not in OF_RELEASES]


def serious(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in about_repository(findings) if finding.severity != "info"]


@pytest.mark.server
def test_a_real_server_loads_a_good_repository(tmp_path: Path) -> None:
    with Server(write_repository(tmp_path / "repository", "packed")) as server:
        assert server.grpc_url


def test_a_fault_is_found_by_its_own_check_alone(tmp_path: Path) -> None:
    assert {case.name for case in BROKEN} | OF_RELEASES == {name for name, *_ in CHECKS}
    for number, case in enumerate(BROKEN):
        root = tmp_path / str(number)
        root.mkdir()  # a case may leave no file
        write_repository(root, case.layout, *case.edits)
        findings = about_repository(run_checks(root, triton=case.triton))
        findings = findings if case.severity == "info" else serious(findings)
        assert {finding.id for finding in findings} == {case.name}, (case, findings)
        found = [f for f in findings if f.severity == case.severity and case.given in f.given]
        places = {name for f in found for name in (f.file, f.file.removesuffix("/config.pbtxt"))}
        assert case.place in places, (case, findings)
        assert all(finding.rule and finding.remedy for finding in found), case


def test_a_repository_without_a_fault_has_no_finding(tmp_path: Path) -> None:
    for layout in LAYOUTS:
        assert serious(run_checks(write_repository(tmp_path / layout, layout))) == [], layout
    for number, case in enumerate(read_fine()):
        root = write_repository(tmp_path / str(number), case.layout, *case.edits)
        assert serious(run_checks(root, triton=case.triton)) == [], case.name


def test_without_onnx_one_info_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = edit("write", "minilm_core/1/model.onnx", "not a protobuf")
    write_repository(tmp_path, "packed", broken)
    monkeypatch.setitem(sys.modules, "onnx", None)  # makes the import fail as if not installed
    (finding,) = run_checks(tmp_path)
    assert (finding.id, finding.severity, finding.file) == ("onnx-readable", "info", "")
    assert "pip install onnx" in finding.remedy


def test_a_folder_that_does_not_exist_is_a_finding(tmp_path: Path) -> None:
    (finding,) = run_checks(tmp_path / "nowhere")
    assert (finding.id, finding.given) == ("repository-readable", "not a folder")


def of(check: str, findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.id == check]


def test_each_entry_has_a_known_release_and_a_source() -> None:
    for defect in KNOWN_DEFECTS:
        assert defect.source
        assert defect.fixed is None or OLDEST < defect.fixed <= max(TRITON_VERSIONS), defect
    for change in CHANGES:
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


def test_a_defect_is_named_only_where_the_repository_meets_it(tmp_path: Path) -> None:
    plain = write_repository(tmp_path / "plain", "packed")
    for setting, release, words in (
        (CACHE, "25.08", "cached responses"),
        (DECOUPLED, "26.10", "a stream whose client has left"),
        (ARCHIVE, "26.05", "an archive in EXECUTION_ENV_PATH"),
    ):
        edited = write_repository(tmp_path / release, "packed", edit("append", STEP, setting))
        found, elsewhere, later = (
            [one for one in of("known-defect", run_checks(root, triton=name)) if words in one.rule]
            for root, name in ((edited, release), (plain, release), (edited, NEWEST))
        )
        assert [STEP in one.given for one in found] == [True], words
        assert elsewhere == later == [], words


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
        error = refusal(run_checks, tmp_path, triton="26.05", upgrade_from=before)
        assert "must be older than the release" in error.message
        assert error.given == before


def damage(content: bytes, chance: random.Random) -> bytes:
    """Cut, repeat or overwrite a few bytes."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(data) + 1)
        stop = min(len(data), start + chance.randint(0, 12))
        data[start:stop] = chance.choice(
            [b"", bytes(data[start:stop]) * 2, chance.randbytes(stop - start), b"}", b'"', b"-1"]
        )
    return bytes(data)


def test_a_tokenizer_of_another_form_makes_lint_not_raise(tmp_path: Path) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/config.pbtxt").write_text('backend: "python"')
    for processor in ('"x"', '{"processors": 5}', '{"single": {"a": 1}}', '{"single": [5]}'):
        (tmp_path / "m/1/tokenizer.json").write_text(f'{{"post_processor": {processor}}}')
        assert of("duplicate-bos-token", run_checks(tmp_path)) == []


def test_settings_of_another_type_are_reported(tmp_path: Path) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/config.pbtxt").write_text('backend: "python"')
    (tmp_path / "m/1/triton_io.py").touch()  # a step of Triptych
    good: dict[str, Any] = {
        "kv_token_bytes": 100,
        "kv_cache_mib": 1,
        "max_length": 9,
        "max_sequences": 4,
    }
    good |= {"gpus": ["0"], "tensor_parallel": 1, "pipeline_parallel": 1, "request_tokens": 9}
    for name in (*good, "special_tokens"):
        for wrong in ("x", None):
            text = json.dumps({**good, name: wrong})
            (tmp_path / "m/1/settings.json").write_text(text)
            found = of("step-settings", run_checks(tmp_path))
            assert [each.given for each in found] == [f"another type of {name}"] * bool(wrong)


def test_no_damage_makes_lint_raise(tmp_path: Path) -> None:
    for seed in range(50):
        chance = random.Random(seed)
        layout = chance.choice(LAYOUTS)
        root = write_repository(tmp_path / str(seed), layout)
        victims = [name for name in good_files(layout) if not name.endswith("/")]
        for name in chance.sample(victims, chance.randint(1, 4)):
            target = root / name
            target.write_bytes(damage(target.read_bytes(), chance))
        for finding in run_checks(root, triton=chance.choice(["25.05", "24.10", "26.08"])):
            assert isinstance(finding, Finding), seed
            assert all(isinstance(text, str) for text in finding.as_dict().values()), seed
