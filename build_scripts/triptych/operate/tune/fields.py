"""The fields of the spec that tuning may change, in the order it tries them.

For each a function looks at what the last measurement showed and proposes values, or says why none
would help: a few good trials, not a grid.
"""

from __future__ import annotations

from triptych.operate.tune.evidence import Evidence, Proposal, Propose, Skip, more_instances
from triptych.spec.plan import Plan

MOST_DELAY_US = 20_000

FULL = 0.5
"""A batch limit that the mean batch reaches less than this share of is not what holds it."""


def queue_delay(evidence: Evidence[Plan]) -> Proposal | Skip:
    """How long the core waits for more rows: pays where batches are small and the core is idle."""
    key = "serving.queue.max_delay_us"
    now = evidence.plan.spec.serving.queue.max_delay_us
    core = evidence.step("core")
    if now:
        lower = tuple(dict.fromkeys((0, now // 4)))
        return Proposal(key, lower, f"requests may wait {now} us for others", others=(now * 2,))
    if core is not None and core.mean_batch >= FULL * evidence.plan.max_batch_size:
        return Skip(key, f"batches fill by themselves: {core.mean_batch:.1f} rows on average")
    most = min(MOST_DELAY_US, min(evidence.limits_us.values(), default=MOST_DELAY_US * 5) / 5)
    values = tuple(value for value in (1000, 4000, 16_000) if value <= most)
    if not values:
        return Skip(key, "the promised latency leaves no time to wait")
    batch = "unknown" if core is None else f"{core.mean_batch:.1f} rows"
    return Proposal(key, values, f"the core's mean batch is {batch}; waiting may fill it")


def instances(step: str) -> Propose:
    """Instances of a step: more where those there are have no time left."""

    def propose(evidence: Evidence[Plan]) -> Proposal | Skip:
        now: int = getattr(evidence.plan.spec.serving.instances, step)
        return more_instances(evidence, f"serving.instances.{step}", step, now)

    return propose


def threads(evidence: Evidence[Plan]) -> Proposal | Skip:
    """Propose the number of threads of one operator: fewer than the backend's one per core."""
    key, core = "core.threads", evidence.plan.spec.core
    if core.device != "cpu":
        return Skip(key, "the core runs on a GPU")
    if core.threads is not None:
        return Proposal(key, (None,), f"{core.threads} threads share an operator")
    if evidence.cores == 1:
        return Skip(key, "the machine has one core")
    instances = evidence.plan.spec.serving.instances.core
    fewer = max(1, evidence.cores // max(2, instances))
    return Proposal(key, (fewer,), "each instance has a thread for every core")


def batch_limit(evidence: Evidence[Plan]) -> Proposal | Skip:
    """Rows of a batch: more where batches are as large as they may be."""
    key, now = "core.max_batch_size", evidence.plan.spec.core.max_batch_size
    core = evidence.step("core")
    if core is None:
        return Skip(key, "the server does not tell how large its batches are")
    if core.mean_batch < FULL * now:
        return Skip(key, f"the mean batch is {core.mean_batch:.1f} of {now}: not the limit")
    return Proposal(key, (now * 2, now * 4), f"mean batch {core.mean_batch:.1f} of {now}")


def bucket_count(evidence: Evidence[Plan]) -> Proposal | Skip:
    """Padded lengths of the bucketed layout: more pad less, fewer share batches more."""
    key, now = "core.bucket_count", evidence.plan.spec.core.bucket_count
    if evidence.plan.layout != "bucketed":
        return Skip(key, f"the layout is {evidence.plan.layout}")
    reason = f"{len(evidence.plan.bucket_edges)} lengths, {evidence.plan.padding_share:.0%} padding"
    return Proposal(key, (max(1, now // 2),), reason, others=(now * 2,))


def layout(evidence: Evidence[Plan]) -> Proposal | Skip:
    key, now = "core.layout", evidence.plan.layout
    if now == "fixed":
        return Skip(key, "all rows have one shape")
    if evidence.plan.spec.core.layout not in (now, "auto"):
        return Skip(key, "its rows cannot be packed")
    other = "bucketed" if now == "packed" else "packed"
    return Proposal(key, (other,), f"rows are {now}")


FIELDS: tuple[Propose, ...] = (
    queue_delay,
    instances("preprocess"),
    instances("core"),
    instances("postprocess"),
    batch_limit,
    threads,
    layout,
    bucket_count,
)
"""In the order they are tried: what costs nothing first, what changes the core last."""
