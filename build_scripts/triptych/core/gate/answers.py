"""Expected answers of the ensemble: the decoded reference, passed through the hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych.base.errors import Progress, UserError
from triptych.core.gate.cached import decoding_of
from triptych.core.gate.reference import reference_of
from triptych.core.gate.runs import (
    Decoded,
    RunBatch,
    decode,
    decode_reference,
    reference_row_outputs,
    run_rows,
)
from triptych.core.inputs import PipelineInputs
from triptych.core.requests import GateRequest, by_request, rows_of
from triptych.runtime.hooking import HOOKS_FILE, Hook, Row, RowForm, call_hook
from triptych.runtime.request_errors import RequestError
from triptych.spec.plan import Plan
from triptych.tasks.results import RowOutputs

ROUNDING = 1e-5
"""Tolerance, relative and absolute, between arrays of several rows and arrays of one row."""


class DecodedAnswer(NamedTuple):
    """Expected answer to one request of one row."""

    outputs: Decoded  # Outputs of the ensemble; empty if the request is rejected
    refusal: str = ""  # Message of the function that rejects the request; else empty


def reference_answers(
    inputs: PipelineInputs, progress: Progress, *, keep: bool = True
) -> list[DecodedAnswer]:
    """Return the expected answer to each request of the gate, by PyTorch fp32.

    Without `keep`, the cache of reference outputs is neither read nor written.

    Raises:
        UserError: A hook of the pipeline fails on the reference's outputs for a row.
    """
    return _finished(inputs, _decode(inputs, progress, keep=keep))


def core_answers(inputs: PipelineInputs, run: RunBatch) -> list[DecodedAnswer]:
    """Return the answer of a core to each request of the gate; `run` runs a batch on the core.

    Raises:
        Incomparable: The core fails.
        UserError: A hook of the pipeline fails on the core's outputs for a row.
    """
    rows = rows_of(inputs.requests)
    outputs = run_rows(run, rows, range(len(rows)), inputs.plan.max_batch_size)
    return _finished(inputs, _decode_each(inputs, [outputs[index] for index in range(len(rows))]))


def check_hooks(inputs: PipelineInputs, progress: Progress) -> None:
    """Call `decode` and `after` as a server would, on the model's answers to the gate's requests.

    Raises:
        UserError: A function fails on a row or returns values that the outputs cannot hold, or
            `after` changes a row depending on the other rows of its request.
    """
    plan = inputs.plan
    after = inputs.find_hook("after")
    if after is None and not plan.spec.makes_outputs:
        return
    decoded = _decode(inputs, progress)
    if after is not None:
        _check_together(after, inputs, decoded, _call_after(after, inputs, decoded))
    progress("hooks", f"{len(decoded)} answers of the model match the declared outputs")


def _decode(
    inputs: PipelineInputs, progress: Progress, *, keep: bool = True
) -> list[DecodedAnswer]:
    plan, requests = inputs.plan, inputs.requests
    expected = reference_of(inputs, rows_of(requests), progress, keep=keep)
    outputs = reference_row_outputs(plan.core, expected)
    try:
        decoded = decode_reference(decoding_of(inputs), requests, outputs)
    except (RequestError, RuntimeError):  # A custom `decode` failed: find the rows.
        return _decode_each(inputs, outputs)
    return [DecodedAnswer(each) for each in decoded]


def _decode_each(inputs: PipelineInputs, outputs: Sequence[RowOutputs]) -> list[DecodedAnswer]:
    """Decode the outputs of all rows, each request alone."""
    decoding, requests = decoding_of(inputs), inputs.requests
    own = by_request(requests, outputs)
    return _answer_each(inputs, lambda index: decode(decoding, [requests[index]], own[index])[0])


def _finished(inputs: PipelineInputs, decoded: list[DecodedAnswer]) -> list[DecodedAnswer]:
    """Return decoded answers as the pipeline's `after` changes them, if it has one."""
    after = inputs.find_hook("after")
    return decoded if after is None else _call_after(after, inputs, decoded)


