"""How Envoy chooses a replica: the one with the least to do, or by a header of the stream."""

from __future__ import annotations

from typing import Any

from triptych.base.explained import Because
from triptych.serving.fleet.settings import ProxySettings


def balancing(settings: ProxySettings) -> dict[str, Any]:
    """Fields of a cluster of Envoy's."""
    if settings.affinity is None:
        return {
            "lb_policy": Because("LEAST_REQUEST", "requests take unequal time, by their length"),
            "common_lb_config": {"healthy_panic_threshold": _no_panic()},
        }
    return {
        "lb_policy": Because(
            "RING_HASH",
            f"a replica for each value of {settings.affinity.value}, and few change it when "
            "replicas come and go",
        ),
        "common_lb_config": {
            "healthy_panic_threshold": _no_panic(),
            "consistent_hashing_lb_config": {
                "hash_balance_factor": Because(
                    150,
                    "percent of the mean that a replica may have under way: a value that "
                    "many ask for overflows to its neighbours",
                )
            },
        },
    }


def _no_panic() -> dict[str, Any]:
    return {"value": Because(0, "servers that are known not to be ready get no traffic")}
