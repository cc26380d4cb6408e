"""Lower precision of cores and builds: results stay right; the layers that hurt most are kept."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import parser

from tests.support import precision_cases as cases
from tests.support.builds import build
from tests.support.precision_cases import CLOSE, CONVERT, HALVES, QUANTIZED
from tests.support.project import build_into, lock_data, quiet, write_pipeline
from tests.support.task_pipelines import write_task
from triptych.base import onnx_graph as export
from triptych.base.errors import UserError
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.precision import float16, layer_exclusion
from triptych.core.precision.calibrate import MAX_VECTORS, capture
from triptych.core.precision.layer_exclusion import ConvertedCore, convert_with_exclusions
from triptych.core.precision.linear import Recipe, find_groups
from triptych.core.precision.quantize import MAX_FP8
from triptych.repository.records import Conversion, GateResult
from triptych.spec.backends import Precision
from triptych.spec.spec import load_spec

pytestmark = pytest.mark.build

KIND: dict[str, int] = {"fp16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}
KIND |= {"fp8": onnx.TensorProto.FLOAT8E4M3FN}
KIND |= dict.fromkeys(("int8", "int8_dynamic"), onnx.TensorProto.INT8)
"""Types of the weights in a converted graph."""
EXPORTED = (
    ("bert", "embedding", "packed"),
    ("bert", "embedding", "bucketed"),
    ("mpnet", "embedding", "bucketed"),
    ("deberta-v3", "spans", "bucketed"),
    ("modernbert", "scores", "packed"),
    ("roberta", "logits", "bucketed"),
)
CONVERTED = [
    *((case, precision) for case in EXPORTED[:2] for precision in CONVERT),
    *((case, precision) for case in EXPORTED[2:] for precision in HALVES),
]


def named(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else "-".join(value)


@pytest.mark.parametrize(("case", "precision"), CONVERTED, ids=named)
def test_an_exported_core_stays_right(
    case: tuple[str, str, str], precision: Precision, tmp_path: Path
) -> None:
    exported, convert = cases.export(*case), CONVERT[precision]
    feeds = exported.feeds()
    done = convert(exported.path, tmp_path / "one", Recipe(precision), feeds)
    path = tmp_path / "one/model.onnx"
    onnx.checker.check_model(path, full_check=True)
    assert cases.declared(path) == cases.declared(exported.path)
    rows = [[7, 8, 9, 4], *[[*range(10, 30), 4]] * 2]
    wanted, found = (cases.run(file, exported.feed(rows)) for file in (exported.path, path))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        inside = np.abs(other) < 1e4  # pads may hold what a mask put there
        assert np.isfinite(one[inside]).all()
        assert 0 < cases.relative_error(one[inside], other[inside]) < CLOSE[precision]
    if case[1] == "embedding":  # a value within rounding of the middle of two may fall either way
        alone = cases.run(path, exported.feed(rows[:1]))[0]
        assert cases.relative_error(found[0][:1], alone) < 0.01
    groups = find_groups(onnx.load(exported.path).graph)
    lower = [name for name, kind in cases.stored(path).items() if kind == KIND[precision]]
    lower = [name for name in lower if not name.endswith("zero")]
    assert len(lower) >= sum(len(group.layers) for group in groups)
    assert done.layers
    check = check_halved if precision in HALVES else check_quantized
    check(exported, path, done)
    # The same rows give the same file, which tells nothing of this machine.
    convert(exported.path, tmp_path / "two", Recipe(precision), feeds)
    content = path.read_bytes()
    assert content == (tmp_path / "two/model.onnx").read_bytes()
    assert str(tmp_path).encode() not in content
    assert b".py" not in content
    some = convert(exported.path, tmp_path / "some", Recipe(precision, kept=done.layers[:2]), feeds)
    assert set(some.excluded_layers) == {*done.excluded_layers, *done.layers[:2]}
    assert (some.layers, some.reasons) == (done.layers, done.reasons)
    before, after = cases.stored(path), cases.stored(tmp_path / "some/model.onnx")
    changed = [name for name, kind in after.items() if kind == 1 and before.get(name) != 1]
    assert 2 <= len(changed) <= 10
    onnx.checker.check_model(tmp_path / "some/model.onnx", full_check=True)
    if precision in QUANTIZED:
        convert(exported.path, tmp_path / "none", Recipe(precision, kept=done.layers), feeds)
        assert np.array_equal(
            cases.run(tmp_path / "none/model.onnx", exported.feed(rows))[0], wanted[0]
        )


def check_halved(exported: cases.Exported, path: Path, done: Conversion) -> None:
    """Angles of rotary positions, buckets of relative ones, pooling, the last probabilities."""
    graph = onnx.load(exported.path).graph
    assert set(done.excluded_layers) == set(done.reasons)
    results = {output.name for output in graph.output}
    for one in graph.node:
        if one.op_type in {"Cos", "Sin", "Log", "Ceil"}:
            assert done.reasons[one.name] == float16.PLACES
        if one.output[0] in results:
            last = one.op_type in ("MatMul", "Gemm")
            assert last or done.reasons[one.name] == float16.RESULT
    norms = [one.name for one in graph.node if one.op_type in ("LayerNormalization", "Softmax")]
    assert sum(name not in done.reasons for name in norms) >= len(norms) // 2


def check_quantized(exported: cases.Exported, path: Path, done: Conversion) -> None:
    """Each group of layers that share an input has one scale for it."""
    groups = find_groups(onnx.load(exported.path).graph)
    assert len(groups[0].layers) == 3  # query, key, value
    assert all(len({layer.input for layer in group.layers}) == 1 for group in groups)
    assert done.layers == tuple(group.name for group in groups)
    assert not done.excluded_layers
    assert set(done.ranges) == set(done.layers)
    kinds = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert kinds["QuantizeLinear"] == len(done.layers)


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
    "a bias beside a transposed weight": (1, "y = Gemm <transB = 1> (x, first, bias)"),
    "a product that is read beside its bias": (
        1,
        "a = MatMul(x, first) b = Add(a, bias) y = Add(a, b)",
    ),
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


@pytest.mark.parametrize(("name", "layout", "precision"), BUILDS)
def test_every_task_is_built(
    name: str, layout: str, precision: Precision, tmp_path: Path, minilm_folder: Path
) -> None:
    core = {"precision": precision, **({"layout": layout} if layout else {})}
    inputs = read_inputs(load_spec(write_task(tmp_path, name, minilm_folder, core=core)), quiet)
    # Of random weights a gate may say anything.
    outcome = build(inputs, tmp_path / "repository", quiet, accept="random weights")
    gate = outcome.gate.as_dict()
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
    file = tmp_path / f"repository/{name}_core/1/model.onnx"
    kinds = Counter(node.op_type for node in onnx.load(file).graph.node)
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


@pytest.mark.parametrize("precision", QUANTIZED)
def test_zeros_and_vectors_beyond_calibration_stay_numbers(
    precision: Precision, tmp_path: Path
) -> None:
    zeros, loud = np.zeros((1, 32), np.float32), np.full((1, 32), 1e6, np.float32)
    path, out = cases.two_layers(tmp_path), tmp_path / "out/model.onnx"
    for calibrated in (cases.vectors(20), zeros):
        feeds = [{"x": row[None]} for row in calibrated]
        CONVERT[precision](path, out.parent, Recipe(precision), feeds)
        for x in (loud, -loud):
            assert np.isfinite(cases.run(out, {"x": x})[0]).all()
    assert not cases.run(out, {"x": zeros})[0].any()  # as calibrated
    silent = cases.two_layers(tmp_path / "silent", first=np.zeros((32, 32), np.float32))
    CONVERT[precision](silent, out.parent, Recipe(precision), [{"x": cases.vectors()}])
    assert not cases.run(out, {"x": cases.vectors()})[0].any()


def as_fp8(values: Any, largest: float) -> Any:
    """The numbers of E4M3 that are closest, on the scale of the largest one."""
    scale = np.float32(largest / MAX_FP8)
    cut = np.clip(np.asarray(values) / scale, -MAX_FP8, MAX_FP8)
    return cut.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


@pytest.mark.parametrize("operator", ["MatMul", "Gemm"])
def test_numbers_are_those_of_fp8(tmp_path: Path, operator: str) -> None:
    weight, largest_weight = cases.matrix(1, 32, 48), float(np.abs(cases.matrix(1, 32, 48)).max())
    # Read by a node first: the range of an input of the graph is that of what it becomes.
    nodes = [cases.node("Mul", "x unit", "kept"), cases.node("MatMul", "kept w", "y")]
    constants = {"unit": np.ones(1, dtype=np.float32), "w": weight}
    if operator == "Gemm":
        nodes[1] = cases.node("Gemm", "kept w", "y", transB=1)
        constants["w"] = np.ascontiguousarray(weight.T)
    source, x = cases.write_graph(tmp_path, nodes, constants, outputs=48), cases.vectors(rows=20)
    feeds = [{"x": x[:8]}, {"x": x[8:]}]
    done = CONVERT["fp8"](source, tmp_path / "out", Recipe("fp8"), feeds)
    largest = float(np.abs(x).max())
    assert done.ranges[done.layers[0]] == pytest.approx(largest)
    found = cases.run(tmp_path / "out/model.onnx", {"x": x})[0]
    assert np.abs(found - as_fp8(x, largest) @ as_fp8(weight, largest_weight)).max() < 1e-5
    assert 0.005 < cases.relative_error(found, x @ weight) < 0.06
    # Beyond what calibration saw a value is cut off, not lost: E4M3 has no infinity, but NaN.
    loud = cases.run(tmp_path / "out/model.onnx", {"x": 100 * x})[0]
    cut = as_fp8(100 * x, largest) @ as_fp8(weight, largest_weight)
    assert np.abs(loud - cut).max() < 1e-5 * np.abs(cut).max()
    assert onnx.load(tmp_path / "out/model.onnx").opset_import[0].version == export.OPSET


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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    return write_pipeline(folder, model={"source": str(tiny_model)})


@pytest.fixture(scope="module")
def fp32(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[PipelineInputs, Path, str]:
    """The tiny pipeline, its fp32 core and that core's key."""
    repository = tmp_path_factory.mktemp("fp32")
    build_into(tiny, repository)
    lock = lock_data(repository, "tiny")
    return (
        read_inputs(load_spec(tiny), quiet),
        repository / "tiny_core/1/model.onnx",
        lock["core_key"],
    )


