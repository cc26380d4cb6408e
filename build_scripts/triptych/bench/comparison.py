"""Two results side by side: what changed, and whether it is more than the noise of the rounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import ValidationError

from triptych.bench.points import BenchResult, Cost, Load, Measurement, Point, from_json, to_json
from triptych.errors import UserError
from triptych.formatting import rounded, signed_percent

Weight = Literal[
    "better", "worse", "changed", "within noise", "same", "one round: cannot tell", "cannot tell"
]
Better = Literal["higher", "lower", ""]
_SUBJECT = ("pipeline", "task", "architecture", "precision", "layout", "server", "requests")


@dataclass(frozen=True)
class Change:
    """One figure before and after.

    Attributes:
        name: with its unit, as ``p99 ms``.
        before: median of the rounds; so is `after`.
        after: see `before`.
        relative: share of `before` it grew by; None where that is 0.
        weight: ``better`` and ``worse`` (``changed`` where neither is) only where all rounds of
            one are beyond all of the other, by more than either's rounds are apart.
        of_step: a figure of a step, as the server counts, not of the client.
    """

    name: str
    before: float
    after: float
    relative: float | None
    weight: Weight
    of_step: bool = False

    def __str__(self) -> str:
        """``p99 ms: 41.2 -> 30.1, -27 %, better``."""
        grown = "" if self.relative is None else f", {signed_percent(self.relative)}"
        return f"{self.name}: {rounded(self.before)} -> {rounded(self.after)}{grown}, {self.weight}"


@dataclass(frozen=True)
class Pair:
    """A contender at a load that both results hold."""

    contender: str
    load: Load
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Comparison:
    """Two results side by side.

    Attributes:
        before: pipeline and time of the first; `after` of the second.
        after: see `before`.
        pairs: what both measured, in the order of the second.
        totals: highest rate and cost, where both have them for the same promise or price.
        only_before: contenders at loads that only the first measured; `only_after` the second.
        only_after: see `only_before`.
        differences: what differs between the subjects, each before and after.
        warnings: why figures may differ for another reason than the pipeline.
    """

    before: str
    after: str
    pairs: tuple[Pair, ...]
    totals: tuple[Change, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    differences: dict[str, tuple[str, str]]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        plain: dict[str, Any] = to_json(self)
        return plain

    def lines(self) -> list[str]:
        """All of it, to print."""
        found = [f"before: {self.before}", f"after: {self.after}"]
        found += [f"warning: {warning}" for warning in self.warnings]
        found += [f"{name}: {a} -> {b}" for name, (a, b) in self.differences.items()]
        for pair in self.pairs:
            found.append(f"{pair.contender}, {pair.load}")
            found += [f"  {change}" for change in pair.changes]
        found += [str(change) for change in self.totals]
        found += [f"only before: {name}" for name in self.only_before]
        found += [f"only after: {name}" for name in self.only_after]
        return found


def read_bench(path: Path) -> BenchResult:
    """The result in a ``bench.json``, or in the folder that holds one.

    Raises:
        UserError: there is none, or it is of another form.
    """
    file = path / "bench.json" if path.is_dir() else path
    remedy = "Give a bench.json that `triptych bench` wrote"
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        return from_json(BenchResult, document)
    except OSError as error:
        given = error.strerror or error
        raise UserError(str(file), "must be a file to read", given=given, remedy=remedy) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        given = f"{where}: {first['msg']}"
        raise UserError(str(file), "must be a bench result", given=given, remedy=remedy) from error
    except ValueError as error:  # of the text: no UTF-8, no JSON
        raise UserError(str(file), "must be JSON", given=error, remedy=remedy) from error


def compare(before: BenchResult, after: BenchResult) -> Comparison:
    """What changed between two results; the pipelines are one contender, whatever their names."""
    first, second = _contenders(before), _contenders(after)
    both = [key for key in second if key in first]
    name = after.subject.pipeline
    return Comparison(
        before=f"{before.subject.pipeline}, {before.subject.measured_at}",
        after=f"{name}, {after.subject.measured_at}",
        pairs=tuple(
            Pair(key[0] or name, key[1], _changes(first[key], second[key])) for key in both
        ),
        totals=_totals(before, after),
        only_before=tuple(_named(key, before) for key in first if key not in second),
        only_after=tuple(_named(key, after) for key in second if key not in first),
        differences=_differences(before, after),
        warnings=_warnings(before, after),
    )


Key = tuple[str, Load]


def _contenders(result: BenchResult) -> dict[Key, Point]:
    """Contender ("" for the pipeline) and load to its point."""
    own: dict[Key, Point] = {("", point.load): point for point in result.points}
    return own | {(point.contender, point.load): point for point in result.baselines}


def _named(key: Key, result: BenchResult) -> str:
    return f"{key[0] or result.subject.pipeline}, {key[1]}"


def _changes(before: Point, after: Point) -> tuple[Change, ...]:
    figures: list[tuple[str, Callable[[Measurement], float], Better]] = [
        ("requests/s", lambda one: one.throughput_per_s, "higher"),
        ("p50 ms", lambda one: one.p50_us / 1e3, "lower"),
        ("p99 ms", lambda one: one.p99_us / 1e3, "lower"),
    ]
    found = [
        _change(name, [read(one) for one in before.rounds], [read(one) for one in after.rounds], up)
        for name, read, up in figures
    ]
    if before.errors or after.errors:
        old, new = ([_failed(one) for one in point.rounds] for point in (before, after))
        found.append(_change("errors %", old, new, "lower"))
    ours, theirs = _steps(before), _steps(after)
    for step in ours:
        if step in theirs:
            for name, up in _STEP_FIGURES.items():
                change = _change(f"{step} {name}", ours[step][name], theirs[step][name], up)
                found.append(replace(change, of_step=True))
    return tuple(found)


_STEP_FIGURES: dict[str, Better] = {"queue ms": "lower", "compute ms": "lower", "batch": ""}


def _steps(point: Point) -> dict[str, dict[str, list[float]]]:
    """Step to its figures in every round."""
    found: dict[str, dict[str, list[float]]] = {}
    for use in (use for one in point.rounds for use in one.steps):
        figures = found.setdefault(use.step, {name: [] for name in _STEP_FIGURES})
        values = (use.queue_us / 1e3, use.compute_us / 1e3, use.mean_batch)
        for name, value in zip(_STEP_FIGURES, values, strict=True):
            figures[name].append(value)
    return found


def _failed(one: Measurement) -> float:
    """Percent of the requests of a round that ended in an error."""
    failed = sum(one.errors.values())
    return 100 * failed / (failed + one.requests) if failed else 0.0


def _change(name: str, before: Sequence[float], after: Sequence[float], better: Better) -> Change:
    old, new = float(median(before)), float(median(after))
    relative = new / old - 1 if old else None
    return Change(name, old, new, relative, _weight(before, after, better))


def _weight(before: Sequence[float], after: Sequence[float], better: Better) -> Weight:
    """See `Change.weight`."""
    if min(len(before), len(after)) < 2:
        return "one round: cannot tell"
    grown = median(after) - median(before)
    if not grown:
        return "same"
    apart = min(after) > max(before) or max(after) < min(before)
    spread = max(max(before) - min(before), max(after) - min(after))
    if not apart or abs(grown) <= spread:
        return "within noise"
    if not better:
        return "changed"
    return "better" if (grown > 0) == (better == "higher") else "worse"


def _totals(before: BenchResult, after: BenchResult) -> tuple[Change, ...]:
    found = []
    if before.rate and after.rate and before.rate.slo == after.rate.slo:
        # A search only brackets the rate: the bracket is its noise.
        old, new = (
            (rate.highest_per_s, rate.lowest_broken_per_s or rate.highest_per_s)
            for rate in (before.rate, after.rate)
        )
        relative = new[0] / old[0] - 1 if old[0] else None
        weight = _weight(old, new, "higher")
        found.append(Change("highest rate/s", old[0], new[0], relative, weight))
    if before.cost and after.cost and _price(before.cost) == _price(after.cost):
        was, now = before.cost.per_million, after.cost.per_million
        # The cost is the rate in other words, and no surer than it.
        weight = found[0].weight if found else "cannot tell"
        found.append(Change(f"{after.cost.currency} a million", was, now, now / was - 1, weight))
    return tuple(found)


def _price(cost: Cost) -> tuple[str, float]:
    return cost.currency, cost.price_per_hour


def _facts(result: BenchResult) -> dict[str, str]:
    subject = result.subject
    found = {name: str(getattr(subject, name)) for name in _SUBJECT}
    found |= {name: str(value) for name, value in subject.overrides.items()}
    found |= {f"machine {name}": value for name, value in subject.machine.items()}
    found |= {f"version of {name}": value for name, value in subject.versions.items()}
    return found | {"slo": str(result.slo)}


def _differences(before: BenchResult, after: BenchResult) -> dict[str, tuple[str, str]]:
    ours, theirs = _facts(before), _facts(after)
    names = dict.fromkeys([*ours, *theirs])
    pairs = {name: (ours.get(name, "not set"), theirs.get(name, "not set")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _warnings(before: BenchResult, after: BenchResult) -> tuple[str, ...]:
    ours, theirs = before.subject, after.subject
    found = []
    if ours.machine != theirs.machine:
        found.append("the machines differ: their speed is part of every change")
    if (ours.requests, ours.lengths) != (theirs.requests, theirs.lengths):
        found.append("the traffic differs: longer or other requests take another time")
    if ours.server != theirs.server:
        found.append("the servers differ: their release or place is part of every change")
    return tuple(found)
