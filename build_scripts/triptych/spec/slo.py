"""What a user promises: latency percentiles at most, requests a second at least.

`Slo` is of a pipeline that answers at once, `GenerationSlo` of one that streams its answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from triptych.base.errors import UserError

PERCENTILES = ("p50", "p90", "p95", "p99", "p99_9")
"""Names of the latency percentiles, as everywhere: in results with ``_us``, in limits ``_ms``."""

MOMENTS = {"ttft": "time to first token", "itl": "inter-token latency", "e2e": "whole answer"}
"""What is timed of a streamed answer: to its first token, between two responses, to its end."""

_TIME = r"(\d+(?:\.\d+)?)\s*(us|ms|s)"
_RELATION = r"\s*(?:<=|<|=)\s*"
_MAX_MS = 3_600_000
LIMIT = rf"p(50|90|95|99|99\.9){_RELATION}{_TIME}"
"""How a limit is written on the command line."""

GENERATION_LIMIT = rf"({'|'.join(MOMENTS)})_p(50|90|95|99){_RELATION}{_TIME}"
"""The same of a streamed answer: ``ttft_p99=500ms``."""

Milliseconds = Annotated[float, Field(gt=0, le=_MAX_MS)]


def _milliseconds(text: str) -> float:
    """``500ms``, ``0.5s`` or ``500000us`` in milliseconds.

    Raises:
        ValueError: a time of another form, or out of range.
    """
    found = re.fullmatch(_TIME, text)
    value = float(found[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[found[2]] if found else 0.0
    if not 0 < value <= _MAX_MS:
        raise ValueError("a time above 0 and up to an hour, as 500ms or 0.5s")
    return value


def _is_time(text: str) -> str:
    _milliseconds(text)
    return text


Time = Annotated[str, AfterValidator(_is_time)]
"""A time with its unit, kept as it is written."""


class Promise(BaseModel):
    """Service level objective; empty where nothing is promised.

    Attributes:
        throughput: fewest requests that must be answered a second.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    throughput: Annotated[float, Field(gt=0)] | None = None

    @property
    def limits_ms(self) -> dict[str, float]:
        """Name of each limited percentile to its limit, in milliseconds."""
        raise NotImplementedError

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
            latencies_us: by the names of `limits_ms`; one that is not there was not measured, as
                the time between tokens of answers with one token each.
        """
        limits = self.limits_us.items()
        return max((latencies_us.get(name, 0.0) / most for name, most in limits), default=0)

    def __str__(self) -> str:
        """``p99 <= 50 ms, at least 100/s``."""
        parts = [
            f"{name.replace('_9', '.9').replace('_', ' ')} <= {most / 1e3:g} ms"
            for name, most in self.limits_us.items()
        ]
        if self.throughput is not None:
            parts.append(f"at least {self.throughput:g}/s")
        return ", ".join(parts) or "none"


class Slo(Promise):
    """What is promised of a pipeline that answers at once.

    Attributes:
        p50_ms: most milliseconds that half of the requests may take, seen by the client.
        p90_ms: see `p50_ms`, and so on.
        p95_ms: see `p50_ms`.
        p99_ms: see `p50_ms`.
        p99_9_ms: see `p50_ms`.
        throughput: see `Promise`.
    """

    p50_ms: Milliseconds | None = None
    p90_ms: Milliseconds | None = None
    p95_ms: Milliseconds | None = None
    p99_ms: Milliseconds | None = None
    p99_9_ms: Milliseconds | None = None

    @property
    def limits_ms(self) -> dict[str, float]:
        """Name of each limited percentile to its limit, in milliseconds."""
        given = {name: getattr(self, f"{name}_ms") for name in PERCENTILES}
        return {name: limit for name, limit in given.items() if limit is not None}


class GenerationSlo(Promise):
    """What is promised of a pipeline that streams its answers; times with their unit: ``500ms``.

    Attributes:
        ttft_p50: most time that half of the requests may wait for their first token.
        ttft_p90: see `ttft_p50`, and so on.
        ttft_p95: see `ttft_p50`.
        ttft_p99: see `ttft_p50`.
        itl_p50: the same between two responses of an answer, after the first.
        itl_p90: see `itl_p50`.
        itl_p95: see `itl_p50`.
        itl_p99: see `itl_p50`.
        e2e_p50: the same of the whole answer.
        e2e_p90: see `e2e_p50`.
        e2e_p95: see `e2e_p50`.
        e2e_p99: see `e2e_p50`.
        throughput: see `Promise`.
    """

    ttft_p50: Time | None = None
    ttft_p90: Time | None = None
    ttft_p95: Time | None = None
    ttft_p99: Time | None = None
    itl_p50: Time | None = None
    itl_p90: Time | None = None
    itl_p95: Time | None = None
    itl_p99: Time | None = None
    e2e_p50: Time | None = None
    e2e_p90: Time | None = None
    e2e_p95: Time | None = None
    e2e_p99: Time | None = None

    @property
    def limits_ms(self) -> dict[str, float]:
        """``ttft_p99`` and the like to the limit, in milliseconds."""
        given = self.model_dump(exclude={"throughput"}, exclude_none=True)
        return {name: _milliseconds(limit) for name, limit in given.items()}


AnySlo = Slo | GenerationSlo


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
    _check_throughput(throughput)
    return Slo(**given) if given else default


def parse_generation_slo(
    limits: Sequence[str], throughput: float | None, default: GenerationSlo
) -> GenerationSlo:
    """As `parse_slo`, of ``ttft_p99=500ms``, ``itl_p99=50ms`` or ``e2e_p95=20s`` each."""
    given: dict[str, str] = {}
    for text in limits:
        found = re.fullmatch(GENERATION_LIMIT, text)
        time = f"{found[3]}{found[4]}" if found else ""
        try:
            _milliseconds(time)
        except ValueError as error:
            raise UserError(
                "--slo",
                f"must be of {', '.join(MOMENTS)} a percentile (p50, p90, p95, p99) and a time",
                given=text,
                remedy="Write for example --slo ttft_p99=500ms --slo itl_p99=50ms",
            ) from error
        given[f"{found[1]}_p{found[2]}"] = time  # type: ignore[index]
    _check_throughput(throughput)
    if not given and throughput is None:
        return default
    return GenerationSlo.model_validate({**given, "throughput": throughput})


def _check_throughput(given: float | None) -> None:
    if given is not None and given <= 0:
        raise UserError("--min-throughput", "must be above 0", given=given)
