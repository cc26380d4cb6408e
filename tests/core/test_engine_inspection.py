"""What the engine inspector says of layers, in every form it has had, and what follows from it.

The descriptions are written after public ones: a BERT of TensorRT 10 (NVIDIA/TensorRT issue 4397),
a ResNet of 10 (issue 4020), a product of 8 (pytorch pull request 66683), and NVIDIA's guide for
moving to 11.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from triptych.base.errors import UserError
from triptych.core.engine.graph import EngineGraph, fused_layers, onnx_nodes
from triptych.core.engine.inspection import Layer, judge_products, read_layers
from triptych.core.engine.make import Request
from triptych.spec.engine_plan import EnginePlan


def layer(
    reads: str,
    writes: str,
    *,
    name: str = "/a/MatMul",
    kind: str = "gemm",
    tactic: str = "",
    metadata: str = "[ONNX Layer: /a/MatMul]",
    key: str = "Format/Datatype",
) -> dict[str, Any]:
    """A layer as the inspector describes it; types are separated by commas."""
    ends = {"Inputs": reads, "Outputs": writes}
    return {
        "Name": name,
        "LayerType": kind,
        **{
            end: [{"Name": "t", "Format": "LINEAR", key: said} for said in types.split(", ")]
            for end, types in ends.items()
        },
        "TacticName": tactic,
        "StreamId": 0,
        "Metadata": metadata,
    }


def read(*layers: Any, casts: frozenset[str] = frozenset()) -> list[Layer]:
    return read_layers(json.dumps({"Layers": layers, "Bindings": ["a", "b"]}), casts)


def request(
    products: dict[str, str], *, precision: str = "fp16", tf32: bool = False, wide_bytes: int = 0
) -> Request:
    graph = EngineGraph({}, {}, products, frozenset(), stored_bytes=100, wide_bytes=wide_bytes)
    return Request(Path("model.onnx"), graph, EnginePlan(precision, (), (), {"tf32": tf32}))


TF32 = "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n"
WIDE_INT8 = "Thirty-two wide channel vectorized row major Int8 format"
KERNELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fp16", layer("Half", "Half")),
    ("fp16", layer("Float", "Float", tactic="sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize32x32")),
    ("tf32", layer("Float", "Float", tactic=TF32)),
    ("fp32", layer("Float", "Float", tactic="sm80_xmma_gemm_f32f32_f32f32_f32_nn_n")),
    ("int8", layer("Int8", "Half", tactic="sm80_xmma_gemm_i8i8_i8i32_f32_tn_n")),
    ("fp8", layer("FP8", "Half", tactic="sm89_xmma_gemm_e4m3e4m3_e4m3f32_f32")),
    ("int8", layer(WIDE_INT8, "Row major linear FP32")),
    ("fp16", layer("Half", "Half", key="Datatype")),  # 11
    ("fp16", layer("FP16", "FP16", key="DataType")),  # 11, in another spelling
    ("bf16", layer("BFloat16", "BFloat16")),
    ("fp16", layer("Half, Half, Half", "Half", kind="kgen", tactic="_gemm_mha_v2_0x957a2fe283f7")),
    ("fp8", layer("FP8, FP8, Half", "Half")),  # with a mask in half precision
    ("", layer("Half, Float", "Half", kind="kgen")),
    ("", layer("Float", "Half", kind="kgen")),
    ("", layer("Int32, UInt8, Bool", "Half", kind="kgen")),
    ("", layer("Float", "Float", kind="Myelin")),
    ("fp16", layer("Half", "Half", kind="Myelin")),
)
"""The type in which a layer computes, empty if its description does not prove one."""


def test_the_type_of_a_kernel_is_read() -> None:
    for precision, described in KERNELS:
        (found,) = read(described)
        assert found.precision == precision, described
    # fp32 around a cast proves nothing.
    nodes = "[ONNX Layer: c][ONNX Layer: /a/MatMul]"
    described = layer("Float", "Float", kind="kgen", metadata=nodes)
    assert [found.precision for found in read(described)] == ["fp32"]
    assert [found.precision for found in read(described, casts=frozenset({"c"}))] == [""]
    # Layers that only move are left out.
    moving = [layer("Float", "Half", kind=kind) for kind in ("Reformat", "Constant", "NoOp")]
    assert read(*moving) == []
    with pytest.raises(UserError, match="detailed information"):
        read("a + b", "c")


def test_the_metadata_and_name_of_a_layer_give_its_nodes() -> None:
    for metadata, nodes in {
        "[ONNX Layer: /a/MatMul][ONNX Layer: /a/Add]": ["/a/MatMul", "/a/Add"],
        "[ONNX Layer: /a/MatMul]\x1e[ONNX Layer: /a[0]/Add]": ["/a/MatMul", "/a[0]/Add"],
        "": [],
    }.items():
        assert onnx_nodes(metadata) == nodes
    for name, parts in {
        "a + b + PWN(c)": ["a", "b", "PWN(c)"],
        "/k/MatMul+/q/MatMul_myl0_16": ["/k/MatMul", "/q/MatMul"],
        "node_MatMul_114": ["node_MatMul_114"],
    }.items():
        assert fused_layers(name) == parts


def seen(name: str, reads: str, **more: Any) -> dict[str, Any]:
    return layer(reads, reads, name=name, metadata=f"[ONNX Layer: {name}]", **more)


def test_products_are_counted_by_the_type_they_are_seen_in() -> None:
    layers = read(seen("a", "Half"), seen("b", "Half"), seen("c", "Float"))
    wanted = {"a": "fp16", "b": "fp16", "c": "fp32", "d": "fp16"}
    matmuls, witness = judge_products(layers, request(wanted), 1000)
    assert (matmuls, witness) == ({"fp16": 2, "fp32": 1, "unseen": 1}, "layers")
    # A layer that only has the name of a product counts for less.
    carrier = layer("Float", "Float", name="add", kind="kgen", metadata="[ONNX Layer: a]")
    matmuls, _ = judge_products(read(seen("a", "Half"), carrier), request({"a": "fp16"}), 1000)
    assert matmuls["fp16"] == 1
    # tf32 is fp32 with an option.
    layers = read(seen("a", "Float", tactic=TF32))
    asked = request({"a": "fp32"}, precision="fp32", tf32=True)
    assert judge_products(layers, asked, 1000) == ({"fp32": 1, "unseen": 0}, "graph")
    with pytest.raises(UserError, match="a \\(tf32 instead of fp32\\)"):
        judge_products(layers, request({"a": "fp32"}, precision="fp32"), 1000)
    # An engine without layers proves nothing but fp32.
    assert judge_products([], request({"a": "fp32"}), 1000) == ({"fp32": 0, "unseen": 1}, "graph")
    with pytest.raises(UserError, match="cannot be verified"):
        judge_products([], request({"a": "fp16"}), 1000)


WRONG_TYPES = {
    "fp16": ["Float"],
    "bf16": ["Half"],
    "int8": ["Half", "Float"],
    "fp8": ["Half"],
    "fp32": ["Half"],
}
"""Types that a kernel may read in place of the type that its product requires."""


def test_a_product_in_another_type_is_named() -> None:
    for wanted, kinds in WRONG_TYPES.items():
        good, reads = ("fp32", "Float") if wanted == "fp32" else ("fp16", "Half")
        for kind in kinds:
            layers = read(seen("good", reads), seen("bad", kind))
            with pytest.raises(UserError) as raised:
                judge_products(layers, request({"good": good, "bad": wanted}), 1000)
            assert raised.value.given.startswith("bad (")
            assert f"instead of {wanted}" in raised.value.given
    names = [f"n{number}" for number in range(8)]
    layers = read(*(seen(name, "Float") for name in names))
    with pytest.raises(UserError) as raised:
        judge_products(layers, request(dict.fromkeys(names, "fp16")), 1000)
    assert raised.value.given.endswith("n4 (fp32 instead of fp16) and 3 more")


def test_where_all_is_fused_the_size_of_the_plan_decides() -> None:
    region = read(layer("Int32", "Float", kind="Myelin", metadata="[ONNX Layer: a]"))
    asked = request({"a": "fp16"}, wide_bytes=100)
    for plan_bytes in (100, 149):
        assert judge_products(region, asked, plan_bytes)[1] == "size"
    for plan_bytes in (150, 201):
        with pytest.raises(UserError, match="none of 1 matrix products"):
            judge_products(region, asked, plan_bytes)
