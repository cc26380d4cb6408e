"""Memory of a batch: the prediction of the plan, against a run of that batch."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import LAYOUTS
from triptych.base.tensors import INPUT_IDS, ROW_LENGTH, ROW_OFFSET, TokenRow
from triptych.core.requests import core_feed
from triptych.repository.manifest import EncoderManifest, read_manifest

pytestmark = pytest.mark.server  # it takes the repository that the tests of servers share

RUN = """
import sys
from pathlib import Path

import numpy as np
import onnxruntime

from triptych.repository.config import session_parameters
from triptych.spec.fields import SessionOptions


def status_mib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


options, run_options = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
parameters = session_parameters(SessionOptions())
options.enable_mem_pattern = parameters["enable_mem_pattern"] != "0"
shrinkage = "memory.enable_memory_arena_shrinkage"
run_options.add_run_config_entry(shrinkage, parameters[shrinkage])
session = onnxruntime.InferenceSession(sys.argv[1], options)
feed = dict(np.load(sys.argv[2]))
session.run(None, feed, run_options)  # the first run allocates what later ones keep
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = status_mib("VmRSS")
session.run(None, feed, run_options)
print(status_mib("VmHWM") - before, status_mib("VmRSS") - before)
"""
"""Prints the MiB by which a process grows at most while it computes a batch, and afterwards."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_takes_the_memory_that_was_predicted_and_returns_it(
    layout: str, minilm_repository: Path, tmp_path: Path
) -> None:
    """Half of the largest batch, for which the prediction is a half, takes less time.

    With a fixed threshold, glibc returns each large block when it is freed. Without it, glibc
    raises the threshold and sometimes keeps a fifth of a batch, which ONNX Runtime has released.
    """
    name = f"minilm_{layout}"
    plan = read_manifest(minilm_repository, name, EncoderManifest).plan
    assert plan.batch_mib is not None
    row = TokenRow(tuple(range(1000, 1000 + plan.max_length)), plan.max_length)
    inputs = (INPUT_IDS, ROW_LENGTH, *([ROW_OFFSET] if layout == "packed" else []))
    rows = [row] * (plan.max_batch_size // 2)
    np.savez(tmp_path / "feed.npz", **core_feed(rows, inputs, pad_token_id=0))
    artifact = minilm_repository / f"{name}_core/1/model.onnx"
    command: list[str | Path] = [sys.executable, "-c", RUN, artifact, tmp_path / "feed.npz"]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    peak_mib, kept_mib = map(float, done.stdout.split())
    assert 0.9 <= peak_mib / (plan.batch_mib / 2) <= 1.2
    assert kept_mib < 0.2 * peak_mib
