"""Two servers side by side: the best setting so far on one, what is tried on the other.

A server without requests costs no time, so both are measured in turns on the same machine, and what
drifts hits both alike. A setting is a spec with overrides: built (every stage cached), linted,
gated where layout or precision change, and only the models that changed are loaded again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from triptych.base.errors import Progress
from triptych.operate.tune.kind import Made, Setting, TunedPipeline
from triptych.operate.tune.objective import Scored, Scoring
from triptych.repository.store import sibling_work_dir
from triptych.serving.bench.measure import Target
from triptych.serving.bench.results import Measurement
from triptych.serving.endpoint import UNSAMPLED
from triptych.serving.hot_reload import reload
from triptych.serving.server import Server

MIN_ROUNDS = 2
"""Of the comparison at the end, even where time is up: one tells nothing of noise."""


class Slot:
    """A repository of its own and the server on it; holds one setting at a time."""

    def __init__(self, folder: Path, kind: TunedPipeline) -> None:
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
    baseline: Setting = field(default_factory=Setting)  # that `begin` was given first
    _start: int | None = None  # clients to begin with a new setting; see `Scoring.score`
    _scored: dict[tuple[str, ...], list[Scored]] = field(default_factory=dict)  # by setting
    _took_s: dict[int, float] = field(default_factory=dict)  # by clients, the last measurement
    _served_s: float = 0.0  # the longest time until another setting was served
    _pair: tuple[Setting | None, Setting | None] = (None, None)  # of the last round
    _rounds: int = 0
    _builds: int = 0

    def put(self, slot: Slot, setting: Setting) -> None:
        """Build and serve `setting` in a slot; see `Slot.put`."""
        self._builds += 1  # every trial builds the same model again: only the first one tells
        slot.put(setting, self.progress, self.progress if self._builds == 1 else _quiet)

    def measure(self, slot: Slot, clients: int) -> Measurement:
        """Measure a slot in a closed loop."""
        began = time.monotonic()
        one = slot.measure(clients, self.seconds)
        self._took_s[clients] = time.monotonic() - began
        return one

    def score(self, slot: Slot) -> Scored:
        """One round of a slot; see `Scoring.score`."""
        known = self.scored(slot.setting)
        start = known[-1].start if known else self._start
        found = self.objective.score(lambda n: self.measure(slot, n), start, again=bool(known))
        known.append(found)
        return found

    def scored(self, setting: Setting | None) -> list[Scored]:
        """All rounds of a setting, in whatever slot."""
        return [] if setting is None else self._scored.setdefault(setting.key, [])

    def measure_s(self, clients: int) -> float:
        """What a measurement takes: as the last one, or on a line through the nearest two."""
        near = sorted(self._took_s, key=lambda known: abs(known - clients))[:2]
        took_s = [self._took_s[known] for known in near]
        if len(near) < 2 or near[0] == clients:
            return sum(took_s[:1])
        slope = (took_s[1] - took_s[0]) / (near[1] - near[0])
        return max(min(took_s), took_s[0] + slope * (clients - near[0]))

    def next_round_s(self) -> float:
        """What the next round of both slots takes, by what was measured so far."""
        return self._round_s(self.best_slot.setting, self.trial_slot.setting)

    def final_s(self) -> float:
        """What the comparison at the end takes at least: two rounds, the baseline served anew."""
        best = self.best_slot.setting
        served_s = 0.0 if best == self.baseline else self._served_s
        rounds_s = MIN_ROUNDS * self._round_s(best, self.baseline)
        starts = {self.scored(one)[-1].start for one in (best, self.baseline) if self.scored(one)}
        apart = self.objective.keeps_clients and len(starts) > 1  # see `_with`
        return served_s + rounds_s + apart * sum(map(self.measure_s, starts))

    def _round_s(self, *settings: Setting | None) -> float:
        """One that was not measured yet, or that failed, is taken to be like the others."""
        known = [self.scored(setting)[-1] for setting in settings if self.scored(setting)]
        keeps = self.objective.keeps_clients
        clients = [[one.start] if keeps else one.found for one in known]
        took_s = [sum(map(self.measure_s, each)) for each in clients]
        return len(settings) * sum(took_s) / len(took_s) if took_s else 0.0

    def begin(self, present: Setting) -> tuple[Any, Scored]:
        """Serve `present` as the best setting, and score it once."""
        self.baseline = present
        self.put(self.best_slot, present)
        scored = self.score(self.best_slot)
        self._start = scored.start
        return self.best_slot.served.plan, scored

    def challenge(self, other: Setting) -> None:
        """Serve `other` beside the best setting; see `Slot.put`."""
        began = time.monotonic()
        self.put(self.trial_slot, other)
        self._served_s = max(self._served_s, time.monotonic() - began)

    def round(self) -> tuple[Scored, Scored]:
        """Score the best setting and the other one once, in turns.

        Raises:
            LoadFailed: one of them answers with errors.
        """
        slots = [self.best_slot, self.trial_slot]
        self._rounds += 1
        found = {slot: self.score(slot) for slot in (slots if self._rounds % 2 else slots[::-1])}
        present, other = found[self.best_slot], found[self.trial_slot]
        pair = (self.best_slot.setting, self.trial_slot.setting)
        if self.objective.keeps_clients and pair != self._pair:
            self._pair = pair
            starts = present.start, other.start
            present = self._with(self.best_slot, present, starts[1])
            other = self._with(self.trial_slot, other, starts[0])
        self._start = present.start
        return present, other

    def _with(self, slot: Slot, scored: Scored, clients: int) -> Scored:
        """The better of a round and one with the clients that the other side has.

        Or a setting would lose whose best number of clients was once measured amid noise.
        """
        if clients in scored.found:
            return scored
        again = self.objective.score(lambda n: self.measure(slot, n), clients, again=True)
        best = again if again.score > scored.score else scored
        self.scored(slot.setting)[-1] = replace(best, found={**scored.found, **again.found})
        return self.scored(slot.setting)[-1]

    def promote(self) -> Any:
        """What was tried is the best now."""
        self.best_slot, self.trial_slot = self.trial_slot, self.best_slot
        return self.best_slot.served.plan


@contextmanager
def trial_servers(
    kind: TunedPipeline, beside: Path, objective: Scoring, seconds: float, progress: Progress
) -> Iterator[TrialServers]:
    """Both servers in a folder of its own beside the repository, removed with all in it at the end.

    Args:
        kind: of the pipeline.
        beside: folder of the model repository, which is left alone.
        objective: how a setting is scored.
        seconds: of each measurement.
        progress: told what is loaded.
    """
    with sibling_work_dir(beside, "tune") as scratch:
        first, second = (Slot(scratch / name, kind) for name in ("a", "b"))
        try:
            yield TrialServers(first, second, objective, seconds, progress)
        finally:
            first.close()
            second.close()


def _quiet(_stage: str, _line: str) -> None:
    """A progress that is told nothing."""
