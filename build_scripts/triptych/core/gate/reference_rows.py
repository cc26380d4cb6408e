"""What the reference makes of core rows, kept in the cache: all candidates are held against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from triptych.base.cache import cached_stage, code_hash, versions_of
from triptych.base.errors import Progress
from triptych.core.feeds import Sample
from triptych.core.inputs import PipelineInputs
from triptych.core.samples import Expected, hash_rows
from triptych.spec.model_cached import CODE as MODEL_CODE

FILE = "expected.npz"
CODE = ("core/gate/reference.py", "core/export/to_onnx.py", "core/export/heads.py")


def reference_of(
    inputs: PipelineInputs,
    samples: Sequence[Sample],
    progress: Progress,
    *,
    double: bool = False,
    keep: bool = True,
) -> list[Expected]:
    """What the core should return for each of `samples`, by the model in PyTorch fp32 (or fp64).

    Without `keep` it is neither looked for in the cache nor left there.

    Raises:
        UserError: transformers cannot load the model.
    """
    if not samples:
        return []
    plan = inputs.plan

    def run() -> list[Expected]:
        from triptych.core.gate.reference import reference_outputs

        return reference_outputs(inputs.model_folder, plan.facts, plan.core, samples, double=double)

    if not keep:
        return run()
    key: dict[str, object] = {
        "facts": plan.facts.of_core,
        "core": asdict(plan.core),
        "rows": hash_rows(samples),
        "double": double,
        "versions": versions_of("torch", "transformers"),
        "code": code_hash(*CODE, *MODEL_CODE),
    }

    def work(target: Path) -> None:
        save(target / FILE, run())

    return load(cached_stage("reference", key, work, progress).folder / FILE)


def save(path: Path, expected: Sequence[Expected]) -> None:
    """Write results of any shape, all rows of a part end to end, for `load`."""
    arrays: dict[str, Any] = {}
    for part, values in enumerate(zip(*expected, strict=True)):
        arrays[f"shapes_{part}"] = np.array([value.shape for value in values], dtype=np.int64)
        arrays[f"values_{part}"] = np.concatenate([value.ravel() for value in values])
    np.savez(path, **arrays)


def load(path: Path) -> list[Expected]:
    """What `save` has written."""
    with np.load(path, allow_pickle=False) as arrays:
        parts = []
        for part in range(len(arrays.files) // 2):
            shapes, values = arrays[f"shapes_{part}"], arrays[f"values_{part}"]
            ends = np.cumsum(shapes.prod(axis=1))[:-1]
            pieces = zip(np.split(values, ends), shapes.tolist(), strict=True)
            parts.append([piece.reshape(shape) for piece, shape in pieces])
    return list(zip(*parts, strict=True))
