"""A pipeline that was built anew, put into a running server; what does not load is told."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from triptych.base.errors import UserError
from triptych.client.models import reload_pipeline
from triptych.container.steps import EndlessLoad
from triptych.serving.server import Server
from triptych.serving.server_log import read_load_state

_LAST_ANSWERS_S = 5.0
"""Steps that were exchanged end once they have answered what they had."""

_POLL_S = 0.05


def reload(server: Server, pipeline: str) -> None:
    """Load what changed of a pipeline while the models before serve, until it is ready.

    A step that would load for ever is ended, and all of it tried once more.

    Args:
        server: one that exchanges models, or was started with some.
        pipeline: the ensemble.

    Raises:
        UserError: a model does not load; the one before goes on serving.
    """
    if server.log_file is None:
        raise RuntimeError("the server was not started")
    with server.log_file.open("rb") as log, _ending_endless_steps(server) as ended:
        try:
            _load(server, pipeline, log)
        except UserError:
            if not ended:
                raise
            _load(server, pipeline, log)


def _load(server: Server, pipeline: str, log: BinaryIO) -> None:
    before = Counter(server.living_steps().values())
    log.seek(0, 2)
    try:
        reload_pipeline(server.grpc_url, pipeline, server.operator_headers)
    finally:  # until the old ones have ended, `death` would take them for dead
        deadline = time.monotonic() + _LAST_ANSWERS_S
        while Counter(server.living_steps().values()) > before and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    # An ensemble loads although a step did not, which then is the one from before.
    failures = read_load_state(log.read().decode("utf-8", "replace"), server.repository).failures
    if failures:
        raise UserError(failures[0].step, "must load", given=failures[0].reason)


@contextmanager
def _ending_endless_steps(server: Server) -> Iterator[list[int]]:
    """Meanwhile each step that would load for ever is killed, which fails its load; their ids."""
    ended: list[int] = []
    is_over, endless = threading.Event(), EndlessLoad()

    def look() -> None:
        while not is_over.wait(_POLL_S):
            for pid in endless.steps(server.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                ended.append(pid)

    watch = threading.Thread(target=look, name="endless loads", daemon=True)
    watch.start()
    try:
        yield ended
    finally:
        is_over.set()
        watch.join()
