"""Ranges of the elements of a model's vectors on the traffic, for the encodings int8 and uint8."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triptych.base.cache import cached_stage, code_hash
from triptych.base.errors import Progress
from triptych.core.gate.reference import reference_of
from triptych.core.inputs import PipelineInputs
from triptych.core.requests import hash_inputs, hash_rows, rows_of
from triptych.repository.render import Ranges
from triptych.runtime.decode_embeddings import RANGES_FILE, to_unit_length
from triptych.runtime.row_metadata import OUTSIDE, unpack_metadata
from triptych.tasks.catalog import image_embedding, multi_vector_embedding, text_embedding

CODE = ("core/gate/ranges.py", "core/gate/reference.py", "runtime/decode_embeddings.py")
_TASKS = tuple(each.TASK.name for each in (image_embedding, multi_vector_embedding, text_embedding))
MULTIPLE = 128
"""Multiples of this number are sizes of vectors, as well as powers of two."""


def find_ranges(inputs: PipelineInputs, progress: Progress) -> Ranges | None:
    """Return the ranges of the reference's vectors for the traffic, with each prompt.

    None for tasks without the encodings. A single vector has no ranges, so it gives no sizes.
    """
    plan = inputs.plan
    if plan.task.name not in _TASKS:
        return None
    texts = {hash_inputs(request.sent) for request in inputs.requests if not request.edge}
    # Prompted requests are edge cases of the gate, with texts of the traffic.
    chosen = [hash_inputs(request.sent) in texts for request in inputs.requests]
    own, size = plan.parameters.get("dimensions"), plan.info.embedding_size
    sizes = (size,) if plan.core.token_outputs else sizes_of(size, own)
    sizes = sizes if sum(chosen) > 1 else ()
    rows = rows_of(inputs.requests)

    def work(target: Path) -> None:
        expected = reference_of(inputs, rows, progress)
        marks: Iterable[bytes] = (data for request in inputs.requests for data in request.metadata)
        kept = [unpack_metadata(data).kinds != OUTSIDE for data in marks] or [...] * len(rows)
        every = zip(compress(expected, chosen), compress(kept, chosen), strict=True)
        vectors = np.concatenate([np.atleast_2d(vector)[mark] for (vector,), mark in every])
        np.save(target / RANGES_FILE, ranges_of(vectors, sizes))

    key: dict[str, object] = {
        "model": plan.info.sha256,
        "facts": plan.info.of_core,
        "rows": hash_rows(compress(rows, chosen)),
        "sizes": sizes,
        "code": code_hash(*CODE),
    }
    folder, cached, _ = cached_stage("ranges", key, work, progress)
    note = " (cached)" if cached else ""
    progress("ranges", f"of the vectors of {sum(chosen)} rows, for int8 and uint8{note}")
    return Ranges(folder / RANGES_FILE, sizes)


def sizes_of(size: int, own: int | None) -> tuple[int, ...]:
    """Return the sizes of vectors whose ranges are recorded: those that models are trained for.

    Args:
        size: Size of the model's vector.
        own: Size that the pipeline returns by default; None for the model's.
    """
    powers = (2**power for power in range(3, size.bit_length()))
    sizes = {*powers, *range(MULTIPLE, size, MULTIPLE), own or size, size}
    return tuple(sorted(each for each in sizes if each <= size))


def ranges_of(vectors: NDArray[np.float32], sizes: Sequence[int]) -> NDArray[np.float32]:
    """Return `RANGES_FILE` for vectors FP32 ``[n, d]``."""
    forms = [vectors, *(to_unit_length(vectors[:, :size]) for size in sizes)]
    return np.concatenate([np.stack((form.min(axis=0), form.max(axis=0))) for form in forms], 1)
