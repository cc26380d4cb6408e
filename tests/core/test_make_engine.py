"""What is asked of TensorRT is checked before, and made by NVIDIA's own parser and builder.

TensorRT for RTX needs no GPU for that.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from engine_networks import FINE, LOWER, OPTIONS, PRODUCT, QUANTIZED, SAME, count_products, write
from triptych.base.errors import UserError
from triptych.core.engine.api import RtxApi, remove_unsupported
from triptych.core.engine.graph import read_graph
from triptych.core.engine.make import make_engine, make_request
from triptych.spec.engine_plan import EnginePlan, ShapeRange

Profiles = tuple[dict[str, ShapeRange], ...]
WEIGHT_ONLY = [*QUANTIZED[2:4], helper.make_node("MatMul", ["x", "wt"], ["y"], name="product")]
UNNAMED = [helper.make_node("MatMul", ["x", "w"], ["y"])]
BF16 = [helper.make_node("Cast", ["x"], ["xb"], name="c", to=TensorProto.BFLOAT16)]
BF16 += [helper.make_node("Cast", ["xb"], ["y"], name="d", to=TensorProto.FLOAT)]


def ask(path: Path, precision: str = "fp32", *, profiles: Profiles = (FINE,)) -> Any:
    return make_request(path, EnginePlan(precision, profiles, (), OPTIONS), RtxApi("8.9"))


def test_each_product_requires_the_type_of_its_operands(tmp_path: Path) -> None:
    cases: list[tuple[Sequence[Any], dict[str, str]]] = [
        (PRODUCT, {"product": "fp32"}),
        (LOWER, {"product": "fp16"}),
        (WEIGHT_ONLY, {"product": "fp32"}),
        (UNNAMED, {"y": "fp32"}),
        (SAME, {}),
        (QUANTIZED, {"product": "int8"}),
    ]
    for nodes, products in cases:
        graph = read_graph(write(tmp_path, nodes))
        assert graph.products == products
    assert graph.stored_bytes == 16 * 4 + 4 + 1 + 16
    assert graph.wide_bytes == 16 * 3
    assert graph.casts == {"q", "dx", "dw"}
    path = write(tmp_path, SAME, kind=TensorProto.INT64)
    assert ask(path).graph.outputs["y"].dtype == "INT64"
    ask(write(tmp_path, BF16))


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
    tmp_path: Path,
) -> None:
    path = write(tmp_path, PRODUCT)
    for profiles, rule in WRONG:
        with pytest.raises(UserError) as raised:
            ask(path, profiles=profiles)
        assert rule in raised.value.rule, profiles
        assert raised.value.field.startswith("plan.engine.profiles")


SETTINGS: dict[str, Any] = {
    "refit": True,
    "weight_streaming": True,
    "tf32": True,
    "workspace_mib": 64,
    "optimization_level": 1,
    "version_compatible": True,
    "hardware": "ampere_plus",
}


class Seen(RtxApi):
    """Keeps the builder's config, as it is when all is set."""

    def set_target(self, config: Any) -> None:
        super().set_target(config)
        self.config = config


def make(path: Path, precision: str = "fp32", *, options: Any = OPTIONS, **more: Any) -> Seen:
    api = Seen("8.9")
    profiles = more.pop("profiles", (FINE,))
    plan = remove_unsupported(EnginePlan(precision, profiles, (), options))
    lines = more.pop("lines", [])
    engine = make_engine(
        api, make_request(path, plan, api), timing_file=None, tell=lines.append, **more
    )
    assert len(engine) > 64
    return api


def test_settings_reach_the_builder_and_a_build_reports_its_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.core.engine.make.TELL_EVERY_S", 0.0)
    path = write(tmp_path, PRODUCT)
    lines: list[str] = []
    api = make(path, lines=lines)
    assert lines[0].startswith("TensorRT for RTX 1.")
    assert any(line.startswith("Building engine: ") for line in lines)
    flags = api.trt.BuilderFlag
    off = ("TF32", "REFIT", "WEIGHT_STREAMING", "VERSION_COMPATIBLE")
    assert not any(api.config.get_flag(getattr(flags, name)) for name in off)
    assert api.config.builder_optimization_level == 3
    assert api.config.profiling_verbosity == api.trt.ProfilingVerbosity.DETAILED
    api = make(path, options=SETTINGS)
    on = [name for name in off if api.config.get_flag(getattr(flags, name))]
    assert on == ["TF32", "WEIGHT_STREAMING"]  # it lacks the others: `remove_unsupported`
    assert api.config.builder_optimization_level == 1
    assert api.config.get_memory_pool_limit(api.trt.MemoryPoolType.WORKSPACE) == 64 << 20
    assert api.config.num_optimization_profiles == 1
    assert api.config.get_compute_capability(0) == api.trt.ComputeCapability.SM89


def test_products_are_read_in_the_types_that_the_graph_gives_them(tmp_path: Path) -> None:
    for precision, nodes in {"fp32": PRODUCT, "fp16": LOWER, "int8": QUANTIZED}.items():
        assert count_products(ask(write(tmp_path, nodes), precision)) == {precision: 1}
    with pytest.raises(UserError, match="none of 1 products is in int8"):
        count_products(ask(write(tmp_path, LOWER), "int8"))


def test_a_graph_that_cannot_be_read_or_built_is_an_error_in_words(tmp_path: Path) -> None:
    nodes = [onnx.helper.make_node("Reshape", ["x", "shape"], ["y"], name="fold")]
    path = write(tmp_path, nodes)
    model = onnx.load(path)
    model.graph.initializer.append(
        onnx.helper.make_tensor("shape", onnx.TensorProto.INT64, [2], [3, -1])
    )
    onnx.save(model, path)
    # Rows of 4 numbers fold into 3 for 3 rows, not for the others of the profile.
    rows = ({"x": ShapeRange((1, 4), (2, 4), (8, 4))},)
    with pytest.raises(UserError) as raised:
        make(path, profiles=rows)
    assert raised.value.given
    assert raised.value.remedy
    path = write(tmp_path, SAME)
    request = ask(path)
    path.write_bytes(b"no graph")
    with pytest.raises(UserError, match=r"model\.onnx"):
        make_engine(RtxApi("8.9"), request, timing_file=None, tell=print)
