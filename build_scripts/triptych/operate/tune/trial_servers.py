"""Two servers: one with the best setting, one with the setting on trial.

An idle server costs no time. Both are measured in turns on the same machine, so that slow changes
affect both. A setting is built with cached stages, linted, and gated if layout or precision change.
Only changed models are loaded again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic

from triptych.base.errors import Progress, no_progress
from triptych.operate.tune.fields import Planned
from triptych.operate.tune.kinds import BuiltSetting, Setting, TunedPipeline
from triptych.operate.tune.objective import Objective, ScoredRound
from triptych.repository.store import sibling_work_dir
from triptych.serving.bench.measure import BenchTarget
from triptych.serving.bench.results import Measurement
from triptych.serving.endpoint import UNSAMPLED
from triptych.serving.hot_reload import reload
from triptych.serving.server import Server

MIN_ROUNDS = 3
"""Minimum number of rounds of the final comparison; two show too little of the noise."""


class TrialServer(Generic[Planned]):
    """A repository and its server, with one setting at a time."""

    def __init__(self, folder: Path, pipeline: TunedPipeline[Planned]) -> None:
        self.repository = folder
        self._pipeline = pipeline
        self._server: Server | None = None
        self.setting: Setting | None = None
        self._built: BuiltSetting[Planned] | None = None

    def put(self, setting: Setting, progress: Progress, building: Progress) -> None:
        """Build and serve a setting, and reload only the changed models.

        Args:
            setting: Setting to serve.
            progress: Called when models are reloaded.
            building: Called at each stage of the build.

        Raises:
            GateFailure, LintFailure, UserError: It cannot be built or served; there is then no
                setting.
        """
        if setting == self.setting:
            return
        self.setting, self._built = None, None
        built = self._pipeline.build(setting, self.repository, building)
        if built.changed and not self._pipeline.reloads:
            self.close()
        name = self._pipeline.folder.name
        if self._server is None:
            server = Server(self.repository, models=[name], environment=UNSAMPLED)
            server.__enter__()
            self._server = server
        elif built.changed:
            progress("load", f"again: {', '.join(built.changed)}")
            try:
                reload(self._server, name)
            except BaseException:
                self.close()
                raise
        self._pipeline.warm_up(self.target, built.requests)
        self.setting, self._built = setting, built

    @property
    def served(self) -> BuiltSetting[Planned]:
        """Setting that is served now."""
        if self._built is None:
            raise RuntimeError("no setting is served")
        return self._built

    @property
    def target(self) -> BenchTarget:
        """Target of the measurements."""
        server = self._server
        if server is None:
            raise RuntimeError("no setting is served")
        name = self._pipeline.folder.name
        return BenchTarget(server.grpc_url, name, server.metrics_url, server.pid)

    def measure(self, clients: int, seconds: float) -> Measurement:
        return self._pipeline.measure(self.target, self.served.requests, clients, seconds)

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None
        self.setting, self._built = None, None


@dataclass
class TrialServers(Generic[Planned]):
    """Both servers; see `trial_servers`. Rounds alternate their order."""

    best: TrialServer[Planned]  # Server with the best setting
    trial: TrialServer[Planned]  # Server with the setting on trial
    objective: Objective
    seconds: float  # Duration of a measurement
    progress: Progress
    baseline: Setting = field(default_factory=Setting)  # Setting of `begin`
    # Clients of the first measurement; see `Objective.score`.
    _start: int | None = None
    _rounds_of: dict[tuple[str, ...], list[ScoredRound]] = field(default_factory=dict)
    # Duration of the last measurement, by clients.
    _took_s: dict[int, float] = field(default_factory=dict)
    # Longest time to serve a setting.
    _served_s: float = 0.0
    # Settings of the last round.
    _pair: tuple[Setting | None, Setting | None] = (None, None)
    _rounds: int = 0
    _builds: int = 0

    def put(self, server: TrialServer[Planned], setting: Setting) -> None:
        """Build and serve a setting; see `TrialServer.put`."""
        # Only the first build reports its stages, because all build the same model.
        self._builds += 1
        server.put(setting, self.progress, self.progress if self._builds == 1 else no_progress)

    def measure(self, server: TrialServer[Planned], clients: int) -> Measurement:
        """Measure a server in a closed loop."""
        began = time.monotonic()
        one = server.measure(clients, self.seconds)
        self._took_s[clients] = time.monotonic() - began
        return one

    def score(self, server: TrialServer[Planned]) -> ScoredRound:
        """Score a server once; see `Objective.score`."""
        known = self.scored(server.setting)
        start = known[-1].start if known else self._start
        scored = self.objective.score(lambda n: self.measure(server, n), start, again=bool(known))
        known.append(scored)
        return scored

    def scored(self, setting: Setting | None) -> list[ScoredRound]:
        """Return all rounds of a setting, in either server."""
        return [] if setting is None else self._rounds_of.setdefault(setting.key, [])

    def measure_s(self, clients: int) -> float:
        """Estimate the duration of a measurement from the last one, or the nearest two."""
        near = sorted(self._took_s, key=lambda known: abs(known - clients))[:2]
        took_s = [self._took_s[known] for known in near]
        if len(near) < 2 or near[0] == clients:
            return sum(took_s[:1])
        slope = (took_s[1] - took_s[0]) / (near[1] - near[0])
        return max(min(took_s), took_s[0] + slope * (clients - near[0]))

    def next_round_s(self) -> float:
        """Estimate the duration of the next round of both servers."""
        return self._round_s(self.best.setting, self.trial.setting)

    def final_s(self) -> float:
        """Estimate the final comparison: `MIN_ROUNDS` rounds and serving the baseline again."""
        best = self.best.setting
        served_s = 0.0 if best == self.baseline else self._served_s
        rounds_s = MIN_ROUNDS * self._round_s(best, self.baseline)
        starts = {self.scored(one)[-1].start for one in (best, self.baseline) if self.scored(one)}
        apart = self.objective.keeps_clients and len(starts) > 1  # see `_with`
        return served_s + rounds_s + apart * sum(map(self.measure_s, starts))

    def _round_s(self, *settings: Setting | None) -> float:
        """Estimate a round; an unmeasured setting counts like the others."""
        known = [self.scored(setting)[-1] for setting in settings if self.scored(setting)]
        keeps = self.objective.keeps_clients
        clients = [[one.start] if keeps else one.by_clients for one in known]
        took_s = [sum(map(self.measure_s, each)) for each in clients]
        return len(settings) * sum(took_s) / len(took_s) if took_s else 0.0

    def begin(self, present: Setting) -> tuple[Planned, ScoredRound]:
        """Serve `present` as the best setting, and score it once."""
        self.baseline = present
        self.put(self.best, present)
        scored = self.score(self.best)
        self._start = scored.start
        return self.best.served.plan, scored

    def start_trial(self, other: Setting) -> None:
        """Serve `other` as the trial; see `TrialServer.put`."""
        began = time.monotonic()
        self.put(self.trial, other)
        self._served_s = max(self._served_s, time.monotonic() - began)

    def round(self) -> tuple[ScoredRound, ScoredRound]:
        """Score the best setting and the trial once each.

        Raises:
            LoadFailed: One of them answers with errors.
        """
        self._rounds += 1
        if self._rounds % 2:
            present, other = self.score(self.best), self.score(self.trial)
        else:
            other, present = self.score(self.trial), self.score(self.best)
        pair = (self.best.setting, self.trial.setting)
        if self.objective.keeps_clients and pair != self._pair:
            self._pair = pair
            starts = present.start, other.start
            present = self._with(self.best, present, starts[1])
            other = self._with(self.trial, other, starts[0])
        self._start = present.start
        return present, other

    def _with(self, server: TrialServer[Planned], scored: ScoredRound, clients: int) -> ScoredRound:
        """Return the better of this round and a round with the other server's number of clients.

        Otherwise a setting would lose if its best number of clients was chosen amid noise.
        """
        if clients in scored.by_clients:
            return scored
        again = self.objective.score(lambda n: self.measure(server, n), clients, again=True)
        best = again if again.score > scored.score else scored
        self.scored(server.setting)[-1] = replace(
            best, by_clients={**scored.by_clients, **again.by_clients}
        )
        return self.scored(server.setting)[-1]

    def accept_trial(self) -> Planned:
        """Make the trial the best setting, and return its plan."""
        self.best, self.trial = self.trial, self.best
        return self.best.served.plan


@contextmanager
def trial_servers(
    pipeline: TunedPipeline[Planned], repository: Path, seconds: float, progress: Progress
) -> Iterator[TrialServers[Planned]]:
    """Yield both servers, in a temporary folder beside the repository.

    Args:
        pipeline: Tuned pipeline.
        repository: Folder of the model repository, which is not changed.
        seconds: Duration of a measurement.
        progress: Called when models are loaded.
    """
    with sibling_work_dir(repository, "tune") as scratch:
        first, second = (TrialServer(scratch / name, pipeline) for name in ("a", "b"))
        try:
            yield TrialServers(first, second, pipeline.objective, seconds, progress)
        finally:
            first.close()
            second.close()
