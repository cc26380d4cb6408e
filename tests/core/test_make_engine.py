"""Engines as NVIDIA's own parser and builder make them, and what the inspector says of layers.

TensorRT for RTX needs no GPU for that. The descriptions of layers are written after public ones: a
BERT of TensorRT 10 (NVIDIA/TensorRT issue 4397), a ResNet of 10 (issue 4020), a product of 8
(pytorch pull request 66683), and NVIDIA's guide for moving to 11.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.support.engine_networks import FINE, OPTIONS, count_products, save_text, write
from tests.support.project import quiet
from triptych.base.cache import sha256_of
from triptych.base.errors import UserError
from triptych.base.extras import install_command
from triptych.core.engine import api, dry_run
from triptych.core.engine.api import RtxApi, remove_unsupported
from triptych.core.engine.dry_run import call_worker, run_dry_build
from triptych.core.engine.graph import EngineGraph, fused_layers, onnx_nodes, read_graph
from triptych.core.engine.inspection import Layer, judge_products, read_layers
from triptych.core.engine.make import Request, make_engine, make_request
from triptych.repository.records import DryRun
from triptych.spec.engine_plan import EnginePlan, ShapeRange


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


def test_a_product_in_another_type_is_named() -> None:
    for wanted, kind in (
        ("fp16", "Float"),
        ("bf16", "Half"),
        ("int8", "Half"),
        ("int8", "Float"),
        ("fp8", "Half"),
        ("fp32", "Half"),
    ):
        with pytest.raises(UserError, match=rf"bad \(\w+ instead of {wanted}\)"):
            judge_products(read(seen("bad", kind)), request({"bad": wanted}), 1000)
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


Profiles = tuple[dict[str, ShapeRange], ...]
PRODUCT = "[product] y = MatMul(x, w)"
SAME = "[same] y = Identity(x)"
LOWER = """
    [c] xl = Cast <to: int = 10> (x)
    [d] wl = Cast <to: int = 10> (w)
    [product] yl = MatMul(xl, wl)
    [e] y = Cast <to: int = 1> (yl)
"""
INT8_WEIGHT = """
    [dw] wd = DequantizeLinear(w8, scale, zero)
    [t] wt = Transpose(wd)
"""
QUANTIZED = f"""
    [q] xq = QuantizeLinear(x, scale, zero)
    [dx] xd = DequantizeLinear(xq, scale, zero)
    {INT8_WEIGHT}
    [product] y = MatMul(xd, wt)
"""
BF16 = "[c] xb = Cast <to: int = 16> (x) [d] y = Cast <to: int = 1> (xb)"


def ask(path: Path, precision: str = "fp32", *, profiles: Profiles = (FINE,)) -> Any:
    return make_request(path, EnginePlan(precision, profiles, (), OPTIONS), RtxApi("8.9"))


def test_each_product_requires_the_type_of_its_operands(tmp_path: Path) -> None:
    for nodes, products in (
        (PRODUCT, {"product": "fp32"}),
        (LOWER, {"product": "fp16"}),
        (f"{INT8_WEIGHT} [product] y = MatMul(x, wt)", {"product": "fp32"}),
        ("y = MatMul(x, w)", {"y": "fp32"}),
        (SAME, {}),
        (QUANTIZED, {"product": "int8"}),
    ):
        graph = read_graph(write(tmp_path, nodes))
        assert graph.products == products
    assert graph.stored_bytes == 16 * 4 + 4 + 1 + 16
    assert graph.wide_bytes == 16 * 3
    assert graph.casts == {"q", "dx", "dw"}
    path = write(tmp_path, SAME, kind="int64")
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
    **dict.fromkeys(("refit", "weight_streaming", "tf32", "version_compatible"), True),
    **{"workspace_mib": 64, "optimization_level": 1, "hardware": "ampere_plus"},
}


class Seen(RtxApi):
    """Keeps the builder's config, as it is when all is set."""

    def set_target(self, config: Any) -> None:
        super().set_target(config)
        self.config = config


def make(path: Path, *, options: Any = OPTIONS, tell: Any = print) -> Seen:
    api = Seen("8.9")
    plan = remove_unsupported(EnginePlan("fp32", (FINE,), (), options))
    engine = make_engine(api, make_request(path, plan, api), timing_file=None, tell=tell)
    assert len(engine) > 64
    return api


def test_settings_reach_the_builder_and_a_build_reports_its_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.core.engine.make.TELL_EVERY_S", 0.0)
    path = write(tmp_path, PRODUCT)
    lines: list[str] = []
    api = make(path, tell=lines.append)
    assert lines[0].startswith("TensorRT for RTX 1.")
    assert any(line.startswith("Building engine: ") for line in lines)
    flags = api.trt.BuilderFlag
    off = ("TF32", "REFIT", "WEIGHT_STREAMING", "VERSION_COMPATIBLE")
    assert not any(api.config.get_flag(getattr(flags, name)) for name in off)
    assert api.config.builder_optimization_level == 3
    assert api.config.profiling_verbosity == api.trt.ProfilingVerbosity.DETAILED
    api = make(path, options=SETTINGS, tell=lines.append)
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


