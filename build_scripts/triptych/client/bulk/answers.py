"""Send rows in batches to a pipeline that returns tensors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError
from triptych.client import (
    AsyncClient,
    BatchNeighborError,
    CanceledError,
    DeadlineExceededError,
    InferenceError,
    InvalidRequestError,
    PipelineConfig,
    PipelineFailedError,
    PipelineNotReadyError,
    Retry,
    ServerUnreachableError,
)
from triptych.client.bulk.batching import REQUESTS, BatchLock, BatchSizeTuner
from triptych.client.bulk.formats import ERROR, AnswerColumn, Answers, RowChunk, Scan
from triptych.client.bulk.options import BulkOptions
from triptych.client.questions import (
    TIMEOUT_S,
    Parameter,
    parse_parameters,
    plain_outputs,
    request_parameter,
)

_IMAGE = "image"
UNREACHABLE_ERRORS = (ServerUnreachableError, PipelineNotReadyError, CanceledError)
_OF_ROWS = (PipelineFailedError, DeadlineExceededError, BatchNeighborError, InvalidRequestError)
_OF_BATCHES = (PipelineFailedError, BatchNeighborError)
"""Row errors that fail every row of a batch on the server."""
PAUSE_S = 1.0
TOO_MANY = 32
"""Number of rows without any result from which the rows are not to blame."""

RETRY = Retry(attempts=1_000_000)
"""Retry policy: a full queue is retried until the deadline, a lost server within the budget."""
_BATCHES = 8
"""Size of a chunk in batches, among which rows of similar length are found."""

RowResult = Mapping[str, Any] | InferenceError


@dataclass(frozen=True)
class TensorSender:
    """Sends chunks of rows.

    Attributes:
        lock: Lock of all senders of the run.
        folder: Folder that paths of images are relative to.
        constants: Inputs that are the same for every row.
        parameters: Parameters of every request; a row's own have precedence.
        timeout_s: Maximum time in seconds for a request, and for the server to be unreachable.
    """

    client: AsyncClient
    config: PipelineConfig
    lock: BatchLock
    folder: Path
    constants: Mapping[str, str | bytes] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S

    async def ask(self, chunk: RowChunk) -> Answers:
        """Return the results of a chunk, with the reason for each row without one.

        Raises:
            InferenceError: No single row is to blame, or none of many rows has a result.
        """
        errors: list[str | None] = [chunk.faults.get(row) for row in range(chunk.count)]
        rows = await asyncio.to_thread(self._read, chunk, errors)
        alike: dict[str, list[int]] = {}
        for row in range(chunk.count):
            if errors[row] is None:
                own = chunk.parameters[row] if chunk.parameters else {}
                try:
                    alike.setdefault(self._key(own), []).append(row)
                except ValueError as error:
                    errors[row] = str(error)
        answers: dict[str, list[Any]] = {name: [None] * chunk.count for name in self.config.outputs}
        sent, first_error = 0, None
        for key, places in alike.items():
            results = await self._each([rows[row] for row in places], json.loads(key))
            sent += len(places)
            for row, result in zip(places, results, strict=True):
                if isinstance(result, InferenceError):
                    errors[row], first_error = result.message, first_error or result
                else:
                    for name, value in result.items():
                        answers[name][row] = value
        if first_error and sent >= TOO_MANY and all(errors):
            raise first_error
        return {**answers, ERROR: errors}

    def _read(self, chunk: RowChunk, errors: list[str | None]) -> list[dict[str, str | bytes]]:
        rows: list[dict[str, str | bytes]] = []
        for row in range(chunk.count):
            own = dict(self.constants)
            try:
                if errors[row] is None:
                    for name, column in chunk.columns.items():
                        own[name] = self._value(name, column[row])
            except ValueError as error:
                errors[row] = str(error)
            rows.append(own)
        return rows

    def _value(self, name: str, value: object) -> str | bytes:
        if isinstance(value, bytes) or (isinstance(value, str) and name != _IMAGE):
            return value
        if not isinstance(value, str):
            given = "nothing" if value is None else f"{value!r:.80}"
            raise ValueError(f"`{name}` must be text. Given: {given}")
        try:
            return (self.folder / value).read_bytes()
        except (OSError, ValueError) as error:
            raise ValueError(f"`{name}` must be a readable file. Given: {error}") from None

    def _key(self, own: Mapping[str, Any]) -> str:
        found = dict(self.parameters)
        for name, value in own.items():
            if (parameter := request_parameter(value)) is None:
                raise ValueError(
                    f"`parameters.{name}` must be a plain value, or a list of texts. "
                    f"Given: {value!r:.80}"
                )
            found[name] = parameter
        return json.dumps(found, sort_keys=True)

    async def _each(
        self, rows: Sequence[Mapping[str, str | bytes]], parameters: Mapping[str, Parameter]
    ) -> list[RowResult]:
        try:
            async with self.lock.shared():
                return await self._send(rows, parameters)
        except _OF_ROWS as error:
            if len(rows) == 1:
                return [error]
        # One row may have failed the others, so send each alone; stop if none of many succeeds.
        results: list[RowResult] = []
        for row in rows:
            results += await self._each([row], parameters)
            if len(results) == TOO_MANY and all(isinstance(r, InferenceError) for r in results):
                raise next(r for r in results if isinstance(r, InferenceError))
        broken = [at for at, result in enumerate(results) if isinstance(result, _OF_BATCHES)]
        if broken:
            # A row of another chunk in the same batch on the server may be the cause.
            async with self.lock.exclusive():
                for at in broken:
                    with suppress(*_OF_ROWS):
                        results[at : at + 1] = await self._send([rows[at]], parameters)
        return results

    async def _send(
        self, rows: Sequence[Mapping[str, str | bytes]], parameters: Mapping[str, Parameter]
    ) -> list[RowResult]:
        inputs = {name: [row[name] for row in rows] for name in self.config.inputs}
        # Allow for the requests running one after the other, because others are in flight too.
        timeout_s = self.timeout_s * ceil(len(rows) / ceil(self.config.max_batch_size / 4))
        away_until = None
        while True:
            try:
                found = await self.client.infer_each(
                    inputs, parameters=parameters, timeout_s=timeout_s
                )
                break
            except UNREACHABLE_ERRORS:
                away_until = away_until or time.monotonic() + self.timeout_s
                if time.monotonic() >= away_until:
                    raise
                await asyncio.sleep(PAUSE_S)
        return [
            each
            if isinstance(each, InferenceError)
            else {
                name: values[0]
                for name, values in plain_outputs(
                    self.config, {name: value[None] for name, value in each.items()}
                ).items()
            }
            for each in found
        ]


class TensorJob:
    """Bulk job for a pipeline that returns tensors.

    Attributes:
        inputs, outputs, batch_sizes, chunk_rows: See `run.BulkJob`.
    """

    def __init__(self, asked: BulkOptions, config: PipelineConfig) -> None:
        """Raise a `UserError` for a name that is no input, or an invalid parameter."""
        self._asked = asked
        self._config = config
        self._columns = _wanted(asked, config)
        self._parameters = parse_parameters(asked.pairs)
        self._lock = BatchLock()
        self.inputs = list(self._columns.values())
        self.outputs = [
            AnswerColumn(name, name, dtype, dims) for name, (dtype, dims) in config.outputs.items()
        ]
        self.batch_sizes = BatchSizeTuner(config.max_batch_size)
        self.chunk_rows = _BATCHES * config.max_batch_size

    def wanted(self, _scan: Scan) -> dict[str, str]:
        return self._columns

    async def asker(self, size: int, stack: AsyncExitStack) -> TensorSender:
        asked = self._asked
        client = AsyncClient(
            asked.pipeline, asked.url, rows_per_request=size, max_in_flight=REQUESTS, retry=RETRY
        )
        return TensorSender(
            await stack.enter_async_context(client),
            self._config,
            self._lock,
            asked.file.parent,
            asked.constants,
            self._parameters,
            TIMEOUT_S if asked.timeout_s is None else asked.timeout_s,
        )


def _wanted(asked: BulkOptions, config: PipelineConfig) -> dict[str, str]:
    """Return the column by input for everything that the pipeline needs except constants."""
    for given in (asked.columns, asked.constants):
        for name in given:
            if name not in config.inputs:
                raise UserError(
                    name,
                    f"is not an input of `{asked.pipeline}`",
                    given=", ".join(given),
                    remedy=f"Its inputs: {', '.join(config.inputs)}",
                )
    return {
        name: asked.columns.get(name, name) for name in config.inputs if name not in asked.constants
    }
