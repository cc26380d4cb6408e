"""Sampled rows as requests of the pipeline, and what the original model answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from triptych.base.errors import Progress, UserError
from triptych.core.gate.answers import Answer, reference_answers
from triptych.core.inputs import PipelineInputs
from triptych.core.reader import RequestReader
from triptych.core.samples import GateRequest
from triptych.operate.watch.sample import SampledRow
from triptych.runtime.hooking import HOOKS_FILE, find_hook


def reader_of(inputs: PipelineInputs) -> RequestReader:
    plan = inputs.plan
    before = find_hook(plan.spec.folder, "before")
    return RequestReader(plan.spec, plan.task, plan.facts, inputs.tokenizer_folder, before)


def requests_of(reader: RequestReader, rows: Sequence[SampledRow]) -> list[GateRequest | None]:
    """The request of each row with its core rows; None where the pipeline refuses it."""
    read = [reader.read_sent(row.inputs, row.parameters, row.place) for row in rows]
    taken = reader.accepted([request for request in read if request is not None])
    by_place = {request.shown: request for request in taken}
    return [by_place.get(row.place) for row in rows]


def answers_to(
    inputs: PipelineInputs, requests: Sequence[GateRequest], progress: Progress
) -> Sequence[Answer]:
    """What the original model answers; nothing of it gets into the cache.

    Raises:
        UserError: a function of the pipeline's fails on one of them.
    """
    if not requests:
        return ()
    # As made-up ones, what `after` refuses is told, not raised.
    edges = tuple(replace(request, edge=True) for request in requests)
    try:
        return reference_answers(replace(inputs, requests=edges), progress, keep=False)
    except UserError:  # whose words may be a text
        raise UserError(
            str(inputs.plan.spec.folder / HOOKS_FILE),
            "must take what the model makes of the rows",
            given="a row that it fails on",
            remedy="Try `triptych build`: it says on what kind of row",
        ) from None
