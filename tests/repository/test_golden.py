"""The bytes of built repositories do not change by accident: every file's hash is on record.

After an intended change, ``pytest tests/repository/test_golden.py --rewrite`` writes
`data/golden.json` again. The diff shows which files of which kind of pipeline changed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import task_models
from conftest import ROOT, build_into, traffic_texts, write_pipeline

pytestmark = pytest.mark.build

GOLDEN = ROOT / "tests/data/golden.json"
CORES: dict[str, dict[str, Any]] = {
    "minilm_packed": {"layout": "packed"},
    "minilm_bucketed": {"layout": "bucketed"},
}
ENGINES: dict[str, dict[str, Any]] = {
    "tensorrt_packed": {"backend": "tensorrt", "precision": "fp16", "layout": "packed"},
    "tensorrt_bucketed": {"backend": "tensorrt", "precision": "fp16", "layout": "bucketed"},
}
TASKS = {
    "token-classification": task_models.tagger,
    "text-classification": task_models.text_classifier,
}


def hashes(folder: Path, minilm: Path) -> dict[str, str]:
    """SHA-256 in hex of each file but locks, cards and runtime code, by path in the repository.

    Locks hold dates and measured figures, cards the latter; a test of `render` compares runtime
    code with its source.
    """
    for name, core in CORES.items():
        build_into(write_pipeline(folder / "pipelines" / name, core=core), folder / "repository")
    tiny = task_models.text_classifier(folder / "models/tiny", minilm, traffic_texts())
    for name, core in ENGINES.items():
        spec = {"task": "text-classification", "model": {"source": str(tiny)}, "core": core}
        spec["accuracy"] = {"label_agreement": 0.9}  # of random weights
        build_into(write_pipeline(folder / "pipelines" / name, **spec), folder / "repository")
    for task, make in TASKS.items():
        model = make(folder / "models" / task, minilm, traffic_texts())
        name = task.replace("-", "_")
        made = write_pipeline(folder / "pipelines" / name, task=task, model={"source": str(model)})
        build_into(made, folder / "repository")
    files = sorted(path for path in (folder / "repository").rglob("*") if path.is_file())
    return {
        path.relative_to(folder / "repository").as_posix(): hashlib.sha256(
            path.read_bytes()
        ).hexdigest()
        for path in files
        if path.suffix != ".py" and path.name not in ("triptych.lock.json", "README.md")
    }


def test_repositories_are_as_on_record(tmp_path: Path, minilm_folder: Path, rewrite: bool) -> None:
    found = hashes(tmp_path, minilm_folder)
    if rewrite:
        text = json.dumps(found, indent=1, sort_keys=True) + "\n"
        GOLDEN.write_text(text, encoding="utf-8")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    changed = {path for path in {*golden, *found} if golden.get(path) != found.get(path)}
    assert not changed
