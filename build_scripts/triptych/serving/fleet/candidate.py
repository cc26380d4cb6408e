"""A server beside a fleet, on another build, that gets copies of some requests and samples them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from triptych.base.errors import UserError
from triptych.serving.fleet.replica import Replica


class Candidate:
    """Its server, kept up as a replica is; nothing that becomes of it changes the fleet.

    Args:
        replica: not started.
        load_s: that its models may take to load.
        on_change: told in a line what went well.
        on_problem: told in a line what did not.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        load_s: float,
        on_change: Callable[[str], None],
        on_problem: Callable[[str], None],
    ) -> None:
        self.replica = replica
        self._load_s = load_s
        self._on_change = on_change
        self._on_problem = on_problem

    def start(self) -> None:
        """Start it, in a thread of its own."""
        replica = self.replica
        done: Future[None] = Future()

        def work() -> None:
            try:
                replica.start(replica.build, self._load_s)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        replica.again_at = None
        replica.work = done
        threading.Thread(target=work, name="candidate", daemon=True).start()

    def look(self) -> None:
        """Tell what became of it, and start it again where it died; as `Fleet.look`."""
        replica = self.replica
        if replica.work is not None:
            if replica.work.done():
                self._end_start(replica.work.exception())
        elif replica.is_ready:
            death = replica.server.death(0.0)
            if death is not None:
                self._failed(death)
        elif replica.again_at is not None and time.monotonic() >= replica.again_at:
            self.start()

    def end(self) -> None:
        """Answer what is under way, and end the server for good."""
        self.replica.end()

    def _end_start(self, error: BaseException | None) -> None:
        self.replica.work = None
        if error is None:
            self.replica.ready()
            self._on_change(f"the candidate is ready at {self.replica.server.grpc_url}")
        elif isinstance(error, UserError):
            self._failed(error)
        else:
            raise error

    def _failed(self, error: UserError) -> None:
        pause_s = self.replica.failed()
        again = "is not started again" if pause_s is None else f"is started again in {pause_s:g} s"
        self._on_problem(f"{error.message} The candidate {again}; the fleet goes on without it.")
