"""Conversions to lower precision: what is converted, what stays fp32, and how right results are."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.support import precision_cases as cases
from tests.support.own_models import SIZE, save_convolution, write_table
from tests.support.precision_cases import CLOSE, HALVES, convert_int8, node
from tests.support.project import LAYOUTS
from triptych.base.errors import UserError
from triptych.base.onnx_graph import open_session, read_model, write_model
from triptych.core.precision import float16
from triptych.core.precision.calibrate import (
    Activations,
    find_smoothing,
    model_ranges,
    quantized,
    round_nearest,
    round_together,
    scale_of,
)
from triptych.core.precision.convolutions import ConvolutionQuantizer, is_convolutional
from triptych.core.precision.float16 import convert
from triptych.core.precision.linear import Recipe, find_groups
from triptych.core.precision.quantize import Quantizer
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


def outlying(rows: int, *, seed: int = 0) -> np.ndarray[Any, Any]:
    """Vectors as transformers have them: two elements are a hundred times the others."""
    vectors = cases.vectors(rows, seed=seed)
    vectors[:, [3, 17]] *= 100
    vectors[:, 3] += 60
    return vectors


@pytest.mark.parametrize("precision", ["int8", "int8_dynamic"])
def test_outliers_do_not_cost_the_other_elements(tmp_path: Path, precision: Precision) -> None:
    path = cases.two_layers(tmp_path)
    feeds = [{"x": row[None]} for row in outlying(300)]
    graph, _ = Quantizer(read_model(path), Recipe(precision), feeds).converted(())
    write_model(graph, tmp_path / "int8")
    feed = {"x": outlying(50, seed=1)}
    wanted = cases.run(path, feed)[0]
    found = cases.run(tmp_path / "int8/model.onnx", feed)[0]
    step = np.abs(outlying(300)).max() / 127
    coarse = (np.rint(feed["x"] / step) * step).astype(np.float32)
    plain = cases.run(path, {"x": coarse})[0]
    errors = [
        np.median(np.linalg.norm(one - wanted, axis=1) / np.linalg.norm(wanted, axis=1))
        for one in (found, plain)
    ]
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_onnx_runtime_makes_integer_kernels_of_it(layout: str, tmp_path: Path) -> None:
    import onnxruntime

    exported = cases.export("bert", "embedding", layout)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    convert_int8(exported.path, tmp_path, Recipe("int8"), exported.feeds())
    path = tmp_path / "model.onnx"
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    layers = sum(len(group.layers) for group in find_groups(onnx.load(exported.path).graph))
    integer = sum(count for kind, count in kinds.items() if "Integer" in kind)
    assert integer == layers, kinds
    assert not kinds["DequantizeLinear"]
    # The signed numbers for TensorRT give the same as the unsigned ones.
    feed = exported.feeds(seed=8)[1]
    recipe = Recipe("int8", backend="tensorrt", device="gpu")
    convert_int8(exported.path, tmp_path / "signed", recipe, exported.feeds())
    signed = cases.run(tmp_path / "signed/model.onnx", feed)[0]
    unsigned = cases.run(path, feed)[0]
    assert cases.relative_error(signed, unsigned) < 5e-3  # the one for TensorRT is fp16 elsewhere


def test_convolutions_are_converted_and_excluded_by_name(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    save_convolution(source)
    assert is_convolutional(read_model(source).graph)
    table = write_table(tmp_path / "table") / "table.onnx"
    assert not is_convolutional(read_model(table).graph)
    random = np.random.default_rng(0)
    feeds = [
        {"images": random.random((1, 3, SIZE, SIZE), np.float32) * scale} for scale in (0.5, 1, 0.8)
    ]
    quantizer = ConvolutionQuantizer(source, Recipe("int8"), feeds)
    assert len(quantizer.layers) == 1
    results = {}
    for kept in ((), quantizer.layers):
        graph, conversion = quantizer.converted(kept)
        assert conversion.excluded_layers == kept
        weights = {tensor.data_type for tensor in graph.graph.initializer}
        assert (onnx.TensorProto.INT8 in weights) is not bool(kept)
        file = write_model(graph, tmp_path / str(len(kept)))
        results[len(kept)] = open_session(file).run(["scores"], feeds[1])[0]
    (wanted,) = open_session(source).run(["scores"], feeds[1])
    np.testing.assert_allclose(results[1], wanted, atol=1e-6)
    apart = np.abs(results[0] - wanted).max()
    assert 0 < apart < 0.05
    with pytest.raises(UserError, match="no rows left to calibrate"):
        ConvolutionQuantizer(source, Recipe("int8"), [])


def correlated(rows: int, width: int = 64, *, rank: int = 6) -> Any:
    random = np.random.default_rng(3)
    basis = random.normal(size=(rank, width))
    few = random.normal(size=(rows, rank)) @ basis
    return (few + 0.05 * random.normal(size=(rows, width))).astype(np.float32)


def error_of(rounded: Any, weight: Any, inputs: Any) -> float:
    return float(np.square(inputs @ (rounded * scale_of(weight) - weight)).mean())


def test_rounding_together_beats_the_nearest_on_correlated_inputs() -> None:
    weight, inputs = cases.matrix(1, 64, 48), correlated(500)
    together = error_of(round_together(weight, inputs), weight, inputs)
    assert together < error_of(round_nearest(weight), weight, inputs) / 3
    fresh = correlated(200)[100:]
    assert error_of(round_together(weight, inputs), weight, fresh) < error_of(
        round_nearest(weight), weight, fresh
    )


def test_rounding_together_stays_within_a_few_steps_of_the_weight() -> None:
    weight = cases.matrix(1, 300, 40)  # more than one block
    rounded = round_together(weight, correlated(400, 300))
    assert rounded.dtype == np.int8
    assert np.abs(rounded).max() <= 127
    assert np.abs(rounded * scale_of(weight) - weight).max() < 8 * scale_of(weight).max()


@pytest.mark.parametrize("dynamic", [False, True])
def test_smoothing_gives_outliers_a_scale_of_their_own(dynamic: bool) -> None:
    vectors = cases.vectors(300, 64)
    vectors[:, 5] *= 200
    found = find_smoothing(Activations.of(vectors), cases.matrix(1, 64, 32), dynamic=dynamic)
    assert found.power > 0
    assert found.scale[5] > 2 * np.median(found.scale)
    assert (found.range is None) == dynamic
    assert 0 < found.error < 0.03


def test_smoothing_shifts_one_sided_elements_to_the_middle() -> None:
    vectors = np.abs(cases.vectors(300, 64))
    found = find_smoothing(Activations.of(vectors), cases.matrix(1, 64, 32), dynamic=False)
    assert np.allclose(found.shift, (vectors.min(0) + vectors.max(0)) / 2)


def test_a_rare_peak_is_cut_off_where_that_costs_less() -> None:
    vectors = cases.vectors(4000, 16)
    vectors[:8] *= 40  # few vectors in thousands
    found = find_smoothing(Activations.of(vectors), cases.matrix(1, 16, 16), dynamic=False)
    assert found.method != "max"
    assert found.range is not None
    smooth = (vectors - found.shift) / found.scale
    assert found.range < np.abs(smooth).max()


def test_values_beyond_the_range_are_cut_off_and_the_others_rounded() -> None:
    vectors = np.array([[0.0, 0.5, 1.27, 50.0, -50.0]], np.float32)
    assert np.allclose(quantized(vectors, 1.27), [[0.0, 0.5, 1.27, 1.27, -1.28]])
    each = quantized(vectors, None)
    assert np.abs(each - vectors).max() <= 50 / 127 / 2 + 1e-6


def test_independent_few_or_no_inputs_do_no_harm() -> None:
    weight = cases.matrix(1, 64, 8)
    inputs = np.eye(64, dtype=np.float32)
    assert np.array_equal(round_together(weight, inputs), round_nearest(weight))
    fresh = cases.vectors(100, 64)
    for inputs in (correlated(2), np.zeros((5, 64), np.float32)):
        rounded = round_together(weight, inputs)
        assert error_of(rounded, weight, fresh) < 2 * error_of(round_nearest(weight), weight, fresh)
    assert not round_together(np.zeros((16, 4), np.float32), correlated(20, 16)).any()
