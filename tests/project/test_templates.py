"""`new`, `build`, `serve`, `infer`: every template answers the command that its own file names."""

import contextlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import build_into, traffic_texts
from scaffolding import ENCODERS
from task_models import MODELS
from triptych.interface.cli import app
from triptych.serving.server import Server
from triptych.spec.scaffold import scaffold
from triptych.spec.tasks import TASKS

pytestmark = pytest.mark.server
MAKERS = dict(reversed(MODELS.values()))
"""Task -> what makes a small model for it; text-embedding has a real one."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    """Every task's template, and the custom one, scaffolded on small models and built."""
    base = tmp_path_factory.mktemp("templates")
    for task in ENCODERS:
        model = None
        if task != "text-embedding":
            make = MAKERS.get(task, MAKERS["text-classification"])
            model = str(make(base / "models" / task, minilm_folder, traffic_texts()))
        made = scaffold(task, task=task, model=model, with_hooks=True, pipelines=base / "pipelines")
        build_into(Path(made.folder), base / "repository")
    return base


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[Any]:
    with Server(base / "repository") as server:
        yield server


@pytest.mark.parametrize("task", ENCODERS)
def test_a_template_answers(base: Path, server: Any, task: str) -> None:
    text = (base / "pipelines" / task / "pipeline.yaml").read_text()
    (command,) = re.findall(r"# Try it: triptych (infer .*)", text)
    words = shlex.split(command.replace("<mask>", "[MASK]"))
    with contextlib.chdir(base):
        done = CliRunner().invoke(app, [*words, "--url", server.grpc_url, "--json"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)
    if task != "custom":
        outputs = TASKS.get(task, TASKS["text-classification"]).outputs
        needed = {tensor.name for tensor in outputs if not tensor.optional}
        # Of the two forms of an embedding the client requests one.
        assert set(row) == (needed or {"embedding"})
        assert set(row) <= {tensor.name for tensor in outputs}
    else:
        assert len(row) > 1


def test_every_one_is_in_one_repository(base: Path) -> None:
    models = {path.name for path in (base / "repository").iterdir()}
    steps = ("", "_preprocess", "_core", "_postprocess")
    assert models == {f"{task}{step}" for task in ENCODERS for step in steps}
