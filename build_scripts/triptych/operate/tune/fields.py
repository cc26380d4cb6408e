"""Tunable fields of the spec, in the order of their trials, for encoders and text generation.

A function for each field proposes values to try from the last measurement, or a reason to skip the
field. This gives a few promising trials instead of a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Generic, Protocol, TypeVar

import psutil
from pydantic import JsonValue

from triptych.building.generation.inputs import GenerationInputs
from triptych.serving.bench.results import Measurement, StepUse
from triptych.spec.any_spec import AnySpec
from triptych.spec.plan import Plan

MIN_BUSY_RATIO = 0.6
"""Minimum busy share of a step's instances for more instances to be tried."""


class HasSpec(Protocol):
    """Plan with the spec that it was made of."""

    @property
    def spec(self) -> AnySpec: ...


Planned = TypeVar("Planned", bound=HasSpec)
"""Plan of a setting: `Plan`, or `GenerationInputs` of a pipeline that generates text."""


@dataclass(frozen=True)
class Observation(Generic[Planned]):
    """Plan and measurement of the best setting."""

    plan: Planned  # plan of the best setting
    measurement: Measurement | None  # measurement at the load of the score; None before the first
    cores: int  # number of cores of this machine
    limits_us: Mapping[str, float]  # limits of the SLO; see `Slo.limits_us`

    def step(self, name: str) -> StepUse | None:
        """Return the server's counts of a step; None without counts."""
        steps = () if self.measurement is None else self.measurement.steps
        return next((use for use in steps if use.step == name), None)


@dataclass(frozen=True)
class Proposal:
    """Values of one field, tried in order until one is not better; a field without is skipped."""

    key: str  # field of the spec, dotted
    values: tuple[JsonValue, ...]  # values to try first; empty to skip the field
    reason: str  # reason of the trial, or why the field is skipped
    others: tuple[JsonValue, ...] = ()  # values to try if the first of `values` is not better
    along: Mapping[str, JsonValue] = field(default_factory=dict)
    """Other fields to set together with `values`, not with `others`."""


Propose = Callable[[Observation[Planned]], Proposal]


def propose_instances(observed: Observation[Planned], key: str, step: str, now: int) -> Proposal:
    """Propose more instances of a step if the present ones are busy."""
    use = observed.step(step)
    if use is not None and use.busy is not None and use.busy < MIN_BUSY_RATIO:
        return Proposal(key, (), f"busy {use.busy:.0%} of the time")
    most = max(2, 2 * observed.cores)
    values = tuple(value for value in (now + 1, now + 2, now + 4) if value <= most)
    if not values:
        return Proposal(key, (), f"{now} on {observed.cores} cores are enough")
    busy = "" if use is None or use.busy is None else f"busy {use.busy:.0%} of the time"
    return Proposal(key, values, busy or "the busy share is unknown")


MAX_DELAY_US = 20_000

MIN_FILL_RATIO = 0.5
"""Minimum mean batch, as a share of the batch limit, for the limit to matter."""


