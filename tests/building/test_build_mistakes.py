"""What a careless user writes is named, and a build takes nothing from other pipelines."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import build_into, quiet, traffic_texts, write_pipeline
from task_models import text_classifier
from triptych.base.errors import UserError
from triptych.core.inputs import read_inputs
from triptych.repository.lint import run_checks
from triptych.runtime.hooking import load_hooks
from triptych.spec.spec import load_spec

pytestmark = pytest.mark.build

DATACLASS = """
from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Rule:
    name: str


def before(rows):
    return rows
"""
MISTAKES: dict[str, tuple[dict[str, Any], str | None, str | None]] = {
    "number for a text": ({}, "def before(rows):\n    return [{'text': 5} for _ in rows]\n", None),
    "deep traffic": ({}, None, "[" * 100000),
    "exit on loading": ({}, "import sys\nsys.exit(0)\n", None),
    "parameter with a dash": ({"parameters": {"top-k": 3}}, None, None),
    "65 instances": ({"serving": {"instances": {"preprocess": 65}}}, None, None),
    "strings in a matrix": (
        {
            "task": "custom",
            "custom": {
                "auto_class": "AutoModelForSequenceClassification",
                "outputs": [{"name": "words", "dtype": "BYTES", "dims": [-1, -1]}],
            },
        },
        "def decode(rows):\n    return rows\n",
        None,
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    return text_classifier(tmp_path_factory.mktemp("model"), minilm_folder, traffic_texts())


def write(folder: Path, model: Path, **fields: Any) -> Path:
    """A pipeline of `model` with three rows of traffic."""
    fields = {"task": "text-classification", **fields}
    write_pipeline(folder, model={"source": str(model)}, **fields)
    (folder / "traffic.jsonl").write_text('{"text": "where is my parcel"}\n' * 3)
    return folder


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(tmp_path: Path, model: Path, mistake: str) -> None:
    fields, hooks, traffic = MISTAKES[mistake]
    folder = write(tmp_path / "mistaken", model, **fields)
    if hooks is not None:
        (folder / "hooks.py").write_text(hooks)
    if traffic is not None:
        (folder / "traffic.jsonl").write_text(traffic)
    with pytest.raises(UserError):
        read_inputs(load_spec(folder), quiet)


def test_hooks_may_have_dataclasses(tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text(DATACLASS)
    assert load_hooks(tmp_path) is not None


def errors_of(repository: Path) -> list[str]:
    return [f.id for f in run_checks(repository, triton="24.10") if f.severity == "error"]


@pytest.mark.parametrize("change", ["shares itself", "shares another", "another layout"])
def test_what_others_use_is_not_taken_away(tmp_path: Path, model: Path, change: str) -> None:
    repository = tmp_path / "repository"
    for name, core in (("owner", {}), ("user", {"shared_from": "owner"}), ("third", {})):
        build_into(write(tmp_path / name, model, core=core), repository)
    assert errors_of(repository) == []
    core = {
        "shares itself": {"shared_from": "owner"},
        "shares another": {"shared_from": "third"},
        "another layout": {"layout": "bucketed"},
    }[change]
    shutil.rmtree(tmp_path / "owner")
    with pytest.raises(UserError):
        build_into(write(tmp_path / "owner", model, core=core), repository)
    assert errors_of(repository) == []


def test_a_pipeline_named_like_a_step_of_another(tmp_path: Path, model: Path) -> None:
    repository = tmp_path / "repository"
    build_into(write(tmp_path / "mail", model), repository)
    with pytest.raises(UserError):
        build_into(write(tmp_path / "mail_preprocess", model), repository)
    assert errors_of(repository) == []
