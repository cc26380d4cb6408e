"""The fields of the spec that tuning may change, in the order it tries them.

For each a function looks at what the last measurement showed and proposes values, or says why none
would help: a few good trials, not a grid.

What a field of the spec is judged by, and what comes of it: values to try, or why none is.

The fields that tuning may change of a pipeline that generates text, in the order it tries them.

As in `fields`: what the last measurement showed decides whether a value is worth a trial, which
here starts an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any, Generic, TypeVar

import psutil
from pydantic import JsonValue

from triptych.building.generation.inputs import GenerationInputs
from triptych.serving.bench.results import Measurement, StepUse
from triptych.spec.plan import Plan

BUSY = 0.6
"""A step whose instances run for a smaller share of the time is not short of them."""

Planned = TypeVar("Planned")
"""What is planned for a setting, with its ``spec``; a kind of pipeline has its own."""


@dataclass(frozen=True)
class Evidence(Generic[Planned]):
    """What the best settings so far look like under load."""

    plan: Planned  # of these settings
    measurement: Measurement | None  # at the load that decides their score; None before any
    cores: int  # of this machine
    limits_us: Mapping[str, float]  # promised; see `Promise.limits_us`

    def step(self, name: str) -> StepUse | None:
        """What the server counted for a step; None where it counted nothing."""
        steps = () if self.measurement is None else self.measurement.steps
        return next((use for use in steps if use.step == name), None)


@dataclass(frozen=True)
class Proposal:
    """Values of one field, to be tried in turn until one is no better than the one before."""

    key: str  # dotted, of the spec
    values: tuple[JsonValue, ...]  # the way up; where even its first is no better:
    reason: str  # why it is worth a try
    others: tuple[JsonValue, ...] = ()  # the way down
    along: Mapping[str, JsonValue] = field(default_factory=dict)
    """Other fields that the way up needs; the way down does not."""


@dataclass(frozen=True)
class Skip:
    """A field that is left alone, and why."""

    key: str
    reason: str


Propose = Callable[[Evidence[Any]], Proposal | Skip]


def more_instances(evidence: Evidence[Any], key: str, step: str, now: int) -> Proposal | Skip:
    """Instances of a step: more where those there are have no time left."""
    use = evidence.step(step)
    if use is not None and use.busy is not None and use.busy < BUSY:
        return Skip(key, f"busy {use.busy:.0%} of the time")
    most = max(2, 2 * evidence.cores)
    values = tuple(value for value in (now + 1, now + 2, now + 4) if value <= most)
    if not values:
        return Skip(key, f"{now} on {evidence.cores} cores is plenty")
    busy = "" if use is None or use.busy is None else f"busy {use.busy:.0%} of the time"
    return Proposal(key, values, busy or "the server does not tell how busy it is")


MAX_DELAY_US = 20_000

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
    most = min(MAX_DELAY_US, min(evidence.limits_us.values(), default=MAX_DELAY_US * 5) / 5)
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


FULL_ENGINE = 0.8
"""Share of the places in a batch that are taken in the mean, from which some requests wait."""

MIN_BATCHED_TOKENS = 64
"""Fewer at a time leave a processor or a GPU idle while a prompt is computed."""

INTERVALS = (4, 16)
"""Tokens of a response that are tried: fewer save little, more are no stream to a reader."""

BLOCK = 16
"""Tokens that a prefix cache keeps together."""

_FREE = 0.5
"""Of the free memory, that a larger KV cache may take: two engines are served side by side."""

Seen = Evidence[GenerationInputs]


def sequences(evidence: Seen) -> Proposal | Skip:
    """Requests of a batch: more where some wait, fewer where tokens are promised sooner."""
    key, spec = "core.max_num_seqs", evidence.plan.spec
    now, together = spec.core.max_num_seqs, under_way(evidence)
    said = f"{together:.1f} requests under way in the mean, {now} have a place"
    if together < FULL_ENGINE * now:
        return Skip(key, said)
    values = [value for value in (now * 2, now * 4) if value <= spec.serving.queue.max_in_flight]
    along: dict[str, JsonValue] = {}
    if values:  # what a larger batch needs is raised with it
        most, memory = values[-1], _memory_for(evidence.plan, values[-1])
        if memory > spec.core.kv_cache.memory_mib:
            along["core.kv_cache.memory_mib"] = memory
        if most > spec.core.max_num_batched_tokens:
            along["core.max_num_batched_tokens"] = most
        if memory - spec.core.kv_cache.memory_mib > _free_mib():
            said, values = f"{said}; {_free_mib():.0f} MiB are left for its KV cache", []
    # Without a promise about each answer a smaller batch is never better.
    fewer = tuple(value for value in (now // 2, now // 4) if value and evidence.limits_us)
    if not values and not fewer:
        return Skip(key, said)
    if not values:
        return Proposal(key, fewer, said)
    return Proposal(key, tuple(values), said, others=fewer, along=along)


def batched_tokens(evidence: Seen) -> Proposal | Skip:
    """Tokens computed at a time: more for first tokens that come sooner, fewer for steady ones."""
    key, now = "core.max_num_batched_tokens", evidence.plan.spec.core.max_num_batched_tokens
    lengths = [len(prompt.ids) for prompt in evidence.plan.prompts]
    places = evidence.plan.spec.core.max_num_seqs
    come = max(max(lengths), sum(lengths) / len(lengths) * min(places, under_way(evidence)))
    least = max(MIN_BATCHED_TOKENS, places)
    more = (now * 2, now * 4) if come > now else ()
    fewer = tuple(value for value in (now // 2, now // 4) if least <= value < come)
    said = f"prompts that may come together have {come:.0f} tokens, a turn {now}"
    if not more and not fewer:
        return Skip(key, said)
    return Proposal(key, more or fewer, said, others=fewer if more else ())


def prefix_caching(evidence: Seen) -> Proposal | Skip:
    """Whether prompts that begin alike share work: what the traffic has, not its repetition."""
    key, now = "core.enable_prefix_caching", evidence.plan.spec.core.enable_prefix_caching
    shared = shared_beginnings([prompt.ids for prompt in evidence.plan.prompts])
    said = f"{shared:.0%} of the prompts' tokens begin another prompt of the traffic, too"
    # A load sends the traffic over and over: with the cache every prompt was seen before.
    if not now and not shared:
        return Skip(key, f"{said}; a load that repeats them would show a gain that is none")
    if now and shared:
        return Skip(key, f"{said}, and it is on")
    return Proposal(key, (not now,), said)


def kv_memory(evidence: Seen) -> Proposal | Skip:
    """Memory of the KV cache: more where requests under way do not fit."""
    key, now = "core.kv_cache.memory_mib", evidence.plan.spec.core.kv_cache.memory_mib
    places, held = evidence.plan.spec.core.max_num_seqs, _held(evidence)
    wanted = min(places, under_way(evidence))
    said = f"it holds {held} requests as the traffic has them; {wanted:.1f} have a place"
    if held >= wanted:
        return Skip(key, said)
    values = tuple(value for value in (now * 2, now * 4) if value - now <= _free_mib())
    if not values:
        return Skip(key, f"{said}; {_free_mib():.0f} MiB are left for more")
    return Proposal(key, values, said)


def kv_precision(evidence: Seen) -> Proposal | Skip:
    """Numbers of the KV cache: smaller ones hold more tokens and are read faster; gated."""
    key = "core.kv_cache.dtype"
    core = evidence.plan.spec.core
    if core.kv_cache.dtype == "fp8" or core.backend == "scripted":
        return Skip(key, "there is no other")
    return Proposal(key, ("fp8",), "keys and values are kept as auto")


def interval(evidence: Seen) -> Proposal | Skip:
    """Tokens of a response: more cost fewer responses, where the promise leaves time for them."""
    key, now = "serving.stream_interval", evidence.plan.spec.serving.stream_interval
    limits = {name: most for name, most in evidence.limits_us.items() if name.startswith("itl")}
    times = {} if evidence.measurement is None else evidence.measurement.latencies_us
    fits = [
        value
        for value in INTERVALS
        if value > now
        and all(times.get(name, 0.0) / now * value <= most for name, most in limits.items())
    ]
    if fits:
        return Proposal(key, tuple(fits), f"a response of {now} costs each step a hop")
    if now > 1:
        return Proposal(key, (max(1, now // 4),), f"{now} tokens wait for each other")
    return Skip(key, "the time that is promised between responses leaves none to wait")


def preprocess_instances(evidence: Seen) -> Proposal | Skip:
    now = evidence.plan.spec.serving.preprocess_instances
    return more_instances(evidence, "serving.preprocess_instances", "preprocess", now)


def under_way(evidence: Seen) -> float:
    """Requests in the mean at the load that decides: how many come, times how long each takes."""
    one = evidence.measurement
    return 0.0 if one is None else one.throughput_per_s * one.mean_us / 1e6


def shared_beginnings(prompts: Sequence[Sequence[int]]) -> float:
    """Share of the tokens that a prefix cache would have of another prompt: of whole blocks."""
    ranked = sorted(map(list, prompts))
    same = (
        takewhile(lambda two: two[0] == two[1], zip(*pair, strict=False))
        for pair in pairwise(ranked)
    )
    common = [sum(1 for _ in begin) // BLOCK * BLOCK for begin in same]
    best = (max(pair) for pair in pairwise([0, *common, 0]))
    return sum(best) / max(1, sum(map(len, ranked)))


def _memory_for(inputs: GenerationInputs, requests: int) -> int:
    """MiB of KV cache that hold so many requests as the traffic has them."""
    return -(-inputs.kv_token_bytes * inputs.request_tokens * requests // 2**20)


def _free_mib() -> float:
    return _FREE * psutil.virtual_memory().available / 2**20


def _held(evidence: Seen) -> int:
    """Requests as the traffic has them that the KV cache holds."""
    inputs = evidence.plan
    memory = inputs.spec.core.kv_cache.memory_mib << 20
    return int(memory // (inputs.kv_token_bytes * inputs.request_tokens))


GENERATION_FIELDS: tuple[Propose, ...] = (
    sequences,
    batched_tokens,
    kv_memory,
    prefix_caching,
    kv_precision,
    interval,
    preprocess_instances,
)
"""In the order they are tried: what usually matters most first."""
