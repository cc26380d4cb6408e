"""What the ONNX parser of each TensorRT takes, and which of the project's own graphs it refuses."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.support import precision_cases as cases
from tests.support.mistakes import check_refused
from tests.support.precision_cases import node
from triptych.core.precision import float16, quantize
from triptych.core.precision.linear import Recipe
from triptych.repository.lint.engine import support_of, unsupported
from triptych.repository.records import Conversion
from triptych.spec.backends import Precision

pytestmark = pytest.mark.build

MAJORS = (8, 10, 11)
CONVERT: dict[Precision, Callable[..., Conversion]] = {
    "fp16": float16.convert,
    "bf16": float16.convert,
    "fp8": quantize.convert_fp8,
    "int8": cases.convert_int8,
}
LACKS = {("bf16", 8): "type BF16 does not exist", ("fp8", 8): "type FP8 does not exist"}
"""The reason for which a TensorRT refuses every core of a precision."""
EXPORTED = [
    ("bert", "embedding", "packed for TensorRT"),
    ("deberta-v3", "spans", "bucketed"),
    ("modernbert", "scores", "packed for TensorRT"),
]


def reasons(path: Path, major: int) -> set[str]:
    """Why the parser is certain to refuse a graph."""
    return {refusal.reason for refusal in unsupported(path, major) if refusal.certain}


def test_every_parser_accepts_the_exported_cores() -> None:
    for exported, major in product((cases.export(*words) for words in EXPORTED), MAJORS):
        found = unsupported(exported.path, major)
        assert not [refusal for refusal in found if refusal.certain], exported
        beyond = {"ReduceSum"} if major == 8 else set()  # of what is documented
        if exported.layout == "bucketed":
            beyond |= {"Clip", "Mod"}
        assert {refusal.operator for refusal in found if refusal.operator} <= beyond, exported


def test_a_converted_core_needs_a_tensorrt_with_its_type(tmp_path: Path) -> None:
    exported = cases.export(*EXPORTED[0])
    for precision, convert in CONVERT.items():
        recipe = Recipe(precision, backend="tensorrt", device="gpu")
        (tmp_path / precision).mkdir()
        convert(exported.path, tmp_path / precision, recipe, exported.feeds())
        for major in MAJORS:
            found = reasons(tmp_path / precision / "model.onnx", major)
            lacking = LACKS.get((precision, major), "")
            assert all(lacking and reason.startswith(lacking) for reason in found), found
            assert bool(found) == bool(lacking), (precision, major)


def test_an_operator_that_the_parser_lacks_is_named(tmp_path: Path) -> None:
    """Also in subgraphs."""
    result = onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None)
    branch = onnx.helper.make_graph([node("Det", "x", "z")], "branch", [], [result])
    for name, nodes, reasons in (
        ("Det", [node("Det", "x", "y")], ["operator Det is not in"]),
        (
            "fused",
            [node("FusedMatMul", "x x", "y", domain="com.microsoft")],
            ["com.microsoft.FusedMatMul"],
        ),
        (
            "If",
            [node("If", "flag", "y", then_branch=branch, else_branch=branch)],
            ["operator Det is not in"] * 2,
        ),
    ):
        (tmp_path / name).mkdir()
        path = write(tmp_path / name, nodes, flag=np.array(True))
        for major in MAJORS:
            found = unsupported_of(path, major)
            assert all(one.certain and one.node for one in found)
            for one, reason in zip(found, reasons, strict=True):
                assert reason in one.reason, (name, major)


def test_quantization_must_be_symmetric_and_signed(tmp_path: Path) -> None:
    nodes = [
        node("QuantizeLinear", "x scale zero", "a"),
        node("DequantizeLinear", "a scale zero", "y"),
    ]
    for zero, reason in (
        (np.array(3, np.int8), "a zero point is not zero"),
        (np.array(0, np.uint8), "UINT8 is for inputs and outputs"),
    ):
        weights = {"scale": np.array(1, np.float32), "zero": zero}
        path = cases.write_graph(tmp_path, nodes, weights)
        for major in MAJORS:
            found = {r.operator: r for r in unsupported_of(path, major)}
            assert reason in found["DequantizeLinear"].reason
            assert found["DequantizeLinear"].certain


def test_a_newer_opset_than_documented_is_told_and_a_release_without_a_record_refused(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, [node("Relu", "x", "y")])
    (refusal,) = unsupported(path, 8)
    assert (refusal.node, refusal.certain) == ("opset", False)
    assert "opset 18" in refusal.reason
    assert unsupported(path, 11) == []
    check_refused("Use one of 8, 10, 11", unsupported, path, 9)


def test_records_name_operators_of_onnx_and_types_of_tensorrt() -> None:
    schemas = {schema.name for schema in onnx.defs.get_all_schemas_with_history()}
    # Names that ONNX gave up, or that only its converters use.
    schemas |= {"ImageScaler", "ParametricSoftplus", "ScaledTanh"}
    for support in map(support_of, MAJORS):
        assert set(support.operators) <= schemas
        assert {kind for kinds in support.operators.values() for kind in kinds} <= support.types
        assert "onnx-tensorrt" in support.source


def unsupported_of(path: Path, major: int) -> list[Any]:
    """Refusals of nodes."""
    return [refusal for refusal in unsupported(path, major) if refusal.operator]


def write(folder: Path, nodes: list[Any], **constants: Any) -> Path:
    """A graph that need not be valid ONNX."""
    graph = onnx.helper.make_graph(
        nodes,
        "graph",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [4, 4])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.microsoft", 1)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets), folder / "model.onnx")
    return folder / "model.onnx"
