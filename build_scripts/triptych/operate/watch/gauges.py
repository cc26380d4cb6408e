"""A look as a file for Prometheus's node exporter (its textfile collector)."""

from __future__ import annotations

from collections.abc import Iterator

from triptych.operate.watch.found import Look

Sample = tuple[str, dict[str, str], float]
_HELP = {
    "triptych_watch_at_seconds": "When the last look was",
    "triptych_watch_rows": "Sampled rows that it compared",
    "triptych_watch_alarms": "What is wrong with the answers, counted",
    "triptych_watch_drifts": "What moved in the requests, counted",
    "triptych_watch_mean_loss": "Mean loss of a test since the build",
    "triptych_watch_allowed_loss": "Mean loss that is still right",
    "triptych_watch_evidence": "Evidence of a test, over what an alarm needs: 1 and more is one",
    "triptych_watch_value": "A metric of the last look",
}


def gauges_text(look: Look) -> str:
    """The text of the file."""
    lines: list[str] = []
    found = list(_samples(look))
    for name, says in _HELP.items():
        own = [(labels, value) for one, labels, value in found if one == name]
        if own:
            lines += [f"# HELP {name} {says}", f"# TYPE {name} gauge"]
            lines += [f"{name}{{{_labels(labels)}}} {value!r}" for labels, value in own]
    return "\n".join(lines) + "\n"


def _samples(look: Look) -> Iterator[Sample]:
    mine = {"pipeline": look.pipeline}
    yield "triptych_watch_at_seconds", mine, look.at
    yield "triptych_watch_rows", mine, float(look.rows)
    yield "triptych_watch_alarms", mine, float(len(look.alarms))
    yield "triptych_watch_drifts", mine, float(len(look.drifts))
    for test in look.tests:
        own = {**mine, "test": test.name}
        yield "triptych_watch_allowed_loss", own, test.allowed
        yield "triptych_watch_evidence", own, test.evidence / test.needed
        if test.mean is not None:
            yield "triptych_watch_mean_loss", own, test.mean
    for figure in look.figures:
        yield "triptych_watch_value", {**mine, "metric": figure.metric}, figure.value


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{value}"' for name, value in labels.items())
