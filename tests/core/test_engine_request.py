"""What is asked of TensorRT is checked before it is asked, and fits the release that is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

import fake_tensorrt
from engine_networks import FINE, LOWER, PRODUCT, QUANTIZED, SAME, write
from engine_options import OPTIONS
from fake_tensorrt import MAJORS
from triptych.base.errors import UserError
from triptych.core.engine.api import Api
from triptych.core.engine.graph import read_graph
from triptych.core.engine.make import make_request
from triptych.spec.engine_plan import EnginePlan, ShapeRange

BF16 = [helper.make_node("Cast", ["x"], ["xb"], name="c", to=TensorProto.BFLOAT16)]
BF16 += [helper.make_node("Cast", ["xb"], ["y"], name="d", to=TensorProto.FLOAT)]
WEIGHT_ONLY = [*QUANTIZED[2:4], helper.make_node("MatMul", ["x", "wt"], ["y"], name="product")]
UNNAMED = [helper.make_node("MatMul", ["x", "w"], ["y"])]


@pytest.mark.parametrize(
    ("nodes", "products"),
    [
        (PRODUCT, {"product": "fp32"}),
        (LOWER, {"product": "fp16"}),
        (QUANTIZED, {"product": "int8"}),
        (WEIGHT_ONLY, {"product": "fp32"}),
        (UNNAMED, {"y": "fp32"}),
        (SAME, {}),
    ],
)
def test_each_product_asks_for_the_type_of_its_operands(
    tmp_path: Path, nodes: Sequence[Any], products: dict[str, str]
) -> None:
    assert read_graph(write(tmp_path, nodes)).products == products


def test_the_weights_of_products_are_measured(tmp_path: Path) -> None:
    graph = read_graph(write(tmp_path, QUANTIZED))
    assert graph.stored_bytes == 16 * 4 + 4 + 1 + 16
    assert graph.wide_bytes == 16 * 3
    assert graph.casts == {"q", "dx", "dw"}


def ask(monkeypatch: pytest.MonkeyPatch, major: str, onnx_file: Path, **plan: Any) -> Any:
    fake_tensorrt.install(monkeypatch, major)
    profiles = plan.pop("profiles", (FINE,))
    return make_request(onnx_file, EnginePlan("fp32", profiles, (), {**OPTIONS, **plan}), Api())


@pytest.mark.parametrize("major", MAJORS)
def test_whole_numbers_of_64_bits_and_bf16_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, major: str
) -> None:
    path = write(tmp_path, SAME, kind=TensorProto.INT64)
    assert ask(monkeypatch, major, path).graph.outputs["y"].dtype == "INT64"
    ask(monkeypatch, major, write(tmp_path, BF16))


WRONG: dict[str, tuple[tuple[dict[str, ShapeRange], ...], str]] = {
    "no profile": ((), "has no profile"),
    "another input": (({"z": FINE["x"]},), "does not name each of the graph's inputs"),
    "one input too many": (({**FINE, "z": FINE["x"]},), "does not name each of the graph's inputs"),
    "an axis too few": (
        ({"x": ShapeRange((1,), (2,), (8,))},),
        "has another number of axes for x than 2",
    ),
    "minimum above optimum": (
        ({"x": ShapeRange((4, 4), (2, 4), (8, 4))},),
        "minimum <= optimum <= maximum",
    ),
    "optimum above maximum": (
        ({"x": ShapeRange((1, 4), (9, 4), (8, 4))},),
        "minimum <= optimum <= maximum",
    ),
    "nothing at all": (
        ({"x": ShapeRange((0, 4), (2, 4), (8, 4))},),
        "minimum <= optimum <= maximum",
    ),
    "a fixed axis that varies": (
        ({"x": ShapeRange((1, 2), (2, 4), (8, 4))},),
        "must keep axis 1 of x at 4",
    ),
    "the second one": ((FINE, {"z": FINE["x"]}), "does not name each of the graph's inputs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_profile_that_does_not_fit_is_told_before_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    profiles, rule = WRONG[case]
    with pytest.raises(UserError) as raised:
        ask(monkeypatch, "10", write(tmp_path, PRODUCT), profiles=profiles)
    assert rule in raised.value.rule
    assert raised.value.field.startswith("plan.engine.profiles")
