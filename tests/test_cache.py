"""Keys of cached stages: they change with the code that a stage runs, and with nothing else."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import ROOT
from triptych import cache
from triptych.cache import cached_stage, code_hash
from triptych.engine.stage import CODE as ENGINE_CODE
from triptych.export.stage import CODE as EXPORT_CODE
from triptych.gate.cached import CODE as GATE_CODE

PACKAGE = ROOT / "build_scripts/triptych"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package that `code_hash` reads."""
    copy = tmp_path / "triptych"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "templates"))
    monkeypatch.setattr(cache, "PACKAGE", copy)
    return copy


def test_a_pattern_that_matches_nothing_is_an_error(package: Path) -> None:
    with pytest.raises(ValueError, match=r"no source file of this package matches 'gone/\*\.py'"):
        code_hash("export/*.py", "gone/*.py")


def edit(package: Path, file: str) -> None:
    path = package / file
    path.write_text(path.read_text(encoding="utf-8") + "# edited\n", encoding="utf-8")


def move(package: Path, file: str) -> None:
    path = package / file
    path.rename(path.with_name("moved.py"))


@pytest.mark.parametrize("change", [edit, move])
def test_the_key_of_a_stage_changes_with_its_code_alone(
    package: Path, change: Callable[[Path, str], None]
) -> None:
    stages = {"export": EXPORT_CODE, "gate": GATE_CODE, "engine": ENGINE_CODE}
    before = {name: code_hash(*patterns) for name, patterns in stages.items()}
    change(package, "repository/lock.py")
    assert {name: code_hash(*patterns) for name, patterns in stages.items()} == before
    change(package, "export/packing.py")
    after = {name: code_hash(*patterns) for name, patterns in stages.items()}
    assert {name for name in stages if after[name] != before[name]} == {"export"}
    change(package, "gate/check.py")
    after = {name: code_hash(*patterns) for name, patterns in stages.items()}
    assert after["gate"] != before["gate"]


def test_every_pattern_of_the_package_matches() -> None:
    """Whatever is named `CODE` or passed to `code_hash` as text."""
    found = 0
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            patterns: list[ast.expr] = []
            text = ast.unparse(node) if isinstance(node, ast.Assign | ast.Call) else ""
            if isinstance(node, ast.Assign) and text.startswith("CODE = ("):
                patterns = ast.parse(text).body[0].value.elts  # type: ignore[attr-defined]
            elif isinstance(node, ast.Call) and text.startswith("code_hash("):
                patterns = [arg for arg in node.args if isinstance(arg, ast.Constant)]
            for pattern in patterns:
                found += 1
                assert list(PACKAGE.glob(ast.literal_eval(pattern))), f"{path}: {pattern}"
    assert found > 20


def test_a_stage_is_done_once_and_appears_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))

    def fail(target: Path) -> None:
        (target / "half").write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        cached_stage("stage", {"key": 1}, fail)
    assert not list((tmp_path / "cache/stage").iterdir())
    folder, cached = cached_stage("stage", {"key": 1}, lambda t: None)
    assert folder.is_dir()
    assert not cached
    assert cached_stage("stage", {"key": 1}, fail) == (folder, True)
