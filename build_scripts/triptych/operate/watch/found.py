"""What one look found, as types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from triptych.base.tensors import TokenRow
from triptych.core.samples import GateRequest
from triptych.operate.tune.drift import Drift
from triptych.operate.watch.mixes import Mix
from triptych.operate.watch.sample import SampledRow
from triptych.operate.watch.scores import Figure
from triptych.operate.watch.sequential import Evidence
from triptych.repository.plain import plain_data
from triptych.spec.tasks.metrics_outputs import Outputs


@dataclass(frozen=True)
class Held:
    """A row with the request that it makes, and what the reference answers."""

    row: SampledRow
    request: GateRequest
    wanted: Outputs

    @property
    def tokens(self) -> int:
        return sum(len(row.ids) for row in self.request.rows if isinstance(row, TokenRow))


@dataclass(frozen=True)
class Group:
    """Rows that have something in common.

    Attributes:
        kind: ``tokens`` or ``label``.
        loss: mean of the first test's losses; 0 where all is right.
        low: end of its 95 % confidence interval.
        high: the other end.
    """

    kind: str
    name: str
    rows: int
    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class Worst:
    """A row far from the reference; texts only where they were asked for."""

    place: str
    tokens: int
    badness: float
    difference: float
    shown: str = ""
    wanted: str = ""
    got: str = ""


@dataclass(frozen=True)
class MeanTest:
    """What all looks at this build tell of one mean.

    Attributes:
        name: a metric, or what `scores` calls it.
        allowed: mean loss that is still right.
        mean: of all rows so far; None before the first.
        rows: so far.
        evidence: factor by which what was seen is likelier with more loss than is allowed, at its
            highest, as a power of ten.
        needed: where it is an alarm, likewise.
        alarm_row: the row of the build, from 1, since which it is one; None where it is none.
    """

    name: str
    allowed: float
    mean: float | None
    rows: int
    evidence: float
    needed: float
    alarm_row: int | None

    @property
    def alarmed(self) -> bool:
        return self.alarm_row is not None


@dataclass(frozen=True)
class Look:
    """What one look found.

    Attributes:
        at: seconds since 1970.
        build: id of the build that is in the repository.
        rows: held against the reference.
        redacted: rows that `redact` changed: they count for lengths and mixes alone.
        others: rows of other builds, left out.
        refused: rows that were answered although the pipeline as it is here refuses them.
        damaged: lines that could not be read.
        alarms: what is wrong, in words; empty where all is well.
        drifts: what moved, in words.
        notes: what else a user should know.
    """

    pipeline: str
    at: float
    build: str
    precision: str
    rows: int
    redacted: int
    others: int
    refused: int
    damaged: int
    figures: tuple[Figure, ...]
    tests: tuple[MeanTest, ...]
    groups: tuple[Group, ...]
    worst: tuple[Worst, ...]
    drift: Drift | None
    mixes: tuple[Mix, ...]
    alarms: tuple[str, ...]
    drifts: tuple[str, ...]
    notes: tuple[str, ...]
    evidence: Mapping[str, Evidence] = field(default_factory=dict, repr=False)

    @property
    def passed(self) -> bool:
        """Whether nothing calls for anybody."""
        return not (self.alarms or self.drifts)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json`` and the timeline; what is no number is null."""
        fields = asdict(replace(self, drift=None, evidence={}))
        del fields["evidence"]
        fields["drift"] = None if self.drift is None else self.drift.as_dict()
        fields["passed"] = self.passed
        plain: dict[str, Any] = plain_data(fields)
        return plain
