"""Two servers: one with the best configuration, one with the configuration on trial.

An idle server costs no time. Both are measured in turns on the same machine, so that slow changes
affect both. A configuration is a spec with overrides. It is built with cached stages,
linted, and gated if layout or precision change. Only changed models are loaded again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from triptych.base.errors import Progress
from triptych.operate.tune.kind import BuiltTrial, TrialConfig, TunedPipeline
from triptych.operate.tune.objective import ScoredRound, Scoring
from triptych.repository.store import sibling_work_dir
from triptych.serving.bench.measure import BenchTarget
from triptych.serving.bench.results import Measurement
from triptych.serving.endpoint import UNSAMPLED
from triptych.serving.hot_reload import reload
from triptych.serving.server import Server

MIN_ROUNDS = 2
"""Minimum number of rounds of the final comparison, because one round does not show noise."""


class Slot:
    """A repository and its server, with one configuration at a time."""

    def __init__(self, folder: Path, kind: TunedPipeline) -> None:
        self.repository = folder
        self._kind = kind
        self._server: Server | None = None
        self.setting: TrialConfig | None = None
        self._made: BuiltTrial | None = None

    def put(self, setting: TrialConfig, progress: Progress, building: Progress) -> None:
        """Build and serve a configuration, and reload only the changed models.

        Args:
            setting: Configuration to serve.
            progress: Called when models are reloaded.
            building: Called at each stage of the build.

        Raises:
            GateFailure, LintFailure, UserError: It cannot be built or
                served; the slot is then empty.
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
    def served(self) -> BuiltTrial:
        """Trial that is served now."""
        if self._made is None:
            raise RuntimeError("the slot is empty")
        return self._made

    @property
    def target(self) -> BenchTarget:
        """Target of the measurements."""
        if self._server is None:
            raise RuntimeError("the slot is empty")
        server = self._server
        return BenchTarget(server.grpc_url, self._kind.folder.name, server.metrics_url, server.pid)

    def measure(self, clients: int, seconds: float) -> Measurement:
        return self._kind.measure(self.target, self.served, clients, seconds)

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None
        self.setting, self._made = None, None