def propose_queue_delay(observed: Observation[Plan]) -> Proposal:
    """Propose queue delays of the core: useful if batches are small and the core is idle."""
    key = "serving.queue.max_delay_us"
    now = observed.plan.spec.serving.queue.max_delay_us
    core = observed.step("core")
    if now:
        lower = tuple(dict.fromkeys((0, now // 4)))
        return Proposal(key, lower, f"requests wait up to {now} us for a batch", others=(now * 2,))
    if core is not None and core.mean_batch >= MIN_FILL_RATIO * observed.plan.max_batch_size:
        return Proposal(
            key, (), f"batches are full without delay: {core.mean_batch:.1f} rows on average"
        )
    most = min(MAX_DELAY_US, min(observed.limits_us.values(), default=MAX_DELAY_US * 5) / 5)
    values = tuple(value for value in (1000, 4000, 16_000) if value <= most)
    if not values:
        return Proposal(key, (), "the latency SLO leaves no time to wait")
    batch = "unknown" if core is None else f"{core.mean_batch:.1f} rows"
    return Proposal(key, values, f"the core's mean batch is {batch}; a delay may fill it")


def propose_step_instances(step: str) -> Propose[Plan]:
    """Propose more instances of a step if the present ones are busy."""

    def propose(observed: Observation[Plan]) -> Proposal:
        now: int = getattr(observed.plan.spec.serving.instances, step)
        return propose_instances(observed, f"serving.instances.{step}", step, now)

    return propose


def propose_threads(observed: Observation[Plan]) -> Proposal:
    """Propose the number of threads of one operator: fewer than the backend's one per core."""
    key, core = "core.threads", observed.plan.spec.core
    if core.device != "cpu":
        return Proposal(key, (), "the core runs on a GPU")
    if core.threads is not None:
        return Proposal(key, (None,), f"{core.threads} threads share an operator")
    if observed.cores == 1:
        return Proposal(key, (), "the machine has one core")
    instances = observed.plan.spec.serving.instances.core
    fewer = max(1, observed.cores // max(2, instances))
    return Proposal(key, (fewer,), "each instance has a thread for every core")


def propose_batch_limit(observed: Observation[Plan]) -> Proposal:
    """Propose larger batches if batches reach their limit."""
    key, now = "core.max_batch_size", observed.plan.spec.core.max_batch_size
    core = observed.step("core")
    if core is None:
        return Proposal(key, (), "the batch sizes are unknown")
    if core.mean_batch < MIN_FILL_RATIO * now:
        return Proposal(key, (), f"the mean batch is {core.mean_batch:.1f} of {now}: not the limit")
    return Proposal(key, (now * 2, now * 4), f"mean batch {core.mean_batch:.1f} of {now}")


def propose_bucket_count(observed: Observation[Plan]) -> Proposal:
    """Propose the number of padded lengths: more reduce padding, fewer fill batches better."""
    key, now = "core.bucket_count", observed.plan.spec.core.bucket_count
    if observed.plan.layout != "bucketed":
        return Proposal(key, (), f"the layout is {observed.plan.layout}")
    reason = f"{len(observed.plan.bucket_edges)} lengths, {observed.plan.padding_share:.0%} padding"
    return Proposal(key, (max(1, now // 2),), reason, others=(now * 2,))


def propose_layout(observed: Observation[Plan]) -> Proposal:
    key, now = "core.layout", observed.plan.layout
    if now == "fixed":
        return Proposal(key, (), "all rows have the same shape")
    if observed.plan.spec.core.layout not in (now, "auto"):
        return Proposal(key, (), "its rows cannot be packed")
    other = "bucketed" if now == "packed" else "packed"
    return Proposal(key, (other,), f"rows are {now}")


FIELDS: tuple[Propose[Plan], ...] = (
    propose_queue_delay,
    propose_step_instances("preprocess"),
    propose_step_instances("core"),
    propose_step_instances("postprocess"),
    propose_batch_limit,
    propose_threads,
    propose_layout,
    propose_bucket_count,
)
"""Fields of encoders in the order of their trials: free changes first, changes of the core last."""


MIN_ENGINE_FILL_RATIO = 0.8
"""Minimum mean occupancy of the batch from which some requests wait."""

MIN_BATCHED_TOKENS = 64
"""Minimum tokens per step; fewer leave a processor or GPU idle during prefill."""

STREAM_INTERVALS = (4, 16)
"""Tokens per response to try: fewer save little, more make streaming coarse."""

PREFIX_BLOCK_TOKENS = 16
"""Tokens per block of the prefix cache."""

_FREE = 0.5
"""Maximum share of free memory for a larger KV cache, because two engines run."""


def propose_sequences(observed: Observation[GenerationInputs]) -> Proposal:
    """Propose the batch size: larger if requests wait, smaller for lower latency."""
    key, spec = "core.max_num_seqs", observed.plan.spec
    now, together = spec.core.max_num_seqs, mean_in_flight(observed)
    said = f"{together:.1f} requests in flight on average, {now} fit into the batch"
    if together < MIN_ENGINE_FILL_RATIO * now:
        return Proposal(key, (), said)
    values = [value for value in (now * 2, now * 4) if value <= spec.serving.queue.max_in_flight]
    along: dict[str, JsonValue] = {}
    if values:  # a larger batch needs more memory and tokens
        most, memory = values[-1], _memory_for(observed.plan, values[-1])
        if memory > spec.core.kv_cache.memory_mib:
            along["core.kv_cache.memory_mib"] = memory
        if most > spec.core.max_num_batched_tokens:
            along["core.max_num_batched_tokens"] = most
        if memory - spec.core.kv_cache.memory_mib > _free_mib():
            said, values = f"{said}; {_free_mib():.0f} MiB are free for its KV cache", []
    # Without a latency SLO a smaller batch is never better.
    fewer = tuple(value for value in (now // 2, now // 4) if value and observed.limits_us)
    if not values and not fewer:
        return Proposal(key, (), said)
    if not values:
        return Proposal(key, fewer, said)
    return Proposal(key, tuple(values), said, others=fewer, along=along)


def propose_batched_tokens(observed: Observation[GenerationInputs]) -> Proposal:
    """Propose tokens per step: more for an earlier first token, fewer for steady tokens."""
    key, now = "core.max_num_batched_tokens", observed.plan.spec.core.max_num_batched_tokens
    lengths = [len(prompt.ids) for prompt in observed.plan.prompts]
    places = observed.plan.spec.core.max_num_seqs
    come = max(max(lengths), sum(lengths) / len(lengths) * min(places, mean_in_flight(observed)))
    least = max(MIN_BATCHED_TOKENS, places)
    more = (now * 2, now * 4) if come > now else ()
    fewer = tuple(value for value in (now // 2, now // 4) if least <= value < come)
    said = f"concurrent prompts have {come:.0f} tokens, a step computes {now}"
    if not more and not fewer:
        return Proposal(key, (), said)
    return Proposal(key, more or fewer, said, others=fewer if more else ())


def propose_prefix_caching(observed: Observation[GenerationInputs]) -> Proposal:
    """Propose prefix caching if prompts of the traffic share prefixes, repetitions aside."""
    key, now = "core.enable_prefix_caching", observed.plan.spec.core.enable_prefix_caching
    shared = shared_prefix_ratio([prompt.ids for prompt in observed.plan.prompts])
    said = f"{shared:.0%} of the prompts' tokens are a prefix of another prompt"
    # A load test repeats the traffic, so with the cache every prompt would be known.
    if not now and not shared:
        return Proposal(key, (), f"{said}; a load test that repeats them would show a false gain")
    if now and shared:
        return Proposal(key, (), f"{said}, and caching is on")
    return Proposal(key, (not now,), said)


def propose_kv_memory(observed: Observation[GenerationInputs]) -> Proposal:
    """Propose more KV cache memory if the requests in flight do not fit."""
    key, now = "core.kv_cache.memory_mib", observed.plan.spec.core.kv_cache.memory_mib
    places, held = observed.plan.spec.core.max_num_seqs, _kv_capacity(observed)
    wanted = min(places, mean_in_flight(observed))
    said = f"the KV cache holds {held} mean requests; the batch has {wanted:.1f}"
    if held >= wanted:
        return Proposal(key, (), said)
    values = tuple(value for value in (now * 2, now * 4) if value - now <= _free_mib())
    if not values:
        return Proposal(key, (), f"{said}; {_free_mib():.0f} MiB are free")
    return Proposal(key, values, said)


def propose_kv_precision(observed: Observation[GenerationInputs]) -> Proposal:
    """Propose lower KV cache precision: more tokens, faster reads; the gate checks it."""
    key = "core.kv_cache.dtype"
    core = observed.plan.spec.core
    if core.kv_cache.dtype == "fp8":
        return Proposal(key, (), "no other precision is supported")
    return Proposal(key, ("fp8",), "keys and values have the precision auto")


def propose_interval(observed: Observation[GenerationInputs]) -> Proposal:
    """Propose tokens per response: more need fewer responses, if the SLO leaves time."""
    key, now = "serving.stream_interval", observed.plan.spec.serving.stream_interval
    limits = {name: most for name, most in observed.limits_us.items() if name.startswith("itl")}
    times = {} if observed.measurement is None else observed.measurement.latencies_us
    fits = [
        value
        for value in STREAM_INTERVALS
        if value > now
        and all(times.get(name, 0.0) / now * value <= most for name, most in limits.items())
    ]
    if fits:
        return Proposal(key, tuple(fits), f"each response of {now} tokens passes every step")
    if now > 1:
        return Proposal(key, (max(1, now // 4),), f"a response waits for {now} tokens")
    return Proposal(key, (), "the inter-token SLO leaves no time to wait")


def propose_preprocess_instances(observed: Observation[GenerationInputs]) -> Proposal:
    now = observed.plan.spec.serving.preprocess_instances
    return propose_instances(observed, "serving.preprocess_instances", "preprocess", now)


def mean_in_flight(observed: Observation[GenerationInputs]) -> float:
    """Return the mean number of requests in flight at the load of the score (Little's law)."""
    measured = observed.measurement
    return 0.0 if measured is None else measured.throughput_per_s * measured.mean_us / 1e6


def shared_prefix_ratio(prompts: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens in whole cache blocks that another prompt also starts with."""
    ranked = sorted(map(list, prompts))
    same = (
        takewhile(lambda two: two[0] == two[1], zip(*pair, strict=False))
        for pair in pairwise(ranked)
    )
    common = [sum(1 for _ in begin) // PREFIX_BLOCK_TOKENS * PREFIX_BLOCK_TOKENS for begin in same]
    best = (max(pair) for pair in pairwise([0, *common, 0]))
    return sum(best) / max(1, sum(map(len, ranked)))


def _memory_for(inputs: GenerationInputs, requests: int) -> int:
    """Return the KV cache memory of mean requests, in MiB."""
    return -(-inputs.kv_token_bytes * inputs.request_tokens * requests // 2**20)


def _free_mib() -> float:
    return _FREE * psutil.virtual_memory().available / 2**20


def _kv_capacity(observed: Observation[GenerationInputs]) -> int:
    """Return how many mean requests the KV cache holds."""
    inputs = observed.plan
    memory = inputs.spec.core.kv_cache.memory_mib << 20
    return int(memory // (inputs.kv_token_bytes * inputs.request_tokens))


GENERATION_FIELDS: tuple[Propose[GenerationInputs], ...] = (
    propose_sequences,
    propose_batched_tokens,
    propose_kv_memory,
    propose_prefix_caching,
    propose_kv_precision,
    propose_interval,
    propose_preprocess_instances,
)
"""Fields of text generation in the order of their trials: the most important first."""
