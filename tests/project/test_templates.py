"""`new`, `build`, `serve`, `infer`: a template answers the command that its own file names."""

import contextlib
from pathlib import Path

import pytest

import task_models
from conftest import build_into, traffic_texts
from scaffolding import answer_of, write
from triptych.serving.server import Server
from triptych.spec.tasks import TASKS

pytestmark = pytest.mark.server
# test_scaffold.py checks the command of every template, test_tasks.py serves every task.
SERVED = {
    "custom": task_models.text_classifier,
    "image-classification": task_models.image_classifier,
    "text-pair-classification": task_models.text_classifier,
}
"""Templates whose hooks and inputs differ the most, with what makes a small model for each."""


def test_a_template_answers_the_command_that_it_names(tmp_path: Path, minilm_folder: Path) -> None:
    for task, make in SERVED.items():
        model = make(tmp_path / "models" / task, minilm_folder, traffic_texts())
        folder = write(tmp_path / "pipelines", task, task, model=str(model), with_hooks=True)
        build_into(folder, tmp_path / "repository")
    with Server(tmp_path / "repository") as server, contextlib.chdir(tmp_path):
        for task in SERVED:
            row = answer_of(tmp_path / "pipelines" / task, server.grpc_url)
            if task == "custom":
                assert len(row) > 1
            else:
                outputs = TASKS.get(task, TASKS["text-classification"]).outputs
                assert set(row) == {tensor.name for tensor in outputs if not tensor.optional}