def _call_after(
    after: Hook, inputs: PipelineInputs, decoded: Sequence[DecodedAnswer]
) -> list[DecodedAnswer]:
    """Call `after` on each answer alone."""
    plan, form = inputs.plan, RowForm(inputs.plan.task.output_settings)

    def answer(index: int) -> Decoded:
        rows = form.rows(decoded[index].outputs)
        return form.tensors(_after(after, plan, [inputs.requests[index]], rows, form))

    return _answer_each(inputs, answer, [answer.refusal for answer in decoded])


def _answer_each(
    inputs: PipelineInputs, answer: Callable[[int], Decoded], refusals: Sequence[str] = ()
) -> list[DecodedAnswer]:
    """Return `answer` for each request, traffic first, and keep the given `refusals`.

    Raises:
        UserError: A function fails, or rejects a request of the traffic.
    """
    requests = inputs.requests
    answers = {index: DecodedAnswer({}, words) for index, words in enumerate(refusals) if words}
    for index in sorted(range(len(requests)), key=lambda index: requests[index].edge):
        try:
            if index not in answers:
                answers[index] = DecodedAnswer(answer(index))
        except (RequestError, RuntimeError) as error:
            answers[index] = _refused(inputs.plan, requests[index], error)
    return [answers[index] for index in range(len(requests))]


def _check_together(
    after: Hook,
    inputs: PipelineInputs,
    decoded: Sequence[DecodedAnswer],
    alone: Sequence[DecodedAnswer],
) -> None:
    """Check that `after` returns the same for all answers in one request as for each alone."""
    plan, form = inputs.plan, RowForm(inputs.plan.task.output_settings)
    file = str(plan.spec.folder / HOOKS_FILE)
    taken = [index for index, answer in enumerate(alone) if not answer.refusal]
    requests = [inputs.requests[index] for index in taken]
    given = [row for index in taken for row in form.rows(decoded[index].outputs)]
    try:
        together = [form.tensors([row]) for row in _after(after, plan, requests, given, form)]
    except (RequestError, RuntimeError) as error:
        raise UserError(
            file,
            f"has a function `after` that fails only on all {len(given)} rows at once",
            given=error,
            remedy="Treat each row by itself",
        ) from error
    for index, got in zip(taken, together, strict=True):
        for name, value in alone[index].outputs.items():
            if not equal_outputs(got[name], value):
                raise UserError(
                    file,
                    "has a function `after` that changes a row depending on the other rows",
                    given=f"a different `{name}` for {inputs.requests[index].preview!r}",
                    remedy="Treat each row by itself",
                )


def equal_outputs(got: NDArray[np.generic], wanted: NDArray[np.generic]) -> bool:
    """Return whether arrays are equal, floats within `ROUNDING`."""
    if got.shape != wanted.shape or not np.issubdtype(wanted.dtype, np.floating):
        return np.array_equal(got, wanted)
    return np.allclose(got, wanted, rtol=ROUNDING, atol=ROUNDING, equal_nan=True)


def _after(
    after: Hook, plan: Plan, requests: Sequence[GateRequest], rows: list[Row], form: RowForm
) -> list[Row]:
    given = [dict(request.inputs) for request in requests] if plan.forwards_inputs else None
    return call_hook("after", after, rows, form.names, given)


def _refused(plan: Plan, request: GateRequest, error: Exception) -> DecodedAnswer:
    """Return the rejection of an edge case; raise `UserError` for any other failure."""
    if request.edge and isinstance(error, RequestError):
        return DecodedAnswer({}, str(error))
    edge = ", a synthetic edge case" if request.edge else ""
    raise UserError(
        str(plan.spec.folder / HOOKS_FILE),
        f"has a function that fails on the model's answer to {request.preview!r}{edge}",
        given=error,
        remedy="Correct the function; raise ValueError to reject a request with a message",
    ) from error
