"""Whether a promise is kept, by how much, and what would help where it is not."""

from __future__ import annotations

from math import ceil

from triptych.base.formatting import rounded
from triptych.operate.tune.results import Outcome
from triptych.spec.plan import Plan
from triptych.spec.slo import Slo


def describe_outcome(slo: Slo, winner: Outcome) -> tuple[bool, str]:
    """Whether the winner keeps the promise, and the sentence that says so with its figures."""
    if slo.is_empty:
        return True, f"nothing is promised; {winner.score:.0f}/s at the highest load"
    if winner.rate is None:
        wanted = slo.throughput or 0.0
        return winner.score >= wanted, against(winner.score, wanted)
    rate = winner.rate.highest_per_s
    limits = slo.model_copy(update={"throughput": None})
    if not rate:
        return False, f"{limits} does not hold at any rate that was tried"
    said = f"{limits} holds up to {rate:.0f}/s (Poisson)"
    if winner.rate.lowest_broken_per_s is not None:
        said += f" and breaks at {winner.rate.lowest_broken_per_s:.0f}/s"
    if slo.throughput is None:
        return True, said
    return rate >= slo.throughput, f"{said}: {against(rate, slo.throughput)}"


def against(found: float, wanted: float) -> str:
    """How far a rate is above or below the promised one, requests a second."""
    side = "above" if found >= wanted else "below"
    return f"{rounded(found)}/s, {abs(found / wanted - 1):.0%} {side} the {wanted:g}/s promised"


def advice(plan: Plan, slo: Slo, winner: Outcome) -> tuple[str, ...]:
    """What would help where tuning alone does not."""
    found = [f"{winner.bottleneck.says} {winner.bottleneck.remedy}".strip()]
    core = plan.spec.core
    if core.precision == "fp32":
        found.append(
            "A lower precision computes faster: `--set core.precision=auto` tries those that pass "
            "the accuracy gate."
        )
    sustained = winner.score if winner.rate is None else winner.rate.highest_per_s
    if slo.throughput is not None and 0 < sustained < slo.throughput:
        count = ceil(slo.throughput / sustained)
        found.append(f"{count} such machines behind a load balancer reach {slo.throughput:g}/s.")
    alone = next((point for point in winner.points if point.load.value == 1), None)
    if alone and not sustained and slo.strain(alone.typical.latencies_us) > 1:
        found.append(
            f"Not even a lone client is answered in time (p99 {alone.median('p99_us') / 1e3:.1f}"
            " ms): no batching can help, only a faster core or shorter texts."
        )
    lengths = plan.lengths
    if lengths is not None and lengths.quantile(0.99) > 4 * lengths.mean:
        found.append(
            f"A hundredth of the rows has {lengths.quantile(0.99)} tokens or more, "
            f"{lengths.mean:.0f} on average: a lower tokenizer.max_length cuts the tail."
        )
    if core.device == "cpu":
        found.append("A GPU, or more cores.")
    return tuple(found)
