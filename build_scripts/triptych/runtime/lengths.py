"""Tokens of the core's rows, counted on the server's metrics page as a Prometheus histogram.

Counters, since Triton's own histogram takes one value a call, and each call leaves the process
(about 25 us). What is counted waits here in plain numbers and goes out every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from .row_types import CoreRows

NAME = "triptych_row_tokens"
FLUSH_S = 2.0
MIN_EDGE = 4
EDGES_AN_OCTAVE = 3


class RowTokens:
    """The counters of one preprocess instance; those of several add up on the page."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Put the pipeline's counters on the page, if the server has one for them."""
        self._counters: list[Any] = []
        if "max_length" not in settings:  # images: all rows are of one size
            return
        self._edges = np.array(edges_of(settings["max_length"], settings["bucket_edges"]))
        self._lengths: list[NDArray[Any]] = []
        self._due_at = 0.0
        try:
            made = _make_counters(settings["pipeline"], self._edges.tolist())
            self._families, self._counters = made  # a counter dies with its family
        except Exception:  # a server without such metrics serves all the same
            return

    def count(self, answered: Sequence[CoreRows]) -> None:
        if not self._counters:
            return
        self._lengths += [rows.tensors["row_length"] for rows in answered]
        now = time.monotonic()
        if now >= self._due_at:
            self._due_at = now + FLUSH_S
            self.flush()

    def flush(self) -> None:
        if not self._counters or not self._lengths:
            return
        tokens = np.concatenate(self._lengths, axis=None)
        self._lengths = []
        places = self._edges.searchsorted(tokens)  # the first edge that holds them
        rows = np.bincount(places, minlength=len(self._edges) + 1)
        # From the last bucket to the first: whoever reads meanwhile sees no bucket above a later
        # one, nor more tokens than the rows can have.
        cumulated = rows.cumsum()[::-1].tolist()
        values = [*cumulated, cumulated[0], int(tokens.sum())]
        try:
            for counter, value in zip(self._counters, values, strict=True):
                if value:
                    counter.increment(value)
        except Exception:  # counts are no reason to fail a request
            self._counters = []


def edges_of(max_length: int, bucket_edges: Sequence[int] = ()) -> list[int]:
    """Upper edges of the histogram, in tokens, ascending.

    They are 1.26 times apart and the same in every pipeline, but for its own padded lengths and
    the last two, ``max_length - 1`` and `max_length`: the rows between them are those that were
    cut to the limit, and the few that have its length by themselves.
    """
    steps = range(EDGES_AN_OCTAVE * max_length.bit_length())
    common = (round(MIN_EDGE * 2 ** (step / EDGES_AN_OCTAVE)) for step in steps)
    edges = {*common, *bucket_edges, max_length - 1, max_length}
    return sorted(edge for edge in edges if 0 < edge <= max_length)


def _make_counters(pipeline: str, edges: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """Three families, and their counters: each bucket from the last to the first, rows, tokens."""
    descriptions = {
        "bucket": "Rows of the model with at most le tokens",
        "count": "Rows of the model",
        "sum": "Tokens of all rows of the model, padding apart",
    }
    families = [
        pb_utils.MetricFamily(
            name=f"{NAME}_{suffix}", description=words, kind=pb_utils.MetricFamily.COUNTER
        )
        for suffix, words in descriptions.items()
    ]
    buckets, rows, tokens = families
    labels = {"pipeline": pipeline}
    ends = ["+Inf", *(str(edge) for edge in reversed(edges))]
    counters = [
        *(buckets.Metric(labels={**labels, "le": end}) for end in ends),
        rows.Metric(labels=labels),
        tokens.Metric(labels=labels),
    ]
    return families, counters
