"""Built repositories do not change by accident: one for each layout and some tasks is on record.

`data/golden` has the configs and settings of each as a tree, the list of its files and links, and
the hashes of binary files. After an intended change, ``pytest tests/repository/test_golden.py
--rewrite`` writes it again, and the diff shows what changed for which kind of pipeline.
"""

import ast
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import task_models
from tests.support.project import ROOT, build_into, traffic_texts, write_pipeline
from triptych.container.device_check import ROWS_FILE

pytestmark = pytest.mark.build

GOLDEN = ROOT / "tests/data/golden"
MEASURED = ("triptych.lock.json", "README.md", "ranges.npy", ROWS_FILE)
"""Files with dates or with values that depend on the machine."""
FILES, HASHES = "files.txt", "hashes.json"
CORES: dict[str, dict[str, Any]] = {
    "minilm_packed": {"layout": "packed"},
    "minilm_bucketed": {"layout": "bucketed"},
}
TINY: dict[str, dict[str, Any]] = {
    "tensorrt_packed": {"backend": "tensorrt", "precision": "fp16", "layout": "packed"},
    "tensorrt_bucketed": {"backend": "tensorrt", "precision": "fp16", "layout": "bucketed"},
    "openvino": {"backend": "openvino", "bucket_count": 2},
}


def build_all(folder: Path, minilm: Path) -> Path:
    """The repository with all pipelines."""
    for name, core in CORES.items():
        build_into(write_pipeline(folder / "pipelines" / name, core=core), folder / "repository")
    tiny = task_models.text_classifier(folder / "models/tiny", minilm, traffic_texts())
    for name, core in TINY.items():
        spec = {"task": "text-classification", "model": {"source": str(tiny)}, "core": core}
        spec["accuracy"] = {"label_agreement": 0.9}  # of random weights
        build_into(write_pipeline(folder / "pipelines" / name, **spec), folder / "repository")
    model = task_models.tagger(folder / "models/tagger", minilm, traffic_texts())
    spec = {"task": "token-classification", "model": {"source": str(model)}}
    made = write_pipeline(folder / "pipelines/token_classification", **spec)
    build_into(made, folder / "repository")
    return folder / "repository"


def describe(repository: Path) -> dict[str, str]:
    """The content of `data/golden` for a repository, by path; test_bundle.py compares the code."""
    described, hashes, names = {}, {}, []
    for path in sorted(repository.rglob("*")):
        if path.is_dir():
            continue
        name = path.relative_to(repository).as_posix()
        names.append(f"{name} -> {path.readlink()}" if path.is_symlink() else name)
        if path.suffix == ".pbtxt" or path.name == "settings.json":
            described[name] = path.read_text(encoding="utf-8")
        elif path.suffix != ".py" and path.name not in MEASURED:
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    described[FILES] = "\n".join(names) + "\n"
    described[HASHES] = json.dumps(hashes, indent=1) + "\n"
    return described


def settings_read(folder: Path) -> set[str]:
    """The names that the code of a step reads from anything named settings."""
    found: set[Any] = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case (
                    ast.Subscript(value=source, slice=ast.Constant(value=name))
                    | ast.Call(
                        func=ast.Attribute(value=source, attr="get"),
                        args=[ast.Constant(value=name), *_],
                    )
                    | ast.Compare(left=ast.Constant(value=name), comparators=[source])
                ) if ast.unparse(source).endswith("settings"):
                    found.add(name)
    return found


def test_repositories_are_as_on_record(tmp_path: Path, minilm_folder: Path, rewrite: bool) -> None:
    repository = build_all(tmp_path, minilm_folder)
    for file in repository.glob("*/1/settings.json"):
        unused = set(json.loads(file.read_text(encoding="utf-8"))) - settings_read(file.parent)
        assert not unused, f"{file.parent.parent.name} does not read {unused}"
    found = describe(repository)
    if rewrite:
        shutil.rmtree(GOLDEN, ignore_errors=True)
        for name, text in found.items():
            (GOLDEN / name).parent.mkdir(parents=True, exist_ok=True)
            (GOLDEN / name).write_text(text, encoding="utf-8")
    golden = {
        path.relative_to(GOLDEN).as_posix(): path.read_text(encoding="utf-8")
        for path in GOLDEN.rglob("*")
        if path.is_file()
    }
    assert found == golden
