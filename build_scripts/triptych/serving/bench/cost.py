"""What inferences cost: money on a device, devices for a load, time of cores and GPUs."""

from __future__ import annotations

from math import ceil, isfinite

from triptych.base.errors import UserError
from triptych.serving.bench.points import Cost, Measurement

HOURS_A_MONTH = 365 / 12 * 24  # 730

_SECONDS_A_DAY = 86_400


def cost_of(
    rate_per_s: float,
    *,
    price_per_hour: float,
    currency: str = "USD",
    daily_requests: float | None = None,
    peak_per_s: float | None = None,
    headroom: float = 0.3,
    tokens_per_s: float | None = None,
) -> Cost:
    """What a device that sustains `rate_per_s` makes of a price.

    A million inferences cost what the device costs for the time they take at the full rate: no
    idle time, no headroom. A month has 730 hours (365 days over 12), and whole machines are paid
    for all of them. There are as many as the rate needs with `headroom` kept free on each, at least
    one: the rate is the peak's where one is given, else the day's mean. Only devices are counted:
    no network, storage or spare machine.

    Args:
        rate_per_s: requests a second of one device, at the promise where there is one.
        price_per_hour: of one device.
        currency: a word to print.
        daily_requests: requests a day; without it there is no cost of a month.
        peak_per_s: most requests a second; without it machines are not told.
        headroom: share of each machine's rate that is kept free, 0 up to 1.
        tokens_per_s: generated at that rate; without it there is no cost of tokens.

    Raises:
        UserError: a number that no device or load can have.
    """
    _above_zero("rate", rate_per_s, "No rate held, so nothing can be priced")
    _above_zero("price", price_per_hour, "Give what an hour of the device costs")
    if daily_requests is not None:
        _above_zero("daily requests", daily_requests, "Leave it out where it is not known")
    if peak_per_s is not None:
        _above_zero("peak rate", peak_per_s, "Leave it out where it is not known")
    if not 0 <= headroom < 1:
        remedy = "0.3 keeps three tenths of each machine free"
        raise UserError("headroom", "must be from 0 up to 1", given=headroom, remedy=remedy)
    mean = None if daily_requests is None else daily_requests / _SECONDS_A_DAY
    if mean is not None and peak_per_s is not None and peak_per_s < mean:
        raise UserError(
            "peak rate",
            "must be at least the mean rate of the day",
            given=f"{peak_per_s:g}/s, and {daily_requests:g} a day are {mean:.4g}/s",
            remedy="Give the rate of the busiest seconds",
        )
    usable = rate_per_s * (1 - headroom)
    machines = None if peak_per_s is None else _machines(peak_per_s, usable)
    monthly = None
    if mean is not None:
        monthly = (machines or _machines(mean, usable)) * HOURS_A_MONTH * price_per_hour
    return Cost(
        rate_per_s=rate_per_s,
        price_per_hour=price_per_hour,
        per_million=price_per_hour / 3600 / rate_per_s * 1e6,
        monthly=monthly,
        machines=machines,
        currency=currency,
        daily_requests=daily_requests,
        peak_per_s=peak_per_s,
        headroom=headroom,
        per_million_tokens=price_per_hour / 3600 / tokens_per_s * 1e6 if tokens_per_s else None,
    )


def core_ms(one: Measurement) -> float | None:
    """Processor time of the server for a request, in ms of a core; None where nobody watched it."""
    used = one.resources
    if used is None or not used.processes or not one.throughput_per_s:
        return None
    return 1e3 * sum(process.cpu_cores for process in used.processes) / one.throughput_per_s


def gpu_ms(one: Measurement) -> float | None:
    """Time that GPUs were busy for a request, in ms; None where the server tells of none.

    The GPUs are the machine's: what others do on them counts, too.
    """
    used = one.resources
    if used is None or not used.gpus or not one.throughput_per_s:
        return None
    return 1e3 * sum(gpu.utilization for gpu in used.gpus) / one.throughput_per_s


def _machines(per_s: float, usable_per_s: float) -> int:
    """Whole machines; a rounding error of the division is no machine."""
    return max(1, ceil(per_s / usable_per_s * (1 - 1e-12)))


def _above_zero(field: str, value: float, remedy: str) -> None:
    if not (isfinite(value) and value > 0):
        raise UserError(field, "must be above 0", given=value, remedy=remedy)
