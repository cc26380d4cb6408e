"""`triptych test`: hooks that break a rule are found, and those that break none are not."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.mistakes import check_refused
from tests.support.project import ROOT
from tests.support.scaffolding import run, write
from triptych.building.pipeline_checks import Check, check_pipeline
from triptych.runtime.hooking import RowForm
from triptych.spec.spec import load_spec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pipeline with scaffolded hooks, to break."""
    return write(tmp_path, "reranking", with_hooks=True)


def problem(folder: Path, hooks: str) -> Check:
    """What is found wrong first with the pipeline, with these hooks instead of its own."""
    (folder / "hooks.py").write_text(hooks, encoding="utf-8")
    (folder / "test_hooks.py").unlink(missing_ok=True)
    *checks, tests = check_pipeline(load_spec(folder))
    assert (tests.name, tests.severity) == ("tests", "warning")
    bad = [check for check in checks if check.severity != "ok"]
    assert len(bad) == 1, bad
    return bad[0]


def test_hooks_that_break_a_rule(folder: Path) -> None:
    cases = yaml.safe_load((ROOT / "tests/data/hooks.yaml").read_text(encoding="utf-8"))
    for check, several in cases.items():
        for case in several:
            found = problem(folder, case["hooks"])
            assert found.name == check, (case, found)
            assert re.search(case["says"], found.note), (case, found)
            unsure = check == "hooks-imports" or "made-up" in case["says"]
            assert found.severity == ("warning" if unsure else "error"), case


def test_after_may_read_the_inputs_as_before_returned_them(folder: Path) -> None:
    rule = """
from __future__ import annotations

from dataclasses import dataclass

import PIL

@dataclass
class Rule:  # which finds its module by name
    word: str = "wifi"

def before(rows):
    return [{**row, "text": row["text"].upper()} for row in rows]

def after(rows, inputs):
    if not all(row.keys() == {"text", "text_pair"} and row["text"].isupper() for row in inputs):
        raise KeyError(inputs)
    word = Rule().word
    return [{**row, "score": float(word in given["text"])} for row, given in zip(rows, inputs)]
"""
    (folder / "hooks.py").write_text(rule, encoding="utf-8")
    (folder / "test_hooks.py").unlink()
    *checks, _ = check_pipeline(load_spec(folder))
    assert {check.severity for check in checks} == {"ok"}
    assert (checks[-1].name, checks[-1].note) == ("after-rows", "12 made-up answers")


WRONG_VALUES: list[tuple[str, list[int], list[Any], str]] = [
    ("BYTES", [-1], ["refund", "other!"], "a row must be a list of str, not str 'refund'"),
    ("BYTES", [-1], [["a", "b"], ["c"]], "equally long, they have [1, 2] elements"),
    ("BYTES", [-1], [["a", None]], "elements must be str, not NoneType"),
    ("BYTES", [2], [["a"]], "must have the shape [1, 2], it has [1, 1]"),
    ("BYTES", [1], [["a"]], "elements must be str, not list"),
    ("FP32", [1], ["0.5"], "elements of type float32, not text"),
    ("FP32", [1], [None], "elements of type float32, not object"),
    ("FP32", [-1], [[1.0], [1.0, 2.0]], "inhomogeneous"),
    ("INT32", [1], [1.5], "elements of type int32, not float64"),
    ("INT8", [1], [300], "int8, from -128 to 127, not 300"),
    ("INT64", [1], [1 << 70], "does not fit"),
    ("BOOL", [1], [1], "elements of type bool"),
]


def test_an_output_takes_only_what_it_was_declared_to_hold() -> None:
    for dtype, dims, rows, words in WRONG_VALUES:
        form = RowForm([{"name": "out", "dtype": dtype, "dims": dims, "json": False}])
        with pytest.raises(RuntimeError) as caught:
            pytest.fail(f"{dtype} {dims}: {form.tensors([{'out': value} for value in rows])}")
        assert words in str(caught.value), (dtype, rows)
    form = RowForm([{"name": "out", "dtype": "UINT8", "dims": [-1], "json": False}])
    assert form.tensors([{"out": [1, 255]}])["out"].tolist() == [[1, 255]]
    form = RowForm([{"name": "out", "dtype": "BYTES", "dims": [1], "json": True}])
    assert form.tensors([{"out": []}])["out"].tolist() == [[b"[]"]]
    for value in ({1, 2}, [float("nan")]):
        with pytest.raises(RuntimeError, match="JSON"):
            form.tensors([{"out": value}])


