"""Own models whose inputs and outputs differ from those of a core, on a real server."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.support.mistakes import check_refused
from tests.support.own_models import build_own, write_rows
from tests.support.scaffolding import run
from triptych.base.onnx_edges import to_served
from triptych.client import Client
from triptych.serving.server import Server

HEAD = '<ir_version: 9, opset_import: ["" : 18]> graph'
GRAPHS: dict[str, Any] = {
    # One number per row: inputs and outputs have the batch alone.
    "scalars": f"""{HEAD} (int64[n] day, float[n] load) => (float[n] score, int64[n] kind)
        <float[7] table = {{0.5, 1, -2, 3, 7, 0, 2}}> {{
        found = Gather(table, day)
        score = Mul(found, load)
        kind = Cast<to=7>(score) }}""",
    # As converters of FP16 leave it: weights, inputs and outputs have 16 bits.
    "half": f"""{HEAD} (float16[n, 3] x) => (float16[n, 2] y) {{
        w = Constant<value_floats=[0.5, -1.0, 2.0, 0.25, 1.5, -0.125]>()
        shape = Constant<value_ints=[3, 2]>()
        half = Cast<to=10>(w)
        weight = Reshape(half, shape)
        y = MatMul(x, weight) }}""",
    # A network over time whose batch is the second axis.
    "times": f"""{HEAD} (float[5, batch, 3] x) => (float[5, batch, 3] sums, float[batch, 3] last) {{
        zero = Constant<value_int=0>()
        four = Constant<value_int=4>()
        sums = CumSum(x, zero)
        last = Gather<axis=0>(sums, four) }}""",
    # Two free axes besides the batch.
    "maps": f"""{HEAD} (float[n, rows, columns] x) => (float[n, rows, columns] y) {{
        y = Relu(x) }}""",
}
GRAPHS["brain"] = GRAPHS["half"].replace("float16", "bfloat16").replace("to=10", "to=16")


def make_sklearn() -> Any:
    """Return a classifier as skl2onnx writes it: labels [n], and a ZipMap of the scores."""
    make, tensors = onnx.helper, onnx.TensorProto
    scaled = make.make_node(
        "Scaler", ["x"], ["scaled"], domain="ai.onnx.ml", offset=[0.0, 0.0], scale=[1.0, 1.0]
    )
    linear = make.make_node(
        "LinearClassifier",
        ["scaled"],
        ["label", "scores"],
        domain="ai.onnx.ml",
        classlabels_ints=[3, 5, 9],
        coefficients=[1.0, 0.5, -1.0, 0.25, 0.1, 2.0],
        intercepts=[0.0, 0.1, -0.2],
        post_transform="SOFTMAX",
    )
    maps = make.make_node(
        "ZipMap", ["scores"], ["probability"], domain="ai.onnx.ml", classlabels_int64s=[3, 5, 9]
    )
    kind = make.make_map_type_proto(tensors.INT64, make.make_tensor_type_proto(tensors.FLOAT, []))
    graph = make.make_graph(
        [scaled, linear, maps],
        "sklearn",
        [make.make_tensor_value_info("x", tensors.FLOAT, [None, 2])],
        [
            make.make_tensor_value_info("label", tensors.INT64, [None]),
            make.make_value_info("probability", make.make_sequence_type_proto(kind)),
        ],
    )
    sets = [make.make_opsetid("", 18), make.make_opsetid("ai.onnx.ml", 3)]
    return make.make_model(graph, opset_imports=sets, ir_version=9)


def make_texts() -> Any:
    """Return that classifier with texts as labels, once more in the form of other classifiers."""
    make, tensors = onnx.helper, onnx.TensorProto
    model = make_sklearn()
    _, linear, maps = model.graph.node
    for node, number in ((linear, "classlabels_ints"), (maps, "classlabels_int64s")):
        (old,) = (each for each in node.attribute if each.name == number)
        node.attribute.remove(old)
        node.attribute.append(make.make_attribute("classlabels_strings", WORDS))
    model.graph.output[0].type.tensor_type.elem_type = tensors.STRING
    model.graph.output[1].type.sequence_type.elem_type.map_type.key_type = tensors.STRING
    words = onnx.numpy_helper.from_array(np.array(WORDS, np.object_), "words")
    flat = onnx.numpy_helper.from_array(np.array([-1]), "flat")
    model.graph.initializer.extend([words, flat])
    model.graph.node.extend(
        [
            make.make_node("ArgMax", ["scores"], ["best"], axis=1),
            make.make_node(
                "ArrayFeatureExtractor", ["words", "best"], ["found"], domain="ai.onnx.ml"
            ),
            make.make_node("Cast", ["found"], ["same"], to=tensors.STRING),
            make.make_node("Reshape", ["same", "flat"], ["other"]),
        ]
    )
    model.graph.output.append(make.make_tensor_value_info("other", tensors.STRING, [None]))
    return model


WORDS = ["no", "perhaps", "über"]
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
GRAPHS["sklearn"] = make_sklearn()
GRAPHS["words"] = make_texts()
INT, FLOAT = {"type": "int"}, {"type": "float"}


def original(name: str) -> Any:
    """Return a graph as an `onnx.ModelProto`."""
    made = GRAPHS[name]
    if not isinstance(made, str):
        return made
    model = onnx.parser.parse_model(made)
    if name == "half":  # converters append casts behind the nodes that read them
        model.graph.node.append(model.graph.node.pop(2))
    return model


def write_pipeline(
    base: Path, name: str, inputs: Any, outputs: Any, rows: list[dict[str, Any]], hooks: str = ""
) -> Path:
    """Write a pipeline around a graph of `GRAPHS`, or around `TOWERS`."""
    folder = base / "pipelines" / name
    folder.mkdir(parents=True)
    if name in GRAPHS:
        onnx.save(original(name), folder / "net.onnx")
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
    for name in ("half", "brain", "times", "sklearn", "words", "maps"):
        onnx.save(original(name), base / f"{name}.onnx")
        words = ("new", name, "--model", base / f"{name}.onnx", "--pipelines", base / "pipelines")
        done = run(*words)
        assert done.exit_code == 0, (done.output, done.exception)
    for folder in sorted((base / "pipelines").iterdir()):
        build_own(base, folder.name)
    return base


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[Any]:
    with Server(base / "repository") as server:
        yield server


def run_original(name: str, feed: dict[str, Any]) -> dict[str, Any]:
    """Run the user's file as it is."""
    session = onnxruntime.InferenceSession(original(name).SerializeToString())
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feed), strict=True))


