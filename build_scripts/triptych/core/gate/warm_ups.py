"""What a core is warmed up with: rows of the traffic, proven to run on the artifact."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from triptych.base.cache import cached_stage, code_hash, versions_of
from triptych.base.errors import Progress, UserError
from triptych.base.onnx_session import open_session
from triptych.base.tensors import TokenRow
from triptych.core.feeds import Sample, core_feed
from triptych.core.inputs import PipelineInputs
from triptych.core.samples import hash_rows, rows_of
from triptych.repository.core_config import warm_up_file

CODE = (
    "core/gate/warm_ups.py",
    "repository/core_config.py",
    "core/feeds.py",
    "base/onnx_session.py",
)
TOGETHER = 2
"""Rows of a batch that is tried; more of the same row show nothing more."""


def write_warm_ups(
    inputs: PipelineInputs, artifact: Path, files: Mapping[str, str], progress: Progress
) -> Path:
    """A folder with one row of the traffic for each length that the plan warms up, cached.

    Each file is one input of the core, as Triton reads an ``input_data_file``.

    Args:
        inputs: of the pipeline, planned in the layout that the artifact has.
        artifact: the ``model.onnx`` that must take the rows, alone and in a batch.
        files: hashes of the file and of those of weights beside it.
        progress: told of a damaged entry of the cache.

    Raises:
        UserError: the artifact fails on one, or returns what is no number.
    """
    plan = inputs.plan
    traffic = [request for request in inputs.requests if not request.edge]
    known = [*rows_of(traffic), *inputs.calibration]
    rows = {warm_up.tokens: _row_of(known, warm_up.tokens) for warm_up in plan.warm_ups}

    def work(target: Path) -> None:
        session = open_session(artifact)
        for tokens, row in rows.items():
            for count in (1, TOGETHER):
                feed = core_feed(
                    [row] * count,
                    plan.core_inputs,
                    pad_token_id=plan.facts.pad_token_id,
                    width=tokens,
                )
                try:
                    outputs = session.run(None, feed)
                except Exception as error:
                    raise _refused(tokens, str(error)) from error
                if not all(np.isfinite(output).all() for output in outputs):
                    raise _refused(tokens, "a result that is not a number")
                if count == 1:
                    for tensor in plan.core_inputs:
                        file = target / warm_up_file(tensor, tokens)
                        file.write_bytes(feed[tensor.name].tobytes())

    stage = {
        "artifact": files,
        "rows": {str(tokens): hash_rows([row]) for tokens, row in rows.items()},
        "layout": plan.layout,
        "pad": plan.facts.pad_token_id,
        "versions": versions_of("onnxruntime"),
        "code": code_hash(*CODE),
    }
    return cached_stage("warm_ups", stage, work, progress).folder


def _row_of(rows: list[Sample], tokens: int) -> Sample:
    """The longest row that fits; where none does, the shortest without tokens of its middle."""
    texts = [row for row in rows if isinstance(row, TokenRow)]
    if not texts:
        return rows[0]
    fitting = [row for row in texts if len(row.ids) <= tokens]
    if fitting:
        return max(fitting, key=lambda row: len(row.ids))
    ids, first = min(texts, key=lambda row: len(row.ids))
    return TokenRow((*ids[: tokens - 1], ids[-1]), min(first, tokens))


def _refused(tokens: int, given: str) -> UserError:
    return UserError(
        "core",
        f"must take the warm-up of {tokens} tokens, or no server would load it",
        given=" ".join(given.split())[:300],
        remedy="Choose another model or precision",
    )
