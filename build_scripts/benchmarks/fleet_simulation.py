"""Event simulation of a fleet: replicas that batch, a load balancer, and an autoscaler.

A free replica takes all waiting requests, up to its maximum batch (Triton's dynamic batching
without delay). The balancer sends a request to the less busy of two random replicas (Envoy's
LEAST_REQUEST). A request that would wait for too long is refused.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from benchmarks.autoscaler import Autoscaler, Observed, Scaling, fixed
from triptych.deploy.numbers import SYNC_S

_BINS_PER_S = 1000
_MAX_WINDOW_S = 90


@dataclass(frozen=True)
class Service:
    """One replica: ``batch_s[n]`` is the duration of a batch of n rows."""

    batch_s: tuple[float, ...]
    max_wait_s: float
    overhead_s: float = 0.0

    @property
    def max_rows(self) -> int:
        """Number of rows in the largest batch."""
        return len(self.batch_s) - 1


@dataclass(frozen=True)
class Outcome:
    """Result of a load.

    Attributes:
        missed: Number of requests that were refused or slower than the limit.
        replica_s: Seconds of all replicas, including those that start and end.
        latency_s: Latency of answered requests by percentile (50 and 99).
        mean_batch: Mean number of rows in a batch.
        max_replicas: Highest number of replicas at once.
    """

    name: str
    offered: int
    missed: int
    replica_s: float
    latency_s: dict[int, float]
    mean_batch: float
    max_replicas: int


@dataclass(eq=False)
class _Replica:
    ready_s: float
    began_s: float
    waiting: deque[float] = field(default_factory=deque)
    running: int = 0
    is_ending: bool = False
    queue_s: float = 0.0
    compute_s: float = 0.0


@dataclass(frozen=True)
class _Scrape:
    """Counters of the fleet, and queue and compute time of each replica."""

    at_s: float
    offered: int
    answered: int
    queue_s: float
    runs: int
    replicas: dict[int, tuple[float, float]]


class Fleet:
    """One run of a simulation; `run` is called once."""

    def __init__(
        self, service: Service, scaling: Scaling, limit_s: float, ready_s: float, seed: int = 0
    ) -> None:
        self._service, self._scaling, self._limit_s = service, scaling, limit_s
        self._ready_s = ready_s
        self._autoscaler = Autoscaler(scaling)
        self._rng = random.Random(seed)
        self._replicas: list[_Replica] = []
        self._up: list[_Replica] = []
        self._starting: deque[_Replica] = deque()
        self._events: list[tuple[float, int, _Replica, list[float]]] = []
        self._scrapes: deque[_Scrape] = deque()
        self._offered = self._missed = self._runs = self._rows = self._answered = 0
        self._max_replicas = 0
        self._queue_s = self._replica_s = 0.0
        self._bins = [0] * (10 * _BINS_PER_S)

    def run(self, arrivals: NDArray[np.float64], first: int) -> Outcome:
        """Serve requests that arrive at these seconds, beginning with `first` ready replicas."""
        for _ in range(first):
            self._add(0.0, ready_s=0.0)
        self._sync(0.0)
        next_sync = float(SYNC_S)
        events = self._events
        for now in arrivals.tolist():
            while next_sync <= now:
                self._finish(next_sync)
                self._sync(next_sync)
                next_sync += SYNC_S
            while events and events[0][0] <= now:
                self._complete()
            self._arrive(now)
        end = float(arrivals[-1])
        self._finish(math.inf)
        for replica in self._replicas:
            self._replica_s += end - min(end, replica.began_s)
        return Outcome(
            self._scaling.name,
            self._offered,
            self._missed,
            self._replica_s,
            {percent: self._percentile(percent) for percent in (50, 99)},
            self._rows / max(1, self._runs),
            self._max_replicas,
        )

    def _arrive(self, now: float) -> None:
        self._offered += 1
        while self._starting and self._starting[0].ready_s <= now:
            replica = self._starting.popleft()
            if not replica.is_ending:
                self._up.append(replica)
        up = self._up
        if not up:
            self._missed += 1
            return
        chosen = up[int(self._rng.random() * len(up))]
        other = up[int(self._rng.random() * len(up))]
        if len(other.waiting) + other.running < len(chosen.waiting) + chosen.running:
            chosen = other
        service = self._service
        if not chosen.running:
            self._start(chosen, now, [now])
        elif len(chosen.waiting) // service.max_rows * service.batch_s[-1] > service.max_wait_s:
            self._missed += 1
        else:
            chosen.waiting.append(now)

    def _start(self, replica: _Replica, now: float, batch: list[float]) -> None:
        rows = len(batch)
        took = self._service.batch_s[rows]
        waited = now * rows - sum(batch)
        replica.running = rows
        replica.queue_s += waited
        replica.compute_s += took * rows
        self._queue_s += waited
        self._runs += 1
        self._rows += rows
        heappush(self._events, (now + took, self._runs, replica, batch))

    def _complete(self) -> None:
        now, _, replica, batch = heappop(self._events)
        limit, bins, overhead = self._limit_s, self._bins, self._service.overhead_s
        for arrived in batch:
            latency = now - arrived + overhead
            if latency > limit:
                self._missed += 1
            bins[min(len(bins) - 1, int(latency * _BINS_PER_S))] += 1
        self._answered += len(batch)
        waiting = replica.waiting
        if waiting:
            rows = min(len(waiting), self._service.max_rows)
            self._start(replica, now, [waiting.popleft() for _ in range(rows)])
            return
        replica.running = 0
        if replica.is_ending:
            self._end(replica, now)

    def _finish(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            self._complete()

    def _add(self, now: float, ready_s: float) -> None:
        replica = _Replica(now + ready_s, now)
        self._replicas.append(replica)
        self._starting.append(replica)
        self._max_replicas = max(self._max_replicas, len(self._replicas))

    def _remove(self, now: float) -> None:
        """Drain the newest replica: it answers its requests and receives no others."""
        replica = [each for each in self._replicas if not each.is_ending][-1]
        replica.is_ending = True
        if replica in self._up:
            self._up.remove(replica)
        if not replica.running:
            self._end(replica, now)

    def _end(self, replica: _Replica, now: float) -> None:
        self._replicas.remove(replica)
        self._replica_s += now - replica.began_s

    def _sync(self, now: float) -> None:
        """Scrape the counters and run the autoscaler, which have the same interval."""
        times = {id(one): (one.queue_s, one.compute_s) for one in self._up}
        counters = self._offered, self._answered, self._queue_s, self._runs
        self._scrapes.append(_Scrape(now, *counters, times))
        while len(self._scrapes) > 2 and self._scrapes[1].at_s < now - _MAX_WINDOW_S:
            self._scrapes.popleft()
        if len(self._scrapes) < 2:
            return
        current = sum(not replica.is_ending for replica in self._replicas)
        wanted = self._autoscaler.replicas(now, current, self._observe)
        for _ in range(wanted - current):
            self._add(now, self._ready_s)
        for _ in range(current - wanted):
            self._remove(now)

    def _observe(self, window_s: float) -> Observed:
        """Return the metrics between the last scrape and the one at the begin of the window."""
        last = self._scrapes[-1]
        earlier = [scrape for scrape in self._scrapes if scrape.at_s <= last.at_s - window_s]
        first = earlier[-1] if earlier else self._scrapes[0]
        seconds = max(1e-9, last.at_s - first.at_s)
        answered, queue_s = last.answered - first.answered, last.queue_s - first.queue_s
        ratios = []
        for replica, (queued, computed) in last.replicas.items():
            before = first.replicas.get(replica, (0.0, 0.0))
            ratios.append((queued - before[0]) / max(1e-6 * seconds, computed - before[1]))
        return Observed(
            offered_per_s=(last.offered - first.offered) / seconds,
            waiting_s=queue_s / answered if answered else math.nan,
            queue_per_execution_s=queue_s / (last.runs - first.runs + 1e-6 * seconds),
            queue_by_compute=sum(ratios) / len(ratios) if ratios else math.nan,
            replicas=len(last.replicas),
        )

    def _percentile(self, percent: int) -> float:
        counts = np.array(self._bins)
        if not counts.sum():
            return math.nan
        index = int(np.searchsorted(counts.cumsum(), counts.sum() * percent / 100))
        return index / _BINS_PER_S


def arrivals(steps: Sequence[tuple[float, float]], seed: int) -> NDArray[np.float64]:
    """Return Poisson arrivals in seconds, for steps of a duration and a rate each."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum([0.0, *(seconds for seconds, _ in steps)])
    parts = [
        np.sort(rng.uniform(start, end, rng.poisson(rate * (end - start))))
        for (start, end), (_, rate) in zip(pairwise(ends), steps, strict=True)
    ]
    return np.concatenate(parts)


def capacity(service: Service, limit_s: float, ratio: float, seed: int = 0) -> float:
    """Return the highest rate at which one replica misses at most `ratio`, to 2 %."""
    low, high = 0.0, service.max_rows / service.batch_s[-1]
    while high - low > 0.02 * high:
        rate = (low + high) / 2
        load = arrivals([(max(120.0, 4000 / rate), rate)], seed)
        outcome = Fleet(service, fixed(1), limit_s, 0.0, seed).run(load, 1)
        low, high = (rate, high) if outcome.missed <= ratio * outcome.offered else (low, rate)
    return low
