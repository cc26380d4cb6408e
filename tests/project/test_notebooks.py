"""The notebooks of `examples` run from their first cell to their last, without Jupyter.

After a change, ``pytest tests/project/test_notebooks.py --rewrite`` stores their new outputs.
"""

import ast
import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.project import ROOT
from tests.support.spark_environment import run_python

EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))
HERE = {"quickstart"}
"""Notebooks that run in the process of the tests; clusters have one of their own."""


def run_cell(source: str, space: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell as Jupyter does and return its outputs."""
    body = ast.parse(source).body
    last = body[-1]
    said, shown, outputs = io.StringIO(), None, list[dict[str, Any]]()
    with contextlib.redirect_stdout(said):
        if not isinstance(last, ast.Expr):
            exec(compile(ast.Module(body, []), "<cell>", "exec"), space)
        else:
            exec(compile(ast.Module(body[:-1], []), "<cell>", "exec"), space)
            shown = eval(compile(ast.Expression(last.value), "<cell>", "eval"), space)
    if said.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": said.getvalue()})
    if shown is not None:
        data = {"image/svg+xml": shown._repr_svg_(), "text/plain": type(shown).__name__}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return outputs


def run_notebook(path: Path, folder: Path) -> dict[str, Any]:
    """The notebook with the outputs of a run in `folder`."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    space: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(folder):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell["outputs"] = run_cell("".join(cell["source"]), space)
    return notebook


def kinds(notebook: dict[str, Any]) -> list[list[str]]:
    """What each cell puts out, but for its content."""
    return [
        [output.get("name") or ", ".join(output["data"]) for output in cell.get("outputs", [])]
        for cell in notebook["cells"]
    ]


APART = """
import json, sys
from pathlib import Path
from tests.project.test_notebooks import run_notebook
found = run_notebook(Path(sys.argv[1]), Path.cwd())
Path("found.json").write_text(json.dumps(found), encoding="utf-8")
"""


def run_apart(path: Path, folder: Path) -> dict[str, Any]:
    """The same in a process of its own; Spark comes from an environment beside the project's."""
    run_python(APART, path, cwd=folder, timeout_s=600, spark=path.stem == "spark")
    found: dict[str, Any] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.server
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in HERE else pytest.mark.long) for name in NOTEBOOKS],
)
def test_a_notebook_runs_and_has_its_outputs_in_place(
    name: str, tmp_path: Path, rewrite: bool
) -> None:
    path = EXAMPLES / f"{name}.ipynb"
    found = (run_notebook if name in HERE else run_apart)(path, tmp_path)
    if rewrite:
        text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert kinds(found) == kinds(stored)
    last = [cell["outputs"][-1] for cell in (found["cells"][-1], stored["cells"][-1])]
    assert last[0] == last[1]  # what was found for each question
    outputs = [output for cell in found["cells"] for output in cell.get("outputs", [])]
    plots = [output["data"]["image/svg+xml"] for output in outputs if "data" in output]
    assert len(plots) == (2 if name in HERE else 0)  # of what a build measured
    assert all(plot.count('class="bar"') >= 1 for plot in plots)


ALONE = """
import sys, triptych
assert not [name for name in sys.modules if name.startswith("triptych.")]
for name in triptych.__all__:
    getattr(triptych, name)
triptych.tune
"""


def test_the_package_alone_imports_nothing_else() -> None:
    words = [sys.executable, "-c", ALONE]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert "has no attribute 'tune'" in done.stderr
