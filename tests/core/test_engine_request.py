"""What is asked of TensorRT is checked before it is asked, and fits the release that is there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

import fake_tensorrt
from engine_networks import FINE, LOWER, OPTIONS, PRODUCT, QUANTIZED, SAME, write
from fake_tensorrt import MAJORS
from triptych.base.errors import UserError
from triptych.core.engine.api import Api
from triptych.core.engine.graph import read_graph
from triptych.core.engine.make import make_request
from triptych.spec.engine_plan import EnginePlan, ShapeRange

Profiles = tuple[dict[str, ShapeRange], ...]
BF16 = [helper.make_node("Cast", ["x"], ["xb"], name="c", to=TensorProto.BFLOAT16)]
BF16 += [helper.make_node("Cast", ["xb"], ["y"], name="d", to=TensorProto.FLOAT)]
WEIGHT_ONLY = [*QUANTIZED[2:4], helper.make_node("MatMul", ["x", "wt"], ["y"], name="product")]
UNNAMED = [helper.make_node("MatMul", ["x", "w"], ["y"])]


def test_each_product_requires_the_type_of_its_operands(tmp_path: Path) -> None:
    cases: list[tuple[Sequence[Any], dict[str, str]]] = [
        (PRODUCT, {"product": "fp32"}),
        (LOWER, {"product": "fp16"}),
        (QUANTIZED, {"product": "int8"}),
        (WEIGHT_ONLY, {"product": "fp32"}),
        (UNNAMED, {"y": "fp32"}),
        (SAME, {}),
    ]
    for nodes, products in cases:
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


def test_int64_and_bf16_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for major in MAJORS:
        path = write(tmp_path, SAME, kind=TensorProto.INT64)
        assert ask(monkeypatch, major, path).graph.outputs["y"].dtype == "INT64"
        ask(monkeypatch, major, write(tmp_path, BF16))


def shapes(low: tuple[int, ...], best: tuple[int, ...], high: tuple[int, ...]) -> Profiles:
    return ({"x": ShapeRange(low, best, high)},)


WRONG: list[tuple[Profiles, str]] = [
    ((), "has no profile"),
    (({"z": FINE["x"]},), "does not name each of the graph's inputs"),
    (({**FINE, "z": FINE["x"]},), "does not name each of the graph's inputs"),
    ((FINE, {"z": FINE["x"]}), "does not name each of the graph's inputs"),
    (shapes((1,), (2,), (8,)), "has another number of axes for x than 2"),
    (shapes((4, 4), (2, 4), (8, 4)), "minimum <= optimum <= maximum"),
    (shapes((1, 4), (9, 4), (8, 4)), "minimum <= optimum <= maximum"),
    (shapes((0, 4), (2, 4), (8, 4)), "minimum <= optimum <= maximum"),
    (shapes((1, 2), (2, 4), (8, 4)), "must keep axis 1 of x at 4"),
]


def test_a_profile_that_does_not_match_the_graph_is_rejected_before_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, PRODUCT)
    for profiles, rule in WRONG:
        with pytest.raises(UserError) as raised:
            ask(monkeypatch, "10", path, profiles=profiles)
        assert rule in raised.value.rule, profiles
        assert raised.value.field.startswith("plan.engine.profiles")
