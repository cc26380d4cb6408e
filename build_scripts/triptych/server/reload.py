"""A pipeline that was built anew, put into a running server; what does not load is told."""

from __future__ import annotations

import time
from collections import Counter

from triptych.client.models import reload_pipeline
from triptych.errors import UserError
from triptych.server.server import Server
from triptych.server.server_log import read_load_state

_LAST_ANSWERS_S = 5.0
"""Steps that were exchanged end once they have answered what they had."""

_POLL_S = 0.05


def reload(server: Server, pipeline: str) -> None:
    """Load what changed of a pipeline while the models before serve, until it is ready.

    Args:
        server: one that exchanges models, or was started with some.
        pipeline: the ensemble.

    Raises:
        UserError: a model does not load; the one before goes on serving.
    """
    if server.log_file is None:
        raise RuntimeError("the server was not started")
    before = Counter(server.living_steps().values())
    with server.log_file.open("rb") as log:
        log.seek(0, 2)
        try:
            reload_pipeline(server.grpc_url, pipeline, server.operator_headers)
        finally:  # until the old ones have ended, `death` would take them for dead
            deadline = time.monotonic() + _LAST_ANSWERS_S
            while Counter(server.living_steps().values()) > before and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        said = log.read().decode("utf-8", "replace")
    # An ensemble loads although a step did not, which then is the one from before.
    failures = read_load_state(said, server.repository).failures
    if failures:
        raise UserError(failures[0].step, "must load", given=failures[0].reason)
