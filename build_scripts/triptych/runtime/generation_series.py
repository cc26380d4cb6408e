"""What the steps of a generation tell on the metrics page: names, and edges of histograms."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "triptych_generation"
GAUGES = {
    "under_way": "Requests that the core has",
    "running": "Requests in the engine's batch",
    "waiting": "Requests that have no place in the batch yet",
    "kv_cache_share": "Of the KV cache that running requests hold, 0 to 1",
}
COUNTERS = {
    "tokens": "Tokens, by kind",
    "ended": "Requests that came to an end in the core, by how",
    "unprepared": "Requests that preprocess could make no token ids of, by how",
}
TOKENS = ("prompt", "cached", "new")
"""Kinds: of prompts whose answers began, those of them that need not be computed, of answers."""
MOMENTS = {
    "ttft": "From a request's token ids to the first new token of a streamed answer",
    "itl": "Between two responses of a streamed answer",
    "e2e": "From a request's token ids to the end of its answer",
}
ENDS = ("stop", "length", "cancelled", "refused", "overloaded", "error")
"""How a request ends. ``refused``: it is at fault; ``overloaded``: for want of room, or at a stop;
``cancelled``: nobody waits for it, or a stop string came."""

_EDGES_MS: Mapping[str, tuple[float, ...]] = {
    "ttft": (50, 200, 500, 1000, 5000, 20_000),
    "itl": (10, 20, 50, 100, 500),
    "e2e": (500, 2000, 10_000, 50_000, 200_000),
}


NAMES = tuple(
    f"{PREFIX}_{name}"
    for name in (
        *GAUGES,
        *COUNTERS,
        *(f"{moment}_ms_{part}" for moment in MOMENTS for part in ("bucket", "count", "sum")),
    )
)
"""Of all series."""


def edges_of(limits_ms: Mapping[str, float]) -> dict[str, list[float]]:
    """Upper edges in milliseconds, ascending, of each of `MOMENTS`.

    Args:
        limits_ms: promised, by names as ``ttft_p99``: a share is exact at an edge alone.
    """
    promised = [(name.partition("_")[0], limit) for name, limit in limits_ms.items()]
    return {
        moment: sorted({*edges, *(limit for name, limit in promised if name == moment)})
        for moment, edges in _EDGES_MS.items()
    }


def edge_label(edge_ms: float) -> str:
    """Of Prometheus' label ``le``."""
    return f"{edge_ms:.15g}"
