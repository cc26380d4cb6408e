"""The numbers of the Envoy in front of replicas, each with its reason: here, and in manifests."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from triptych.base.explained import Because

_EDGES_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000)


@dataclass(frozen=True)
class ProxySettings:
    """Seconds, milliseconds, MiB and percent, as the names say; `proxy_settings` makes one.

    `affinity`, where it is set, is a header of streams that decides on their replica.
    """

    max_request_mib: Because
    retry_percent: Because
    latency_edges_ms: Because
    affinity: Because | None = None
    retries: Because = Because(
        2,
        "two replicas may be going at once; a request that ends its server ends three at most",
    )
    retry_at_least: Because = Because(
        32, "retries that may always be under way: of few requests a share is nothing"
    )
    reselections: Because = Because(
        64,
        "a retry must not go where it failed, and a dead replica looks idle: of two replicas "
        "3 in 4 picks are of the idle one, so that few draws would not do",
    )
    least_backoff_s: Because = Because(
        0.025, "with jitter, and up to ten times that: a queue that was full may have room then"
    )
    connect_s: Because = Because(1, "replicas are near: one that takes longer is not there")
    check_interval_s: Because = Because(
        1,
        "also without traffic, which Envoy would check once a minute: who asks first must not pay",
    )
    check_timeout_s: Because = Because(
        3, "as the image's own health check: a server under load answers late"
    )
    check_failures: Because = Because(3, "one late answer takes no replica out")
    check_passes: Because = Because(1, "a server says that it is ready once all of its models are")
    eject_after: Because = Because(
        2,
        "refused or broken connections in a row. Statuses do not count: UNAVAILABLE may be a full "
        "queue, and INTERNAL the request's own fault, on every replica that it is sent to",
    )
    eject_s: Because = Because(
        5, "then it may try again, and earlier where a health check passes meanwhile"
    )
    eject_percent: Because = Because(
        50, "a network that fails between proxy and replicas must not take out all of them"
    )
    keepalive_s: Because = Because(60, "as the servers' own: clients that vanished are noticed")
    keepalive_timeout_s: Because = Because(20, "see the interval")
    most_at_once: Because = Because(
        1_000_000,
        "requests, pending ones and connections: the pipelines know what they can take and refuse "
        "the rest; Envoy's own 1024 would refuse before they do",
    )
    mirrored_at_once: Because = Because(
        16,
        "mirrored requests under way: of more, none is mirrored. Each is held whole until the "
        "candidate has answered, and a slow one must not fill this proxy's memory",
    )
    dns_refresh_s: Because = Because(
        5,
        "a replica that got ready is found within that; one that goes sleeps longer before it does",
    )


def proxy_settings(
    *,
    replicas: int,
    max_request_mib: int,
    limits_ms: Iterable[float] = (),
    affinity: str | None = None,
) -> ProxySettings:
    """The settings of a fleet.

    Args:
        replicas: fewest that are behind the proxy.
        max_request_mib: the largest request that its pipelines take (`largest_request_mib`).
        limits_ms: of the latency percentiles that are promised (`Slo.limits_ms`).
        affinity: a header of streams: those with the same value go to the same replica.
    """
    limits = sorted(set(limits_ms))
    promised = ", ".join(f"{limit:g}" for limit in limits)
    return ProxySettings(
        affinity=None
        if affinity is None
        else Because(
            affinity,
            "streams of one value begin alike: one replica keeps what it computed of that. Without "
            "the header a stream goes anywhere",
        ),
        max_request_mib=Because(
            max_request_mib,
            "MiB, as the servers' own limit: no pipeline here takes a larger request. A whole one "
            "is held until it is answered, so that it can be sent again",
        ),
        retry_percent=Because(
            min(100, max(20, math.ceil(200 / max(1, replicas - 1)))),
            f"of the requests under way may be retries: twice what each of {replicas} replicas "
            "leaves to the others when it dies, at least 20, so that overload is not multiplied",
        ),
        latency_edges_ms=Because(
            sorted({*map(float, _EDGES_MS), *limits}),
            "edges of the latency histograms in ms"
            + (f"; {promised} are promised (serving.slo)" if limits else ""),
        ),
    )
