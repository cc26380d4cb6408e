"""Preprocess with the bucketed layout, which sends requests of equal length one after another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .bucketing import order_by_length
from .preprocess import Job, Preprocess, Results
from .row_types import CoreRows


class Padded(Preprocess):
    """Preprocess that puts requests in the order of their padded lengths."""

    def order(self, jobs: Sequence[Job], rows: dict[int, CoreRows]) -> Iterable[int]:
        order = order_by_length(
            rows,
            batch_tokens=self.settings["batch_tokens"],
            pad_token_id=self.settings.get("pad_token_id", 0),
        )
        for index in order:
            jobs[index].width = rows[index].width
        return order

    def take(self, jobs: list[Job]) -> Results:
        results = super().take(jobs)
        for job, _ in results:
            if job.sender is None and job.width != results[-1][0].width:
                # Triton batches only adjacent requests of equal shape. A send takes a round trip,
                # so the most frequent shape is returned instead, after all others.
                job.sender = job.request.get_response_sender()
        return results
