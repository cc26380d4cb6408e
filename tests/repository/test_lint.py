"""Lint finds every planted fault with the check it belongs to, and nothing where all is well."""

import random
import sys
from pathlib import Path

import pytest

from lint_repositories import LAYOUTS, edit, good_files, read_faults, read_fine, write_repository
from triptych.base.errors import Finding
from triptych.repository.lint import CHECKS, run_checks
from triptych.serving.server import Server

BROKEN = read_faults()
OF_RELEASES = {"known-defect", "changed-behavior"}
"""Checks whose findings are about a release of Triton: test_lint_releases.py has their cases."""


def about_repository(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.id not in OF_RELEASES]


def serious(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in about_repository(findings) if finding.severity != "info"]


def test_a_good_repository_has_no_error_and_no_warning(tmp_path: Path) -> None:
    for layout in LAYOUTS:
        assert serious(run_checks(write_repository(tmp_path / layout, layout))) == [], layout


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
