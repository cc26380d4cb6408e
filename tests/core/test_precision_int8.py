"""int8 graphs: right, the same whatever the neighbors, and in a form both runtimes take."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import precision_cases as cases
from conftest import LAYOUTS
from own_models import SIZE, save_convolution, write_table
from triptych.base.errors import UserError
from triptych.base.onnx_graph import open_session, read_model, value_types, write_model
from triptych.core.precision.convolutions import ConvolutionQuantizer, is_convolutional
from triptych.core.precision.linear import Recipe, find_groups
from triptych.core.precision.quantize import Quantizer, convert_int8
from triptych.spec.backends import Precision

pytestmark = pytest.mark.build

BOTH: tuple[Precision, ...] = ("int8", "int8_dynamic")


def rows_of(values: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    return [{"x": row[None]} for row in values]


def outlying(rows: int, *, seed: int = 0) -> np.ndarray[Any, Any]:
    """Vectors as transformers have them: two elements are a hundred times the others."""
    vectors = cases.vectors(rows, seed=seed)
    vectors[:, [3, 17]] *= 100
    vectors[:, 3] += 60
    return vectors


def quantize(path: Path, precision: Precision, feeds: Sequence[Mapping[str, Any]]) -> Quantizer:
    return Quantizer(read_model(path), Recipe(precision), feeds)


@pytest.fixture(scope="module", params=LAYOUTS)
def exported(request: pytest.FixtureRequest) -> Any:
    return cases.export("bert", "embedding", request.param)


@pytest.fixture(scope="module")
def for_tensorrt(exported: Any) -> Any:
    recipe = Recipe("int8", backend="tensorrt", device="gpu")
    return Quantizer(read_model(exported.path), recipe, exported.feeds()).converted(())[0]


@pytest.mark.parametrize("precision", BOTH)
def test_outliers_do_not_cost_the_other_elements(tmp_path: Path, precision: Precision) -> None:
    path = cases.two_layers(tmp_path)
    graph, _ = quantize(path, precision, rows_of(outlying(300))).converted(())
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


def test_onnx_runtime_makes_integer_kernels_of_it(
    exported: Any, for_tensorrt: Any, tmp_path: Path
) -> None:
    import onnxruntime

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
    signed = cases.run(write_model(for_tensorrt, tmp_path / "signed"), feed)[0]
    unsigned = cases.run(path, feed)[0]
    assert cases.relative_error(signed, unsigned) < 5e-3  # the one for TensorRT is fp16 elsewhere


def test_tensorrt_gets_what_it_demands(for_tensorrt: Any) -> None:
    """Signed, around 0, one scale an input and one an output of a weight; pairs before MatMul."""
    graph = for_tensorrt.graph
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    quantizers = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    assert quantizers
    for node in quantizers:
        scale, zero = (constants[name] for name in node.input[1:])
        assert scale.shape == ()
        assert zero.dtype == np.int8
        assert zero == 0
        (user,) = [other for other in graph.node if node.output[0] in other.input]
        assert user.op_type == "DequantizeLinear"
        assert user.input[1:] == node.input[1:]
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in constants:
            weight, scale, zero = (constants[name] for name in node.input)
            assert weight.dtype == zero.dtype == np.int8
            assert scale.shape == zero.shape == (weight.shape[1],)
            assert not zero.any()
        if node.op_type == "MatMul" and node.input[1] in makers:
            kinds = [makers[name].op_type for name in node.input]
            assert len(set(kinds) & {"DequantizeLinear"}) == 0 or set(kinds) == {"DequantizeLinear"}


def test_what_tensorrt_does_not_quantize_is_fp16(for_tensorrt: Any) -> None:
    """Products of attention, the quantized layers' results, and all that is between them."""
    model = for_tensorrt
    onnx.checker.check_model(model)
    types = value_types(model)
    makers = {name: node for node in model.graph.node for name in node.output}
    layers = [
        node
        for node in model.graph.node
        if node.op_type == "MatMul" and makers[node.input[0]].op_type == "DequantizeLinear"
    ]
    others = [node for node in model.graph.node if node.op_type in ("Softmax", "Erf", "Tanh")]
    assert layers
    assert others
    for node in (*layers, *others):
        assert types[node.input[0]] == types[node.output[0]] == onnx.TensorProto.FLOAT16, node.name
    for value in (*model.graph.input, *model.graph.output):
        assert value.type.tensor_type.elem_type != onnx.TensorProto.FLOAT16


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
