"""The Python files of a repository: the modules of the runtime that its pipeline uses."""

from __future__ import annotations

import re
from pathlib import Path

from triptych.building.generation.render import ENGINES
from triptych.repository.bundle import RUNTIME, Link, StepCode, bundle
from triptych.repository.render import PARTS, step_code
from triptych.tasks.catalog import TASKS

STEPS = ("preprocess", "core", "postprocess")


def encoder(task: str, *parts: str) -> dict[str, StepCode]:
    """Version folders of a pipeline to the modules that they need."""
    codes = step_code(TASKS[task], parts)
    return {f"{task}_{step}/1": own for step, own in codes.items()}


def write(folder: Path, files: dict[str, bytes | Link]) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Link):
            (folder / path).symlink_to(content.target)
        else:
            (folder / path).write_bytes(content)


def test_no_file_lacks_a_module_that_it_imports(tmp_path: Path) -> None:
    for task in TASKS:
        write(tmp_path, bundle(encoder(task)))
    for part in PARTS:
        write(tmp_path / part, bundle(encoder("text-embedding", part)))
    for name, engine in ENGINES.items():
        codes = {f"{name}_{step}/1": StepCode([f"generation_{step}", "engine"]) for step in STEPS}
        write(tmp_path, bundle(codes, {"engine": RUNTIME / engine.file}))
    for link in tmp_path.rglob("*.py"):
        assert link.exists()
        for line in link.read_text(encoding="utf-8").splitlines():
            if line.startswith("from ."):
                module = line.split()[1].removeprefix(".")
                assert link.with_name(f"{module}.py").exists(), (link, module)


def test_a_file_is_a_module_as_it_stands_and_the_steps_are_short() -> None:
    files = bundle(encoder("text-embedding", "packed rows", "row lengths"))
    for path, content in files.items():
        if isinstance(content, bytes) and not path.endswith("/model.py"):
            assert content == (RUNTIME / Path(path).name).read_bytes(), path
    # The steps of an embedding can be read in ten minutes.
    lines = [content.count(b"\n") for content in files.values() if isinstance(content, bytes)]
    assert len(lines) <= 12
    assert sum(lines) <= 1400


def test_modules_import_each_other_only_in_the_form_that_is_followed() -> None:
    for path in RUNTIME.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"^ *(?:from|import) +\..*", text, re.MULTILINE)
        assert all(re.match(r"(    )?from \.\w+ import ", line) for line in found), path
        typed = [line for line in found if line.startswith(" ")]
        assert not typed or "if TYPE_CHECKING:\n" + "\n".join(typed) in text, path