def test_no_garbage_is_collected_while_a_builder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of an older builder, as garbage, would wait forever for a lock of this one."""
    trt, collects = RtxApi("8.9").trt, list[bool]()
    make_builder = trt.Builder

    def make_watched(logger: Any) -> Any:
        collects.append(gc.isenabled())
        return make_builder(logger)

    monkeypatch.setattr(trt, "Builder", make_watched)
    count_products(ask(write(tmp_path, PRODUCT), "fp32"))
    assert (collects, gc.isenabled()) == ([False], True)


def test_a_graph_that_cannot_be_read_or_built_is_an_error_in_words(tmp_path: Path) -> None:
    nodes = "shape = Constant <value_ints: ints = [3, -1]> () [fold] y = Reshape(x, shape)"
    path = write(tmp_path, nodes)
    # Rows of 4 numbers fold into 3 for 3 rows, not for the others of the profile.
    with pytest.raises(UserError) as raised:
        make(path)
    assert raised.value.given
    assert raised.value.remedy
    path = write(tmp_path, SAME)
    request = ask(path)
    path.write_bytes(b"no graph")
    with pytest.raises(UserError, match=r"model\.onnx"):
        make_engine(RtxApi("8.9"), request, timing_file=None, tell=print)


ROWS = ({"x": ShapeRange((1, 16), (4, 16), (8, 16))},)
SQUARE = "turned = Transpose <perm: ints = [1, 0]> (wide) [scores] y = MatMul(wide, turned)"
REFUSED = """
    [places] found = NonZero(wide)
    across = Transpose <perm: ints = [1, 0]> (found)
    picked = GatherND(wide, across)
    y = Abs(picked)
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))


def graph(
    folder: Path, rest: str = "y = Abs(wide)", *, dims: str = "rows,16", lower: str = "float16"
) -> Path:
    """Write a product in a lower precision, cast to ``wide`` in fp32, and the `rest` of a graph."""
    kind = {"float16": 10, "bfloat16": 16}[lower]
    text = f"""
    g (float[rows,16] x) => (float[{dims}] y)
    <{lower}[16,16] weight = {{{", ".join("1" * 256)}}}> {{
        low = Cast <to: int = {kind}> (x)
        [product] first = MatMul(low, weight)
        wide = Cast <to: int = 1> (first)
        {rest}
    }}"""
    path = save_text(folder / "model.onnx", text)
    model = onnx.load(path)
    model.graph.initializer[0].name = "layer.0.dense.weight"  # no name in the text form
    model.graph.node[1].input[1] = "layer.0.dense.weight"
    onnx.save(model, path)
    return path


def run(
    path: Path, progress: Any = quiet, precision: str = "fp16", **settings: Any
) -> DryRun | None:
    plan = EnginePlan(precision, ROWS, (), OPTIONS)
    return run_dry_build(path, {path.name: sha256_of(path)}, plan, progress, **settings)


def refused(path: Path, **settings: Any) -> UserError:
    with pytest.raises(UserError) as raised:
        run(path, **settings)
    return raised.value


def test_a_graph_is_parsed_and_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    path = graph(tmp_path)
    found = run(path, lambda _stage, line: lines.append(line), gpu="9.0")
    assert found is not None
    assert (found.compute_capability, found.products) == ("8.9", {"fp16": 1})
    assert found.tensorrt_rtx == api.installed_rtx_version()
    assert found.layers >= 3
    assert found.size_bytes > 512
    assert "for compute capability 8.9, the nearest to 9.0" in lines[0]
    assert lines[1].endswith("s: a dry run, not the engine")
    monkeypatch.setattr(dry_run, "_WORKER", ("false",))
    assert run(path, lambda _stage, line: lines.append(line), gpu="9.0") == found
    assert "(cached)" in lines[2]
    assert "exit code 1" in refused(path, gpu="12.0").given


def test_what_the_builder_would_refuse_is_named_with_a_remedy(tmp_path: Path) -> None:
    path = graph(tmp_path, SQUARE, dims="rows,rows")
    error = refused(path)
    assert (error.field, error.given) == ("core.precision", "scores (fp32 instead of fp16)")
    found = run(path, fp32_products=["scores"])  # on purpose
    assert found is not None
    assert found.products == {"fp16": 1, "fp32": 1}
    error = refused(graph(tmp_path, REFUSED, dims="n"))
    assert error.field == "model.onnx"
    assert "node places (NonZero), after layer.0.dense" in error.given
    assert "core.backend: onnxruntime" in error.remedy
    assert "--no-dry-run" in error.remedy
    error = refused(graph(tmp_path, lower="bfloat16"), precision="bf16", gpu="7.0")
    assert error.field == "core.precision"
    assert error.rule == "is a type that the GPU does not support"
    assert "sm75" in error.given
    assert error.remedy.startswith("Set it to fp16, or use a newer GPU; or build with --no-dry-run")


ENDINGS = {
    "import os; os.kill(os.getpid(), 11)": "killed by SIGSEGV",
    "print('out of memory'); raise SystemExit(3)": "exit code 3, after: out of memory",
    "import time; time.sleep(60)": "no result after 0.5 s",
}


def test_a_crash_or_a_timeout_of_the_builder_is_an_error_in_words() -> None:
    for body, said in ENDINGS.items():
        with pytest.raises(UserError) as raised:
            call_worker((sys.executable, "-c", body), {}, limit_s=0.5 if "sleep" in body else 60)
        assert said in raised.value.given, body
        assert "--no-dry-run" in raised.value.remedy


def test_without_tensorrt_for_rtx_the_dry_run_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(api, "RTX_DISTRIBUTION", "no-such-distribution")
    assert run(graph(tmp_path), lambda _stage, line: lines.append(line)) is None
    command = install_command(dry_run.EXTRA)
    assert lines == [f"skipped: TensorRT for RTX is not installed ({command})"]
    near = {"7.0": "7.5", "7.5": "7.5", "8.7": "8.6", "9.0": "8.9", "10.0": "8.9", "12.1": "12.1"}
    assert {wanted: api.nearest_capability(wanted) for wanted in near} == near
