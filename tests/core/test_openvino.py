"""Cores of OpenVINO: the gate runs them as the backend does, and fp32 stays fp32."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.project import build_into, quiet, write_pipeline
from triptych.base.errors import UserError
from triptych.base.extras import install_command
from triptych.building import auto
from triptych.container.manifests import core_variables
from triptych.container.processor import FP32_LIMIT, find_instruction_sets, sets_for
from triptych.core.gate.runs import open_core, run_rows
from triptych.core.inputs import read_inputs
from triptych.core.requests import rows_of
from triptych.repository.manifest import CompiledManifest, read_manifest
from triptych.spec.spec import load_spec

pytestmark = pytest.mark.build

PRECISION = """
import sys
from pathlib import Path
from triptych.core.openvino import compile_model
compiled = compile_model(Path(sys.argv[1]), {})[1]
print(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())
"""


def built(folder: Path, model: Path, **core: Any) -> CompiledManifest:
    pipeline = write_pipeline(
        folder / "tiny",
        model={"source": str(model)},
        core={"backend": "openvino", **core},
        accuracy={"min_cosine": 0.9, "max_difference": 0.2},  # of random weights
    )
    build_into(pipeline, folder / "repository")
    return read_manifest(folder / "repository", "tiny", CompiledManifest)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_each_precision_passes_the_gate_in_openvino(
    tmp_path: Path, tiny_model: Path, precision: str
) -> None:
    manifest = built(tmp_path, tiny_model, precision=precision)
    assert manifest.gate.passed
    assert manifest.gate.precision == precision
    assert manifest.plan.layout == "bucketed"
    assert manifest.instruction_sets == sets_for(precision, find_instruction_sets())
    limit = FP32_LIMIT if precision == "fp32" else {}
    assert core_variables(tmp_path / "repository") == limit
    if precision == "fp32":
        worst = {verdict.metric: verdict.value for verdict in manifest.gate.verdicts}
        assert worst["max_difference"] < 1e-5
        file = tmp_path / "repository/tiny_core/1/model.onnx"
        words = [sys.executable, "-c", PRECISION, str(file)]
        environment = {**os.environ, **FP32_LIMIT}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["f32"]


def test_a_core_is_run_by_openvino_only_as_it_is_served(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(tmp_path, tiny_model, precision="bf16")
    inputs = read_inputs(load_spec(tmp_path / "tiny"), quiet)
    file = tmp_path / "repository/tiny_core/1/model.onnx"
    rows = rows_of(inputs.requests)[:4]
    by_onnxruntime, in_fp32, in_bf16 = (
        run_rows(open_core(file, inputs.plan, precision), rows, range(4), 4)
        for precision in ("", "fp32", "bf16")
    )
    for index, row in by_onnxruntime.items():
        for name, values in row.items():
            np.testing.assert_allclose(in_fp32[index][name], values, atol=1e-5)
            np.testing.assert_allclose(in_bf16[index][name], values, atol=0.05)
            if "avx512_bf16" in find_instruction_sets():
                assert np.abs(in_bf16[index][name] - values).max() > 1e-5
    # It rounds fp16 in another way than other backends do.
    with pytest.raises(UserError, match="is not supported by openvino on a cpu"):
        build_into(tmp_path / "tiny", tmp_path / "repository", "core.precision=fp16")
    monkeypatch.setattr(auto, "has_openvino", lambda: False)
    with pytest.raises(UserError, match=re.escape(install_command("openvino"))):
        build_into(tmp_path / "tiny", tmp_path / "repository")
