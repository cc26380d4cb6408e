"""The gate's requests as a client sends them, and what the spec says the server must refuse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from triptych.gate.decoded import as_floats
from triptych.gate.live.send import LiveRequest, live_request
from triptych.plan.plan import Plan
from triptych.requests.samples import GateRequest
from triptych.runtime import module_of
from triptych.runtime.row_types import RowInputs


def live_requests(plan: Plan, requests: Sequence[GateRequest]) -> list[LiveRequest]:
    """What a client sends for each of `requests`."""
    found = []
    for request in requests:
        asked = as_floats(request.parameters)
        found.append(live_request(request.sent, asked, plan.parameters))
    return found


def refusals(
    plan: Plan, folder: Path, requests: Sequence[GateRequest], sent: Sequence[LiveRequest]
) -> list[str]:
    """For each request the words in which the pipeline must refuse it; empty where it must not.

    The gate's own rows are cut to the limit whatever the spec says; a server does what it says.

    Args:
        plan: with the limits.
        folder: with the ``tokenizer.json``, where the task has one.
        requests: of the gate.
        sent: what a client sends for each.
    """
    settings = {**plan.row_settings, "bucket_edges": []}
    maker = module_of(plan.task.rows).RowMaker(settings, folder)
    asks = [
        RowInputs({name: [value] for name, value in request.inputs.items()}, request.parameters)
        for request in requests
    ]
    make = maker.make if plan.facts.image is not None else maker.token_rows
    return [
        _too_long(plan, live) or (_words(made) if isinstance(made, Exception) else "")
        for live, made in zip(sent, make(asks), strict=True)
    ]


def _too_long(plan: Plan, live: LiveRequest) -> str:
    """Texts are measured before anything else is done with them."""
    limit = plan.spec.tokenizer.max_text_bytes
    for name, value in live.inputs.items():
        if isinstance(value, str) and len(value.encode()) > limit:
            return f"`{name}` must have at most {limit} bytes"
    return ""


def _words(error: Exception) -> str:
    """What the client makes of the error of a request of one row."""
    return str(error).removeprefix("row 0: ")
