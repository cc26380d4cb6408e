"""Which waiting prompts share a batch: as many as may, of like length, the oldest among them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def next_batch(lengths: Sequence[int], kinds: Sequence[Hashable], *, most: int) -> list[int]:
    """Places in the queue, shortest prompt first; empty where nothing waits.

    Args:
        lengths: tokens of each waiting prompt, oldest first.
        kinds: prompts of another kind than the oldest's wait for a batch of their own.
        most: prompts of a batch.
    """
    like = [place for place, kind in enumerate(kinds) if kind == kinds[0]]
    order = sorted(like, key=lambda place: lengths[place])
    if len(order) <= most:
        return order
    oldest = order.index(0)
    # Of the runs of neighbors with the oldest in it, the one that pads least.
    starts = range(max(0, oldest - most + 1), min(oldest, len(order) - most) + 1)

    def padding(start: int) -> int:
        own = [lengths[place] for place in order[start : start + most]]
        return own[-1] * most - sum(own)

    best = min(starts, key=padding)
    return order[best : best + most]
