"""Prices worked out by hand."""

import math
from typing import Any

import pytest

from triptych.base.errors import UserError
from triptych.serving.bench.comparison import HOURS_A_MONTH, Price
from triptych.serving.bench.results import Cost


def cost(rate_per_s: float = 100, **price: Any) -> Cost:
    found = Price(**{"currency": "USD", "headroom": 0.3, **price}).cost(rate_per_s)
    assert found is not None
    return found


def test_a_million_inferences_cost_the_time_they_take() -> None:
    # 100/s: a million take 10,000 s, at 3.60 an hour 0.001 a second.
    found = cost(price_per_hour=3.6)
    assert found.per_million == pytest.approx(10.0)
    assert (found.monthly, found.machines, found.currency) == (None, None, "USD")


def test_a_month_is_paid_for_all_its_hours() -> None:
    assert pytest.approx(730.0) == HOURS_A_MONTH
    # One request a day still takes a machine; 8,640,000 a day are 100/s, 70/s a machine: two.
    assert cost(price_per_hour=2, daily_requests=1).monthly == pytest.approx(1460)
    assert cost(price_per_hour=2, daily_requests=8_640_000).monthly == pytest.approx(2920)


@pytest.mark.parametrize(
    ("peak", "headroom", "machines"),
    [(70, 0.3, 1), (70.1, 0.3, 2), (700, 0.3, 10), (100, 0, 1), (100, 0.5, 2), (0.01, 0.3, 1)],
)
def test_machines_for_a_peak_keep_their_headroom(
    peak: float, headroom: float, machines: int
) -> None:
    found = cost(price_per_hour=1, peak_per_s=peak, headroom=headroom)
    assert found.machines == machines
    assert found.monthly is None


def test_the_peak_decides_what_a_month_costs() -> None:
    found = cost(
        price_per_hour=1, daily_requests=864_000, peak_per_s=200, currency="EUR", headroom=0.3
    )
    assert found.machines == 3
    assert found.monthly == pytest.approx(3 * 730)
    assert found.currency == "EUR"


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("rate", {"rate_per_s": -1}),
        ("rate", {"rate_per_s": math.nan}),
        ("price", {"price_per_hour": 0}),
        ("price", {"price_per_hour": math.inf}),
        ("daily requests", {"daily_requests": 0}),
        ("peak rate", {"peak_per_s": -5}),
        ("peak rate", {"peak_per_s": 1, "daily_requests": 8_640_000}),
        ("headroom", {"headroom": 1}),
        ("headroom", {"headroom": -0.1}),
        ("headroom", {"headroom": math.nan}),
    ],
)
def test_nonsense_is_refused(field: str, changes: dict[str, Any]) -> None:
    arguments = {"rate_per_s": 100, "price_per_hour": 1, **changes}
    with pytest.raises(UserError) as caught:
        cost(**arguments)
    assert caught.value.field == field
    assert caught.value.given
    assert caught.value.remedy
