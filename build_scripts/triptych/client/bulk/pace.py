"""How many rows a request has, found by trials on the server at hand.

Measured, MiniLM packed on 2 busy cores, rows a second: requests of 8 rows, 12 at once 44; 8, 2 at
once 53; 4, 6 at once 70; 2, 8 at once 77; 1, 16 at once 73. On a GPU big batches win.
"""

from __future__ import annotations

from math import ceil

CHUNKS = 3
"""Under way at once: while the last requests of one end, those of the others keep the server busy;
and as many make a trial."""
REQUESTS = 4
"""Of a chunk under way."""
_SHARES = (16, 8, 4)
"""Of the batch limit in a request: with `REQUESTS` of each of the `CHUNKS` under way, between one
batch and three."""
_TURNS = 2
"""Of each size: the better one counts, since others use the server, too."""


class Pace:
    """Which size of request the next chunk takes.

    Args:
        max_batch_size: of the pipeline.

    Attributes:
        sizes: rows of a request that are tried.
        chosen: after the trials; None before.
    """

    def __init__(self, max_batch_size: int) -> None:
        self.sizes = list(dict.fromkeys(ceil(max_batch_size / share) for share in _SHARES))
        self.chosen = self.sizes[0] if len(self.sizes) == 1 else None
        self._rates = dict.fromkeys(self.sizes, 0.0)
        self._trials = [size for _ in range(_TURNS) for size in self.sizes]
        self._started = self._ended = self._rows = 0
        self._began_at = 0.0

    def start(self, now: float) -> int | None:
        """The size for the next chunk; None where it waits for the end of a trial."""
        if self.chosen is not None:
            return self.chosen
        if self._started == CHUNKS:
            return None
        if not self._started:
            self._began_at = now
        self._started += 1
        return self._trials[0]

    def end(self, rows: int, now: float) -> None:
        """A chunk of `rows` rows is answered."""
        if self.chosen is not None:
            return
        self._ended, self._rows = self._ended + 1, self._rows + rows
        if self._ended == CHUNKS:
            size = self._trials.pop(0)
            rate = self._rows / max(now - self._began_at, 1e-9)
            self._rates[size] = max(self._rates[size], rate)
            self._started = self._ended = self._rows = 0
            if not self._trials:
                self.chosen = max(self._rates, key=self._rates.__getitem__)
