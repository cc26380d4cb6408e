"""`triptych new --model` of own models: what it declares can be built, and answers as the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from tests.support.own_models import build_own
from tests.support.scaffolding import run
from triptych.core.export.own_module import load_module
from triptych.spec.model_fields import ModelSpec, load_model_spec

pytestmark = pytest.mark.build

NETS = """
import torch
from torch import nn


class Calendar(nn.Module):
    def __init__(self):
        super().__init__()
        self.days, self.months = nn.Embedding(7, 4), nn.Embedding(12, 5)
        self.last = nn.Linear(9 + 3, 2)

    def forward(self, day, month, features):
        parts = [self.days(day), self.months(month - 1).flatten(1), features]
        return self.last(torch.cat(parts, 1)).sum(1)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, ids, mask):
        weight = mask.unsqueeze(-1).float()
        return self.last((self.words(ids) * weight).sum(1) / (weight.sum(1) + 1e-9))


class Mean(Words):
    def forward(self, ids):
        return {"score": super().forward(ids, torch.ones_like(ids))}


def images():
    return nn.Sequential(nn.Conv2d(1, 4, 5), nn.Flatten(), nn.Linear(4 * 24 * 24, 3))
"""


def new(folder: Path, name: str, factory: str) -> ModelSpec:
    """Return the spec that `triptych new` writes for a module of `NETS`."""
    (folder / "nets.py").write_text(NETS)
    model = f"{folder / 'nets.py'}:{factory}"
    done = run("new", name, "--model", model, "--pipelines", folder / "pipelines")
    assert done.exit_code == 0, (done.output, done.exception)
    return load_model_spec(folder / "pipelines" / name)


def test_a_module_gets_its_inputs_and_ranges_and_builds(tmp_path: Path) -> None:
    spec = new(tmp_path, "calendar", "Calendar")
    limits = {name: (each.type, each.min, each.max) for name, each in spec.inputs.items()}
    assert limits == {
        "day": ("int", 0, 6),
        "month": ("int", 1, 12),
        "features": ("float", None, None),
    }
    assert spec.inputs["features"].shape == [3]
    build_own(tmp_path, "calendar")
    feed = {
        "day": np.array([[0], [6]]),
        "month": np.array([[12], [1]]),
        "features": np.array([[1, 2, 3], [0, -1, 2]], np.float32),
    }
    core = tmp_path / "repository/calendar_core/1/model.onnx"
    (got,) = onnxruntime.InferenceSession(core).run(None, feed)
    feed["day"] = feed["day"][:, 0]
    with torch.no_grad():
        wanted = load_module(spec)(*map(torch.from_numpy, feed.values())).numpy()
    np.testing.assert_allclose(got[:, 0], wanted, atol=1e-5)


def test_a_free_axis_is_declared_if_zeros_at_its_end_change_nothing(tmp_path: Path) -> None:
    words = new(tmp_path, "words", "Words")
    name, axis = words.model.axis
    assert axis is not None
    assert axis.of == {"ids": 1, "mask": 1}
    assert words.inputs["ids"].shape == [name]
    assert (words.inputs["ids"].min, words.inputs["ids"].max) == (0, 49)
    mean = new(tmp_path, "mean", "Mean")
    assert not mean.model.axes
    assert list(mean.outputs) == ["score"]
    assert [type(size) for size in mean.inputs["ids"].shape] == [int]


def test_a_module_of_images_gets_their_size_and_a_function(tmp_path: Path) -> None:
    spec = new(tmp_path, "pictures", "images")
    assert spec.inputs["input"].type == "bytes"
    assert "HEIGHT, WIDTH = 28, 28" in (spec.folder / "hooks.py").read_text()
