"""The notebooks of `examples` run from their first cell to their last, without Jupyter.

After a change, ``pytest tests/project/test_notebooks.py --rewrite`` stores their new outputs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))

RUN = """
import ast, contextlib, io, json, sys
cells, space, outputs = json.load(sys.stdin), {"__name__": "__main__"}, []
for cell in cells:
    said, shown = io.StringIO(), None
    body = ast.parse(cell).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(said):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), space)
        if last is not None:
            shown = eval(compile(ast.Expression(last.value), "<cell>", "eval"), space)
    found = []
    if said.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": said.getvalue()})
    if shown is not None:
        data = {"image/svg+xml": shown._repr_svg_(), "text/plain": type(shown).__name__}
        found.append({"data": data, "metadata": {}, "output_type": "display_data"})
    outputs.append(found)
print(json.dumps(outputs))
"""


def run_notebook(path: Path, folder: Path) -> dict[str, Any]:
    """The notebook with the outputs of a run in `folder`."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    sources = json.dumps(["".join(cell["source"]) for cell in cells])
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=sources,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for cell, outputs in zip(cells, json.loads(done.stdout.splitlines()[-1]), strict=True):
        cell["outputs"] = outputs
    return notebook


def kinds(notebook: dict[str, Any]) -> list[list[str]]:
    """What each cell puts out, but for its content."""
    return [
        [output.get("name") or ", ".join(output["data"]) for output in cell.get("outputs", [])]
        for cell in notebook["cells"]
    ]


@pytest.mark.server
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_has_its_outputs_in_place(
    path: Path, tmp_path: Path, rewrite: bool
) -> None:
    found = run_notebook(path, tmp_path)
    if rewrite:
        text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert kinds(found) == kinds(stored)
    last = [cell["outputs"][-1] for cell in (found["cells"][-1], stored["cells"][-1])]
    assert last[0] == last[1]  # what was found for each question
    plots = [
        output["data"]["image/svg+xml"]
        for cell in found["cells"]
        for output in cell.get("outputs", [])
        if "data" in output
    ]
    assert len(plots) == 2
    assert all(plot.count('class="bar"') >= 1 for plot in plots)


def test_the_package_alone_imports_nothing_else() -> None:
    code = "import triptych, sys; print([m for m in sys.modules if m.startswith('triptych.')])"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
    code = "import triptych\nfor name in triptych.__all__: getattr(triptych, name)\ntriptych.tune"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "has no attribute 'tune'" in done.stderr