class Gate:
    """A gate that passes as soon as enough layers are kept: how many, the file tells by its size.

    It stands in for the real one, whose verdict on a random model is an accident.
    """

    precision: Precision = "int8"
    judged_by = ""

    def __init__(self, *, passes_at: int) -> None:
        self.passes_at = passes_at
        self.judged: list[Mapping[str, str]] = []

    def run(self, artifact: Path, files: Mapping[str, str]) -> GateResult:
        import onnx

        self.judged.append(files)
        kinds = [node.op_type for node in onnx.load(artifact).graph.node]
        kept = LAYERS - kinds.count("QuantizeLinear")
        failures = () if kept >= self.passes_at else (f"only {kept} layers kept",)
        return GateResult("int8", 1, 0, True, (), failures)


LAYERS = 8  # two transformer layers: q/k/v, attention output, two of the feed-forward


def lowered_by(fp32: tuple[PipelineInputs, Path, str], gate: Gate, *, mark: str) -> ConvertedCore:
    inputs, file, key = fp32
    gate.judged_by = mark
    return convert_with_exclusions(inputs, file, key, gate, quiet)


def test_the_layers_that_hurt_most_are_kept(fp32: Any, tmp_path: Path) -> None:
    gate = Gate(passes_at=0)
    lowered = lowered_by(fp32, gate, mark=f"{tmp_path} passes")
    assert lowered.conversion.excluded_layers == ()
    assert len(lowered.conversion.layers) == LAYERS
    assert len(gate.judged) == 1
    assert not lowered.conversion.layer_errors
    gate = Gate(passes_at=3)
    lowered = lowered_by(fp32, gate, mark=str(tmp_path))
    layer_errors = lowered.conversion.layer_errors
    assert set(lowered.conversion.excluded_layers) == set(
        sorted(layer_errors, key=lambda n: -layer_errors[n])[:3]
    )
    assert lowered.gate.passed
    assert len(gate.judged) == 4  # 0, 1, 2 and 3 layers
    times = lowered.conversion.batch_ms
    assert set(times) == {"fp32", "nothing kept", "as kept"}
    assert all(time > 0 for time in times.values())
    # What was found is not looked for again, only judged before it ships.
    again = Gate(passes_at=3)
    assert lowered_by(fp32, again, mark=str(tmp_path)) == lowered
    assert len(again.judged) == 1


