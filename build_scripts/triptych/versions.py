"""What each Triton release knows: its version, config fields and known faults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from triptych.errors import UserError


@dataclass(frozen=True, order=True)
class Release:
    """A monthly Triton release, as in the image tag: ``24.10``."""

    year: int
    month: int

    def __str__(self) -> str:
        return f"{self.year:02d}.{self.month:02d}"


@dataclass(frozen=True)
class Since:
    """Something that exists from one release on.

    Attributes:
        name: a dotted path into the config (``ensemble_scheduling.max_inflight_requests``) or a
            server flag without its dashes.
        release: the first release that knows it.
    """

    name: str
    release: Release


# Release -> Triton version, from the tags of the server repository (`TRITON_VERSION`).
TRITON_VERSIONS: dict[Release, str] = {
    Release(24, 10): "2.51.0",
    Release(24, 11): "2.52.0",
    Release(24, 12): "2.53.0",
    Release(25, 1): "2.54.0",
    Release(25, 2): "2.55.0",
    Release(25, 3): "2.56.0",
    Release(25, 4): "2.57.0",
    Release(25, 5): "2.58.0",
    Release(25, 6): "2.59.0",
    Release(25, 7): "2.59.1",
    Release(25, 8): "2.60.0",
    Release(25, 9): "2.61.0",
    Release(25, 10): "2.62.0",
    Release(25, 11): "2.63.0",
    Release(25, 12): "2.64.0",
    Release(26, 1): "2.65.0",
    Release(26, 2): "2.66.0",
    Release(26, 3): "2.67.0",
    Release(26, 4): "2.68.0",
    Release(26, 5): "2.69.0",
    Release(26, 6): "2.70.0",
    Release(26, 7): "2.71.0",
    Release(26, 8): "2.72.0",
    Release(26, 9): "2.73.0",
}

# A field older than the first release listed here counts as always known.
CONFIG_FIELDS: tuple[Since, ...] = (
    Since("ensemble_scheduling.step.model_namespace", Release(23, 6)),
    Since("sequence_batching.iterative_sequence", Release(23, 12)),
    Since("runtime", Release(24, 1)),
    Since("input.is_non_linear_format_io", Release(24, 8)),
    Since("output.is_non_linear_format_io", Release(24, 8)),
    Since("model_metrics", Release(24, 11)),
    Since("ensemble_scheduling.max_inflight_requests", Release(25, 11)),
)

# First and last release whose dynamic batcher answers in completion order in spite of
# `preserve_ordering` (core #449, mended by core #520).
PRESERVE_ORDERING_BROKEN = (Release(25, 9), Release(26, 7))
# Before it, a request hangs for ever when one step refuses it for `max_queue_size` while another
# step of it runs (core #466).
STEP_QUEUE_LIMIT_SAFE = Release(26, 2)
# The first image with TensorRT 10: INT64 inputs and outputs do not exist before it.
TENSORRT_INT64 = Release(24, 5)


def parse_release(text: str) -> Release:
    """The release named by `text`: ``24.10``, an image tag ``24.10-py3`` or a version ``2.51.0``.

    Raises:
        UserError: none of the three, or a Triton version that is not in `TRITON_VERSIONS`.
    """
    match = re.fullmatch(r"(\d\d)\.(\d\d)(?:-[\w.-]+)?", text.strip())
    if match and 1 <= int(match[2]) <= 12:
        return Release(int(match[1]), int(match[2]))
    for release, version in TRITON_VERSIONS.items():
        if text.strip() == version:
            return release
    raise UserError(
        "triton",
        "must be a Triton release as in its image tag, YY.MM",
        given=text,
        remedy="Write for example 24.10, or 26.08 for the image tritonserver:26.08-py3",
    )


def fields_newer_than(config: Any, triton: str | Release) -> list[Since]:
    """The fields set in `config` that the release `triton` does not know.

    A server refuses the whole config over one unknown field.

    Raises:
        UserError: `triton` is not a release.
    """
    release = _release(triton)
    return [
        field
        for field in CONFIG_FIELDS
        if field.release > release and any(_holders(config, field.name))
    ]


def without_newer_fields(config: Any, triton: str | Release) -> Any:
    """A copy of `config` without the fields that the release `triton` does not know.

    Raises:
        UserError: `triton` is not a release.
    """
    copy = type(config)()
    copy.CopyFrom(config)
    for field in fields_newer_than(config, triton):
        for holder in list(_holders(copy, field.name)):
            holder.ClearField(field.name.rpartition(".")[2])
    return copy


def _release(triton: str | Release) -> Release:
    return triton if isinstance(triton, Release) else parse_release(triton)


def _holders(message: Any, path: str) -> Iterator[Any]:
    """The messages within `message` in which the last field of the dotted `path` is set."""
    head, _, rest = path.partition(".")
    value = next((value for field, value in message.ListFields() if field.name == head), None)
    if value is None:
        return
    if not rest:
        yield message
        return
    for child in [value] if hasattr(value, "ListFields") else value:
        yield from _holders(child, rest)
