"""Remedy of a failed gate: the first change that helps and was not tried."""

from __future__ import annotations

from triptych.repository.records import GateResult
from triptych.spec.plan import Plan


def remedy_of(plan: Plan, gate: GateResult) -> str:
    """Return the remedy as a sentence. If both layouts are allowed, fp32 failed in both."""
    spec = plan.spec
    own = [
        f"accuracy.{verdict.metric}"
        for verdict in gate.verdicts
        if not verdict.passed and getattr(spec.accuracy, verdict.metric, None) is not None
    ]
    if own:
        return f"Loosen {own[0]}, which the pipeline sets, or leave it out for the default"
    if spec.core.shared_from is not None:
        return "Leave core.shared_from out: the pipeline then has a core of its own"
    if gate.precision != "fp32":
        close = "" if gate.precision in ("fp16", "bf16") else "fp16, which loses less, or "
        return f"Set core.precision to {close}fp32, or add traffic like the worst rows"
    return (
        "Look at the worst rows: mend traffic.jsonl where nobody sends such; otherwise only "
        "--accept-failed-gate REASON builds it, and puts that on record"
    )
