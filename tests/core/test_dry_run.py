"""A dry run builds an engine with NVIDIA's own parser and builder, which need no GPU."""

import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

from conftest import quiet
from engine_networks import OPTIONS
from triptych.base.cache import sha256_of
from triptych.base.errors import UserError
from triptych.base.extras import install_command
from triptych.core.engine import api, dry_run
from triptych.core.engine.dry_run import call_worker, run_dry_build
from triptych.repository.records import DryRun
from triptych.spec.engine_plan import EnginePlan, ShapeRange

ROWS = ({"x": ShapeRange((1, 16), (4, 16), (8, 16))},)
WEIGHT = "<float16[16,16] weight = {" + ",".join(["1"] * 256) + "}>"
HALF = f"""
half (float[rows,16] x) => (float[rows,16] y)
{WEIGHT} {{
  low = Cast<to: int = 10>(x)
  [product] first = MatMul(low, weight)
  y = Cast<to: int = 1>(first)
}}
"""
MIXED = f"""
mixed (float[rows,16] x) => (float[rows,rows] y)
{WEIGHT} {{
  low = Cast<to: int = 10>(x)
  first = MatMul(low, weight)
  wide = Cast<to: int = 1>(first)
  turned = Transpose<perm: ints = [1, 0]>(wide)
  [scores] y = MatMul(wide, turned)
}}
"""
REFUSED = f"""
refused (float[rows,16] x) => (float[n] y)
{WEIGHT} {{
  low = Cast<to: int = 10>(x)
  first = MatMul(low, weight)
  wide = Cast<to: int = 1>(first)
  [places] found = NonZero(wide)
  across = Transpose<perm: ints = [1, 0]>(found)
  picked = GatherND(wide, across)
  y = Abs(picked)
}}
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))


def graph(folder: Path, text: str) -> Path:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 19]> {text}')
    model.graph.initializer[0].name = "layer.0.dense.weight"
    for node in model.graph.node:
        node.input[:] = [name.replace("weight", "layer.0.dense.weight") for name in node.input]
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


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
    path = graph(tmp_path, HALF)
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
    path = graph(tmp_path, MIXED)
    error = refused(path)
    assert (error.field, error.given) == ("core.precision", "scores (fp32 instead of fp16)")
    found = run(path, fp32_products=["scores"])  # on purpose
    assert found is not None
    assert found.products == {"fp16": 1, "fp32": 1}
    error = refused(graph(tmp_path, REFUSED))
    assert error.field == "model.onnx"
    assert "node places (NonZero), after layer.0.dense" in error.given
    assert "core.backend: onnxruntime" in error.remedy
    assert "--no-dry-run" in error.remedy
    text = HALF.replace("float16[", "bfloat16[").replace("int = 10", "int = 16")
    error = refused(graph(tmp_path, text), precision="bf16", gpu="7.0")
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
    assert run(graph(tmp_path, HALF), lambda _stage, line: lines.append(line)) is None
    command = install_command(dry_run.EXTRA)
    assert lines == [f"skipped: TensorRT for RTX is not installed ({command})"]
    near = {"7.0": "7.5", "7.5": "7.5", "8.7": "8.6", "9.0": "8.9", "10.0": "8.9", "12.1": "12.1"}
    assert {wanted: api.nearest_capability(wanted) for wanted in near} == near
