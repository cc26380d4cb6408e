"""Known defects of Triton and changes of its behavior, each with its releases and its source.

A release has a fix if its branch rYY.MM contains the commit. For 26.09 to 26.11, whose branches
were not read, the source is the release notes or the main branch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from triptych.base.releases import OVERFLOW_CHECKED, Release

Feature = Literal[
    "any server",
    "ensemble",
    "dynamic batching",
    "python step",
    "python metrics",
    "decoupled model",
    "response cache",
    "environment archive",
    "TensorRT engine",
]
"""Part of a repository or server without which a defect or change has no effect."""


@dataclass(frozen=True)
class KnownDefect:
    """Defect that every supported release has until it is `fixed`."""

    feature: Feature  # Part of a repository that meets it
    effect: str  # Clause that follows "In this release,"
    fixed: Release | None  # First release without the defect; None if no release has a fix
    source: str  # Issue or pull request of Triton, or its release notes
    # Sentence for users who cannot use another release; empty if nothing helps.
    workaround: str = ""

    def is_in(self, release: Release) -> bool:
        """Return whether a release has the defect."""
        return self.fixed is None or release < self.fixed


@dataclass(frozen=True)
class ReleaseChange:
    """Intended change of what a server does for an unchanged repository."""

    feature: Feature  # Part of a repository that is concerned
    release: Release  # First release with the change
    effect: str  # Sentence on what differs
    source: str  # Issue or pull request of Triton, or its release notes


KNOWN_DEFECTS: tuple[KnownDefect, ...] = (
    KnownDefect(
        "any server",
        "the server may crash (SIGSEGV, SIGABRT) when many gRPC clients cancel within milliseconds",
        Release(25, 4),
        "server pull requests 7840, in 24.12, and 8078",
        "Give clients deadlines well above the p99 of the latency.",
    ),
    KnownDefect(
        "any server",
        "a batch size that overflows an integer is not rejected",
        Release(25, 5),
        "core pull request 434",
    ),
    KnownDefect(
        "any server",
        "an HTTP request of many small chunks uses memory without a limit",
        Release(26, 5),
        "server pull request 8770",
        "Limit the size of requests in a gateway.",
    ),
    KnownDefect(
        "any server",
        "the server keeps the memory of compressed HTTP requests that fail",
        Release(26, 5),
        "server pull request 8764",
        "Accept no compressed requests in a gateway.",
    ),
    KnownDefect(
        "any server",
        "an HTTP request with an Inference-Header-Content-Length that is too large crashes the "
        "server",
        Release(26, 9),
        "server pull request 8925",
        "Remove that header in a gateway.",
    ),
    KnownDefect(
        "dynamic batching",
        "the batcher may use the memory of a request after it was released",
        Release(26, 11),
        "release notes of 26.11",
    ),
    KnownDefect(
        "python step",
        "a request whose shape overflows 64 bits ends the process of a step that has an input with "
        "a free dimension",
        OVERFLOW_CHECKED,
        "core pull request 475",
        "Steps of Triptych survive it; give inputs of your own steps fixed dimensions.",
    ),
    KnownDefect(
        "python step",
        "the server may die or wait forever if a step gets no processor time while it is loaded",
        Release(25, 8),
        "python_backend pull request 408",
        "Give the container the processors that its steps need to start.",
    ),
    KnownDefect(
        "python step",
        "a damaged message in shared memory is read beyond its end",
        Release(25, 7),
        "python_backend pull requests 405 and 406",
        "Let no other container use the same /dev/shm.",
    ),
    KnownDefect(
        "python step",
        "/v2/health/ready is 200 although the process of a step is dead",
        Release(26, 4),
        "core pull request 473",
        "Use `python3 -m triptych.container.health` as the health check; the serving image does.",
    ),
    KnownDefect(
        "python metrics",
        "the process of a step that has metrics of its own crashes (SIGSEGV) when the server stops",
        Release(26, 9),
        "server issue 8662, python_backend pull request 429",
    ),
    KnownDefect(
        "python metrics",
        "the server may crash (SIGSEGV) at the first request after a step with metrics of its own "
        "was loaded again",
        None,
        "server issue 8663, core pull request 471",
        "Start a new server instead of loading a step again.",
    ),
    KnownDefect(
        "decoupled model",
        "a stream whose client has left may be canceled without a word in the log",
        Release(26, 11),
        "release notes of 26.11",
    ),
    KnownDefect(
        "response cache",
        "the memory of cached responses is not released",
        Release(25, 9),
        "core pull request 449",
        "Remove response_cache.",
    ),
    KnownDefect(
        "environment archive",
        "an archive in EXECUTION_ENV_PATH may write outside of its folder",
        Release(26, 6),
        "python_backend pull request 437",
        "Use only archives that you have packed.",
    ),
)
"""Defects in the order in which they are listed: those of every server first."""

CHANGES: tuple[ReleaseChange, ...] = (
    ReleaseChange(
        "python step",
        Release(24, 11),
        "The image has Python 3.12 instead of 3.10 and Ubuntu 24.04 instead of 22.04: archives for "
        "EXECUTION_ENV_PATH and compiled packages must be made again.",
        "server pull request 7783",
    ),
    ReleaseChange(
        "ensemble",
        Release(25, 6),
        "The steps of an ensemble may receive requests in another order than the one in which the "
        "previous step answered them.",
        "core pull request 438",
    ),
    ReleaseChange(
        "any server",
        Release(25, 6),
        "HTTP requests of more than 64 MiB are rejected unless --http-max-input-size allows them.",
        "server pull request 8174",
    ),
    ReleaseChange(
        "any server",
        Release(26, 4),
        "Clients cannot use shared memory unless --allow-client-shm=true is set.",
        "server pull request 8739",
    ),
    ReleaseChange(
        "python step",
        Release(26, 4),
        "/v2/health/ready and the readiness of a step are 400 when the process of the step is "
        "dead.",
        "core pull request 473",
    ),
    ReleaseChange(
        "TensorRT engine",
        Release(26, 6),
        "The image has TensorRT 11 instead of 10: every engine must be built again.",
        "release notes of 26.06",
    ),
    ReleaseChange(
        "any server",
        Release(26, 6),
        "The server accepts no new gRPC connections as soon as it receives SIGTERM.",
        "observed on 26.06 beside 24.10",
    ),
    ReleaseChange(
        "any server",
        Release(26, 10),
        "A canceled request that still waits is dropped before it is executed; requests within an "
        "ensemble are not.",
        "release notes of 26.10",
    ),
)
"""Changes in order of release."""


def defects_of(release: Release, features: Collection[str]) -> list[KnownDefect]:
    """Return the known defects of a release that concern one of the `features`."""
    return [
        defect for defect in KNOWN_DEFECTS if defect.feature in features and defect.is_in(release)
    ]


def changes_between(
    before: Release, after: Release, features: Collection[str]
) -> list[ReleaseChange]:
    """Return the changes in the releases after `before` up to `after` that concern `features`."""
    return [
        change
        for change in CHANGES
        if change.feature in features and before < change.release <= after
    ]