@pytest.mark.server
def test_one_number_per_row_goes_in_and_out(server: Any) -> None:
    days, loads = np.array([7, 1, 3]), np.array([2, -1, 0.5], np.float32)
    wanted = run_original("scalars", {"day": days - 1, "load": loads})
    with Client("scalars", server.grpc_url) as client:
        got = client.infer({"day": days, "load": loads})
        with pytest.raises(Exception, match="`day` must be from -7 to 6"):
            client.infer({"day": [8], "load": [1.0]})
    np.testing.assert_allclose(got["score"].ravel(), wanted["score"], atol=1e-6)
    assert got["kind"].ravel().tolist() == wanted["kind"].tolist() == [4, 0, -1]


@pytest.mark.server
def test_a_forward_takes_and_returns_the_batch_alone(server: Any) -> None:
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


@pytest.mark.server
def test_numbers_of_16_bits_are_computed_in_32(server: Any) -> None:
    x = np.array([[1.5, -2, 0.25], [100, 3, -7]], np.float32)
    wanted = run_original("half", {"x": x.astype(np.float16)})["y"]
    for name in ("half", "brain"):
        with Client(name, server.grpc_url) as client:
            got = client.infer({"x": x})["y"]
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, wanted, name)  # numbers that 16 bits can hold


@pytest.mark.server
def test_a_batch_behind_the_time_comes_first(server: Any) -> None:
    x = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
    wanted = run_original("times", {"x": x.transpose(1, 0, 2)})
    with Client("times", server.grpc_url) as client:
        got = client.infer({"x": x})
    np.testing.assert_allclose(got["sums"], wanted["sums"].transpose(1, 0, 2), atol=1e-6)
    np.testing.assert_allclose(got["last"], wanted["last"], atol=1e-6)


