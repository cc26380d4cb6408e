"""The fields that tuning may change of a pipeline that generates text, in the order it tries them.

As in `fields`: what the last measurement showed decides whether a value is worth a trial, which
here starts an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile

import psutil
from pydantic import JsonValue

from triptych.building.generation.inputs import GenerationInputs
from triptych.operate.tune.evidence import Evidence, Proposal, Propose, Skip, more_instances

FULL = 0.8
"""Share of the places in a batch that are taken in the mean, from which some requests wait."""

LEAST_BATCHED_TOKENS = 64
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
    key, spec = "core.max_sequences", evidence.plan.spec
    now, together = spec.core.max_sequences, under_way(evidence)
    said = f"{together:.1f} requests under way in the mean, {now} have a place"
    if together < FULL * now:
        return Skip(key, said)
    values = [value for value in (now * 2, now * 4) if value <= spec.serving.queue.max_size]
    along: dict[str, JsonValue] = {}
    if values:  # what a larger batch needs is raised with it
        most, memory = values[-1], _memory_for(evidence.plan, values[-1])
        if memory > spec.core.kv_cache.memory_mib:
            along["core.kv_cache.memory_mib"] = memory
        if most > spec.core.max_batched_tokens:
            along["core.max_batched_tokens"] = most
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
    key, now = "core.max_batched_tokens", evidence.plan.spec.core.max_batched_tokens
    lengths = [len(prompt.ids) for prompt in evidence.plan.prompts]
    places = evidence.plan.spec.core.max_sequences
    come = max(max(lengths), sum(lengths) / len(lengths) * min(places, under_way(evidence)))
    least = max(LEAST_BATCHED_TOKENS, places)
    more = (now * 2, now * 4) if come > now else ()
    fewer = tuple(value for value in (now // 2, now // 4) if least <= value < come)
    said = f"prompts that may come together have {come:.0f} tokens, a turn {now}"
    if not more and not fewer:
        return Skip(key, said)
    return Proposal(key, more or fewer, said, others=fewer if more else ())


def prefix_caching(evidence: Seen) -> Proposal | Skip:
    """Whether prompts that begin alike share work: what the traffic has, not its repetition."""
    key, now = "core.prefix_caching", evidence.plan.spec.core.prefix_caching
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
    places, held = evidence.plan.spec.core.max_sequences, _held(evidence)
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
    key = "core.kv_cache.precision"
    core = evidence.plan.spec.core
    if core.kv_cache.precision == "fp8" or core.backend == "scripted":
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
