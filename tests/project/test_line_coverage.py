"""The report of the package's coverage: what a process executed, and what no process did."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import line_coverage
from tests.support.line_coverage import PACKAGE, executed_lines, find_module, functions_of, report
from tests.support.project import ROOT

SCRIPT = """
import pathlib, sys
from tests.support import line_coverage
line_coverage.FOLDER = pathlib.Path(sys.argv[1])
from triptych.base.formatting import percent
percent(0.5)
"""


def test_the_lines_of_all_processes_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = (ROOT / "tests/support/child_coverage", ROOT, PACKAGE.parent)
    path = os.pathsep.join(map(str, folders))
    words = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, check=True)
    source = (PACKAGE / "base/formatting.py").read_text(encoding="utf-8")
    bodies = dict(functions_of(source))
    first = executed_lines(tmp_path)["base/formatting.py"]
    assert bodies["percent"] & first
    assert not bodies["milliseconds"] & first
    of_another = {"base/formatting.py": sorted(bodies["milliseconds"])}
    (tmp_path / "another.json").write_text(json.dumps(of_another))
    assert executed_lines(tmp_path)["base/formatting.py"] == first | bodies["milliseconds"]

    for name, text in (("base/formatting.py", source), ("client/empty.py", "a = 1\n")):
        (tmp_path / "package" / name).parent.mkdir(parents=True)
        (tmp_path / "package" / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(line_coverage, "PACKAGE", tmp_path / "package")
    lines = list(report(executed_lines(tmp_path)))
    never = next(line for line in lines if line.startswith("base/formatting.py: "))
    assert " power," in never
    assert not any(f" {name}," in never for name in ("percent", "milliseconds"))
    packages = {line.split()[0]: line.split() for line in lines[1 : lines.index("")]}
    assert packages["all"][2] != packages["client"][2] == "0.0%"


def test_a_step_of_a_repository_is_a_file_of_the_runtime(tmp_path: Path) -> None:
    assert find_module(PACKAGE / "spec/plan.py") == "spec/plan.py"
    assert find_module(tmp_path / "minilm_preprocess/1/preprocess.py") == "runtime/preprocess.py"
    assert find_module(tmp_path / "minilm_preprocess/1/hooks.py") is None
    assert find_module(tmp_path / "preprocess.py") is None
    assert find_module("built-in") is None
