"""A chunk of rows to the pipeline, and what became of each row."""

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
from triptych.client.bulk.asked import Asked
from triptych.client.bulk.formats import ERROR, AnswerColumn, Answers, Chunk, Scan
from triptych.client.bulk.pace import REQUESTS, Pace
from triptych.client.bulk.turns import Turns
from triptych.client.questions import (
    TIMEOUT_S,
    Parameter,
    parse_parameters,
    plain_outputs,
    request_parameter,
)

_IMAGE = "image"
AWAY = (ServerUnreachableError, PipelineNotReadyError, CanceledError)
_OF_ROWS = (PipelineFailedError, DeadlineExceededError, BatchNeighborError, InvalidRequestError)
_OF_BATCHES = (PipelineFailedError, BatchNeighborError)
"""Of what is a row's fault: what fails every row of a batch at the server."""
PAUSE_S = 1.0
TOO_MANY = 32
"""So many rows, none of which is answered, are not to blame themselves."""

RETRY = Retry(attempts=1_000_000)
"""A full queue is waited for as long as the deadline allows, a lost server as its budget lasts."""
_BATCHES = 8
"""Of the pipeline's batch limit in a chunk: rows of like length are found among so many."""

RowResult = Mapping[str, Any] | InferenceError


@dataclass(frozen=True)
class Asker:
    """Sends chunks of rows.

    Attributes:
        turns: of all that send for the same run.
        folder: from where paths of images start.
        constants: inputs that are the same for every row.
        parameters: of every request; a row's own win.
        timeout_s: that a request may take, and that the server may be away.
    """

    client: AsyncClient
    config: PipelineConfig
    turns: Turns
    folder: Path
    constants: Mapping[str, str | bytes] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S

    async def ask(self, chunk: Chunk) -> Answers:
        """The answers of `chunk`, and why rows have none.

        Raises:
            InferenceError: no row is to blame, or none of many is answered.
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

    def _read(self, chunk: Chunk, errors: list[str | None]) -> list[dict[str, str | bytes]]:
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
            async with self.turns.beside():
                return await self._send(rows, parameters)
        except _OF_ROWS as error:
            if len(rows) == 1:
                return [error]
        # One of them may have failed the others: each alone, but not all where none is answered.
        results: list[RowResult] = []
        for row in rows:
            results += await self._each([row], parameters)
            if len(results) == TOO_MANY and all(isinstance(r, InferenceError) for r in results):
                raise next(r for r in results if isinstance(r, InferenceError))
        broken = [at for at, result in enumerate(results) if isinstance(result, _OF_BATCHES)]
        if broken:
            # It may have been a row of another chunk, in the same batch at the server.
            async with self.turns.alone():
                for at in broken:
                    with suppress(*_OF_ROWS):
                        results[at : at + 1] = await self._send([rows[at]], parameters)
        return results

    async def _send(
        self, rows: Sequence[Mapping[str, str | bytes]], parameters: Mapping[str, Parameter]
    ) -> list[RowResult]:
        inputs = {name: [row[name] for row in rows] for name in self.config.inputs}
        # As long as its requests may take one after the other: others are under way, too.
        timeout_s = self.timeout_s * ceil(len(rows) / ceil(self.config.max_batch_size / 4))
        away_until = None
        while True:
            try:
                found = await self.client.infer_each(
                    inputs, parameters=parameters, timeout_s=timeout_s
                )
                break
            except AWAY:
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


class Inferring:
    """Rows to a pipeline that answers each with tensors.

    Attributes:
        inputs, outputs, pace, chunk_rows: see `run.Work`.
    """

    def __init__(self, asked: Asked, config: PipelineConfig) -> None:
        """Raises `UserError`: a name that is no input, or a parameter that is none."""
        self._asked = asked
        self._config = config
        self._columns = _wanted(asked, config)
        self._parameters = parse_parameters(asked.pairs)
        self._turns = Turns()
        self.inputs = list(self._columns.values())
        self.outputs = [
            AnswerColumn(name, name, dtype, dims) for name, (dtype, dims) in config.outputs.items()
        ]
        self.pace = Pace(config.max_batch_size)
        self.chunk_rows = _BATCHES * config.max_batch_size

    def wanted(self, _scan: Scan) -> dict[str, str]:
        return self._columns

    async def asker(self, size: int, stack: AsyncExitStack) -> Asker:
        asked = self._asked
        client = AsyncClient(
            asked.pipeline, asked.url, rows_per_request=size, max_in_flight=REQUESTS, retry=RETRY
        )
        return Asker(
            await stack.enter_async_context(client),
            self._config,
            self._turns,
            asked.file.parent,
            asked.constants,
            self._parameters,
            TIMEOUT_S if asked.timeout_s is None else asked.timeout_s,
        )


def _wanted(asked: Asked, config: PipelineConfig) -> dict[str, str]:
    """Input -> column, for all that the pipeline wants of a row but the constants."""
    for given in (asked.columns, asked.constants):
        for name in given:
            if name not in config.inputs:
                raise UserError(
                    name,
                    f"must be an input of `{asked.pipeline}`",
                    given=", ".join(given),
                    remedy=f"It takes {', '.join(config.inputs)}",
                )
    return {
        name: asked.columns.get(name, name) for name in config.inputs if name not in asked.constants
    }
