"""What a user promises: latency percentiles at most, requests a second at least."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from triptych.errors import UserError

PERCENTILES = ("p50", "p90", "p95", "p99", "p99_9")
"""Names of the latency percentiles, as everywhere: in results with ``_us``, in limits ``_ms``."""

LIMIT = r"p(50|90|95|99|99\.9)\s*(?:<=|<|=)\s*(\d+(?:\.\d+)?)\s*(us|ms|s)"
"""How a limit is written on the command line."""

Milliseconds = Annotated[float, Field(gt=0, le=3_600_000)]


class Slo(BaseModel):
    """Service level objective; empty where nothing is promised.

    Attributes:
        p50_ms: most milliseconds that half of the requests may take, seen by the client.
        p90_ms: see `p50_ms`, and so on.
        p95_ms: see `p50_ms`.
        p99_ms: see `p50_ms`.
        p99_9_ms: see `p50_ms`.
        throughput: fewest requests that must be answered a second.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    p50_ms: Milliseconds | None = None
    p90_ms: Milliseconds | None = None
    p95_ms: Milliseconds | None = None
    p99_ms: Milliseconds | None = None
    p99_9_ms: Milliseconds | None = None
    throughput: Annotated[float, Field(gt=0)] | None = None

    @property
    def limits_ms(self) -> dict[str, float]:
        """Name of each limited percentile to its limit, in milliseconds."""
        given = {name: getattr(self, f"{name}_ms") for name in PERCENTILES}
        return {name: limit for name, limit in given.items() if limit is not None}

    @property
    def limits_us(self) -> dict[str, float]:
        """See `limits_ms`; in microseconds."""
        return {name: limit * 1e3 for name, limit in self.limits_ms.items()}

    @property
    def is_empty(self) -> bool:
        return not self.limits_us and self.throughput is None

    def strain(self, latencies_us: Mapping[str, float]) -> float:
        """The largest measured latency over its limit: up to 1 the limits hold; 0 without any.

        Args:
            latencies_us: by the names in `PERCENTILES`.
        """
        return max((latencies_us[name] / most for name, most in self.limits_us.items()), default=0)

    def __str__(self) -> str:
        """``p99 <= 50 ms, at least 100/s``."""
        parts = [
            f"{name.replace('_', '.')} <= {most / 1e3:g} ms"
            for name, most in self.limits_us.items()
        ]
        if self.throughput is not None:
            parts.append(f"at least {self.throughput:g}/s")
        return ", ".join(parts) or "none"


def parse_slo(limits: Sequence[str], throughput: float | None, default: Slo) -> Slo:
    """`default`, or what was asked for in place of it.

    Args:
        limits: ``p99=50ms`` each, in ms, s or us.
        throughput: requests a second.
        default: of the spec; nothing of it is left where anything is asked for.

    Raises:
        UserError: a limit of another form.
    """
    given: dict[str, float] = {} if throughput is None else {"throughput": throughput}
    for text in limits:
        found = re.fullmatch(LIMIT, text)
        if found is None or not 0 < float(found[2]) < 1e9:
            raise UserError(
                "--slo",
                "must be a percentile (p50, p90, p95, p99, p99.9) and a time",
                given=text,
                remedy="Write for example --slo p99=50ms",
            )
        scale = {"us": 1e-3, "ms": 1.0, "s": 1e3}[found[3]]
        given[f"p{found[1].replace('.', '_')}_ms"] = float(found[2]) * scale
    if throughput is not None and throughput <= 0:
        raise UserError("--min-throughput", "must be above 0", given=throughput)
    return Slo(**given) if given else default
