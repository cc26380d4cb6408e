"""Lower precision of every task's core, of odd graphs, and of models beside their weights."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

import precision_cases as cases
from conftest import quiet, traffic_texts
from task_conversions import CONVERT, traffic_of
from task_models import MODELS
from triptych.base import onnx_graph as export
from triptych.base.errors import UserError
from triptych.base.onnx_graph import open_session
from triptych.building.build import BuildOutcome, build
from triptych.core.inputs import read_inputs
from triptych.core.precision.calibrate import MAX_VECTORS, capture, quiet_options
from triptych.core.precision.linear import Recipe, find_groups
from triptych.spec.backends import Precision
from triptych.spec.spec import load_spec

pytestmark = pytest.mark.build

QUANTIZED: tuple[Precision, ...] = ("int8", "int8_dynamic", "fp8")
BUILDS = (
    ("topics", "packed", "int8"),
    ("masks", "packed", "int8_dynamic"),
    ("images", "", "int8"),
    pytest.param("tags", "bucketed", "int8", marks=pytest.mark.long),
    pytest.param("answers", "packed", "int8", marks=pytest.mark.long),
    pytest.param("ranks", "bucketed", "int8", marks=pytest.mark.long),
    pytest.param("hypotheses", "packed", "int8", marks=pytest.mark.long),
)
"""Each task once: pipeline of `MODELS`, layout, precision. Their search of layers is long."""
BIAS = cases.vectors(1)[0]
CONSTANTS: dict[str, Any] = {
    "first": cases.matrix(1),
    "last": cases.matrix(2),
    "first_of_three_axes": cases.matrix(1)[None],
    "narrow": cases.matrix(3, cases.WIDTH, 4),
    "widen": cases.matrix(4, 4, cases.WIDTH),
    "bias": BIAS,
    "bias_of_two_axes": BIAS[None],
    "axis": np.array([0]),
    "place": np.array(3),
    "ones": np.ones(1, np.float32),
    "zero": np.float32(0),
    "NAME": np.float32(2),
}
"""The constants of `ODD`."""
CLASH = (2, "a = MatMul(x, first) b = Mul(a, NAME) y = MatMul(b, last)")
ODD: dict[str, tuple[int, str]] = {
    "one weight, two layers": (2, "a = MatMul(x, first) b = Relu(a) y = MatMul(b, first)"),
    "one weight, once transposed": (
        2,
        "a = MatMul(x, first) b = Relu(a) y = Gemm <transB = 1> (b, first)",
    ),
    "a head tied by a Transpose": (
        1,
        "a = MatMul(x, first) turned = Transpose <perm = [1, 0]> (first) y = MatMul(a, turned)",
    ),
    "a weight that is looked up as well": (
        1,
        "a = MatMul(x, first) row = Gather(first, place) y = Add(a, row)",
    ),
    "a weight of three axes": (
        1,
        "a = MatMul(x, first_of_three_axes) b = Squeeze(a, axis) y = MatMul(b, last)",
    ),
    "a bias that is computed": (
        1,
        "positive = Relu(bias) a = Gemm(x, first, positive) y = MatMul(a, last)",
    ),
    "a bias of one number": (1, "a = MatMul(x, first) y = Add(a, ones)"),
    "a bias of two axes": (1, "y = Gemm(x, first, bias_of_two_axes)"),
    "a bias left empty": (1, "y = Gemm(x, first, NOTHING)"),
    "a product added to itself": (1, "a = MatMul(x, first) y = Add(a, a)"),
    "a bias added after another layer": (
        2,
        "a = MatMul(x, first) b = Relu(x) c = MatMul(b, last) d = Add(a, bias) y = Add(c, d)",
    ),
    "an input that a later layer shares": (
        2,
        "a = MatMul(x, first) b = Relu(a) c = MatMul(x, last) y = Add(b, c)",
    ),
    "a weight on the left": (
        1,
        "turned = Transpose <perm = [1, 0]> (x) a = MatMul(first, turned)"
        " b = Transpose <perm = [1, 0]> (a) y = MatMul(b, last)",
    ),
    "a layer too small to gain": (
        1,
        "a = MatMul(x, narrow) b = MatMul(a, widen) y = MatMul(b, last)",
    ),
    "bodies that read a product and a layer's weight": (
        1,
        """a = MatMul(x, first) b = Add(a, bias) sum = ReduceSum <keepdims = 0> (x)
        above = Greater(sum, zero)
        d = If (above) <
            then_branch = then () => (float[n, m] then) {
                again = MatMul(x, first) then = Add(again, a)
            },
            else_branch = else () => (float[n, m] else) { else = Identity(a) }>
        y = Add(b, d)""",
    ),
    **{f"a constant named {name}": CLASH for name in ("x/scale", "int8/zero", "a//fp8")},
}
"""By what is odd about a graph from ``x`` to ``y``: number of layers to quantize, and its nodes."""


def write_odd(folder: Path, name: str) -> Path:
    """Write a graph of `ODD`."""
    graph = parser.parse_graph(f"odd (float x) => (float y) {{ {ODD[name][1]} }}")
    bodies = [attribute.g for node in graph.node for attribute in node.attribute]
    read = {key for part in (graph, *bodies) for node in part.node for key in node.input}
    used = {key: CONSTANTS[key] for key in CONSTANTS if key in read}
    for node in graph.node:
        node.name = f"make_{node.output[0]}"
        if "NAME" in node.input:  # looks like one that the converters make
            node.input[1] = name.removeprefix("a constant named ")
            used[node.input[1]] = used.pop("NAME")
        if node.input[-1] == "NOTHING":
            node.input[-1] = ""
    return cases.write_graph(folder, graph.node, used)


def built(folder: Path, model: Path, task: str, layout: str, precision: Precision) -> BuildOutcome:
    """The pipeline, whatever its gate says: of random weights it may say anything."""
    folder.mkdir()
    spec: dict[str, Any] = {"task": task, "model": {"source": str(model)}}
    spec["core"] = {"precision": precision, **({"layout": layout} if layout else {})}
    if task == "zero-shot-classification":
        spec["parameters"] = {"candidate_labels": ["billing", "a delivery"]}
    (folder / "pipeline.yaml").write_text(json.dumps(spec), encoding="utf-8")
    lines = map(json.dumps, traffic_of(task, folder))
    (folder / "traffic.jsonl").write_text("\n".join(lines), encoding="utf-8")
    inputs = read_inputs(load_spec(folder), quiet)
    return build(inputs, folder.parent / "repository", quiet, accept="random weights")


@pytest.mark.parametrize(("name", "layout", "precision"), BUILDS)
def test_every_task_is_built(
    name: str, layout: str, precision: Precision, tmp_path: Path, minilm_folder: Path
) -> None:
    task, make = MODELS[name]
    model = make(tmp_path / "model", minilm_folder, traffic_texts())
    gate = built(tmp_path / name, model, task, layout, precision).gate.as_dict()
    assert gate["precision"] == precision
    assert gate["finite"]
    assert ("accepted" in gate) == bool(gate["failures"])
    values = {verdict["metric"]: verdict["value"] for verdict in gate["verdicts"]}
    assert values["batch_sensitivity"] < 0.02
    if "probe" in gate:
        assert gate["probe"]["rows"] >= 350
        values |= {verdict["metric"]: verdict["value"] for verdict in gate["probe"]["verdicts"]}
    else:
        assert any("the general probe contains no images" in note for note in gate["notes"])
    assert ("probe" in gate) == (name != "images")
    for failure in gate["failures"]:
        metric, _, rest = failure.removeprefix("outside your traffic: ").partition(" is ")
        assert metric in values, failure
        assert ", below " in rest or ", above " in rest, failure
    conversion = gate["conversion"]
    assert len(conversion["layers"]) >= 8
    assert set(conversion["excluded_layers"]) < set(conversion["layers"])
    core = tmp_path / f"repository/{name}_core/1/model.onnx"
    kinds = Counter(node.op_type for node in onnx.load(core).graph.node)
    assert kinds["QuantizeLinear"] == len(conversion["layers"]) - len(conversion["excluded_layers"])


@pytest.mark.parametrize("precision", QUANTIZED)
@pytest.mark.parametrize("name", ODD)
def test_odd_graphs_stay_right(name: str, precision: Precision, tmp_path: Path) -> None:
    path = write_odd(tmp_path, name)
    feeds = [{"x": row[None]} for row in cases.vectors(64)]
    CONVERT[precision](path, tmp_path / "out", Recipe(precision), feeds)
    products = [
        node
        for node in onnx.load(tmp_path / "out/model.onnx").graph.node
        if node.op_type in ("MatMul", "Gemm") and "weight" in node.input[1]
    ]
    assert len(products) == ODD[name][0]
    feed = {"x": cases.vectors(5, seed=9)}
    found, wanted = (cases.run(p, feed)[0] for p in (tmp_path / "out/model.onnx", path))
    assert 0 < cases.relative_error(found, wanted) < (0.08 if precision == "fp8" else 0.03)


@pytest.mark.parametrize("precision", CONVERT)
def test_a_layer_to_keep_that_does_not_exist_is_refused(
    precision: Precision, tmp_path: Path
) -> None:
    path = cases.two_layers(tmp_path)
    recipe = Recipe(precision, kept=("make_a", "make_q"))
    with pytest.raises(UserError, match=r"Given: make_q\. .*such as make_"):
        CONVERT[precision](path, tmp_path / "out", recipe, [{"x": cases.vectors(8)}])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("precision", QUANTIZED)
def test_what_cannot_be_quantized_says_what_to_do(precision: Precision, tmp_path: Path) -> None:
    convert, recipe, out = CONVERT[precision], Recipe(precision), tmp_path / "out"
    with pytest.raises(UserError, match=rf"left to calibrate {precision} .*Add real requests"):
        convert(cases.two_layers(tmp_path), out, recipe, [])
    path = cases.write_graph(tmp_path / "none", [cases.node("Relu", "x", "y")], {})
    with pytest.raises(UserError, match=rf"is not supported for this model. Given: {precision}"):
        convert(path, out, recipe, [{"x": cases.vectors(8)}])
    assert not out.exists()


@pytest.mark.parametrize("precision", CONVERT)
def test_large_models_have_their_weights_beside_them(
    precision: Precision,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = cases.two_layers(tmp_path / "small")
    monkeypatch.setattr(export, "MAX_PROTOBUF", 1000)
    export.save_onnx(onnx.load(path), tmp_path / "model.onnx")
    feeds = [{"x": row[None]} for row in cases.vectors(64)]
    for source, out in ((path, "one"), (tmp_path / "model.onnx", "two")):
        CONVERT[precision](source, tmp_path / out, Recipe(precision), feeds)
        assert {file.name for file in (tmp_path / out).iterdir()} == {
            "model.onnx",
            "model.onnx.data",
        }
    feed = {"x": cases.vectors(5, seed=9)}
    wanted, one, two = (
        cases.run(file, feed)[0]
        for file in (path, tmp_path / "one/model.onnx", tmp_path / "two/model.onnx")
    )
    assert np.array_equal(one, two)
    assert cases.relative_error(one, wanted) < 0.08
    assert "already exists" not in capfd.readouterr().err


def test_sessions_may_share_their_options(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = cases.two_layers(tmp_path)
    options = quiet_options()
    for _ in range(2):
        open_session(path, options)
    assert capfd.readouterr().err == ""


def test_capture_keeps_some_vectors_and_the_extremes_of_all(tmp_path: Path) -> None:
    path = cases.two_layers(tmp_path)
    rows = cases.vectors(3 * MAX_VECTORS).reshape(6, -1, cases.WIDTH)
    seen = capture(onnx.load(path), ["x", "b"], [{"x": row} for row in rows])
    every = rows.reshape(-1, cases.WIDTH)
    for name, values in (("x", every), ("b", np.maximum(every @ cases.matrix(1), 0))):
        assert MAX_VECTORS * 0.9 < len(seen[name].vectors) <= MAX_VECTORS
        assert np.allclose(seen[name].low, values.min(0), atol=1e-5)
        assert np.allclose(seen[name].high, values.max(0), atol=1e-5)
    assert np.array_equal(seen["x"].vectors[0], every[0])


def test_layers_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    nodes = [cases.node("MatMul", "x first", "a"), cases.node("MatMul", "a last", "y")]
    for one in nodes:
        one.name = "layer"
    path = cases.write_graph(tmp_path, nodes, {"first": cases.matrix(1), "last": cases.matrix(2)})
    assert [group.name for group in find_groups(onnx.load(path).graph)] == ["layer", "layer'"]
