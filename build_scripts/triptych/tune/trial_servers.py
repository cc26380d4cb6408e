"""Two servers side by side: the best setting so far on one, what is tried on the other.

A server without requests costs no time, so both are measured in turns on the same machine, and what
drifts hits both alike. A setting is a spec with overrides: built (every stage cached), linted,
gated where layout or precision change, and only the models that changed are loaded again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triptych.bench.measure import Target
from triptych.bench.points import Measurement
from triptych.errors import Progress
from triptych.repository.store import work_beside
from triptych.server.endpoint import UNSAMPLED
from triptych.server.reload import reload
from triptych.server.server import Server
from triptych.tune.kind import Kind, Made, Setting
from triptych.tune.objective import Scored, Scoring


class Slot:
    """A repository of its own and the server on it; holds one setting at a time."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.repository = folder
        self._kind = kind
        self._server: Server | None = None
        self.setting: Setting | None = None
        self._made: Made | None = None

    def put(self, setting: Setting, progress: Progress, building: Progress) -> None:
        """Build and serve `setting`, loading again only the models that changed.

        Args:
            setting: to be served.
            progress: told what is loaded again.
            building: told what becomes of each stage of the build.

        Raises:
            GateFailure, GenerationGateFailure, LintFailure, UserError: it cannot be built or
                served; the slot is empty.
        """
        if setting == self.setting:
            return
        self.setting, self._made = None, None
        made = self._kind.make(setting, self.repository, building)
        if made.changed and not self._kind.exchanges:
            self.close()
        if self._server is None:
            name = self._kind.folder.name
            server = Server(self.repository, models=[name], environment=UNSAMPLED)
            server.__enter__()
            self._server = server
        elif made.changed:
            progress("load", f"again: {', '.join(made.changed)}")
            try:
                reload(self._server, self._kind.folder.name)
            except BaseException:
                self.close()
                raise
        self._kind.warm_up(self.target, made)
        self.setting, self._made = setting, made

    @property
    def served(self) -> Made:
        """The pipeline as it is served now."""
        if self._made is None:
            raise RuntimeError("the slot is empty")
        return self._made

    @property
    def target(self) -> Target:
        """Where it is served."""
        if self._server is None:
            raise RuntimeError("the slot is empty")
        server = self._server
        return Target(server.grpc_url, self._kind.folder.name, server.metrics_url, server.pid)

    def measure(self, clients: int, seconds: float) -> Measurement:
        return self._kind.measure(self.target, self.served, clients, seconds)

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None
        self.setting, self._made = None, None


@dataclass
class TrialServers:
    """Both slots; see `trial_servers`. Each round begins with another one."""

    best_slot: Slot  # has the best setting so far
    trial_slot: Slot
    objective: Scoring
    seconds: float  # of each measurement
    progress: Progress
    _start: int | None = None  # clients to begin with a new setting; see `Scoring.score`
    _starts: dict[Slot, int] = field(default_factory=dict)  # with that of the slot
    _rounds: int = 0
    _builds: int = 0

    def put(self, slot: Slot, setting: Setting) -> None:
        """Build and serve `setting` in a slot; see `Slot.put`."""
        self._builds += 1  # every trial builds the same model again: only the first one tells
        self._starts.pop(slot, None)
        slot.put(setting, self.progress, self.progress if self._builds == 1 else _quiet)

    def score(self, slot: Slot) -> Scored:
        """One round of a slot; see `Scoring.score`."""
        known = self._starts.get(slot)
        found = self.objective.score(
            lambda n: slot.measure(n, self.seconds),
            self._start if known is None else known,
            again=known is not None,
        )
        self._starts[slot] = found.start
        return found

    def begin(self, present: Setting) -> tuple[Any, Scored]:
        """Serve `present` as the best setting, and score it once."""
        self.put(self.best_slot, present)
        scored = self.score(self.best_slot)
        self._start = scored.start
        return self.best_slot.served.plan, scored

    def challenge(self, other: Setting) -> None:
        """Serve `other` beside the best setting; see `Slot.put`."""
        self.put(self.trial_slot, other)

    def round(self) -> tuple[Scored, Scored]:
        """Score the best setting and the other one once, in turns.

        Raises:
            LoadFailed: one of them answers with errors.
        """
        slots = [self.best_slot, self.trial_slot]
        self._rounds += 1
        found = {slot: self.score(slot) for slot in (slots if self._rounds % 2 else slots[::-1])}
        self._start = found[self.best_slot].start
        return found[self.best_slot], found[self.trial_slot]

    def promote(self) -> Any:
        """What was tried is the best now."""
        self.best_slot, self.trial_slot = self.trial_slot, self.best_slot
        return self.best_slot.served.plan


@contextmanager
def trial_servers(
    kind: Kind, beside: Path, objective: Scoring, seconds: float, progress: Progress
) -> Iterator[TrialServers]:
    """Both servers in a folder of its own beside the repository, removed with all in it at the end.

    Args:
        kind: of the pipeline.
        beside: folder of the model repository, which is left alone.
        objective: how a setting is scored.
        seconds: of each measurement.
        progress: told what is loaded.
    """
    with work_beside(beside, "tune") as scratch:
        first, second = (Slot(scratch / name, kind) for name in ("a", "b"))
        try:
            yield TrialServers(first, second, objective, seconds, progress)
        finally:
            first.close()
            second.close()


def _quiet(_stage: str, _line: str) -> None:
    """A progress that is told nothing."""
