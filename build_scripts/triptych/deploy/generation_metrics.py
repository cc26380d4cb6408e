"""What the steps of a generation tell of a fleet, as PromQL.

Triton's own counters say little of it (seen on 24.10): a request that fails is two failures of the
ensemble, one that its client leaves is a success, and a decoupled core is done with a request as
soon as it has taken it in. Times and ends are counted by the core, see `runtime`.
"""

from __future__ import annotations

from triptych.deploy.metrics import Metrics
from triptych.runtime.generation_series import PREFIX, edge_label

_FAULTS = 'how=~"overloaded|error"'
"""Ends of requests that were the server's fault."""
_OURS = 'how!="refused"'
"""Ends of requests that were not at fault themselves."""


class GenerationMetrics(Metrics):
    """Expressions over the replicas of one pipeline that generates text."""

    def gauge(self, name: str) -> str:
        """Of each replica: ``running`` and the like."""
        return self._of_pipeline(f"{PREFIX}_{name}")

    def ended(self, window: str) -> str:
        """Requests that came to an end during a window, but those that were at fault."""
        span = self.window(window)
        return f"sum(increase({self._ended(_OURS)}[{span}]))"

    def ended_by_how(self, window: str) -> str:
        """Requests a second that came to an end, by ``how``."""
        return f"sum by (how) (rate({self._ended()}[{self.window(window)}]))"

    def faulty_share(self, window: str) -> str:
        """Share of `ended` that failed or found no room: 0 to 1; NaN without requests."""
        bad, all_ = (self._rate(self._ended(which), window) for which in (_FAULTS, _OURS))
        lost = self._rate(self._unprepared('how="error"'), window)
        return f"({bad} + ({lost} or vector(0))) / ({all_} + ({lost} or vector(0)))"

    def late_share(self, moment: str, limit_ms: float, window: str) -> str:
        """Share of the times of a moment that are above an edge; NaN without any."""
        edge = f'le="{edge_label(limit_ms)}"'
        good = self._rate(self._of_pipeline(f"{PREFIX}_{moment}_ms_bucket", edge), window)
        all_ = self._rate(self._of_pipeline(f"{PREFIX}_{moment}_ms_count"), window)
        return f"clamp_min(1 - {good} / {all_}, 0)"

    def timed(self, moment: str, window: str) -> str:
        """Times of a moment that were counted during a window."""
        series = self._of_pipeline(f"{PREFIX}_{moment}_ms_count")
        return f"sum(increase({series}[{self.window(window)}]))"

    def quantile_ms(self, moment: str, quantile: float, window: str) -> str:
        """Of all replicas together, to the edges of the buckets."""
        series = self._of_pipeline(f"{PREFIX}_{moment}_ms_bucket")
        rates = f"sum by (le) (rate({series}[{self.window(window)}]))"
        return f"histogram_quantile({quantile:g}, {rates})"

    def tokens_by_kind(self, window: str) -> str:
        """Tokens a second, by ``kind``."""
        series = self._of_pipeline(f"{PREFIX}_tokens")
        return f"sum by (kind) (rate({series}[{self.window(window)}]))"

    def cached_share(self, window: str) -> str:
        """Of the prompts' tokens, that the prefix cache had."""
        cached, all_ = (
            self._rate(self._of_pipeline(f"{PREFIX}_tokens", f'kind="{kind}"'), window)
            for kind in ("cached", "prompt")
        )
        return f"{cached} / {all_}"

    def silent(self, window: str) -> str:
        """Replicas that had requests throughout a window, and made no token in it."""
        span = self.window(window)
        busy = f"sum by (pod) (min_over_time({self.gauge('under_way')}[{span}])) > 0"
        tokens = self._of_pipeline(f"{PREFIX}_tokens", 'kind="new"')
        return f"{busy}\nand sum by (pod) (increase({tokens}[{span}])) == 0"

    def unprepared_by_how(self, window: str) -> str:
        """Requests a second that did not reach the core, by ``how``."""
        return f"sum by (how) (rate({self._unprepared()}[{self.window(window)}]))"

    def _unprepared(self, *where: str) -> str:
        return self._of_pipeline(f"{PREFIX}_unprepared", *where)

    def _ended(self, *where: str) -> str:
        return self._of_pipeline(f"{PREFIX}_ended", *where)