def test_neighbors_among_many_layers_are_ranked_and_kept_together(
    fp32: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_exclusion, "MAX_RANKED", 3)
    gate = Gate(passes_at=2)
    found = lowered_by(fp32, gate, mark=str(tmp_path)).conversion
    groups = [found.layers[:3], found.layers[3:6], found.layers[6:]]
    assert [len({found.layer_errors[name] for name in group}) for group in groups] == [1, 1, 1]
    assert found.excluded_layers == max(groups, key=lambda group: found.layer_errors[group[0]])
    assert len(gate.judged) == 2


def test_where_nothing_passes_the_last_try_is_told_and_forgotten(fp32: Any, tmp_path: Path) -> None:
    gate = Gate(passes_at=LAYERS)
    lowered = lowered_by(fp32, gate, mark=str(tmp_path))
    assert lowered.gate.failures == ("only 4 layers kept",)  # at most half of them
    assert set(lowered.conversion.layer_errors) == set(lowered.conversion.layers)
    again = Gate(passes_at=LAYERS)
    lowered_by(fp32, again, mark=str(tmp_path))
    assert len(again.judged) == len(gate.judged) > 1


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_minilm_passes_in_lower_precision(tmp_path: Path, precision: str) -> None:
    folder = write_pipeline(tmp_path / "minilm", core={"precision": precision})
    built = build_into(folder, tmp_path / "repository")
    lock = lock_data(tmp_path / "repository", "minilm")
    gate = built.gate.without_texts().as_dict()
    assert lock["gate"] == json.loads(json.dumps(gate))
    assert gate["precision"] == precision
    assert gate["failures"] == []
    assert len(gate["conversion"]["layers"]) == 24
    layer_errors = gate["conversion"].get("layer_errors", {})
    assert (precision == "int8") >= bool(layer_errors)  # fp16 needs no search
    assert (
        len([name for name in gate["conversion"]["excluded_layers"] if name in layer_errors]) <= 12
    )
    found = {verdict["metric"]: verdict["value"] for verdict in gate["verdicts"]}
    assert found["mean_cosine"] >= 0.998
    assert found["nearest_neighbor_agreement"] >= 0.97
    assert lock["core_key"] != lock["source_key"]
    assert build_into(folder, tmp_path / "repository").changed == ()


