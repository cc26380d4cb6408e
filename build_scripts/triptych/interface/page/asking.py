"""One request of the page to a served pipeline, and what the server counted of it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from triptych.client import Client, InferenceError, StepStatistics
from triptych.client.infer import plain_outputs
from triptych.client.models import read_settings
from triptych.interface.page.form import Asked

_COUNTED_WITHIN_S = 0.5
"""Triton counts a request shortly after it has answered it."""
_ROWS = 2


@dataclass(frozen=True)
class Times:
    """Where the time of one request went.

    Attributes:
        whole_us: from here to the server and back.
        steps: what the server counted of each step meanwhile; empty where it does not tell.
        requests: sent from here.
        unknown: why there are no steps; empty where there are.
    """

    whole_us: float
    steps: tuple[StepStatistics, ...]
    requests: int
    unknown: str = ""

    @property
    def alone(self) -> bool:
        """Whether the server counted this page's requests and no others."""
        return all(step.requests == self.requests for step in self.steps)

    @property
    def outside_us(self) -> float:
        """Of the whole, what no step accounts for: gRPC, and the server between the steps."""
        return max(0.0, self.whole_us - sum(map(total_us, self.steps)))


def total_us(step: StepStatistics) -> float:
    """The mean time of a request in `step`, its queue included."""
    return step.queue_us + step.compute_input_us + step.compute_infer_us + step.compute_output_us


@dataclass(frozen=True)
class Reply:
    """An answer: every output of each row as plain data, and the times."""

    rows: tuple[dict[str, Any], ...]
    times: Times


class Asker:
    """Sends what the page asks to the pipeline, one request at a time.

    Args:
        pipeline: its name.
        url: ``host:port`` of the server's gRPC endpoint.
        timeout_s: of a request.

    Raises:
        UserError: the address is none.
    """

    def __init__(self, pipeline: str, url: str, timeout_s: float) -> None:
        self.url = url
        self._client = Client(pipeline, url, timeout_s=timeout_s, rows_per_request=_ROWS)
        self._turn = threading.Lock()

    def settings(self) -> dict[str, Any]:
        """What the first step was built with: rules and values of parameters among others.

        Raises:
            InferenceError: the pipeline is not served there.
            UserError: its step is not.
        """
        return read_settings(self.url, self._client.interface().steps[0])

    def ask(self, asked: Asked) -> Reply:
        """Send one request.

        Raises:
            InferenceError: the pipeline refuses it, or fails.
        """
        inputs = {name: [row[name] for row in asked.rows] for name in asked.rows[0]}
        with self._turn:
            config = self._client.interface()
            before, unknown = self._counts()
            began = time.perf_counter()
            outputs = self._client.infer(inputs, parameters=asked.parameters)
            whole_us = (time.perf_counter() - began) * 1e6
            requests = -(-len(asked.rows) // min(_ROWS, config.max_batch_size))
            steps = () if unknown else self._since(before, requests)
        columns = plain_outputs(config, outputs)
        rows = tuple(
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        )
        return Reply(rows, Times(whole_us, steps, requests, unknown))

    def close(self) -> None:
        self._client.close()

    def _counts(self) -> tuple[list[StepStatistics], str]:
        try:
            return self._client.step_statistics(), ""
        except InferenceError as error:  # a server may keep its counts to itself
            return [], str(error)

    def _since(self, before: list[StepStatistics], requests: int) -> tuple[StepStatistics, ...]:
        until = time.monotonic() + _COUNTED_WITHIN_S
        while True:
            now = self._client.step_statistics()
            steps = tuple(new - old for new, old in zip(now, before, strict=True))
            counted = all(step.requests >= requests for step in steps)
            if counted or time.monotonic() > until:
                return steps
            time.sleep(0.01)
