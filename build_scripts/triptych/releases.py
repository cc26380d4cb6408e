"""What each Triton release knows: its version, TensorRT, config fields, flags and known faults."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
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
        name: a dotted path into the config (``ensemble_scheduling.max_inflight_requests``), a key
            of `parameters`, or a server flag without its dashes (``metrics-config.x`` for a setting
            within one).
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

# TensorRT of the -py3 image, where it is known to the last digit: its release notes, and images of
# that month that print it. What only follows from other images of the same month is left out.
TENSORRT_VERSIONS: dict[Release, str] = {
    Release(26, 5): "10.16.1.11",
    Release(26, 6): "11.0.0.114",
    Release(26, 7): "11.1.0.106",
    Release(26, 8): "11.2.1",
}

# The first image with each major version of TensorRT; nothing is said of images before the first.
_TENSORRT_MAJORS = ((Release(22, 1), 8), (Release(24, 5), 10), (Release(26, 6), 11))

# CUDA of the image, major and minor, from the release notes and docs/introduction/compatibility.md.
CUDA_VERSIONS: dict[Release, str] = {
    Release(24, 5): "12.4",
    Release(25, 1): "12.8",
    Release(25, 2): "12.8",
    Release(25, 3): "12.8",
    Release(25, 4): "12.9",
    Release(25, 5): "12.9",
    Release(25, 6): "12.9",
    Release(25, 7): "12.9",
    Release(25, 8): "13.0",
    Release(25, 9): "13.0",
    Release(25, 10): "13.0",
    Release(25, 11): "13.0",
    Release(25, 12): "13.1",
    Release(26, 1): "13.1",
    Release(26, 2): "13.1",
    Release(26, 3): "13.2",
    Release(26, 4): "13.2",
    Release(26, 5): "13.2",
    Release(26, 6): "13.3",
    Release(26, 7): "13.3",
    Release(26, 8): "13.4",
    Release(26, 9): "13.4",
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

# Of the server (`src/command_line_parser.cc` of each branch), in order of release; what is older
# than the first release here counts as always known. Those of 23.06 came in 23.04 to 23.06.
SERVER_FLAGS: tuple[Since, ...] = (
    Since("metrics-config", Release(23, 6)),
    Since("trace-config", Release(23, 6)),
    Since("metrics-address", Release(23, 6)),
    Since("grpc-restricted-protocol", Release(23, 6)),
    Since("grpc-header-forward-pattern", Release(23, 6)),
    Since("http-header-forward-pattern", Release(23, 6)),
    Since("http-restricted-api", Release(23, 12)),
    Since("model-load-retry-count", Release(24, 1)),
    Since("grpc-max-connection-age", Release(24, 1)),
    Since("model-config-name", Release(24, 5)),
    Since("enable-peer-access", Release(24, 8)),
    Since("metrics-config.histogram_latencies", Release(24, 11)),
    Since("grpc-infer-thread-count", Release(25, 4)),
    Since("grpc-max-response-pool-size", Release(25, 4)),
    Since("http-max-input-size", Release(25, 6)),
    Since("allow-client-shm", Release(26, 4)),
)
# `histogram_latencies` also counts requests to models that are not decoupled.
HISTOGRAMS_FOR_ALL = Release(26, 1)
# Client shared memory is refused unless `--allow-client-shm=true`.
CLIENT_SHM_OFF_BY_DEFAULT = Release(26, 4)

# Of the tensorrt backend: when scratch memory for its contexts is found.
CONTEXT_MEMORY = "execution_context_allocation_strategy"
# Keys of `parameters` by backend: an older backend takes no notice of them.
BACKEND_PARAMETERS: Mapping[str, tuple[Since, ...]] = {
    "tensorrt": (Since(CONTEXT_MEMORY, Release(25, 5)),),
}
# Data types of inputs and outputs by backend: an older backend refuses the model.
BACKEND_TYPES: Mapping[str, tuple[Since, ...]] = {
    "tensorrt": (Since("TYPE_BF16", Release(24, 6)),),
}

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


def first_release(name: str) -> Release:
    """The first release that knows a config field (dotted) or a backend's parameter.

    Raises:
        KeyError: none of the tables has it.
    """
    known = (*CONFIG_FIELDS, *(one for own in BACKEND_PARAMETERS.values() for one in own))
    return {one.name: one.release for one in known}[name]


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


def parameters_newer_than(config: Any, triton: str | Release) -> list[Since]:
    """The `parameters` of `config` that its backend in the release `triton` takes no notice of.

    Raises:
        UserError: `triton` is not a release.
    """
    release = _release(triton)
    known = BACKEND_PARAMETERS.get(config.backend, ())
    return [since for since in known if since.release > release and since.name in config.parameters]


def without_newer_fields(config: Any, triton: str | Release) -> Any:
    """A copy of `config` without the fields and parameters that the release `triton` lacks.

    Raises:
        UserError: `triton` is not a release.
    """
    copy = type(config)()
    copy.CopyFrom(config)
    for field in fields_newer_than(config, triton):
        for holder in list(_holders(copy, field.name)):
            holder.ClearField(field.name.rpartition(".")[2])
    for parameter in parameters_newer_than(config, triton):
        del copy.parameters[parameter.name]
    return copy


def flags_newer_than(flags: Iterable[str], triton: str | Release) -> list[Since]:
    """What of a server's command line the release `triton` does not know.

    A server refuses to start over one unknown flag.

    Args:
        flags: words of the command line (``--grpc-infer-thread-count=8``; a value may be a word of
            its own); or names of flags without their dashes.
        triton: the release that is to take them.

    Raises:
        UserError: `triton` is not a release.
    """
    release = _release(triton)
    given = set(_flag_names(flags))
    return [flag for flag in SERVER_FLAGS if flag.release > release and flag.name in given]


def _flag_names(words: Iterable[str]) -> Iterator[str]:
    """``--a=b=c`` is the flag ``a`` and, within it, the setting ``a.b``."""
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


def tensorrt_of(triton: str | Release) -> str | None:
    """The TensorRT inside the image of a release; None where that is not known exactly.

    Raises:
        UserError: `triton` is not a release.
    """
    return TENSORRT_VERSIONS.get(_release(triton))


def tensorrt_major(triton: str | Release) -> int | None:
    """The major version of the TensorRT inside the image of a release; None where not known.

    Raises:
        UserError: `triton` is not a release.
    """
    release = _release(triton)
    if release > max(TRITON_VERSIONS):
        return None
    return next((major for since, major in reversed(_TENSORRT_MAJORS) if since <= release), None)


def releases_with(tensorrt: str) -> list[Release]:
    """The releases whose image is known to have exactly this TensorRT."""
    return [release for release, version in TENSORRT_VERSIONS.items() if version == tensorrt]


def cuda_of(triton: str | Release) -> str | None:
    """Major and minor version of the CUDA inside the image of a release; None where not known.

    Raises:
        UserError: `triton` is not a release.
    """
    return CUDA_VERSIONS.get(_release(triton))


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
