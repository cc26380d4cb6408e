"""fp16 and bf16: what is converted, what stays fp32, and how right the results are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import precision_cases as cases
from precision_cases import CLOSE, HALVES, node
from triptych.core.precision import float16
from triptych.core.precision.calibrate import model_ranges
from triptych.core.precision.float16 import convert
from triptych.core.precision.linear import Recipe
from triptych.repository.records import Conversion, plain_record, read_record
from triptych.spec.backends import Precision

pytestmark = pytest.mark.build

FP16 = onnx.TensorProto.FLOAT16


def constant(number: float) -> Any:
    return np.array(number, dtype=np.float32)


def test_what_overflows_fp16_is_found_on_rows_and_kept(tmp_path: Path) -> None:
    # Two factors that fp16 has: only rows show that their product leaves it.
    steps = [("a", "up", "c"), ("c", "up", "big"), ("big", "down", "d"), ("d", "down", "b")]
    middle = [node("Mul", f"{value} {factor}", result) for value, factor, result in steps]
    source = cases.two_layers(tmp_path, *middle, up=constant(1000.0), down=constant(0.001))
    x = cases.vectors()
    wanted = cases.run(source, {"x": x})[0]
    blind = convert(source, tmp_path / "blind", Recipe("fp16"), ())
    assert not np.isfinite(cases.run(tmp_path / "blind/model.onnx", {"x": x})[0]).all()
    assert "make_big" not in blind.reasons
    assert blind.notes
    done = convert(source, tmp_path / "seen", Recipe("fp16"), [{"x": x[:3]}])
    assert "big reaches" in done.reasons["make_big"]
    assert "big reaches" in done.reasons["make_d"]
    assert "make_a" not in done.reasons
    assert done.ranges["big"] > 65504
    for run in (cases.run, cases.run_plainly):  # nothing between the two is rounded to fp16
        found = run(tmp_path / "seen/model.onnx", {"x": x})[0]
        assert cases.relative_error(found, wanted) < 2e-3
    # bf16 reaches as far as fp32.
    done = convert(source, tmp_path / "bf16", Recipe("bf16"), [{"x": x}])
    assert not done.reasons
    assert cases.relative_error(cases.run(tmp_path / "bf16/model.onnx", {"x": x})[0], wanted) < 0.02


def test_headroom_is_left_for_rows_that_calibration_did_not_see(tmp_path: Path) -> None:
    x = cases.vectors()
    plain = cases.two_layers(tmp_path / "plain")
    limit = 65504 / float16.HEADROOM / model_ranges(onnx.load(plain), [{"x": x}])["a"]
    middle = [node("Mul", "a up", "c"), node("Relu", "c", "b")]
    for factor, kept in ((0.9, False), (1.1, True)):
        source = cases.two_layers(tmp_path, *middle, up=constant(limit * factor))
        done = convert(source, tmp_path / "out", Recipe("fp16"), [{"x": x}])
        assert ("make_c" in done.reasons) is kept
    assert limit > 1e4 / 5  # a mask of -1e4 and the scores beside it are within


MASKS = [float(np.finfo(np.float32).min), -np.inf, -1e9, -1e4]
MASKED: dict[str, list[Any]] = {
    "added": [node("Where", "hidden never zero", "mask"), node("Add", "a mask", "scores")],
    "filled": [node("Where", "hidden never a", "scores")],
    "multiplied": [
        node("Cast", "hidden", "ones", to=1),
        node("Mul", "ones never", "mask"),
        node("Add", "a mask", "scores"),
    ],
}


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("masked", MASKS)
def test_masks_never_become_infinite(tmp_path: Path, precision: Precision, masked: float) -> None:
    x, constants = cases.vectors(), {"limit": constant(0.5), "zero": constant(0.0)}
    for form, nodes in MASKED.items():
        if form == "multiplied" and np.isinf(masked):
            continue  # 0 times infinity
        middle = [node("Greater", "x limit", "hidden"), *nodes]
        middle += [node("Softmax", "scores", "b", axis=-1)]
        source = cases.two_layers(tmp_path, *middle, never=constant(masked), **constants)
        done = convert(source, tmp_path / "out", Recipe(precision), [{"x": x}])
        path = tmp_path / "out/model.onnx"
        wanted = cases.run(source, {"x": x})[0]
        assert cases.relative_error(cases.run(path, {"x": x})[0], wanted) < CLOSE[precision], form
        assert np.isfinite(cases.run(path, {"x": np.ones_like(x)})[0]).all(), form
        assert bool(done.notes) is (masked < -65504)
        assert {"make_scores", "make_b"}.isdisjoint(done.reasons), form


def test_a_lowest_number_that_is_no_mask_stays(tmp_path: Path) -> None:
    lowest = constant(float(np.finfo(np.float32).min))
    source = cases.two_layers(tmp_path, node("Clip", "a lowest", "b"), lowest=lowest)
    done = convert(source, tmp_path / "out", Recipe("fp16"), [{"x": cases.vectors()}])
    assert "beyond" in done.reasons["make_b"]
    assert cases.stored(tmp_path / "out/model.onnx")["lowest"] == onnx.TensorProto.FLOAT


@pytest.mark.parametrize("precision", HALVES)
def test_a_small_epsilon_does_not_vanish(tmp_path: Path, precision: Precision) -> None:
    middle = [
        node("ReduceL2", "a axis", "length", keepdims=1),
        node("Clip", "length epsilon", "at_least"),
        node("Div", "a at_least", "b"),
    ]
    extra = {"axis": np.array([1]), "epsilon": constant(1e-12)}
    source = cases.two_layers(tmp_path, *middle, **extra)
    x = cases.vectors()
    x[2], x[3] = 0, x[3] * 1e-3
    done = convert(source, tmp_path / "out", Recipe(precision), [{"x": x}])
    found = cases.run(tmp_path / "out/model.onnx", {"x": x})[0]
    wanted = cases.run(source, {"x": x})[0]
    assert (found[2] == 0).all()
    assert cases.relative_error(found, wanted) < CLOSE[precision]
    assert done.reasons["make_length"] == float16.SUMS
    for name in ("make_at_least", "make_b"):
        assert (name in done.reasons) is (precision == "fp16")


def test_what_an_operator_cannot_take_stays_fp32(tmp_path: Path) -> None:
    middle = [
        node("Reshape", "a image", "pixels"),
        node("Conv", "pixels kernel", "filtered", pads=[1, 1, 1, 1]),
        node("Reshape", "filtered flat", "b"),
    ]
    kernel = cases.matrix(5, 9, 1).reshape(1, 1, 3, 3)
    shapes = {"image": np.array([-1, 1, 4, 8]), "flat": np.array([-1, 32])}
    source = cases.two_layers(tmp_path, *middle, kernel=kernel, **shapes)
    x = cases.vectors()
    for precision in HALVES:
        done = convert(source, tmp_path / precision, Recipe(precision), [{"x": x}])
        assert ("make_filtered" in done.reasons) is (precision == "bf16")
        path = tmp_path / precision / "model.onnx"
        assert cases.stored(path)["kernel"] == (1 if precision == "bf16" else FP16)
        wanted = cases.run(source, {"x": x})[0]
        assert cases.relative_error(cases.run(path, {"x": x})[0], wanted) < CLOSE[precision]


def test_a_constant_that_both_kinds_read_is_exact_for_fp32(tmp_path: Path) -> None:
    nodes = [
        node("Mul", "x factor", "a"),  # before any weight: fp32
        node("MatMul", "a first", "b"),
        node("Mul", "b factor", "c"),
        node("MatMul", "c last", "y"),
    ]
    weights = {"first": cases.matrix(1), "last": cases.matrix(2), "factor": constant(0.1)}
    source = cases.write_graph(tmp_path, nodes, weights)
    convert(source, tmp_path / "out", Recipe("fp16"), [{"x": cases.vectors()}])
    kinds = cases.stored(tmp_path / "out/model.onnx")
    assert kinds["factor"] == FP16
    assert kinds["factor_fp32"] == onnx.TensorProto.FLOAT


def test_bf16_constants_are_rounded_from_fp32(tmp_path: Path) -> None:
    first = cases.matrix(1) * 1e-6  # below what fp16 holds well
    source = cases.two_layers(tmp_path, first=first)
    convert(source, tmp_path / "out", Recipe("bf16"), ())
    graph = onnx.load(tmp_path / "out/model.onnx").graph
    tensor = next(tensor for tensor in graph.initializer if tensor.name == "first")
    stored = onnx.numpy_helper.to_array(tensor).astype(np.float32)
    assert np.abs(stored / first - 1).max() <= 2.0**-8


def test_ranges_are_the_largest_magnitudes_over_all_batches(tmp_path: Path) -> None:
    source = cases.two_layers(tmp_path)
    x = cases.vectors(rows=40)
    ranges = model_ranges(onnx.load(source), [{"x": x[:7]}, {"x": x[7:]}])
    a = x @ cases.matrix(1)
    assert list(ranges) == ["x", "a", "b", "y"]
    assert ranges["x"] == np.abs(x).max()
    assert ranges["a"] == pytest.approx(np.abs(a).max(), rel=1e-5)
    assert ranges["b"] == pytest.approx(a.max(), rel=1e-5)
    infinite = cases.two_layers(tmp_path / "inf", node("Div", "a zero", "b"), zero=constant(0.0))
    found = model_ranges(onnx.load(infinite), [{"x": x}])
    assert found["b"] == np.inf
    recorded = json.dumps(plain_record(Conversion((), ranges=found)))
    assert np.isnan(read_record(Conversion, json.loads(recorded)).ranges["b"])


@pytest.mark.parametrize("precision", HALVES)
def test_every_operator_of_a_view_rounds(tmp_path: Path, precision: Precision) -> None:
    import ml_dtypes

    kind: Any = np.float16 if precision == "fp16" else ml_dtypes.bfloat16

    def rounded(values: Any) -> Any:
        return np.asarray(values).astype(kind).astype(np.float32)

    # Operators that ONNX Runtime fuses, or runs in fp32 without rounding between them.
    steps = (("Add", "a bias", "c"), ("Tanh", "c", "d"), ("Mul", "d d", "e"), ("Relu", "e", "b"))
    bias = cases.matrix(3, 1, 32)[0]
    source = cases.two_layers(tmp_path, *(node(*step) for step in steps), bias=bias)
    x = cases.vectors(rows=64)
    convert(source, tmp_path / "out", Recipe(precision), [{"x": x}])
    first, last, bias = map(rounded, (cases.matrix(1), cases.matrix(2), bias))
    a = rounded(rounded(x) @ first)
    d = rounded(np.tanh(rounded(a + bias)))
    wanted = rounded(rounded(d * d) @ last)
    found = cases.run(tmp_path / "out/model.onnx", {"x": x})[0]
    # A sum in another order may fall to the other side of a rounding, rarely.
    assert (found != wanted).mean() < 0.02
    assert found.dtype == np.float32
