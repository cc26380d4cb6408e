"""Connections of a job in an event loop of its own, for callers without one."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from triptych.base.errors import UserError
from triptych.client import InferenceError
from triptych.client.server_info import request_failure
from triptych.interface import api
from triptych.interface.bulk.files import Answers, RowChunk
from triptych.interface.bulk.jobs import JobOptions, open_job
from triptych.interface.bulk.sending import send_chunks
from triptych.runtime.counters import ROW_TOKENS
from triptych.serving.bench.resources import fetch_metrics

Result = TypeVar("Result")


class Session:
    """Job of a served pipeline with its connections, which a thread keeps open until `close`.

    Args:
        options: Options of the job.
        repository: Folder of a model repository, which a server is started on in place of
            `options.url`; None for none.

    Attributes:
        job: Job of the pipeline.

    Raises:
        UserError: The pipeline is not built or not served, or an option is not supported by it.
    """

    def __init__(self, options: JobOptions, repository: Path | str | None = None) -> None:
        self._metrics_url = ""  # Metrics page of its own server
        with ExitStack() as opened:
            if repository is not None:
                server = api.serve(options.pipeline, repository=repository)
                started = opened.enter_context(server)
                options = replace(options, url=started.grpc_url)
                self._metrics_url = started.metrics_url
            self.options = options
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(target=self._loop.run_forever, daemon=True)
            thread.start()
            opened.callback(_stop, self._loop, thread)
            connections = AsyncExitStack()
            opened.callback(_run, self._loop, connections.aclose())
            self.run(self._open(connections))
            self.close = weakref.finalize(self, opened.pop_all().close)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`, which uses `send`.

        Raises:
            UserError: The server is unreachable, or no single row is to blame for an error.
        """
        try:
            return _run(self._loop, work)
        except InferenceError as error:
            raise request_failure(self.options.pipeline, self.options.url, error) from error

    def send(self, chunks: Iterator[RowChunk]) -> AsyncGenerator[tuple[RowChunk, Answers], None]:
        """Yield chunks with their results; see `send_chunks`. One call at a time is supported."""
        return send_chunks(self._senders, self.job.batch_sizes, chunks)

    def use(self) -> dict[str, float]:
        """Return sums since the server's start: seconds that its steps ran, and `tokens`.

        The steps are `tokenize`, `core` and `postprocess`; there is none of several servers. A
        server at a URL does not tell the tokens.
        """
        used = self.run(self._steps())
        with suppress(UserError):  # a server that has just ended
            for name, labels, value in (
                fetch_metrics(self._metrics_url) if self._metrics_url else ()
            ):
                if (name, labels.get("pipeline")) == (f"{ROW_TOKENS}_sum", self.options.pipeline):
                    used["tokens"] = value
        return used

    async def _steps(self) -> dict[str, float]:
        used: dict[str, float] = {}
        with suppress(InferenceError):
            for step in await next(iter(self._senders.values())).client.step_statistics():
                kind = step.model.rpartition("_")[2]
                key = kind if kind in ("core", "postprocess") else "tokenize"
                # Each request of a batch counts the time of the batch.
                share = step.executions / max(step.requests, 1)
                used[key] = used.get(key, 0.0) + share * step.compute_infer_total_us / 1e6
        return used

    async def _open(self, connections: AsyncExitStack) -> None:
        self.job = await open_job(self.options, connections)
        sizes = self.job.batch_sizes.sizes
        self._senders = {size: await self.job.open_sender(size, connections) for size in sizes}


def _run(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work` in the loop of another thread."""
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    finally:
        future.cancel()  # where an interrupt ended the wait


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
