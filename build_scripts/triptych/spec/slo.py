"""Service level objectives (SLO): limits on latency percentiles, minimum throughput.

`Slo` applies to pipelines with one response, `GenerationSlo` to pipelines that stream.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from triptych.base.errors import UserError

PERCENTILES = ("p50", "p90", "p95", "p99", "p99_9")
"""Names of latency percentiles. Results have the suffix ``_us``, limits ``_ms``."""

MOMENTS = {"ttft": "time to first token", "itl": "inter-token latency", "e2e": "whole answer"}
"""Latency metrics of a streamed response."""

_TIME = r"(\d+(?:\.\d+)?)\s*(us|ms|s)"
_LIMIT = re.compile(r"(\w+(?:\.9)?)\s*(?:<=|<|=)\s*(\S.*)")
"""Pattern of a limit on the command line: ``p99=50ms``, ``ttft_p99=500ms``."""

_MAX_MS = 3_600_000

Milliseconds = Annotated[float, Field(gt=0, le=_MAX_MS)]


def _milliseconds(text: str) -> float:
    """Return ``500ms``, ``0.5s`` or ``500000us`` in milliseconds.

    Raises:
        ValueError: The text is not a time, or out of range.
    """
    found = re.fullmatch(_TIME, text)
    value = float(found[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[found[2]] if found else 0.0
    if not 0 < value <= _MAX_MS:
        raise ValueError("must be a time greater than 0, at most 1 hour, such as 500ms or 0.5s")
    return value


def _is_time(text: str) -> str:
    _milliseconds(text)
    return text


Time = Annotated[str, AfterValidator(_is_time)]
"""Time with its unit, stored as written."""


_SloT = TypeVar("_SloT", bound="SloBase")


class SloBase(BaseModel):
    """Base of SLOs; empty if nothing is limited.

    Attributes:
        throughput: Minimum number of requests per second.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    throughput: Annotated[float, Field(gt=0)] | None = None

    @property
    def without_throughput(self: _SloT) -> _SloT:
        """SLO with the same latency limits and no minimum throughput."""
        return self.model_copy(update={"throughput": None})

    @property
    def limits_ms(self) -> dict[str, float]:
        """Limits in ms by name of the percentile."""
        raise NotImplementedError

    @property
    def limits_us(self) -> dict[str, float]:
        """Limits in µs by name of the percentile."""
        return {name: limit * 1e3 for name, limit in self.limits_ms.items()}

    @property
    def is_empty(self) -> bool:
        return not self.limits_us and self.throughput is None

    def slo_ratio(self, latencies_us: Mapping[str, float]) -> float:
        """Return the largest ratio of a measured latency to its limit: above 1 the SLO is missed.

        Args:
            latencies_us: Latencies in µs by the names of `limits_ms`. A missing one counts as 0,
                such as the inter-token latency of responses with one token.
        """
        limits = self.limits_us.items()
        return max((latencies_us.get(name, 0.0) / most for name, most in limits), default=0)

    def __str__(self) -> str:
        """Return a text such as ``p99 <= 50 ms, at least 100/s``."""
        parts = [
            f"{name.replace('_9', '.9').replace('_', ' ')} <= {most / 1e3:g} ms"
            for name, most in self.limits_us.items()
        ]
        if self.throughput is not None:
            parts.append(f"at least {self.throughput:g}/s")
        return ", ".join(parts) or "none"


class Slo(SloBase):
    """SLO of a pipeline with one response per request.

    Attributes:
        p50_ms, p90_ms, p95_ms, p99_ms, p99_9_ms: Maximum latency in ms at this percentile,
            measured by the client.
    """

    p50_ms: Milliseconds | None = None
    p90_ms: Milliseconds | None = None
    p95_ms: Milliseconds | None = None
    p99_ms: Milliseconds | None = None
    p99_9_ms: Milliseconds | None = None

    @property
    def limits_ms(self) -> dict[str, float]:
        given = {name: getattr(self, f"{name}_ms") for name in PERCENTILES}
        return {name: limit for name, limit in given.items() if limit is not None}


class GenerationSlo(SloBase):
    """SLO of a pipeline that streams; times have a unit: ``500ms``.

    Attributes:
        ttft_p50, ttft_p90, ttft_p95, ttft_p99: Maximum time to the first token.
        itl_p50, itl_p90, itl_p95, itl_p99: Maximum time between two responses of a stream.
        e2e_p50, e2e_p90, e2e_p95, e2e_p99: Maximum time to the end of the response.
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
        given = self.model_dump(exclude={"throughput"}, exclude_none=True)
        return {name: _milliseconds(limit) for name, limit in given.items()}


AnySlo = Slo | GenerationSlo


def parse_slo(limits: Sequence[str], throughput: float | None, default: Slo) -> Slo:
    """Return the SLO given by options, or `default` if there is none.

    Args:
        limits: ``p99=50ms`` each, in ms, s or us.
        throughput: Minimum number of requests per second.
        default: SLO of the spec.

    Raises:
        UserError: A limit has another form.
    """
    known = {name.replace("_", "."): f"{name}_ms" for name in PERCENTILES}
    form = "PERCENTILE=TIME with percentile p50, p90, p95, p99 or p99.9"
    given = _parse_limits(limits, known, form, "--slo p99=50ms")
    _check_throughput(throughput)
    if not given and throughput is None:
        return default
    return Slo(throughput=throughput, **{name: _milliseconds(time) for name, time in given.items()})


def parse_generation_slo(
    limits: Sequence[str], throughput: float | None, default: GenerationSlo
) -> GenerationSlo:
    """Return the SLO given by options such as ``ttft_p99=500ms``; see `parse_slo`."""
    known = {name: name for name in GenerationSlo.model_fields if name != "throughput"}
    metrics = f"metric {', '.join(MOMENTS)} and percentile p50, p90, p95 or p99"
    form = f"METRIC_PERCENTILE=TIME with {metrics}"
    given = _parse_limits(limits, known, form, "--slo ttft_p99=500ms --slo itl_p99=50ms")
    _check_throughput(throughput)
    if not given and throughput is None:
        return default
    return GenerationSlo.model_validate({**given, "throughput": throughput})


def _parse_limits(
    limits: Sequence[str], known: Mapping[str, str], form: str, example: str
) -> dict[str, str]:
    """Return the time of each limit by its field; `known` are the fields by the names in options.

    Raises:
        UserError: A limit has another form, which `form` and `example` describe.
    """
    given = {}
    for text in limits:
        name, time = found.groups() if (found := _LIMIT.fullmatch(text)) else ("", "")
        try:
            _milliseconds(time)
            given[known[name]] = time
        except (KeyError, ValueError) as error:
            raise UserError(
                "--slo",
                f"must have the form {form}, and a time of at most 1 hour",
                given=text,
                remedy=f"Example: {example}",
            ) from error
    return given


def _check_throughput(given: float | None) -> None:
    if given is not None and not given > 0:
        raise UserError(
            "--min-throughput",
            "must be greater than 0",
            given=given,
            remedy="Give requests per second, such as 100",
        )
