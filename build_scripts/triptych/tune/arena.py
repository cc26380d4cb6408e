"""Two servers side by side: the best settings so far on one, what is tried on the other.

A server without requests costs no time, so both are measured in turns on the same machine, and what
drifts hits both alike. A setting is a spec with overrides: built (every stage cached), linted,
gated where layout or precision change, and only the models that changed are loaded again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triptych import build as assemble
from triptych.bench.measure import Target, measure
from triptych.bench.points import Load, Measurement
from triptych.client.models import reload_models
from triptych.errors import Progress
from triptych.pipeline.spec import load_spec
from triptych.requests.inputs import PipelineInputs, read_inputs
from triptych.server.server import Server
from triptych.tune.objective import Objective, Scored

WARM_UP_REQUESTS = 60
_PREFIX = ".tune-"


@dataclass(frozen=True)
class Setting:
    """Numbers to be measured.

    Attributes:
        overrides: dotted key of the spec to its value; empty for the spec as it is.
    """

    overrides: Mapping[str, Any] = field(default_factory=dict)

    def with_change(self, key: str, value: Any) -> Setting:
        """The same with another value of one field."""
        return Setting({**self.overrides, key: value})


class Slot:
    """A repository of its own and the server on it; holds one setting at a time."""

    def __init__(self, folder: Path, pipeline: Path, base: Sequence[str]) -> None:
        self.repository = folder
        self._pipeline = pipeline
        self._base = tuple(base)
        self._server: Server | None = None
        self.setting: Setting | None = None
        self._prepared: PipelineInputs | None = None

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
        self.setting, self._prepared = None, None
        changes = [f"{key}={_as_yaml(value)}" for key, value in setting.overrides.items()]
        spec = load_spec(self._pipeline, [*self._base, *changes], untuned=True)
        prepared = read_inputs(spec, building)
        built = assemble.build(prepared, self.repository, building)
        name = prepared.plan.spec.name
        if self._server is None:
            server = Server(self.repository, models=[name])
            server.__enter__()
            self._server = server
        elif built.changed:
            progress("load", f"again: {', '.join(built.changed)}")
            try:
                reload_models(self._server.grpc_url, name, built.changed)
            except BaseException:
                self.close()
                raise
        measure(
            self.target,
            prepared.traffic,
            Load("concurrency", 8),
            seconds=0.5,
            warmup_requests=WARM_UP_REQUESTS,
        )
        self.setting, self._prepared = setting, prepared

    @property
    def served(self) -> PipelineInputs:
        """The pipeline as it is served now."""
        if self._prepared is None:
            raise RuntimeError("the slot is empty")
        return self._prepared

    @property
    def target(self) -> Target:
        """Where it is served."""
        if self._server is None:
            raise RuntimeError("the slot is empty")
        server = self._server
        name = self._pipeline.name
        return Target(server.grpc_url, name, server.metrics_url, server.pid)

    def measure(self, clients: int, seconds: float) -> Measurement:
        """With so many clients."""
        load = Load("concurrency", float(clients))
        return measure(self.target, self.served.traffic, load, seconds=seconds)

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        self.setting, self._prepared = None, None


class Arena:
    """Both slots. `best` holds the best settings so far."""

    def __init__(
        self,
        best: Slot,
        challenger: Slot,
        objective: Objective,
        seconds: float,
        progress: Progress,
    ) -> None:
        self.best, self.challenger = best, challenger
        self._objective, self._seconds = objective, seconds
        self._progress = self._building = progress

    def put(self, slot: Slot, setting: Setting) -> None:
        """Build and serve `setting` in a slot; see `Slot.put`."""
        slot.put(setting, self._progress, self._building)
        self._building = _quiet  # every trial builds the same model again

    def promote(self) -> None:
        """What was tried is the best now."""
        self.best, self.challenger = self.challenger, self.best

    def score(self, slot: Slot, start: int | None) -> Scored:
        """One round of a slot; see `Objective.score`."""
        return self._objective.score(lambda n: slot.measure(n, self._seconds), start)

    def close(self) -> None:
        """Stop both servers."""
        self.best.close()
        self.challenger.close()


@contextmanager
def arena(
    pipeline: Path,
    beside: Path,
    objective: Objective,
    seconds: float,
    progress: Progress,
    *,
    base: Sequence[str] = (),
) -> Iterator[Arena]:
    """An arena in a folder of its own beside the repository, removed with all in it at the end.

    Args:
        pipeline: folder of the pipeline.
        beside: folder of the model repository, which is left alone.
        objective: how a setting is scored.
        seconds: of each measurement.
        progress: told what is loaded.
        base: ``KEY=VALUE`` overrides of the spec, below those of a setting.
    """
    home = beside.resolve().parent
    home.mkdir(parents=True, exist_ok=True)
    _remove_orphans(home)
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-", dir=home) as scratch:
        first, second = (Slot(Path(scratch, name), pipeline, base) for name in ("a", "b"))
        found = Arena(first, second, objective, seconds, progress)
        try:
            yield found
        finally:
            found.close()


def _remove_orphans(home: Path) -> None:
    """Remove what a run that was killed left behind."""
    for path in home.glob(f"{_PREFIX}*-*"):
        owner = path.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(path, ignore_errors=True)


def _as_yaml(value: Any) -> str:
    return "null" if value is None else str(value)


def _quiet(_stage: str, _line: str) -> None:
    """A progress that is told nothing."""
