"""One server of a fleet: started, stopped and started again, each in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from triptych.base.errors import UserError
from triptych.container.health import find_fault
from triptych.container.locks import find_pipelines
from triptych.serving.fleet.builds import Build
from triptych.serving.server import Server
from triptych.serving.wait import Pauses

_ASK_POLL_S = 0.2


class Replica:
    """A server and what became of it; `Fleet` decides, the methods here take their time.

    Attributes:
        name: as it is told to the user.
        build: what it serves, or is being started on.
        is_ready: whether it may get requests.
        work: its start or exchange under way; None where there is none.
        again_at: when it is to be started again, on the monotonic clock; None where it is not.
        most_failed_starts: in a row: what fails so often will fail again.
    """

    most_failed_starts = 6

    def __init__(self, name: str, server: Server, models: Sequence[str], build: Build) -> None:
        self.name = name
        self.server = server
        self.build = build
        self.is_ready = False
        self.work: Future[None] | None = None
        self.again_at: float | None = None
        self._models = frozenset(models)
        self._failed_starts = 0
        self._pauses = Pauses()
        self._ready_at = time.monotonic()
        self._ending = threading.Lock()
        self._ended = False
        self._was_started = False

    @property
    def is_given_up(self) -> bool:
        """Whether it answers nothing and is not started again."""
        return not self.is_ready and self.work is None and self.again_at is None

    def start(self, build: Build, timeout_s: float) -> None:
        """Start it on `build`, and return once each of its pipelines has answered a question.

        Raises:
            UserError: it does not load, or does not answer.
        """
        with self._ending:
            if self._ended:
                raise RuntimeError("the fleet is being stopped")
            if build != self.build:
                self.build = build
                self._failed_starts = 0
            if self._was_started:
                self.server.restart(build.folder)
            else:
                self._was_started = True
                self.server.start()
        deadline = time.monotonic() + timeout_s
        self.server.wait_ready(timeout_s)
        self._answer(deadline)

    def drain(self) -> None:
        """Answer what is under way, then end the server."""
        with self._ending:
            self.server.stop()

    def end(self) -> None:
        """`drain`, and never start again."""
        with self._ending:
            self._ended = True
            self.server.stop()

    def ready(self) -> None:
        """Count it as one that answers."""
        self.is_ready = True
        self._failed_starts = 0
        self._ready_at = time.monotonic()

    def failed(self) -> float | None:
        """Count a death or a failed start; the pause until the next start, None if that is over."""
        now = time.monotonic()
        self._failed_starts += not self.is_ready
        pause_s = self._pauses.take_s(now - self._ready_at if self.is_ready else 0.0)
        self.is_ready = False
        if self._failed_starts >= self.most_failed_starts:
            self.again_at = None
            return None
        self.again_at = now + pause_s
        return pause_s

    def _answer(self, deadline: float) -> None:
        pipelines = [
            pipeline
            for pipeline in find_pipelines(self.build.folder)
            if not self._models or pipeline.name in self._models
        ]
        url = f"http://{self.server.http_url}"
        while pipelines and (fault := find_fault(url, pipelines)):
            death = self.server.death(_ASK_POLL_S)
            if death is not None:
                raise death
            if time.monotonic() > deadline:
                raise UserError(self.name, "must answer a question of its traffic", given=fault)