@dataclass
class TrialServers:
    """Both slots; see `trial_servers`. Rounds alternate the order of the slots."""

    best_slot: Slot  # has the best configuration
    trial_slot: Slot
    objective: Scoring
    seconds: float  # duration of a measurement
    progress: Progress
    baseline: TrialConfig = field(default_factory=TrialConfig)  # configuration of `begin`
    _start: int | None = None  # clients of the first measurement; see `Scoring.score`
    _scored: dict[tuple[str, ...], list[ScoredRound]] = field(
        default_factory=dict
    )  # rounds by configuration
    _took_s: dict[int, float] = field(
        default_factory=dict
    )  # duration of the last measurement, by clients
    _served_s: float = 0.0  # longest time to serve a configuration
    _pair: tuple[TrialConfig | None, TrialConfig | None] = (
        None,
        None,
    )  # configurations of the last round
    _rounds: int = 0
    _builds: int = 0

    def put(self, slot: Slot, setting: TrialConfig) -> None:
        """Build and serve a configuration in a slot; see `Slot.put`."""
        self._builds += (
            1  # only the first build reports its stages, because all build the same model
        )
        slot.put(setting, self.progress, self.progress if self._builds == 1 else _quiet)

    def measure(self, slot: Slot, clients: int) -> Measurement:
        """Measure a slot in a closed loop."""
        began = time.monotonic()
        one = slot.measure(clients, self.seconds)
        self._took_s[clients] = time.monotonic() - began
        return one

    def score(self, slot: Slot) -> ScoredRound:
        """Score a slot once; see `Scoring.score`."""
        known = self.scored(slot.setting)
        start = known[-1].start if known else self._start
        found = self.objective.score(lambda n: self.measure(slot, n), start, again=bool(known))
        known.append(found)
        return found

    def scored(self, setting: TrialConfig | None) -> list[ScoredRound]:
        """Return all rounds of a configuration, in either slot."""
        return [] if setting is None else self._scored.setdefault(setting.key, [])

    def measure_s(self, clients: int) -> float:
        """Estimate the duration of a measurement from the last one, or the nearest two."""
        near = sorted(self._took_s, key=lambda known: abs(known - clients))[:2]
        took_s = [self._took_s[known] for known in near]
        if len(near) < 2 or near[0] == clients:
            return sum(took_s[:1])
        slope = (took_s[1] - took_s[0]) / (near[1] - near[0])
        return max(min(took_s), took_s[0] + slope * (clients - near[0]))

    def next_round_s(self) -> float:
        """Estimate the duration of the next round of both slots."""
        return self._round_s(self.best_slot.setting, self.trial_slot.setting)

    def final_s(self) -> float:
        """Estimate the final comparison: `MIN_ROUNDS` rounds and serving the baseline again."""
        best = self.best_slot.setting
        served_s = 0.0 if best == self.baseline else self._served_s
        rounds_s = MIN_ROUNDS * self._round_s(best, self.baseline)
        starts = {self.scored(one)[-1].start for one in (best, self.baseline) if self.scored(one)}
        apart = self.objective.keeps_clients and len(starts) > 1  # see `_with`
        return served_s + rounds_s + apart * sum(map(self.measure_s, starts))

    def _round_s(self, *settings: TrialConfig | None) -> float:
        """Estimate a round; an unmeasured configuration counts like the others."""
        known = [self.scored(setting)[-1] for setting in settings if self.scored(setting)]
        keeps = self.objective.keeps_clients
        clients = [[one.start] if keeps else one.found for one in known]
        took_s = [sum(map(self.measure_s, each)) for each in clients]
        return len(settings) * sum(took_s) / len(took_s) if took_s else 0.0

    def begin(self, present: TrialConfig) -> tuple[Any, ScoredRound]:
        """Serve `present` as the best configuration, and score it once."""
        self.baseline = present
        self.put(self.best_slot, present)
        scored = self.score(self.best_slot)
        self._start = scored.start
        return self.best_slot.served.plan, scored

    def challenge(self, other: TrialConfig) -> None:
        """Serve `other` as the trial; see `Slot.put`."""
        began = time.monotonic()
        self.put(self.trial_slot, other)
        self._served_s = max(self._served_s, time.monotonic() - began)

    def round(self) -> tuple[ScoredRound, ScoredRound]:
        """Score the best configuration and the trial once each.

        Raises:
            LoadFailed: One of them answers with errors.
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

    def _with(self, slot: Slot, scored: ScoredRound, clients: int) -> ScoredRound:
        """Return the better of this round and a round with the other slot's number of clients.

        Otherwise a configuration would lose if its best number of clients was chosen amid noise.
        """
        if clients in scored.found:
            return scored
        again = self.objective.score(lambda n: self.measure(slot, n), clients, again=True)
        best = again if again.score > scored.score else scored
        self.scored(slot.setting)[-1] = replace(best, found={**scored.found, **again.found})
        return self.scored(slot.setting)[-1]

    def promote(self) -> Any:
        """Make the trial the best configuration, and return its plan."""
        self.best_slot, self.trial_slot = self.trial_slot, self.best_slot
        return self.best_slot.served.plan


@contextmanager
def trial_servers(
    kind: TunedPipeline, beside: Path, objective: Scoring, seconds: float, progress: Progress
) -> Iterator[TrialServers]:
    """Yield both servers, in a temporary folder beside the repository.

    Args:
        kind: Tuned pipeline.
        beside: Folder of the model repository, which is not changed.
        objective: Objective that scores configurations.
        seconds: Duration of a measurement.
        progress: Called when models are loaded.
    """
    with sibling_work_dir(beside, "tune") as scratch:
        first, second = (Slot(scratch / name, kind) for name in ("a", "b"))
        try:
            yield TrialServers(first, second, objective, seconds, progress)
        finally:
            first.close()
            second.close()


def _quiet(_stage: str, _line: str) -> None:
    """Ignore messages of progress."""
