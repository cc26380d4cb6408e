"""Two servers side by side: the best setting so far on one, what is tried on the other.

A server without requests costs no time, so both are measured in turns on the same machine, and what
drifts hits both alike. A setting is a spec with overrides: built (every stage cached), linted,
gated where layout or precision change, and only the models that changed are loaded again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from triptych import building as assemble
from triptych.bench.measure import Target, measure
from triptych.bench.points import Load, Measurement
from triptych.errors import Progress
from triptych.pipeline.spec import load_spec
from triptych.plan.plan import Plan
from triptych.repository.store import work_beside
from triptych.requests.inputs import PipelineInputs, read_inputs
from triptych.server.endpoint import UNSAMPLED
from triptych.server.reload import reload
from triptych.server.server import Server
from triptych.tune.objective import Objective, Scored

WARM_UP_REQUESTS = 60


@dataclass(frozen=True)
class Setting:
    """Numbers to be measured: dotted key of the spec to its value; empty for the spec as it is."""

    overrides: Mapping[str, JsonValue] = field(default_factory=dict)


class Slot:
    """A repository of its own and the server on it; holds one setting at a time."""

    def __init__(self, folder: Path, pipeline: Path, base: Sequence[str]) -> None:
        self.repository = folder
        self._pipeline = pipeline
        self._base = tuple(base)
        self._server: Server | None = None
        self.setting: Setting | None = None
        self._inputs: PipelineInputs | None = None

    def put(self, setting: Setting, progress: Progress, building: Progress) -> None:
        """Build and serve `setting`, loading again only the models that changed.

        Args:
            setting: to be served.
            progress: told what is loaded again.
            building: told what becomes of each stage of the build.

        Raises:
            GateFailure, LintFailure, UserError: it cannot be built or served; the slot is empty.
        """
        if setting == self.setting:
            return
        self.setting, self._inputs = None, None
        changes = [
            f"{key}={'null' if value is None else value}"
            for key, value in setting.overrides.items()
        ]
        spec = load_spec(self._pipeline, [*self._base, *changes], untuned=True)
        inputs = read_inputs(spec, building)
        built = assemble.build(inputs, self.repository, building)
        name = inputs.plan.spec.name
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
        measure(
            self.target,
            inputs.traffic,
            Load("concurrency", 8),
            seconds=0.5,
            warmup_requests=WARM_UP_REQUESTS,
        )
        self.setting, self._inputs = setting, inputs

    @property
    def served(self) -> PipelineInputs:
        """The pipeline as it is served now."""
        if self._inputs is None:
            raise RuntimeError("the slot is empty")
        return self._inputs

    @property
    def target(self) -> Target:
        """Where it is served."""
        if self._server is None:
            raise RuntimeError("the slot is empty")
        server = self._server
        return Target(server.grpc_url, self._pipeline.name, server.metrics_url, server.pid)

    def measure(self, clients: int, seconds: float) -> Measurement:
        load = Load("concurrency", float(clients))
        return measure(self.target, self.served.traffic, load, seconds=seconds)

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None
        self.setting, self._inputs = None, None


@dataclass
class TrialServers:
    """Both slots; see `trial_servers`. Each round begins with another one."""

    best_slot: Slot  # has the best setting so far
    trial_slot: Slot
    objective: Objective
    seconds: float  # of each measurement
    progress: Progress
    _start: int | None = None  # clients to begin with; see `Objective.score`
    _rounds: int = 0
    _builds: int = 0

    def put(self, slot: Slot, setting: Setting) -> None:
        """Build and serve `setting` in a slot; see `Slot.put`."""
        self._builds += 1  # every trial builds the same model again: only the first one tells
        slot.put(setting, self.progress, self.progress if self._builds == 1 else _quiet)

    def score(self, slot: Slot) -> Scored:
        """One round of a slot; see `Objective.score`."""
        return self.objective.score(lambda n: slot.measure(n, self.seconds), self._start)

    def begin(self, present: Setting) -> tuple[Plan, Scored]:
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

    def promote(self) -> Plan:
        """What was tried is the best now."""
        self.best_slot, self.trial_slot = self.trial_slot, self.best_slot
        return self.best_slot.served.plan


@contextmanager
def trial_servers(
    pipeline: Path,
    beside: Path,
    objective: Objective,
    seconds: float,
    progress: Progress,
    *,
    base: Sequence[str] = (),
) -> Iterator[TrialServers]:
    """Both servers in a folder of its own beside the repository, removed with all in it at the end.

    Args:
        pipeline: folder of the pipeline.
        beside: folder of the model repository, which is left alone.
        objective: how a setting is scored.
        seconds: of each measurement.
        progress: told what is loaded.
        base: ``KEY=VALUE`` overrides of the spec, below those of a setting.
    """
    with work_beside(beside, "tune") as scratch:
        first, second = (Slot(scratch / name, pipeline, base) for name in ("a", "b"))
        try:
            yield TrialServers(first, second, objective, seconds, progress)
        finally:
            first.close()
            second.close()


def _quiet(_stage: str, _line: str) -> None:
    """A progress that is told nothing."""