@pytest.mark.server
def test_a_classifier_of_sklearn_returns_labels_and_scores(server: Any) -> None:
    x = np.array([[1, 2], [-3, 0.5], [0, -2]], np.float32)
    for name, labels in (("sklearn", (3, 5, 9)), ("words", WORDS)):
        wanted = run_original(name, {"x": x})
        with Client(name, server.grpc_url) as client:
            got = client.infer({"x": x})
        for output in wanted.keys() - {"probability"}:
            assert got[output].ravel().tolist() == wanted[output].tolist()
        assert len(set(wanted["label"])) > 1
        scores = [[row[label] for label in labels] for row in wanted["probability"]]
        np.testing.assert_allclose(got["probability"], scores, atol=1e-6)


def test_two_free_axes_are_served_in_one_size(base: Path, server: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(2, 16, 16)).astype(np.float32)
    with Client("maps", server.grpc_url) as client:
        np.testing.assert_array_equal(client.infer({"x": x})["y"], np.maximum(x, 0))
    folder = shutil.copytree(base / "pipelines/maps", tmp_path / "pipelines/maps")
    shutil.copy(base / "maps.onnx", tmp_path)
    write_rows(folder, [{"x": [[1.0] * size] * size} for size in (2, 3)])
    check_refused("its axes rows and columns differ between rows", build_own, tmp_path, "maps")


def test_other_texts_are_refused_by_their_operator_and_labels_among_several_models(
    tmp_path: Path,
) -> None:
    text = f"{HEAD} (float[n, 2] x) => (string[n, 2] y) {{ y = Cast<to=8>(x) }}"
    GRAPHS["texts"] = text
    x, outputs = {"x": {**FLOAT, "shape": [2]}}, {"y": {"type": "text", "shape": [2]}}
    write_pipeline(tmp_path, "texts", x, outputs, [{"x": [1.0, 2.0]}])
    check_refused("STRING of the operator Cast", build_own, tmp_path, "texts")
    folder = write_pipeline(tmp_path, "words", x, {"label": {"type": "text"}}, [{"x": [1.0, 2.0]}])
    spec = json.loads((folder / "pipeline.yaml").read_text())
    del spec["model"]
    spec["models"] = {name: {"onnx": "net.onnx"} for name in ("one", "other")}
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    check_refused("texts of the output `label` of one", build_own, tmp_path, "words")


@pytest.mark.build
def test_nodes_are_sorted_beside_outputs_that_are_left_out() -> None:
    """A converter of FP16 appends the casts around an LSTM that has no first output."""
    make, tensors = onnx.helper, onnx.TensorProto
    weights = {"w": np.ones((1, 4, 2), np.float32), "r": np.ones((1, 4, 1), np.float32)}
    steps = make.make_node("LSTM", ["wide", "w", "r", "", ""], ["", "last"], hidden_size=1)
    graph = make.make_graph(
        [
            steps,
            make.make_node("Relu", ["cast"], ["y"]),
            make.make_node("Cast", ["x"], ["wide"], to=tensors.FLOAT),
            make.make_node("Cast", ["last"], ["cast"], to=tensors.FLOAT),
        ],
        "lstm",
        [make.make_tensor_value_info("x", tensors.FLOAT16, [5, "batch", 2])],
        [make.make_tensor_value_info("y", tensors.FLOAT, [1, "batch", 1])],
        [onnx.numpy_helper.from_array(each, name) for name, each in weights.items()],
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 18)], ir_version=9)
    assert to_served(model)
    onnx.checker.check_model(model)


@pytest.mark.build
def test_two_meanings_of_a_shape_are_refused(tmp_path: Path) -> None:
    folder = write_towers(tmp_path, "towers")
    text = TOWERS.replace(".sum(1)", ".softmax(1).amax(-1)")  # of [batch, 1], all are 1
    (folder / "net.py").write_text(text)
    check_refused("Add `scalars: [user, item]` to `model`", build_own, tmp_path, "towers")
