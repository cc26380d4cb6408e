"""A look in lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from triptych.operate.tune.drift import describe_drift
from triptych.operate.watch.found import Look, MeanTest
from triptych.operate.watch.scores import Figure, is_worse


def describe_look(look: Look) -> Iterator[tuple[str, str]]:
    """The lines that show it, each with its style."""
    left = f", {look.redacted} more were redacted" if look.redacted else ""
    yield f"{look.pipeline}, {look.precision}: {look.rows} new rows compared{left}", "bold"
    for figure in look.figures:
        yield describe_figure(figure), "red" if is_worse(figure) else ""
    for test in look.tests:
        yield describe_test(test), "red" if test.alarmed else ""
    for group in look.groups:
        interval = f"{group.low:.4f} to {group.high:.4f}"
        yield (
            f"  {group.kind} {group.name}: {group.rows} rows, loss {group.loss:.4f} ({interval})",
            "",
        )
    yield from _describe_requests(look)
    if not look.passed:
        yield from _describe_worst(look)
    for alarm in look.alarms:
        yield f"alarm: {alarm}", "red"
    for drift in look.drifts:
        yield f"drift: {drift}", "yellow"
    if look.drift is not None and look.drift.proposal is not None:
        yield f"build what is proposed with these rows: triptych watch {look.pipeline} --apply", ""
    if look.passed:
        yield "all is well", "green"


def _describe_requests(look: Look) -> Iterator[tuple[str, str]]:
    if look.drift is not None:
        for line, style in describe_drift(look.drift):
            yield f"  {line}", style
    for mix in look.mixes:
        yield f"  {mix.kind}: {mix.largest}", "yellow" if mix.moved else ""
    for note in look.notes:
        yield f"  note: {note}", "yellow"
    if look.refused:
        yield f"  {look.refused} rows were answered that the pipeline now refuses", "yellow"


def _describe_worst(look: Look) -> Iterator[tuple[str, str]]:
    yield "rows furthest from the reference:", "bold"
    for row in look.worst:
        figures = f"badness {row.badness:.3g}, difference {row.difference:.3g}"
        yield f"  {row.place}, {row.tokens} tokens: {figures}", ""
        if row.shown:
            yield f"    {row.shown!r}", ""
            yield f"    wanted {row.wanted}", ""
            yield f"    got    {row.got}", ""


def describe_figure(figure: Figure) -> str:
    """A metric in a line."""
    interval = "" if figure.low is None else f"({figure.low:.6g} to {figure.high:.6g})"
    limit = "" if figure.limit is None else f"limit {figure.limit:g}"
    built = "" if figure.built is None else f"built with {figure.built:.6g}"
    return f"  {figure.metric:28} {figure.value:>10.6g} {interval:24} {limit:14} {built}".rstrip()


def describe_test(test: MeanTest) -> str:
    """A test in a line."""
    mean = "-" if test.mean is None else f"{test.mean:.4g}"
    evidence = f"evidence 10^{test.evidence:.1f} of 10^{test.needed:.1f}"
    return (
        f"  since the build, {test.rows} rows: {test.name} loses {mean}"
        f" ({test.allowed:.2g} are allowed), {evidence}"
    )
