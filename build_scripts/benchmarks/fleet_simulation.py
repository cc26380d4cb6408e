"""An event simulation of a fleet: replicas that batch, a balancer, and an autoscaler over them.

A replica takes all that waits, up to its largest batch, as soon as it is free (Triton's dynamic
batching without delay); a batch of `n` takes as long as was measured. The balancer gives a request
to the less busy of two replicas drawn at random (Envoy's LEAST_REQUEST). A request that would wait
for longer than it may is refused.
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

_BINS_A_S = 1000


@dataclass(frozen=True)
class Service:
    """One replica, as measured: `batch_s[n]` seconds for a batch of n, `overhead_s` around it."""

    batch_s: tuple[float, ...]
    longest_wait_s: float
    overhead_s: float = 0.0

    @property
    def most(self) -> int:
        """Rows of the largest batch."""
        return len(self.batch_s) - 1


@dataclass(frozen=True)
class Outcome:
    """What became of a load.

    Attributes:
        offered: requests.
        missed: of them slower than promised, or refused.
        replica_s: seconds of all replicas, those that start and end included.
        latency_s: of the answered, by percentile (50 and 99).
        mean_batch: rows.
        most: replicas at once.
    """

    name: str
    offered: int
    missed: int
    replica_s: float
    latency_s: dict[int, float]
    mean_batch: float
    most: int


@dataclass(eq=False)
class _Replica:
    ready_s: float
    began_s: float
    waiting: deque[float] = field(default_factory=deque)
    running: int = 0
    is_going: bool = False
    queue_s: float = 0.0
    compute_s: float = 0.0
    runs: int = 0
    answered: int = 0


@dataclass(frozen=True)
class _Page:
    """Counters at a scrape: of the fleet, and queue and compute of each replica."""

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
        self._chance = random.Random(seed)
        self._replicas: list[_Replica] = []
        self._up: list[_Replica] = []
        self._starting: deque[_Replica] = deque()
        self._events: list[tuple[float, int, _Replica, list[float]]] = []
        self._number = 0
        self._pages: deque[_Page] = deque()
        self._offered = self._missed = 0
        self._spent_s = 0.0
        self._most = 0
        self._runs = self._rows = self._answered = 0
        self._queue_s = 0.0
        self._bins = [0] * (10 * _BINS_A_S)

    def run(self, arrivals: NDArray[np.float64], first: int) -> Outcome:
        """Serve requests that come at these seconds, with `first` replicas that are ready."""
        for _ in range(first):
            self._add(0.0, ready_s=0.0)
        self._look(0.0)
        next_look = float(SYNC_S)
        events = self._events
        for now in arrivals.tolist():
            while next_look <= now:
                self._finish(next_look)
                self._look(next_look)
                next_look += SYNC_S
            while events and events[0][0] <= now:
                self._complete()
            self._arrive(now)
        end = float(arrivals[-1])
        self._finish(math.inf)
        for replica in self._replicas:
            self._spent_s += end - min(end, replica.began_s)
        return Outcome(
            self._scaling.name,
            self._offered,
            self._missed,
            self._spent_s,
            {percent: self._percentile(percent) for percent in (50, 99)},
            self._rows / max(1, self._runs),
            self._most,
        )

    def _arrive(self, now: float) -> None:
        self._offered += 1
        while self._starting and self._starting[0].ready_s <= now:
            replica = self._starting.popleft()
            if not replica.is_going:
                self._up.append(replica)
        up = self._up
        if not up:
            self._missed += 1
            return
        one = up[int(self._chance.random() * len(up))]
        other = up[int(self._chance.random() * len(up))]
        if len(other.waiting) + other.running < len(one.waiting) + one.running:
            one = other
        service = self._service
        if not one.running:
            self._start(one, now, [now])
        elif len(one.waiting) // service.most * service.batch_s[-1] > service.longest_wait_s:
            self._missed += 1
        else:
            one.waiting.append(now)

    def _start(self, replica: _Replica, now: float, batch: list[float]) -> None:
        rows = len(batch)
        took = self._service.batch_s[rows]
        waited = now * rows - sum(batch)
        replica.running = rows
        replica.runs += 1
        replica.queue_s += waited
        replica.compute_s += took * rows
        self._queue_s += waited
        self._runs += 1
        self._rows += rows
        self._number += 1
        heappush(self._events, (now + took, self._number, replica, batch))

    def _complete(self) -> None:
        now, _, replica, batch = heappop(self._events)
        limit, bins, overhead = self._limit_s, self._bins, self._service.overhead_s
        for came in batch:
            latency = now - came + overhead
            if latency > limit:
                self._missed += 1
            bins[min(len(bins) - 1, int(latency * _BINS_A_S))] += 1
        replica.answered += len(batch)
        self._answered += len(batch)
        waiting = replica.waiting
        if waiting:
            rows = min(len(waiting), self._service.most)
            self._start(replica, now, [waiting.popleft() for _ in range(rows)])
            return
        replica.running = 0
        if replica.is_going:
            self._end(replica, now)

    def _finish(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            self._complete()

    def _add(self, now: float, ready_s: float) -> None:
        replica = _Replica(now + ready_s, now)
        self._replicas.append(replica)
        self._starting.append(replica)
        self._most = max(self._most, len(self._replicas))

    def _remove(self, now: float) -> None:
        """The newest goes: what it has is answered, nothing more comes."""
        replica = [each for each in self._replicas if not each.is_going][-1]
        replica.is_going = True
        if replica in self._up:
            self._up.remove(replica)
        if not replica.running:
            self._end(replica, now)

    def _end(self, replica: _Replica, now: float) -> None:
        self._replicas.remove(replica)
        self._spent_s += now - replica.began_s

    def _look(self, now: float) -> None:
        """A scrape, and the autoscaler, which look equally often."""
        each = {id(one): (one.queue_s, one.compute_s) for one in self._up}
        page = _Page(now, self._offered, self._answered, self._queue_s, self._runs, each)
        self._pages.append(page)
        while len(self._pages) > 2 and self._pages[1].at_s < now - 90:
            self._pages.popleft()
        if len(self._pages) < 2:
            return
        current = sum(not replica.is_going for replica in self._replicas)
        wanted = self._autoscaler.replicas(now, current, self._observe)
        for _ in range(wanted - current):
            self._add(now, self._ready_s)
        for _ in range(current - wanted):
            self._remove(now)

    def _observe(self, window_s: float) -> Observed:
        """Between the last scrape and that which a window goes back to."""
        last = self._pages[-1]
        earlier = [page for page in self._pages if page.at_s <= last.at_s - window_s]
        first = earlier[-1] if earlier else self._pages[0]
        seconds = max(1e-9, last.at_s - first.at_s)
        answered = last.answered - first.answered
        queue_s, runs = last.queue_s - first.queue_s, last.runs - first.runs
        ratios = []
        for replica, (queued, computed) in last.replicas.items():
            before = first.replicas.get(replica, (0.0, 0.0))
            ratios.append((queued - before[0]) / max(1e-6 * seconds, computed - before[1]))
        return Observed(
            offered_per_s=(last.offered - first.offered) / seconds,
            waiting_s=queue_s / answered if answered else math.nan,
            queue_an_execution_s=queue_s / (runs + 1e-6 * seconds),
            queue_by_compute=sum(ratios) / len(ratios) if ratios else math.nan,
            seen=len(last.replicas),
        )

    def _percentile(self, percent: int) -> float:
        counts = np.array(self._bins)
        if not counts.sum():
            return math.nan
        place = int(np.searchsorted(counts.cumsum(), counts.sum() * percent / 100))
        return place / _BINS_A_S


def arrivals(steps: Sequence[tuple[float, float]], seed: int) -> NDArray[np.float64]:
    """Seconds at which requests come: seconds and rate of each step, Poisson."""
    chance = np.random.default_rng(seed)
    ends = np.cumsum([0.0, *(seconds for seconds, _ in steps)])
    parts = [
        np.sort(chance.uniform(start, end, chance.poisson(rate * (end - start))))
        for (start, end), (_, rate) in zip(pairwise(ends), steps, strict=True)
    ]
    return np.concatenate(parts)


def capacity(service: Service, limit_s: float, share: float, seed: int = 0) -> float:
    """The highest rate at which one replica answers all but `share` in time, to 2 %."""
    low, high = 0.0, service.most / service.batch_s[-1]
    while high - low > 0.02 * high:
        rate = (low + high) / 2
        outcome = Fleet(service, fixed(1), limit_s, 0.0, seed).run(
            arrivals([(max(120.0, 4000 / rate), rate)], seed), 1
        )
        if outcome.missed <= share * outcome.offered:
            low = rate
        else:
            high = rate
    return low
