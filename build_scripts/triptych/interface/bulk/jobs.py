"""Jobs and senders of a bulk run: batches for a pipeline of tensors, single requests for text."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from triptych.base.errors import UserError
from triptych.client import (
    AsyncClient,
    CanceledError,
    Completion,
    DeadlineExceededError,
    InferenceError,
    InvalidRequestError,
    PipelineConfig,
    PipelineFailedError,
    PipelineNotReadyError,
    Retry,
    ServerUnreachableError,
)
from triptych.client.generation import encode_inputs
from triptych.client.plain import plain_outputs, request_parameter
from triptych.client.streams import AsyncGeneration
from triptych.client.wire import Parameter
from triptych.interface.bulk.files import (
    ERROR,
    UTF_8,
    AnswerColumn,
    Answers,
    RowChunk,
    Scan,
    check_columns,
)
from triptych.interface.bulk.sending import REQUESTS, BatchSizeTuner
from triptych.interface.cli.rows import (
    TIMEOUT_S,
    parse_parameter,
    parse_parameters,
    parse_sampling,
    parse_value,
)
from triptych.spec.traffic import PARAMETERS

Result = TypeVar("Result")
RowResult = Mapping[str, object] | InferenceError
EmptyCells = Literal["send", "skip", "refuse"]
SPOOLED = "triptych-stdin-"
"""Start of the name of the folder that holds a copy of standard input."""

_UNREACHABLE_ERRORS = (ServerUnreachableError, PipelineNotReadyError, CanceledError)
_ROW_ERRORS = (PipelineFailedError, DeadlineExceededError, InvalidRequestError)
_PAUSE_S = 1.0
_MIN_FAILED_ROWS = 32
"""Number of rows without any result from which the rows are not to blame."""
_RETRY = Retry(attempts=1_000_000, longest_pause_s=0.1, budget_share=1.0)
"""Retry policy: a full queue is retried until the deadline, a lost server within the budget, and
each row of a failed batch alone, soon after it."""
_CHUNK_BATCHES = 8
"""Size of a chunk in batches, among which rows of similar length are found."""
_MAX_TEXT_REQUESTS = 32
"""Number of text requests in flight: the default batch size. Others wait, as for a full queue."""
_TEXT_CHUNK_ROWS = 64
_TEXT_TIMEOUT_S = 600.0
_PROMPT = "prompt"
"""Option of the pipeline that a column of the file may give."""

_PROMPTS, _MESSAGES, _SAMPLING = ("text_input", "text"), "messages", "sampling_parameters"
_TEXT_COLUMNS = (
    AnswerColumn("text_output", "text_output"),
    AnswerColumn("finish_reason", "finish_reason"),
    AnswerColumn("prompt_tokens", "prompt_tokens", np.int32),
    AnswerColumn("completion_tokens", "completion_tokens", np.int32),
)


@dataclass(frozen=True)
class JobOptions:
    """Options of a job, wherever its rows come from."""

    pipeline: str
    url: str
    # Column of the rows by input of the pipeline, if its name differs; `text` for the prompts of a
    # pipeline that generates text.
    columns: Mapping[str, str] = field(default_factory=dict)
    # Value of an input for every row: a text, or the bytes of an image.
    constants: Mapping[str, str | bytes] = field(default_factory=dict)
    pairs: Sequence[str] = ()  # Parameters of every request, ``KEY=VALUE``
    # Maximum time in seconds for a request, and for the server to be unreachable. None: 30, or 600
    # for a pipeline that generates text.
    timeout_s: float | None = None
    # Column of the rows by request parameter.
    parameter_columns: Mapping[str, str] = field(default_factory=dict)
    # Treatment of rows with an empty input: they are sent, left without a result, or reported as
    # errors.
    empty: EmptyCells = "send"
    encoding: str = UTF_8  # Name of the encoding of files' text
    suffix: str | None = None  # Extension of the files' format; None for that of each file

    @property
    def folder(self) -> Path:
        """Folder that paths of images are relative to."""
        return Path()

    def identity(self) -> dict[str, object]:
        """Return the options that a resumed run must share with the interrupted one."""
        return {
            "pipeline": self.pipeline,
            "columns": dict(self.columns),
            "constants": {name: repr(value) for name, value in self.constants.items()},
            "parameters": sorted(self.pairs),
            "parameter columns": dict(self.parameter_columns),
            "empty cells": self.empty,
        }


@dataclass(frozen=True, kw_only=True)
class BulkOptions(JobOptions):
    """Options of a bulk run of one file."""

    file: Path
    out: Path
    json_cells: bool = False  # Whether vectors are written into cells, as JSON

    @property
    def folder(self) -> Path:
        return self.file if self.file.is_dir() else self.file.parent

    def identity(self) -> dict[str, object]:
        stat = self.file.stat()
        read = [str(self.file.resolve()), stat.st_size, stat.st_mtime_ns]
        if self.file.parent.name.startswith(SPOOLED):  # a copy of standard input
            read = ["-", hashlib.sha256(self.file.read_bytes()).hexdigest()]
        return {
            **super().identity(),
            "file": read,
            "encoding": self.encoding,
            "JSON in cells": self.json_cells,
        }


def wanted_columns(
    job: TensorJob | TextJob, options: JobOptions, scan: Scan, path: Path
) -> dict[str, str]:
    """Return the column by input, and by ``parameters.NAME``, that is read of each row.

    Raises:
        UserError: The file at `path` does not have a column.
    """
    given = {f"{PARAMETERS}.{key}": name for key, name in options.parameter_columns.items()}
    wanted = {**job.wanted(scan), **given}
    check_columns(wanted, scan.columns, path)
    return wanted


def prepare(chunk: RowChunk, options: JobOptions) -> RowChunk:
    """Return a chunk with the parameters of its columns, and with its empty rows marked.

    A row with an empty text as its fault has no result and no error.
    """
    columns = dict(chunk.columns)
    faults = dict(chunk.faults)
    parameters = [dict(own) for own in chunk.parameters] or [{} for _ in range(chunk.count)]
    for name in options.parameter_columns:
        for row, cell in enumerate(columns.pop(f"{PARAMETERS}.{name}")):
            try:
                value = parse_parameter(cell) if isinstance(cell, str) and cell else cell
            except ValueError as error:
                faults.setdefault(row, f"`{name}` must be a plain value. Given: {error}")
                continue
            if value not in (None, ""):
                parameters[row][name] = value
    if options.empty != "send":
        for row in range(chunk.count):
            empty = [name for name, column in columns.items() if column[row] in (None, "", b"")]
            if empty:
                told = f"`{empty[0]}` is empty" if options.empty == "refuse" else ""
                faults.setdefault(row, told)
    given = parameters if chunk.parameters or options.parameter_columns else ()
    return replace(chunk, columns=columns, faults=faults, parameters=given)


class BatchLock:
    """Read-write lock: `shared` requests run concurrently, an `exclusive` one alone."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._entrance = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Hold the lock together with other requests."""
        async with self._entrance:
            self._in_flight += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Hold the lock alone."""
        async with self._entrance:
            await self._idle.wait()
            yield


async def _retry_unreachable(send: Callable[[], Awaitable[Result]], timeout_s: float) -> Result:
    """Return the result of `send`, repeated for `timeout_s` while the server is unreachable.

    Raises:
        InferenceError: See its subclasses.
    """
    give_up_at = None
    while True:
        try:
            return await send()
        except _UNREACHABLE_ERRORS:
            give_up_at = give_up_at or time.monotonic() + timeout_s
            if time.monotonic() >= give_up_at:
                raise
        await asyncio.sleep(_PAUSE_S)


@dataclass(frozen=True)
class TensorSender:
    """Sends chunks of rows."""

    client: AsyncClient
    config: PipelineConfig
    lock: BatchLock  # Lock of all senders of the run
    folder: Path  # Folder that paths of images are relative to
    # Inputs that are the same for every row.
    constants: Mapping[str, str | bytes] = field(default_factory=dict)
    # Parameters of every request; a row's own have precedence.
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    # Maximum time in seconds for a request, and for the server to be unreachable.
    timeout_s: float = TIMEOUT_S

    async def send(self, chunk: RowChunk) -> Answers:
        """Return the results of a chunk, with the reason for each row without one.

        Raises:
            InferenceError: No single row is to blame, or none of many rows has a result.
        """
        errors: list[str | None] = [chunk.faults.get(row) for row in range(chunk.count)]
        rows = await asyncio.to_thread(self._read, chunk, errors)
        groups: dict[str, list[int]] = {}
        has_prompts = _PROMPT in chunk.columns and _PROMPT not in self.config.inputs
        for row in range(chunk.count):
            if errors[row] is None:
                own = dict(chunk.parameters[row]) if chunk.parameters else {}
                prompt = chunk.columns[_PROMPT][row] if has_prompts else None
                if prompt:
                    own[_PROMPT] = prompt
                try:
                    groups.setdefault(self._key(own, rows[row]), []).append(row)
                except ValueError as error:
                    errors[row] = str(error)
        answers: dict[str, list[object]] = {
            name: [None] * chunk.count for name in self.config.outputs
        }
        sent, first_error = 0, None
        for key, indexes in groups.items():
            parameters = json.loads(key)[0]
            results = await self._send_with_retries([rows[row] for row in indexes], parameters)
            sent += len(indexes)
            for row, result in zip(indexes, results, strict=True):
                if isinstance(result, InferenceError):
                    errors[row], first_error = result.message, first_error or result
                else:
                    for name, value in result.items():
                        answers[name][row] = value
        if first_error and sent >= _MIN_FAILED_ROWS and None not in errors:
            raise first_error
        return {**answers, ERROR: [error or None for error in errors]}

    def _read(self, chunk: RowChunk, errors: list[str | None]) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        for row in range(chunk.count):
            own: dict[str, object] = dict(self.constants)
            try:
                if errors[row] is None:
                    for name, column in chunk.columns.items():
                        is_given = column[row] not in (None, "") and name in self.config.row_types
                        if name in self.config.inputs or is_given:
                            own[name] = self._value(name, column[row])
            except ValueError as error:
                errors[row] = str(error)
            rows.append(own)
        return rows

    def _value(self, name: str, value: object) -> object:
        kind = self.config.row_types.get(name)
        if kind not in (None, "bytes"):
            return parse_value(value, kind) if isinstance(value, str) else value
        if kind is not None and isinstance(value, str):
            return self._read_file(name, value)
        if isinstance(value, bytes) or (isinstance(value, str) and name != "image"):
            return value
        if not isinstance(value, str):
            given = "null" if value is None else f"{value!r:.80}"
            raise ValueError(f"`{name}` must be text. Given: {given}")
        return self._read_file(name, value)

    def _read_file(self, name: str, path: str) -> bytes:
        try:
            return (self.folder / path).read_bytes()
        except (OSError, ValueError) as error:
            raise ValueError(f"`{name}` must be a readable file. Given: {error}") from None

    def _key(self, own: Mapping[str, object], inputs: Mapping[str, object]) -> str:
        parameters = dict(self.parameters)
        for name, value in own.items():
            if (parameter := request_parameter(value)) is None:
                raise ValueError(
                    f"`parameters.{name}` must be a plain value, or a list of texts. "
                    f"Given: {value!r:.80}"
                )
            parameters[name] = parameter
        return json.dumps([parameters, sorted(inputs)], sort_keys=True)

    async def _send_with_retries(
        self, rows: Sequence[Mapping[str, object]], parameters: Mapping[str, Parameter]
    ) -> list[RowResult]:
        failed: Sequence[int] = range(len(rows))
        try:
            async with self.lock.shared():
                results = await self._send(rows, parameters)
            failed = [at for at in failed if isinstance(results[at], PipelineFailedError)]
        except _ROW_ERRORS as error:
            results = [error] * len(rows)
        if failed and len(rows) > 1:
            # Other rows of the run may be the cause, so send each alone; stop if none succeeds.
            async with self.lock.exclusive():
                for count, index in enumerate(failed, 1):
                    with suppress(*_ROW_ERRORS):
                        results[index : index + 1] = await self._send([rows[index]], parameters)
                    if count == _MIN_FAILED_ROWS:
                        errors = [each for each in results if isinstance(each, InferenceError)]
                        if len(errors) == len(rows):
                            raise errors[0]
        return results

    async def _send(
        self, rows: Sequence[Mapping[str, object]], parameters: Mapping[str, Parameter]
    ) -> list[RowResult]:
        inputs = {name: [row[name] for row in rows] for name in rows[0]}
        # Allow for the requests running one after the other, because others are in flight too.
        timeout_s = self.timeout_s * ceil(len(rows) / ceil(self.config.max_batch_size / 4))
        rows_found = await _retry_unreachable(
            lambda: self.client.infer_each(inputs, parameters=parameters, timeout_s=timeout_s),
            self.timeout_s,
        )
        return [
            outputs
            if isinstance(outputs, InferenceError)
            else {
                name: values[0]
                for name, values in plain_outputs(
                    self.config, {name: value[None] for name, value in outputs.items()}
                ).items()
            }
            for outputs in rows_found
        ]


class TensorJob:
    """Bulk job for a pipeline that returns tensors.

    Attributes:
        outputs: Columns that are added, except that of errors.
    """

    def __init__(self, options: JobOptions, config: PipelineConfig) -> None:
        """Raise a `UserError` for a name that is no input, or an invalid parameter."""
        self._options = options
        self._config = config
        self._columns = _wanted(options, config)
        self._parameters = parse_parameters(options.pairs)
        self._lock = BatchLock()
        self._optional = [name for name in config.row_types if name in config.options]
        if _PROMPT in config.options and not config.row_types:
            self._optional.append(_PROMPT)
        self.outputs = [
            AnswerColumn(name, name, dtype, dims) for name, (dtype, dims) in config.outputs.items()
        ]
        self.batch_sizes = BatchSizeTuner(config.max_batch_size)
        self.chunk_rows = _CHUNK_BATCHES * config.max_batch_size

    def wanted(self, scan: Scan) -> dict[str, str]:
        """Return the column by input that is read of a row, with the optional ones of the file."""
        found = [name for name in self._optional if name in scan.columns]
        return {**self._columns, **dict(zip(found, found, strict=True))}

    async def open_sender(self, size: int, stack: AsyncExitStack) -> TensorSender:
        """Return a sender of requests of `size` rows; `stack` closes it."""
        options = self._options
        client = AsyncClient(
            options.pipeline,
            options.url,
            rows_per_request=size,
            max_in_flight=REQUESTS,
            retry=_RETRY,
        )
        return TensorSender(
            await stack.enter_async_context(client),
            self._config,
            self._lock,
            options.folder,
            options.constants,
            self._parameters,
            TIMEOUT_S if options.timeout_s is None else options.timeout_s,
        )


def _wanted(options: JobOptions, config: PipelineConfig) -> dict[str, str]:
    """Return the column by input for everything that the pipeline needs except constants."""
    for given in (options.columns, options.constants):
        for name in given:
            if name not in config.inputs:
                raise UserError(
                    name,
                    f"is not an input of `{options.pipeline}`",
                    given=", ".join(given),
                    remedy=f"Its inputs: {', '.join(config.inputs)}",
                )
    needed = [name for name in config.inputs if name not in options.constants]
    return {name: options.columns.get(name, name) for name in needed}


class TextJob:
    """Bulk job for a pipeline that generates text from prompts or conversations.

    Attributes:
        outputs: See `TensorJob`.
    """

    def __init__(self, options: JobOptions, _config: PipelineConfig) -> None:
        """Raise a `UserError` for an unsupported option or an invalid parameter."""
        other = [*options.constants, *(name for name in options.columns if name != "text")]
        if other:
            raise UserError(
                ", ".join(other),
                "is not supported for a pipeline that generates text",
                remedy="Give the column of prompts with --text-column",
            )
        self._options = options
        self._parameters = parse_sampling(options.pairs)
        self._slots = asyncio.Semaphore(_MAX_TEXT_REQUESTS)
        named = options.columns.get("text")
        self._prompts = _PROMPTS if named is None else (named,)
        self.outputs = _TEXT_COLUMNS
        self.batch_sizes = BatchSizeTuner(1)
        self.chunk_rows = _TEXT_CHUNK_ROWS

    def wanted(self, scan: Scan) -> dict[str, str]:
        prompts = [name for name in self._prompts if name in scan.columns]
        wanted = {name: name for name in (_MESSAGES, _SAMPLING) if name in scan.columns}
        if prompts or _MESSAGES not in wanted or "text" in self._options.columns:
            wanted["text"] = (*prompts, self._prompts[-1])[0]
        return wanted

    async def open_sender(self, _size: int, stack: AsyncExitStack) -> TextSender:
        client = AsyncClient(self._options.pipeline, self._options.url, retry=_RETRY)
        await stack.enter_async_context(client)
        given_s = self._options.timeout_s
        timeout_s = _TEXT_TIMEOUT_S if given_s is None else given_s
        return TextSender(client, self._slots, self._parameters, timeout_s)


@dataclass(frozen=True)
class TextSender:
    """Sends chunks of rows."""

    client: AsyncClient
    slots: asyncio.Semaphore  # Semaphore for requests in flight, of all chunks
    parameters: Mapping[str, object]  # Parameters of every request; a row's own have precedence
    # Maximum time in seconds for a request with its wait for a slot, and for the server to be
    # unreachable.
    timeout_s: float

    async def send(self, chunk: RowChunk) -> Answers:
        """Return the results of a chunk, with the reason for each row without one.

        Raises:
            InferenceError: The server is unreachable, or none of many rows has a result.
        """
        tasks = [asyncio.create_task(self._row(chunk, row)) for row in range(chunk.count)]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        refused = [result for result in results if isinstance(result, InferenceError)]
        if len(refused) == chunk.count >= _MIN_FAILED_ROWS:
            raise refused[0]
        rows = [
            (result.text, result.finish_reason, *_token_counts(result), None)
            if isinstance(result, Completion)
            else (*([None] * 4), (result if isinstance(result, str) else result.message) or None)
            for result in results
        ]
        names = [*(column.name for column in _TEXT_COLUMNS), ERROR]
        return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))

    async def _row(self, chunk: RowChunk, row: int) -> Completion | InferenceError | str:
        if row in chunk.faults:
            return chunk.faults[row]
        try:
            inputs = self._inputs(chunk, row)
        except ValueError as error:
            return str(error)
        except InferenceError as error:
            return error

        async def generate() -> Completion:
            async with self.slots:
                return await AsyncGeneration(self.client, inputs, self.timeout_s).whole()

        try:
            return await _retry_unreachable(generate, self.timeout_s)
        except _UNREACHABLE_ERRORS:
            raise
        except InferenceError as error:
            return error

    def _inputs(self, chunk: RowChunk, row: int) -> Mapping[str, bytes]:
        values = {name: column[row] for name, column in chunk.columns.items()}
        prompt, messages = values.get("text"), _data(_MESSAGES, values.get(_MESSAGES))
        if not isinstance(prompt, str | None):
            raise ValueError(f"`text_input` must be text. Given: {prompt!r:.80}")
        if messages is not None and not isinstance(messages, list):
            raise ValueError(f"`messages` must be a list of messages. Given: {messages!r:.80}")
        sampling = _data(_SAMPLING, values.get(_SAMPLING)) or {}
        own = chunk.parameters[row] if chunk.parameters else {}
        if not isinstance(sampling, dict):
            raise ValueError(f"`{_SAMPLING}` must be an object. Given: {sampling!r:.80}")
        return encode_inputs(prompt or "", messages, {**self.parameters, **sampling, **own})  # type: ignore[typeddict-item]


def _data(name: str, value: object) -> object:
    """Return the plain data of a cell, which some formats store as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value else None
    except ValueError as error:
        raise ValueError(f"`{name}` must be JSON. Given: {error}") from None


def _token_counts(answer: Completion) -> tuple[int | None, int | None]:
    usage = answer.usage
    return (None, None) if usage is None else (usage.prompt_tokens, usage.completion_tokens)


async def open_job(options: JobOptions, stack: AsyncExitStack) -> TensorJob | TextJob:
    """Return the job of a served pipeline; `stack` closes its connection.

    Raises:
        InferenceError: The server is unreachable, or does not serve the pipeline.
        UserError: An option is not supported by the pipeline.
    """
    client = await stack.enter_async_context(AsyncClient(options.pipeline, options.url))
    config = await client.interface(timeout_s=options.timeout_s)
    return (TextJob if config.generates else TensorJob)(options, config)
