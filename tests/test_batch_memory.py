"""Memory of the largest batch: what the build predicts, against a run of that batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import LAYOUTS
from triptych.repository.lock import read_lock
from triptych.requests.feeds import core_feed
from triptych.tensors import INPUT_IDS, ROW_LENGTH, ROW_OFFSET, TokenRow

pytestmark = pytest.mark.server  # it takes the repository that the tests of servers share


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_largest_batch_takes_the_memory_that_was_predicted(
    layout: str, minilm_repository: Path, tmp_path: Path
) -> None:
    name = f"minilm_{layout}"
    plan = read_lock(minilm_repository, name).plan
    assert plan.batch_mib is not None
    row = TokenRow(tuple(range(1000, 1000 + plan.max_length)), plan.max_length)
    inputs = (INPUT_IDS, ROW_LENGTH, *([ROW_OFFSET] if layout == "packed" else []))
    feed = core_feed([row] * plan.max_batch_size, inputs, pad_token_id=0)
    np.savez(tmp_path / "feed.npz", **feed)
    artifact = minilm_repository / f"{name}_core/1/model.onnx"
    command = [sys.executable, "-m", "triptych.graph.run_memory", artifact, tmp_path / "feed.npz"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert 0.9 <= float(done.stdout) / plan.batch_mib <= 1.2
