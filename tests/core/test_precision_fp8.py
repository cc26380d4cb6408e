"""fp8: what is quantized, exactly how, and how right the results are."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

import precision_cases as cases
from precision_cases import node
from triptych.base.onnx_graph import OPSET
from triptych.core.precision.linear import Recipe
from triptych.core.precision.quantize import MAX_FP8, convert_fp8

pytestmark = pytest.mark.build

FP8 = onnx.TensorProto.FLOAT8E4M3FN
RECIPE = Recipe("fp8")


@pytest.fixture(scope="module", params=["packed", "bucketed"])
def exported(request: Any) -> cases.Exported:
    return cases.export("bert", "embedding", request.param)


def operators(path: Path) -> list[str]:
    return [one.op_type for one in onnx.load(path).graph.node]


def as_fp8(values: Any, largest: float) -> Any:
    scale = np.float32(largest / MAX_FP8)
    cut = np.clip(np.asarray(values) / scale, -MAX_FP8, MAX_FP8)
    return cut.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def test_both_layouts_are_quantized_and_right(exported: cases.Exported, tmp_path: Path) -> None:
    feeds = exported.feeds()
    done = convert_fp8(exported.path, tmp_path / "one", RECIPE, feeds)
    path = tmp_path / "one/model.onnx"
    onnx.checker.check_model(path, full_check=True)
    assert cases.declared(path) == cases.declared(exported.path)
    assert onnx.load(path).opset_import[0].version == OPSET
    layers = 2 * 6
    assert len(done.layers) == 2 * 4  # query, key and value read one value: they are a group
    assert not done.excluded_layers
    assert list(done.ranges) == list(done.layers)
    found = operators(path)
    assert found.count("QuantizeLinear") == len(done.layers)
    assert found.count("DequantizeLinear") == len(done.layers) + layers
    kinds = cases.stored(path)
    assert sum(kind == FP8 and not name.endswith("/zero") for name, kind in kinds.items()) == layers
    assert path.stat().st_size < exported.path.stat().st_size
    row, loud = [7, 8, 9, 4], [*range(40, 80)]
    feed = exported.feed([row, *[[*range(10, 30), 4]] * 2])
    vectors, wanted = cases.run(path, feed)[0], cases.run(exported.path, feed)[0]
    assert vectors.dtype == np.float32
    assert 1e-4 < cases.relative_error(vectors, wanted) < 0.1
    alone = cases.run(path, exported.feed([row]))[0][0]
    among = cases.run(path, exported.feed([row, loud, loud, loud]))[0][0]
    # Sums in another order may fall to the other side of a rounding, 1/16 of one number.
    assert cases.relative_error(among, alone) < 0.01
    convert_fp8(exported.path, tmp_path / "two", RECIPE, feeds)
    assert path.read_bytes() == (tmp_path / "two/model.onnx").read_bytes()
    assert str(tmp_path).encode() not in path.read_bytes()
    kept = (done.layers[0], done.layers[3])
    some = convert_fp8(exported.path, tmp_path / "some", Recipe("fp8", kept=kept), feeds)
    assert (some.excluded_layers, some.layers) == (kept, done.layers)
    after = operators(tmp_path / "some/model.onnx")
    assert found.count("QuantizeLinear") - after.count("QuantizeLinear") == 2
    assert found.count("DequantizeLinear") - after.count("DequantizeLinear") == 2 + 3 + 1
    convert_fp8(exported.path, tmp_path / "none", Recipe("fp8", kept=done.layers), feeds)
    assert np.array_equal(cases.run(tmp_path / "none/model.onnx", feed)[0], wanted)


@pytest.mark.parametrize("operator", ["MatMul", "Gemm"])
def test_numbers_are_those_of_fp8(tmp_path: Path, operator: str) -> None:
    weight = cases.matrix(1, 32, 48)
    if operator == "Gemm":
        one = node("Gemm", "x w", "y", transB=1)
        constants = {"w": np.ascontiguousarray(weight.T)}
    else:
        one, constants = node("MatMul", "x w", "y"), {"w": weight}
    # Read by a node first: the range of an input of the graph is that of what it becomes.
    nodes = [node("Mul", "x unit", "kept"), one]
    one.input[0] = "kept"
    source = cases.write_graph(
        tmp_path, nodes, {"unit": np.ones(1, dtype=np.float32), **constants}, outputs=48
    )
    x = cases.vectors(rows=20)
    convert_fp8(source, tmp_path / "out", RECIPE, [{"x": x}])
    largest = float(np.abs(x).max())
    wanted = as_fp8(x, largest) @ as_fp8(weight, float(np.abs(weight).max()))
    found = cases.run(tmp_path / "out/model.onnx", {"x": x})[0]
    assert np.abs(found - wanted).max() < 1e-5
    assert 0.005 < cases.relative_error(found, x @ weight) < 0.06
    # Beyond what calibration saw a value is cut off, not lost: E4M3 has no infinity, but NaN.
    loud = cases.run(tmp_path / "out/model.onnx", {"x": 100 * x})[0]
    cut = as_fp8(100 * x, largest) @ as_fp8(weight, float(np.abs(weight).max()))
    assert np.abs(loud - cut).max() < 1e-5 * np.abs(cut).max()


def test_an_input_of_the_graph_is_calibrated_and_a_relu_runs(tmp_path: Path) -> None:
    source = cases.two_layers(tmp_path)
    x = cases.vectors()
    done = convert_fp8(source, tmp_path / "out", RECIPE, [{"x": x[:3]}, {"x": x[3:]}])
    assert done.ranges[done.layers[0]] == pytest.approx(np.abs(x).max())
    found = cases.run(tmp_path / "out/model.onnx", {"x": x})[0]
    assert cases.relative_error(found, cases.run(source, {"x": x})[0]) < 0.1


def test_a_layer_that_only_ever_read_zeros_stays_finite(tmp_path: Path) -> None:
    zeros, x = np.zeros((3, 32), dtype=np.float32), cases.vectors()
    source = cases.two_layers(tmp_path)
    convert_fp8(source, tmp_path / "out", RECIPE, [{"x": zeros}])
    assert np.isfinite(cases.run(tmp_path / "out/model.onnx", {"x": x})[0]).all()
    silent = cases.two_layers(tmp_path / "silent", first=np.zeros((32, 32), dtype=np.float32))
    convert_fp8(silent, tmp_path / "out", RECIPE, [{"x": x}])
    assert (cases.run(tmp_path / "out/model.onnx", {"x": x})[0] == 0).all()


def test_a_weight_used_twice_is_stored_once(tmp_path: Path) -> None:
    middle = [node("MatMul", "a first", "c"), node("Relu", "c", "b")]
    source, x = cases.two_layers(tmp_path, *middle), cases.vectors()
    convert_fp8(source, tmp_path / "out", RECIPE, [{"x": x}])
    kinds = cases.stored(tmp_path / "out/model.onnx")
    assert kinds["first/fp8"] == FP8
    assert "first" not in kinds
    found = cases.run(tmp_path / "out/model.onnx", {"x": x})[0]
    assert cases.relative_error(found, cases.run(source, {"x": x})[0]) < 0.15
