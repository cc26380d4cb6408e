"""The Python files of a repository: the parts of the runtime that its pipeline uses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from triptych.building.generation.render import ENGINES
from triptych.repository.bundle import RUNTIME, Link, bundle
from triptych.repository.render import PARTS, step_roots
from triptych.tasks.catalog import TASKS

RUFF = Path(sys.executable).with_name("ruff")
STEPS = ("preprocess", "core", "postprocess")


def encoder(task: str, *parts: str) -> dict[str, list[str]]:
    """Version folders of a pipeline to the definitions that they need."""
    roots = step_roots(TASKS[task], parts)
    return {f"{task}_{step}/1": own for step, own in roots.items()}


def write(folder: Path, files: dict[str, bytes | Link]) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Link):
            (folder / path).symlink_to(content.target)
        else:
            (folder / path).write_bytes(content)


def test_no_file_lacks_or_has_a_name_that_it_uses(tmp_path: Path) -> None:
    for task in TASKS:
        write(tmp_path, bundle(encoder(task)))
    for part in PARTS:
        write(tmp_path / part, bundle(encoder("text-embedding", part)))
    for name, engine in ENGINES.items():
        roots = {f"{name}_{step}/1": [f"generation_{step}.TritonPythonModel"] for step in STEPS}
        roots[f"{name}_core/1"].append("engine.Engine")
        write(tmp_path, bundle(roots, {"engine": RUNTIME / engine.file}))
    # Unused imports, undefined names, unsorted imports, too many empty lines.
    rules = "--select=F,E1,E3,I,W2"
    done = subprocess.run(
        [RUFF, "check", "--isolated", "--preview", "--line-length=100", rules, tmp_path],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    for link in tmp_path.rglob("*.py"):
        assert link.exists()
        for line in link.read_text(encoding="utf-8").splitlines():
            if line.startswith("from ."):
                module = line.split()[1].removeprefix(".")
                assert link.with_name(f"{module}.py").exists(), (link, module)


def test_a_file_has_what_its_pipeline_uses_and_no_more(tmp_path: Path) -> None:
    files = bundle(encoder("text-embedding", "flow control"))
    texts = {path: c.decode() for path, c in files.items() if isinstance(c, bytes)}
    rows = texts["text-embedding_preprocess/1/rows_text.py"]
    assert "class PlainTextRowMaker" in rows
    counts = texts["text-embedding_preprocess/1/in_flight.py"]
    assert "def admit(" in counts
    assert "def of_server(" not in counts  # a method that only the server's process calls
    for path, text in texts.items():
        name = Path(path).name.replace("model.py", f"{path.split('_')[1].split('/')[0]}.py")
        source = iter((RUNTIME / name).read_text(encoding="utf-8").splitlines())
        body = text[text.index("\n\n\n") :]  # behind the imports
        assert all(line in source for line in body.splitlines()), path
    # The steps of an embedding can be read in ten minutes.
    plain = bundle(encoder("text-embedding", "packed rows", "row lengths")).values()
    lines = [content.count(b"\n") for content in plain if isinstance(content, bytes)]
    assert len(lines) <= 12
    assert sum(lines) <= 1400


def test_an_import_that_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    odd = tmp_path / "odd.py"
    odd.write_text("from .a.b import c\n\n\nclass Odd:\n    value = c\n")
    with pytest.raises(ValueError, match=r"odd\.py, line 1: import of an unknown form"):
        bundle({"a/1": ["odd.Odd"]}, {"odd": odd})