def test_decode_of_a_custom_task_and_the_images_of_the_traffic_must_be_there(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path, "custom", "custom")
    assert "`decode` is missing" in problem(folder, "def before(rows): return rows").note
    (folder / "hooks.py").unlink()
    checks = check_pipeline(load_spec(folder))
    assert (checks[-1].name, checks[-1].severity) == ("hooks-load", "error")
    folder = write(tmp_path, "image-classification", "images", with_hooks=True)
    (folder / "samples/stripes.png").unlink()
    check_refused("traffic.jsonl:2", check_pipeline, load_spec(folder))


def test_the_pipelines_own_tests_fail_with_a_broken_hook(folder: Path) -> None:
    with (folder / "test_hooks.py").open("a", encoding="utf-8") as file:
        file.write(
            "\n\ndef test_scores_have_one_decimal() -> None:\n"
            "    assert hooks.after([{'score': 0.98765}]) == [{'score': 1.0}]\n"
        )
    done = run("test", "mine", "--json", "--pipelines", folder.parent)
    assert done.exit_code == 1, done.output
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert [name for name, check in checks.items() if not check["ok"]] == ["tests"]
    assert "test_scores_have_one_decimal" in checks["tests"]["problem"]


def test_the_generated_tests_allow_outputs_that_after_adds(folder: Path) -> None:
    with (folder / "pipeline.yaml").open("a") as file:
        file.write("\noutputs: [{name: good, dtype: BOOL}]\n")
    after = "def after(rows):\n    return [{**row, 'good': row['score'] > 0.5} for row in rows]\n"
    (folder / "hooks.py").write_text(after)
    assert [check for check in check_pipeline(load_spec(folder)) if check.severity != "ok"] == []
    # An output that is lost, or a field that `before` adds, still fails.
    (folder / "hooks.py").write_text(after.replace("**row, ", ""))
    assert check_pipeline(load_spec(folder))[-1].severity == "error"
    before = "\n\ndef before(rows):\n    return [{**row, 'more': 'text'} for row in rows]\n"
    (folder / "hooks.py").write_text(after + before)
    assert check_pipeline(load_spec(folder))[-1].severity == "error"


def test_tests_may_be_missing_and_not_empty(folder: Path) -> None:
    # Settings of other tests further up do not count.
    (folder.parent / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (folder.parent / "conftest.py").write_text("raise RuntimeError('not mine')\n")
    assert check_pipeline(load_spec(folder))[-1].severity == "ok"
    (folder / "test_hooks.py").write_text("")
    assert (check_pipeline(load_spec(folder))[-1].severity) == "error"
    assert "has no tests" in check_pipeline(load_spec(folder))[-1].note
    (folder / "test_hooks.py").unlink()
    assert check_pipeline(load_spec(folder))[-1].severity == "warning"
    (folder / "hooks.py").unlink()
    checks = [(check.name, check.severity) for check in check_pipeline(load_spec(folder))]
    assert checks == [("spec", "ok"), ("traffic", "ok"), ("hooks", "ok")]


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({refused}))  # importing one of them raises ModuleNotFoundError
sys.argv = ["triptych", "test", "mine", "--json", "--pipelines", {pipelines!r}]
from triptych.interface.cli import main
main()
"""


def test_only_pytest_must_be_installed_and_what_hooks_print_stays_out_of_the_result(
    folder: Path,
) -> None:
    with (folder / "hooks.py").open("a") as hooks:
        hooks.write("\n\nprint('hello')\n")

    def run_without(*refused: str) -> subprocess.CompletedProcess[str]:
        program = WITHOUT.format(refused=refused, pipelines=str(folder.parent))
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    done = run_without("torch", "transformers", "onnx", "PIL")
    assert done.returncode == 0, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert {check["severity"] for check in checks.values()} == {"ok"}
    assert "hello" in done.stderr
    done = run_without("pytest")
    assert done.returncode == 2, done.stderr
    assert "pip install pytest" in done.stdout + done.stderr
