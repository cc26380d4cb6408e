"""The tables of a tuning report: before and after, every trial, the front, what was not tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triptych.bench.points import Point
from triptych.bench.verdict import best_point
from triptych.formatting import (
    NOTHING,
    amount,
    code,
    milliseconds,
    rounded,
    shown,
    signed_percent,
)
from triptych.pipeline.slo import Slo
from triptych.report.html import PROSE, table
from triptych.report.load_tables import n
from triptych.tune.results import Outcome, Trial, TuneResult

_PRICES = ("Price of a million", "Price of a month")
_KINDS = {"better": "good", "worse": "bad", "failed": "bad"}


def before_after(result: TuneResult) -> str:
    """The baseline's figures beside the winner's."""
    old, new = result.baseline, result.winner
    rows = [
        _row(name, [rounded(was), rounded(now)], grown(was, now))
        for name, (was, now) in change_of(result).items()
    ]
    rows.append(_row("Bottleneck", [shown(one.bottleneck.kind) for one in (old, new)], ""))
    heads = ['<span class="hidden">Figure</span>', n("Before"), n("After"), n("Change")]
    return table("compared", "Before and after", heads, rows)


def change_of(result: TuneResult) -> dict[str, tuple[float | None, float | None]]:
    """Figure to what it was and what it is; without those that neither has."""
    pairs = {
        name: (read(result.baseline, result.slo), read(result.winner, result.slo))
        for name, read in _READ.items()
    }
    cost = result.winner.cost or result.baseline.cost
    return {
        f"{name}, {cost.currency}" if cost and name in _PRICES else name: pair
        for name, pair in pairs.items()
        if pair != (None, None)
    }


def settings(change: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """``core.instances: 1 -> 2`` each, as HTML."""
    lines = (
        f"{code(key)}: {shown(before[key]) + ' → ' if key in before else ''}{shown(value)}"
        for key, value in change.items()
    )
    return "<br>".join(lines)


def all_trials(trials: Sequence[Trial]) -> str:
    """Every trial in order: what was changed, why, and what came of it."""
    heads = [n("No."), "Change", n("Score"), n("Against"), n("Gain"), "Verdict"]
    return table("trials", "Trials", heads, [_trial(each) for each in trials]) if trials else ""


def front(labelled: Sequence[tuple[str, Point]]) -> str:
    """The points worth choosing from: nothing else gives more for as little latency."""
    rows = [
        f'<tr><th scope="row">{shown(label)}</th><td>{shown(str(point.load))}</td>'
        f'<td class="n">{rounded(point.median("throughput_per_s"))}</td>'
        f'<td class="n">{milliseconds(point.median("p50_us"))}</td>'
        f'<td class="n">{milliseconds(point.median("p99_us"))}</td></tr>'
        for label, point in labelled
    ]
    heads = ["Setting", "Load", n("Requests/s"), n("p50, ms"), n("p99, ms")]
    return table("front", "Pareto front", heads, rows) if rows else ""


def skipped(reasons: Mapping[str, str]) -> str:
    """What was not worth a trial, and why."""
    rows = [
        f'<tr><th scope="row">{code(key)}</th><td>{shown(reason, PROSE)}</td></tr>'
        for key, reason in reasons.items()
    ]
    return table("skipped", "Not tried", ["Setting", "Why not"], rows) if rows else ""


def _throughput(one: Outcome, slo: Slo) -> float | None:
    best = best_point(one.points, slo)
    return best.median("throughput_per_s") if best else None


def _p99(one: Outcome, slo: Slo) -> float | None:
    best = best_point(one.points, slo)
    return best.median("p99_us") / 1e3 if best else None


_READ: dict[str, Callable[[Outcome, Slo], float | None]] = {
    "Score, requests/s": lambda one, _: one.score,
    "Best throughput, requests/s": _throughput,
    "p99 there, ms": _p99,
    "Highest rate, requests/s": lambda one, _: one.rate.highest_per_s if one.rate else None,
    "Price of a million": lambda one, _: one.cost.per_million if one.cost else None,
    "Price of a month": lambda one, _: one.cost.monthly if one.cost else None,
}


def grown(old: float | None, new: float | None) -> str:
    """``+12 %``; a dash where there is nothing to grow from."""
    return NOTHING if not old or new is None else signed_percent(new / old - 1)


def _row(name: str, cells: Sequence[str], last: str) -> str:
    body = "".join(f'<td class="n">{cell}</td>' for cell in (*cells, last))
    return f'<tr><th scope="row">{name}</th>{body}</tr>'


def _trial(one: Trial) -> str:
    kind = _KINDS.get(one.verdict, "quiet")
    numbers = (rounded(one.score), rounded(one.against), grown(one.against, one.score))
    cells = "".join(f'<td class="n">{cell}</td>' for cell in numbers)
    took = f"{amount(one.rounds, 'round')}, {rounded(one.seconds)} s"
    return (
        f'<tr><td class="n">{one.number}</td>'
        f"<td>{settings(one.change, one.before)}"
        f'<span class="says wide">{shown(one.reason, PROSE)}</span></td>{cells}'
        f'<td><span class="{kind}">{shown(one.verdict)}</span>'
        f'<span class="says wide">{shown(one.says, PROSE)}</span>'
        f'<span class="says">{took}</span></td></tr>'
    )
