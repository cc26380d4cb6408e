"""The GPU test in whole: what it says without a GPU, and a tiny model on a CPU and a fake GPU."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.gpu import parts, report, run
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import AS_GENERATED, DONE
from benchmarks.gpu.pipelines import GpuModel
from benchmarks.gpu.report import INCOMPLETE
from tests.support import engine_cases
from tests.support.project import ROOT
from triptych.container.machine import find_gpus

pytestmark = pytest.mark.long  # loads, servers, every system
SHORT = ("--layouts", "packed", "bucketed", "--loads", "1x1", "2x4", "--batches", "1", "32")
SECONDS = ("--seconds", "0.02", "--served-seconds", "0.5")


@pytest.mark.skipif(bool(find_gpus()), reason="there is a GPU here")
def test_without_a_gpu_or_its_packages_it_says_so_and_exits_with_3(tmp_path: Path) -> None:
    def run_check(*options: str) -> subprocess.CompletedProcess[str]:
        script = str(ROOT / "build_scripts/benchmarks/gpu")
        command = [sys.executable, *options, script, "--check", "--home", str(tmp_path)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    done = run_check()
    assert done.returncode == INCOMPLETE, done.stderr
    reason = "device: this machine has no GPU (no NVIDIA driver reports one)"
    lines = done.stdout.splitlines()
    assert f"skipped: 8 served parts: {reason}" in lines
    assert "skipped: 8 build parts: would run (--check)" in lines
    assert lines[-1] == "38 parts: 0 done, 0 failed, 0 not finished, 38 skipped."
    done = run_check("-S")
    assert done.returncode == INCOMPLETE
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def measure(home: Path, model: Path, device: str, *words: str) -> list[parts.Result]:
    """Run the parts of a tiny model in this process, as on a machine that has everything."""
    options = run.parse_options(["--home", str(home), "--device", device, *words, *SHORT, *SECONDS])
    options.models = [
        GpuModel(
            "tiny", "tiny, RANDOM weights", lambda folder: str(model), lambda folder: model, 60
        )
    ]

    def run_part(part: parts.Part, machine: str, limit_s: float) -> tuple[str, str]:
        run.run_here(part, Namespace(**{**vars(options), "run_on": machine}))
        return "", ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "run_apart", run_part)
        machine = Machine({"device": device}, {})
        return run.run(parts.list_parts(options), machine, options, lambda so_far: None)


@pytest.mark.long
@pytest.mark.server
@pytest.mark.replacement  # served by the emulated backend, which the command itself refuses
def test_a_tiny_model_is_measured_on_a_cpu(tmp_path: Path, tiny_model: Path) -> None:
    skipped = ("--precisions", "fp32", "--skip", "compile", "peer")
    found = {one.part: one for one in measure(tmp_path, tiny_model, "cpu", *skipped)}
    assert {one.status for one in found.values() if one.reason != "of --skip"} == {DONE}
    checks = [
        (one.data[AS_GENERATED] if name.startswith("served ") else one.data)["check"]
        for name, one in found.items()
        if name.startswith(("served ", "process ")) and one.status == DONE
    ]
    assert len(checks) == 2 + 4
    assert all(check["wrong"] == 0 and check["largest_difference"] < 1e-5 for check in checks)
    served = found["served tiny_onnxruntime_fp32_packed"].data[AS_GENERATED]
    assert [*served["loads"]] == ["1 x 1", "2 x 4", "Poisson"]
    assert served["offered_per_s"] == pytest.approx(0.7 * served["loads"]["1 x 1"]["rate_per_s"])
    tables = {table.title.split(",")[0]: table for table in report.make_tables([*found.values()])}
    assert [*tables] == ["Targets", "Served by tritonserver and others", "In process", "Builds"]
    assert len(tables["In process"].rows) == 4


def test_engines_are_built_and_timed_on_a_fake_gpu(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_cases.machine(monkeypatch, tmp_path, "10")
    only = ("--only", "reference", "tensorrt_fp16", "--skip", "served")
    found = {one.part: one for one in measure(tmp_path, tiny_model, "cuda", *only)}
    for layout in ("packed", "bucketed"):
        name = f"tiny_tensorrt_fp16_{layout}"
        assert found[f"engine {name}"].data["engine"]["precision"] == "fp16"
        result = found[f"process {name}"]
        assert (result.status, result.reason) == (DONE, "")
        assert result.data["check"]["wrong"] == 0
        assert result.data["check"]["largest_difference"] > 1e-6  # it is fp16
        assert [*result.data["loads"]] == ["1", "32"]
