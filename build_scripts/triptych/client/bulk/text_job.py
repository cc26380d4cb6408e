"""Send rows to a pipeline that generates text, many at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from triptych.base.errors import UserError
from triptych.client import AsyncClient, Completion, InferenceError, PipelineConfig
from triptych.client.bulk.answers import PAUSE_S, RETRY, TOO_MANY, UNREACHABLE_ERRORS
from triptych.client.bulk.batching import BatchSizeTuner
from triptych.client.bulk.formats import ERROR, AnswerColumn, Answers, RowChunk, Scan
from triptych.client.bulk.options import BulkOptions
from triptych.client.generation import encode_inputs
from triptych.client.questions import parse_sampling
from triptych.client.streams import AsyncGeneration

ANSWERS = (
    AnswerColumn("text_output", "text_output"),
    AnswerColumn("finish_reason", "finish_reason"),
    AnswerColumn("prompt_tokens", "prompt_tokens", np.int32),
    AnswerColumn("completion_tokens", "completion_tokens", np.int32),
)
AT_ONCE = 32
"""Number of requests in flight: the default batch size. Requests that meet a full queue wait."""
CHUNK_ROWS = 64
TIMEOUT_S = 600.0

PROMPTS, MESSAGES, SAMPLING = ("text_input", "text"), "messages", "sampling_parameters"


class TextJob:
    """Bulk job for a pipeline that generates text from prompts or conversations.

    Attributes:
        inputs, outputs, batch_sizes, chunk_rows: See `run.BulkJob`.
    """

    def __init__(self, asked: BulkOptions, _config: PipelineConfig) -> None:
        """Raise a `UserError` for an unsupported option or an invalid parameter."""
        other = [*asked.constants, *(name for name in asked.columns if name != "text")]
        if other:
            raise UserError(
                ", ".join(other),
                "is not supported for a pipeline that generates text",
                remedy="Give the column of prompts with --text-column",
            )
        self._asked = asked
        self._parameters = parse_sampling(asked.pairs)
        self._slots = asyncio.Semaphore(AT_ONCE)
        named = asked.columns.get("text")
        self._prompts = PROMPTS if named is None else (named,)
        self.inputs = [*self._prompts, MESSAGES, SAMPLING]
        self.outputs = ANSWERS
        self.batch_sizes = BatchSizeTuner(1)
        self.chunk_rows = CHUNK_ROWS

    def wanted(self, scan: Scan) -> dict[str, str]:
        found = [name for name in self._prompts if name in scan.names]
        wanted = {name: name for name in (MESSAGES, SAMPLING) if name in scan.names}
        if found or MESSAGES not in wanted or "text" in self._asked.columns:
            wanted["text"] = (*found, self._prompts[-1])[0]
        return wanted

    async def asker(self, _size: int, stack: AsyncExitStack) -> TextSender:
        client = AsyncClient(self._asked.pipeline, self._asked.url, retry=RETRY)
        await stack.enter_async_context(client)
        given_s = self._asked.timeout_s
        timeout_s = TIMEOUT_S if given_s is None else given_s
        return TextSender(client, self._slots, self._parameters, timeout_s)


@dataclass(frozen=True)
class TextSender:
    """Sends chunks of rows.

    Attributes:
        slots: Semaphore for requests in flight, of all chunks.
        parameters: Parameters of every request; a row's own have precedence.
        timeout_s: Maximum time in seconds for a request with its wait for a slot, and for the
            server to
            be unreachable.
    """

    client: AsyncClient
    slots: asyncio.Semaphore
    parameters: Mapping[str, Any]
    timeout_s: float

    async def ask(self, chunk: RowChunk) -> Answers:
        """Return the results of a chunk, with the reason for each row without one.

        Raises:
            InferenceError: The server is unreachable, or none of many rows has a result.
        """
        tasks = [asyncio.create_task(self._row(chunk, row)) for row in range(chunk.count)]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        refused = [one for one in found if isinstance(one, InferenceError)]
        if len(refused) == chunk.count >= TOO_MANY:
            raise refused[0]
        rows = [
            (one.text, one.finish_reason, *_tokens(one), None)
            if isinstance(one, Completion)
            else (None, None, None, None, one if isinstance(one, str) else one.message)
            for one in found
        ]
        names = [*(column.name for column in ANSWERS), ERROR]
        return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))

    async def _row(self, chunk: RowChunk, row: int) -> Completion | InferenceError | str:
        if row in chunk.faults:
            return chunk.faults[row]
        try:
            order = self._order(chunk, row)
        except ValueError as error:
            return str(error)
        except InferenceError as error:
            return error
        away_until = None
        while True:
            try:
                async with self.slots:
                    return await AsyncGeneration(self.client, order, self.timeout_s).whole()
            except UNREACHABLE_ERRORS:
                away_until = away_until or time.monotonic() + self.timeout_s
                if time.monotonic() >= away_until:
                    raise
            except InferenceError as error:
                return error
            await asyncio.sleep(PAUSE_S)

    def _order(self, chunk: RowChunk, row: int) -> Mapping[str, bytes]:
        given = {name: column[row] for name, column in chunk.columns.items()}
        prompt, messages = given.get("text"), _data(MESSAGES, given.get(MESSAGES))
        if not isinstance(prompt, str | None):
            raise ValueError(f"`text_input` must be text. Given: {prompt!r:.80}")
        if messages is not None and not isinstance(messages, list):
            raise ValueError(f"`messages` must be a list of messages. Given: {messages!r:.80}")
        said = _data(SAMPLING, given.get(SAMPLING)) or {}
        own = chunk.parameters[row] if chunk.parameters else {}
        if not isinstance(said, dict):
            raise ValueError(f"`{SAMPLING}` must be an object. Given: {said!r:.80}")
        return encode_inputs(prompt or "", messages, {**self.parameters, **said, **own})  # type: ignore[typeddict-item]


def _data(name: str, value: object) -> Any:
    """Return the plain data of a cell, which some formats store as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value else None
    except ValueError as error:
        raise ValueError(f"`{name}` must be JSON. Given: {error}") from None


def _tokens(answer: Completion) -> tuple[int | None, int | None]:
    usage = answer.usage
    return (None, None) if usage is None else (usage.prompt_tokens, usage.completion_tokens)
