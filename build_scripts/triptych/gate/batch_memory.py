"""Memory that a core's largest batch takes, measured on the artifact in a process of its own.

Memory of a batch grows in proportion to its rows, so a few rows of the maximum length are run and
the result is scaled: the largest batch itself would take seconds to minutes to compute.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from triptych.cache import cached_stage, code_hash, versions_of
from triptych.errors import Progress, UserError
from triptych.requests.feeds import core_feed
from triptych.requests.inputs import PipelineInputs
from triptych.requests.samples import rows_of
from triptych.tensors import TokenRow

CODE = ("gate/batch_memory.py", "requests/feeds.py", "graph/*.py", "runtime/packed_rows.py")
PROBED_ROWS = 4
RESULT_FILE = "batch_mib.txt"
LIMIT_S = 600


def measure_batch_mib(
    inputs: PipelineInputs, artifact: Path, files: Mapping[str, str], progress: Progress
) -> float | None:
    """Return the MiB that the largest batch takes beside the weights; cached.

    Returns None for a core on a GPU, whose memory a CPU cannot show.

    Args:
        inputs: Inputs of the pipeline, planned in the layout that the artifact has.
        artifact: The core's ``model.onnx``.
        files: Hashes of the artifact and of the weights beside it.
        progress: Receives a line if an entry of the cache is damaged.

    Raises:
        UserError: The artifact cannot run rows of the maximum length.
    """
    plan = inputs.plan
    if plan.spec.core.device == "gpu":
        return None
    probed = min(PROBED_ROWS, plan.max_batch_size)
    row = rows_of(inputs.requests)[0]
    if isinstance(row, TokenRow):
        longest = max((r for r in rows_of(inputs.requests) if isinstance(r, TokenRow)), key=_size)
        ids = np.resize(np.array(longest.ids, np.int64), plan.max_length).tolist()
        row = TokenRow(tuple(ids), min(longest.first_segment, plan.max_length))

    def work(target: Path) -> None:
        pad = plan.facts.pad_token_id
        feed = core_feed([row] * probed, plan.core_inputs, pad_token_id=pad)
        with tempfile.NamedTemporaryFile(suffix=".npz") as file:
            np.savez(file, **feed)
            file.flush()
            command: list[str | Path] = [
                sys.executable,
                "-m",
                "triptych.graph.run_memory",
                artifact,
                file.name,
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise UserError(
                "core",
                f"must run a batch of {probed} rows of the maximum length",
                given=" ".join(done.stderr.split())[-300:],
                remedy="Lower tokenizer.max_length or core.max_batch_size",
            )
        batch_mib = float(done.stdout) * plan.max_batch_size / probed
        (target / RESULT_FILE).write_text(f"{batch_mib:.1f}", encoding="utf-8")

    stage = {
        "artifact": files,
        "layout": plan.layout,
        "rows": [probed, plan.max_batch_size, plan.max_length],
        "versions": versions_of("onnxruntime"),
        "code": code_hash(*CODE),
    }
    folder = cached_stage("batch_memory", stage, work, progress).folder
    return float((folder / RESULT_FILE).read_text(encoding="utf-8"))


def _size(row: TokenRow) -> int:
    return len(row.ids)
