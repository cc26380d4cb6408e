"""Runs the micro-batches of one dynamic batch at a time, side by side where that pays."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from triptych.serving.backends.onnxruntime import ort_feeds
    from triptych.serving.backends.onnxruntime.ort_contract import Contract
    from triptych.serving.backends.onnxruntime.ort_feeds import Array, Feed, Part, Ticket
else:
    import ort_feeds

Run = Callable[["Feed"], Sequence["Array"]]


class Outcome(NamedTuple):
    """The end of one request.

    Attributes:
        ticket: the request; its outputs are complete unless `error` is set.
        error: what its rows failed with.
        more: whether other requests of the same dynamic batch are still running.
    """

    ticket: Ticket
    error: Exception | None
    more: bool


class _MicroBatch:
    __slots__ = ("error", "parts", "values")

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self.values: Sequence[Array] = ()
        self.error: Exception | None = None


class Runner:
    """Splits dynamic batches, runs the pieces and reports each request as soon as it is done.

    Args:
        contract: how feeds are built and outputs cut.
        run_alone: runs a feed with all cores of the instance.
        run_beside: runs a feed with one worker's share of the cores; called from several threads.
        workers: how many micro-batches run side by side; with 1 there are no threads.
        budget: most elements in a micro-batch; 0 for no limit.
    """

    def __init__(
        self, contract: Contract, *, run_alone: Run, run_beside: Run, workers: int, budget: int
    ) -> None:
        self._contract = contract
        self._run_alone = run_alone
        self._run_beside = run_beside
        self._workers = workers
        self._budget = budget
        self._tasks: SimpleQueue[_MicroBatch | None] = SimpleQueue()
        self._done: SimpleQueue[_MicroBatch] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, daemon=True)
            for _ in range(workers if workers > 1 else 0)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, tickets: Sequence[Ticket]) -> Iterator[Outcome]:
        """Run all rows of `tickets`; yields every ticket once, in the order they finish.

        A micro-batch that fails is run again request by request, so that only those requests fail
        whose own rows cannot be run.
        """
        batches = [
            _MicroBatch(parts)
            for parts in ort_feeds.form_micro_batches(
                tickets,
                budget=self._budget,
                workers=self._workers,
                separable=self._contract.rows_separable,
            )
        ]
        if len(batches) == 1 or not self._threads:
            yield from self._run_here(deque(batches))
            return
        for batch in batches:
            self._tasks.put(batch)
        running = len(batches)
        while running:
            batch = self._done.get()
            ended, again = self._settle(batch)
            for retry in again:
                self._tasks.put(retry)
            running += len(again) - 1
            for ticket in ended:
                yield Outcome(ticket, batch.error, more=running > 0)

    def close(self) -> None:
        """Stop the worker threads."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _run_here(self, batches: deque[_MicroBatch]) -> Iterator[Outcome]:
        while batches:
            batch = batches.popleft()
            self._attempt(batch, self._run_alone)
            ended, again = self._settle(batch)
            batches.extendleft(reversed(again))
            for ticket in ended:
                yield Outcome(ticket, batch.error, more=bool(batches))

    def _work(self) -> None:
        while (batch := self._tasks.get()) is not None:
            self._attempt(batch, self._run_beside)
            self._done.put(batch)

    def _attempt(self, batch: _MicroBatch, run: Run) -> None:
        try:
            batch.values = run(ort_feeds.build_feed(self._contract, batch.parts))
        except Exception as error:  # whatever it is, it must end these requests only
            batch.error = error

    def _settle(self, batch: _MicroBatch) -> tuple[list[Ticket], list[_MicroBatch]]:
        """The tickets that ended with `batch`, and what must be tried again."""
        if batch.error is None:
            try:
                return ort_feeds.hand_out(self._contract, batch.values, batch.parts), []
            except ort_feeds.SplitError as error:
                batch.error = error
        parts_of: dict[int, list[Part]] = {}
        for part in batch.parts:
            if not part.ticket.closed:
                parts_of.setdefault(id(part.ticket), []).append(part)
        if len(parts_of) > 1:
            return [], [_MicroBatch(parts) for parts in parts_of.values()]
        failed = [parts[0].ticket for parts in parts_of.values()]
        for ticket in failed:
            ticket.closed = True
        return failed, []