def test_what_would_not_run_is_refused_before_any_work(tiny: Path, tmp_path: Path) -> None:
    told: list[str] = []
    for precision in ("bf16", "fp8"):
        inputs = read_inputs(load_spec(tiny, [f"core.precision={precision}"]), quiet)
        with pytest.raises(UserError, match="is not supported by onnxruntime"):
            build(inputs, tmp_path / "repository", lambda stage, line: told.append(stage))
    assert told == []
    assert not (tmp_path / "repository").exists()


def test_a_shared_core_brings_its_precision(tmp_path: Path, tiny_model: Path) -> None:
    """fp16 of a random model passes: its limits are those of rounding alone."""
    source, repository = {"source": str(tiny_model)}, tmp_path / "repository"
    first = write_pipeline(tmp_path / "owner", model=source)
    second = write_pipeline(tmp_path / "sharer", model=source, core={"shared_from": "owner"})
    lines = (second / "traffic.jsonl").read_text(encoding="utf-8").splitlines()
    (second / "traffic.jsonl").write_text("\n".join(lines[:60]), encoding="utf-8")
    build_into(first, repository, "core.precision=fp16")
    built = build_into(second, repository)
    assert built.gate.precision == "fp16"
    owner, sharer = (lock_data(repository, name) for name in ("owner", "sharer"))
    assert owner["core_key"] == sharer["core_key"]
    assert built.gate.rows < owner["gate"]["rows"]  # judged on its own traffic
    with pytest.raises(UserError, match="differs from that of the shared core, fp16"):
        build_into(second, repository, "core.precision=int8")
