"""Alerts on what the watch found, on the watch itself, and on samples that were lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triptych.base.explained import ExplainedValue
from triptych.deploy.alerting import SHORTEST_FOR, alert, camel, who
from triptych.deploy.metrics import Metrics
from triptych.deploy.options import WATCH_EVERY, DeployOptions
from triptych.repository.manifest import BuildManifest

WATCH_SILENT = "3h"
"""Two looks may be late or fail before anybody is told."""
DROPPED_WINDOW = "6h"
MAX_DROPPED = 0.1
MIN_DROPPED = 20


def watch_alerts(
    lock: BuildManifest, options: DeployOptions, metrics: Metrics
) -> Iterator[dict[str, Any]]:
    """Of a pipeline that samples, as far as somebody looks at it."""
    if lock.spec.serving.sample is None:
        return
    if options.monitor_image is not None:
        yield from _of_looks(lock, options, metrics)
    lost, all_ = metrics.samples_dropped(DROPPED_WINDOW), metrics.samples_drawn(DROPPED_WINDOW)
    yield alert(
        f"{camel(options.name)}SamplesDropped",
        {"severity": "ticket", "kind": "watch", **who(lock.spec.name, options)},
        ExplainedValue(
            f"{lost} / {all_} > {MAX_DROPPED:g}\nand {lost} >= {MIN_DROPPED}",
            "what the disk refused, what did not fit into a request's ticket, what the writer "
            "could not take: with so many lost, the rest is no uniform choice of the requests. "
            "Rows that `redact` leaves out are nobody's loss",
        ),
        f"{lock.spec.name}: samples are lost",
        "triptych_sample_dropped says why: disk (volume full, not writable), waiting (too much at "
        "once: lower serving.sample.rate), large (rows over a MiB).",
        metrics.window(SHORTEST_FOR),
    )


def _of_looks(
    lock: BuildManifest, options: DeployOptions, metrics: Metrics
) -> Iterator[dict[str, Any]]:
    start, name = camel(options.name), lock.spec.name
    labels = who(lock.spec.name, options)
    yield alert(
        f"{start}AnswersWrong",
        {"severity": "page", "kind": "answers", **labels},
        ExplainedValue(
            f"max({metrics.watch('alarms')}) > 0",
            "the watch's own test, of all rows since the build: one that is right raises it once "
            "in 1,000 builds, however often it is looked at. So it needs no window here",
        ),
        f"{name}: live answers are further from the original model's than the gate allows",
        "The watch's report names the metric, the rows and what differs from the build; what was "
        "rolled out last goes back first.",
    )
    yield alert(
        f"{start}RequestsDrifted",
        {"severity": "ticket", "kind": "rows", **labels},
        ExplainedValue(
            f"max({metrics.watch('drifts')}) > 0",
            "lengths, labels or scripts of a look that chance explains less than once in a million",
        ),
        f"{name}: requests are not like those that it was built for",
        f"The watch's report says what moved; triptych traffic {name} --from-sample and a build "
        "fit it to them.",
    )
    looked = metrics.watch("at_seconds")
    yield alert(
        f"{start}WatchSilent",
        {"severity": "ticket", "kind": "watch", **labels},
        ExplainedValue(
            f"time() - max({looked}) > {metrics.seconds(WATCH_SILENT):g}\n"
            f"or absent_over_time({looked}[{metrics.window(WATCH_SILENT)}])",
            f"a look is due every {WATCH_EVERY}: two may be missing. Whether answers are right is "
            "not known meanwhile",
        ),
        f"{name}: nobody has looked at its answers for {WATCH_SILENT}",
        "kubectl logs of the watch says what fails.",
        metrics.window(WATCH_EVERY),
    )
