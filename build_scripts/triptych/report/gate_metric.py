"""What the report says of a metric."""

from __future__ import annotations

from triptych.tasks.accuracy import METRICS


def says(metric: str) -> str:
    """What `metric` says, in a few words; "" for one that is not known."""
    return METRICS[metric].says if metric in METRICS else ""


def better(metric: str) -> str:
    """``higher``, ``lower``, or "" for a metric that is not known."""
    return METRICS[metric].better if metric in METRICS else ""
