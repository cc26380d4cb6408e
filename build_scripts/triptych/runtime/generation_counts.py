"""What the steps of a generation tell on the server's metrics page: load, times, tokens, ends.

Histograms are counters, for the reasons of `lengths`: what is counted waits here in plain numbers,
and goes out every few seconds. All methods but `send` are called on one thread.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import triton_python_backend_utils as pb_utils

from .generation_engine import Delta, Load
from .generation_series import COUNTERS, ENDS, GAUGES, MOMENTS, PREFIX, TOKENS, edge_label

FLUSH_S, SHOW_S = 5.0, 0.2
"""Between two times that counts go out, and gauges."""

_Key = tuple[str, str]


class Unprepared:
    """Requests that do not reach the core: ``refused`` and ``error`` of `ENDS`, told at once."""

    def __init__(self, pipeline: str) -> None:
        self._metrics: Mapping[str, Any] = {}
        try:
            # Of its own name: a metric that two models share dies with the first of them.
            self._family = _family(
                "unprepared", COUNTERS["unprepared"], pb_utils.MetricFamily.COUNTER
            )
            self._metrics = {
                how: _metric(self._family, {"pipeline": pipeline, "how": how})
                for how in ("refused", "error")
            }
        except Exception:  # a server without such metrics serves all the same
            return

    def count(self, how: str) -> None:
        """One more."""
        with suppress(Exception):  # counts are no reason to fail a request
            self._metrics[how].increment(1)


class Clock:
    """The times of one request; `streamed` where its client sees them."""

    __slots__ = ("began_at", "streamed", "told_at")

    def __init__(self, *, streamed: bool) -> None:
        self.began_at = time.monotonic()
        self.told_at: float | None = None
        self.streamed = streamed


class GenerationCounts:
    """The metrics of one core.

    Args:
        settings: ``pipeline``, and ``time_edges_ms`` as `generation_series.edges_of` has them.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._edges: Mapping[str, Sequence[float]] = settings["time_edges_ms"]
        self._buckets = {name: [0] * (len(edges) + 1) for name, edges in self._edges.items()}
        self._sums_ms = dict.fromkeys(self._edges, 0.0)
        self._counted: Counter[_Key] = Counter()
        self._shown: dict[str, float] = {}
        self._due_at = 0.0
        self._show_at = 0.0
        self._families: list[Any] = []  # a metric dies with its family
        self._metrics: dict[_Key, Any] | None = None
        self._pipeline: str = settings["pipeline"]

    def take(self, clock: Clock, delta: Delta, prompt_tokens: int) -> None:
        """Count what came of an answer."""
        now = time.monotonic()
        if clock.told_at is None:
            self._counted["tokens", "prompt"] += prompt_tokens
            self._counted["tokens", "cached"] += delta.cached_tokens
        if clock.streamed:
            since = clock.began_at if clock.told_at is None else clock.told_at
            self._time("ttft" if clock.told_at is None else "itl", now - since)
        clock.told_at = now
        self._counted["tokens", "new"] += len(delta.token_ids)
        if delta.finish:
            self._time("e2e", now - clock.began_at)
            self.end(delta.finish)

    def end(self, how: str) -> None:
        """Count the end of a request, by one of `ENDS`."""
        self._counted["ended", how if how in ENDS else "error"] += 1

    def due(self, load: Load, under_way: int) -> Mapping[_Key, float]:
        """What `send` is to send now: gauges that changed, and at times all that was counted."""
        now = time.monotonic()
        if now < self._show_at:
            return {}
        self._show_at = now + SHOW_S
        gauges = {"under_way": under_way, **load._asdict()}
        found: dict[_Key, float] = {
            (name, ""): value for name, value in gauges.items() if self._shown.get(name) != value
        }
        self._shown = gauges
        if now >= self._due_at:
            self._due_at = now + FLUSH_S
            found.update(self.rest())
        return found

    def rest(self) -> Mapping[_Key, float]:
        """All that was counted and not sent."""
        found: dict[_Key, float] = {}
        for moment, buckets in self._buckets.items():
            # From the last bucket to the first: whoever reads meanwhile sees none above a later.
            ends = ["+Inf", *(edge_label(edge) for edge in reversed(self._edges[moment]))]
            totals = list(accumulate(buckets))[::-1]
            found |= {(f"{moment}_ms_bucket", end): n for end, n in zip(ends, totals, strict=True)}
            found[f"{moment}_ms_count", ""] = totals[0]
            found[f"{moment}_ms_sum", ""] = self._sums_ms[moment]
            self._buckets[moment] = [0] * len(buckets)
        self._sums_ms = dict.fromkeys(self._edges, 0.0)
        found.update(self._counted)
        self._counted.clear()
        return {key: value for key, value in found.items() if value}

    def send(self, values: Mapping[_Key, float]) -> None:
        """Put values on the page; waits for the server at each. The first call makes them."""
        try:
            if self._metrics is None:
                self._metrics = self._made()
            for key, value in values.items():
                if self._metrics:
                    metric = self._metrics[key]
                    metric.set(value) if key[0] in GAUGES else metric.increment(value)
        except Exception:  # counts are no reason to fail a request, nor a server without metrics
            self._metrics = {}

    def close(self) -> None:
        """Send what is left, and take all off the page."""
        self.send(self.rest())
        made = [*self._families, *(self._metrics or {}).values()]
        self._families.clear()
        self._metrics = {}
        while made:  # metrics before their families
            made.pop()

    def _time(self, moment: str, seconds: float) -> None:
        ms = seconds * 1e3
        self._buckets[moment][bisect_left(self._edges[moment], ms)] += 1
        self._sums_ms[moment] += ms

    def _made(self) -> dict[_Key, Any]:
        made: dict[_Key, Any] = {}
        gauge, counter = pb_utils.MetricFamily.GAUGE, pb_utils.MetricFamily.COUNTER
        for name, words, kind, label, values in (
            *((name, words, gauge, "", [""]) for name, words in GAUGES.items()),
            *((*made[:2], counter, *made[2:]) for made in self._histograms()),
            ("tokens", COUNTERS["tokens"], counter, "kind", TOKENS),
            ("ended", COUNTERS["ended"], counter, "how", ENDS),
        ):
            family = _family(name, words, kind)
            self._families.append(family)
            for value in values:
                labels = {"pipeline": self._pipeline, **({label: value} if label else {})}
                made[name, value] = _metric(family, labels)
        return made

    def _histograms(self) -> Iterator[tuple[str, str, str, list[str]]]:
        """Name, description, label and its values."""
        for moment, words in MOMENTS.items():
            ends = [edge_label(edge) for edge in self._edges[moment]]
            yield f"{moment}_ms_bucket", f"{words}: at most le ms", "le", [*ends, "+Inf"]
            yield f"{moment}_ms_count", f"{words}: how often", "", [""]
            yield f"{moment}_ms_sum", f"{words}: ms in all", "", [""]


def _family(name: str, words: str, kind: Any) -> Any:
    return pb_utils.MetricFamily(name=f"{PREFIX}_{name}", description=words, kind=kind)


def _metric(family: Any, labels: Mapping[str, str]) -> Any:
    return family.Metric(labels=dict(labels))
