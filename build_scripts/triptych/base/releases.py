"""Triton releases: versions, TensorRT, config fields and flags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triptych.base.errors import UserError

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig


@dataclass(frozen=True, order=True)
class Release:
    """Monthly Triton release, as in the image tag: ``24.10``."""

    year: int
    month: int

    def __str__(self) -> str:
        return f"{self.year:02d}.{self.month:02d}"


@dataclass(frozen=True)
class Since:
    """Feature that exists from one release on."""

    # Dotted path in the config (``ensemble_scheduling.max_inflight_requests``), key of
    # `parameters`, or server flag without dashes (``metrics-config.x`` for a setting in it).
    name: str
    release: Release  # First release that supports it for models like the generated ones


OLDEST = Release(24, 10)
"""Oldest supported release, that of the embedded server."""

# The numbers below are pull requests; a release has one when its branch rYY.MM has the commit.

# Release -> Triton version: `TRITON_VERSION` of the server's branches, for 26.09 that of
# its main, for later ones the release notes.
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
    Release(26, 10): "2.74.0",
    Release(26, 11): "2.75.0",
}

# TensorRT of the -py3 image, where it is known to the last digit: its release notes, and images of
# that month that print it. What only follows from other images of the same month is left out.
TENSORRT_VERSIONS: dict[Release, str] = {
    Release(26, 5): "10.16.1.11",
    Release(26, 6): "11.0.0.114",
    Release(26, 7): "11.1.0.106",
    Release(26, 8): "11.2.1.2",
}

ACCELERATOR_BF16 = Release(26, 2)
"""First release whose ONNX Runtime backend accepts ``precision_mode: BF16`` of its TensorRT
accelerator (branch r26.02 of onnxruntime_backend); earlier ones refuse to load the model."""

_TENSORRT_11 = Release(26, 6)
"""First image with TensorRT 11; earlier ones have TensorRT 10."""

# A field that is not listed here is known to every release (`model_config.proto` of common).
CONFIG_FIELDS: tuple[Since, ...] = (
    Since("model_metrics", Release(24, 11)),  # common #126, core #405
    Since("ensemble_scheduling.max_inflight_requests", Release(25, 11)),  # common #141, core #455
)

# Of the server (`src/command_line_parser.cc` of each branch), in order of release; what is not here
# is known to every release.
SERVER_FLAGS: tuple[Since, ...] = (
    Since("grpc-max-response-pool-size", Release(25, 3)),  # server #7879
    Since("grpc-infer-thread-count", Release(25, 4)),  # server #8061
    Since("http-max-input-size", Release(25, 6)),  # server #8174
    # 24.11 to 25.12 take it (core #396) and have histograms of decoupled models alone (core #464).
    Since("metrics-config.histogram_latencies", Release(26, 1)),
    Since("allow-client-shm", Release(26, 4)),  # server #8739
)
CONTEXT_MEMORY = "execution_context_allocation_strategy"
"""Parameter of the tensorrt backend: when scratch memory of contexts is allocated (its #108)."""
# Keys of `parameters` by backend: an older backend takes no notice of them.
BACKEND_PARAMETERS: Mapping[str, tuple[Since, ...]] = {
    "tensorrt": (Since(CONTEXT_MEMORY, Release(25, 5)),),
}

# First and last release whose dynamic batcher answers in completion order in spite of
# `preserve_ordering` (core #449, fixed by core #520).
PRESERVE_ORDERING_BROKEN = (Release(25, 9), Release(26, 7))
OVERFLOW_CHECKED = Release(26, 4)
"""First release that refuses a request whose shape overflows 64 bits (core pull request 475)."""
# Before it, a request hangs for ever when one step refuses it for `max_queue_size` while another
# step of it runs (core #466).
STEP_QUEUE_LIMIT_SAFE = Release(26, 2)


def parse_release(text: str) -> Release:
    """Return the release named by ``24.10``, an image tag ``24.10-py3`` or a version ``2.51.0``.

    Raises:
        UserError: The text is none of these, an unknown version, or older than `OLDEST`.
    """
    match = re.fullmatch(r"(\d\d)\.(\d\d)(?:-[\w.-]+)?", text.strip())
    if match and 1 <= int(match[2]) <= 12:
        release = Release(int(match[1]), int(match[2]))
        if release >= OLDEST:
            return release
        raise UserError(
            "triton",
            f"must be Triton {OLDEST} or later",
            given=text,
            remedy=f"Use an image of {OLDEST} or later",
        )
    for release, version in TRITON_VERSIONS.items():
        if text.strip() == version:
            return release
    raise UserError(
        "triton",
        "must be a Triton release as in its image tag, YY.MM",
        given=text,
        remedy="Example: 24.10, or 26.11 for the image tritonserver:26.11-py3",
    )


def first_release(name: str) -> Release:
    """Return the first release that supports a config field (dotted), flag or backend parameter.

    Raises:
        KeyError: No table has it.
    """
    tables = (CONFIG_FIELDS, SERVER_FLAGS, *BACKEND_PARAMETERS.values())
    return {one.name: one.release for table in tables for one in table}[name]


def fields_newer_than(config: object, release: Release) -> list[Since]:
    """Return the fields of `config` that a release does not know and would reject."""
    return [
        field
        for field in CONFIG_FIELDS
        if field.release > release and any(_holders(config, field.name))
    ]


def parameters_newer_than(config: ModelConfig, release: Release) -> list[Since]:
    """Return the `parameters` of `config` that its backend ignores in a release."""
    known = BACKEND_PARAMETERS.get(config.backend, ())
    return [since for since in known if since.release > release and since.name in config.parameters]


def without_newer_fields(config: ModelConfig, release: Release) -> ModelConfig:
    """Return a copy of `config` without the fields and parameters that a release lacks."""
    copy = type(config)()
    copy.CopyFrom(config)
    for field in fields_newer_than(config, release):
        for holder in list(_holders(copy, field.name)):
            holder.ClearField(field.name.rpartition(".")[2])
    for parameter in parameters_newer_than(config, release):
        del copy.parameters[parameter.name]
    return copy


def flags_newer_than(flags: Iterable[str], release: Release) -> list[Since]:
    """Return the flags of a command line that a release does not know.

    The server does not start with an unknown flag, and ignores an unknown setting in one.

    Args:
        flags: Words of the command line (``--grpc-infer-thread-count=8``; a value may be a
            separate word), or names of flags without dashes.
        release: Release of the server.
    """
    given = set(_flag_names(flags))
    return [flag for flag in SERVER_FLAGS if flag.release > release and flag.name in given]


def _flag_names(words: Iterable[str]) -> Iterator[str]:
    """Yield names of flags and settings: ``--a=b=c`` is the flag ``a`` and the setting ``a.b``."""
    flag = ""
    for word in words:
        name, _, value = word.partition("=")
        if name.startswith("--") or not flag:
            flag = name.removeprefix("--")
            yield flag
        else:
            value = word
        if value:
            yield f"{flag}.{value.partition('=')[0]}"
        if value or not word.startswith("--"):
            flag = ""


def tensorrt_major(release: Release) -> int | None:
    """Return the major version of TensorRT in the image of a release; None if unknown."""
    if release > max(TRITON_VERSIONS):
        return None
    return 11 if release >= _TENSORRT_11 else 10


def releases_with(tensorrt: str) -> list[Release]:
    """Return the releases whose image is known to have exactly this TensorRT."""
    return [release for release, version in TENSORRT_VERSIONS.items() if version == tensorrt]


def _holders(message: Any, path: str) -> Iterator[Any]:
    """Yield the messages in `message` in which the last field of the dotted `path` is set."""
    head, _, rest = path.partition(".")
    value = next((value for field, value in message.ListFields() if field.name == head), None)
    if value is None:
        return
    if not rest:
        yield message
        return
    for child in [value] if hasattr(value, "ListFields") else value:
        yield from _holders(child, rest)
