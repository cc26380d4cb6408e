"""Own models whose inputs and outputs differ from those of a core, on a real server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from mistakes import check_refused
from own_models import build_own, write_rows
from triptych.client import Client
from triptych.serving.server import Server

RANDOM = np.random.default_rng(0)
HEAD = '<ir_version: 9, opset_import: ["" : 18]> graph'
GRAPHS = {
    # One number per row: inputs and outputs have the batch alone.
    "scalars": f"""{HEAD} (int64[n] day, float[n] load) => (float[n] score, int64[n] kind)
        <float[7] table = {{0.5, 1, -2, 3, 7, 0, 2}}> {{
        found = Gather(table, day)
        score = Mul(found, load)
        kind = Cast<to=7>(score) }}""",
}
TOWERS = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.users, self.items = torch.nn.Embedding(30, 8), torch.nn.Embedding(40, 8)

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(1)
"""
INT, FLOAT = {"type": "int"}, {"type": "float"}


def write_pipeline(
    base: Path, name: str, inputs: Any, outputs: Any, rows: list[dict[str, Any]], hooks: str = ""
) -> Path:
    """Write a pipeline around a graph of `GRAPHS`, or around `TOWERS`."""
    folder = base / "pipelines" / name
    folder.mkdir(parents=True)
    if name in GRAPHS:
        onnx.save(onnx.parser.parse_model(GRAPHS[name]), folder / "net.onnx")
    (folder / "net.py").write_text(TOWERS)
    model = {"onnx": "net.onnx"} if name in GRAPHS else {"module": "net.py:Net"}
    spec = {"task": "model", "model": model, "inputs": inputs, "outputs": outputs}
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    if hooks:
        (folder / "hooks.py").write_text(hooks)
    write_rows(folder, rows)
    return folder


def write_towers(base: Path, name: str, hooks: str = "") -> Path:
    rows = [{"user": index % 30, "item": index % 40} for index in range(24)]
    return write_pipeline(base, name, {"user": INT, "item": INT}, {"score": FLOAT}, rows, hooks)


def write_scalars(base: Path) -> Path:
    hooks = "def preprocess(rows):\n    return {'day': rows['day'] - 1, 'load': rows['load']}\n"
    rows = [{"day": index % 7 + 1, "load": index / 4} for index in range(24)]
    outputs = {"score": FLOAT, "kind": INT}
    inputs = {"day": {"type": "int", "min": 1}, "load": FLOAT}
    return write_pipeline(base, "scalars", inputs, outputs, rows, hooks)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("edges")
    write_scalars(base)
    write_towers(base, "towers")
    for folder in sorted((base / "pipelines").iterdir()):
        build_own(base, folder.name)
    return base


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[Any]:
    with Server(base / "repository") as server:
        yield server


def run_original(base: Path, name: str, feed: dict[str, Any]) -> dict[str, Any]:
    """Run the user's file as it is."""
    session = onnxruntime.InferenceSession(base / f"pipelines/{name}/net.onnx")
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feed), strict=True))


@pytest.mark.server
def test_one_number_per_row_goes_in_and_out(base: Path, server: Any) -> None:
    days, loads = np.array([7, 1, 3]), np.array([2, -1, 0.5], np.float32)
    wanted = run_original(base, "scalars", {"day": days - 1, "load": loads})
    with Client("scalars", server.grpc_url) as client:
        got = client.infer({"day": days, "load": loads})
        with pytest.raises(Exception, match="`day` must be from -7 to 6"):
            client.infer({"day": [8], "load": [1.0]})
    np.testing.assert_allclose(got["score"].ravel(), wanted["score"], atol=1e-6)
    assert got["kind"].ravel().tolist() == wanted["kind"].tolist() == [4, 0, -1]


@pytest.mark.server
def test_a_forward_takes_and_returns_the_batch_alone(base: Path, server: Any) -> None:
    import torch
    from torch import nn

    torch.manual_seed(0)
    users, items = nn.Embedding(30, 8), nn.Embedding(40, 8)
    user, item = torch.tensor([29, 0, 5]), torch.tensor([1, 39, 7])
    with torch.inference_mode():
        wanted = (users(user) * items(item)).sum(1).numpy()
    with Client("towers", server.grpc_url) as client:
        got = client.infer({"user": user.numpy(), "item": item.numpy()})
    np.testing.assert_allclose(got["score"].ravel(), wanted, atol=1e-5)


def test_two_meanings_of_a_shape_are_refused(tmp_path: Path) -> None:
    folder = write_towers(tmp_path, "towers")
    text = TOWERS.replace(".sum(1)", ".softmax(1).amax(-1)")  # of [batch, 1], all are 1
    (folder / "net.py").write_text(text)
    check_refused("Add `scalars: [user, item]` to `model`", build_own, tmp_path, "towers")
