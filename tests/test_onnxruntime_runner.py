"""How the local ONNX Runtime backend runs micro-batches side by side, seen on a held-up model."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from triptych.server.backends.onnxruntime import ort_runner
from triptych.server.stand_in import contract, feeds


class Bench:
    """A runner of two workers whose model doubles its input; token 0 waits, token -1 fails."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.answers: SimpleQueue[Any] = SimpleQueue()
        self.alone = 0
        tokens: Any = {"name": "tokens", "data_type": "TYPE_INT32", "dims": [-1]}
        self.contract = contract.parse_contract(
            {"name": "double", "max_batch_size": 8, "input": [tokens], "output": [tokens]},
            backend="onnxruntime",
        )
        self.runner = importlib.import_module("ort_runner").Runner(
            self.contract,
            run_alone=self.run_alone,
            run_beside=self.run_beside,
            workers=2,
            budget=4,
            answer=self.answers.put,
        )

    def run_alone(self, feed: feeds.Feed) -> list[Any]:
        self.alone += 1
        return self.run_beside(feed)

    def run_beside(self, feed: feeds.Feed) -> list[Any]:
        tokens = feed["tokens"]
        if (tokens == 0).any():
            assert self.go.wait(10)
        if (tokens < 0).any():
            raise ValueError("negative")
        return [tokens * 2]

    def run(self, *requests: list[list[int]]) -> list[Any]:
        """What `Runner.run` returns for these requests, named by their first token."""
        return list(
            self.runner.run(
                [
                    feeds.new_ticket(self.contract, rows[0][0], {"tokens": np.array(rows)})
                    for rows in requests
                ]
            )
        )

    def answered(self, count: int) -> dict[int, str]:
        """The next answers by name: their outputs, or their error."""
        outcomes = [self.answers.get(timeout=10) for _ in range(count)]
        return {
            ticket.caller: str(error or ticket.outputs()[0].tolist()) for ticket, error in outcomes
        }


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    # As Triton does, and under the name it has there.
    monkeypatch.syspath_prepend(Path(ort_runner.__file__).parent)
    monkeypatch.delitem(sys.modules, "ort_runner", raising=False)
    bench = Bench()
    yield bench
    bench.go.set()
    bench.runner.close()


def test_the_next_batch_is_let_in_while_the_last_pieces_run(bench: Bench) -> None:
    assert bench.run([[0, 0, 0]], [[5, 5, 5]]) == []  # returns, though the first cannot end
    assert bench.answered(1) == {5: "[[10, 10, 10]]"}
    assert bench.run([[6, 6, 6]], [[7, 7, 7]]) == []
    assert bench.answered(2) == {6: "[[12, 12, 12]]", 7: "[[14, 14, 14]]"}
    bench.go.set()
    assert bench.answered(1) == {0: "[[0, 0, 0]]"}


def test_a_lone_row_has_all_cores_if_they_are_idle(bench: Bench) -> None:
    bench.run([[0, 0, 0]], [[5, 5, 5]])
    assert bench.answered(1) == {5: "[[10, 10, 10]]"}
    assert bench.run([[6]]) == []  # a worker is busy: this row must not take its core
    assert bench.answered(1) == {6: "[[12]]"}
    assert bench.alone == 0
    bench.go.set()
    bench.answered(1)
    deadline = time.monotonic() + 10
    while not (outcomes := bench.run([[7]])):  # the worker takes a moment to become idle
        assert time.monotonic() < deadline
        bench.answered(1)
    ((ticket, error),) = outcomes
    assert (ticket.outputs()[0].tolist(), error, bench.alone) == ([[14]], None, 1)


def test_a_request_that_fails_in_two_pieces_is_answered_once(bench: Bench) -> None:
    assert bench.run([[-1, -1], [-1, -1], [-1, -1], [-1, -1]], [[5, 5]]) == []
    assert bench.answered(2) == {-1: "negative", 5: "[[10, 10]]"}
    assert bench.run([[6, 6]], [[7, 7]]) == []
    assert bench.answered(2) == {6: "[[12, 12]]", 7: "[[14, 14]]"}
