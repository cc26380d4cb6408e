"""Collect TensorRT's messages, and turn every known failure into a `UserError`.

The patterns are messages in the libraries of 10, and in logs that users of 10 and 11 reported.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from triptych.base.errors import UserError
from triptych.core.engine.api import Api
from triptych.core.engine.graph import describe_position

if TYPE_CHECKING:
    import tensorrt as trt

MAX_QUOTE = 400
MAX_LOG = 10_000


class Messages:
    """Log of TensorRT: messages of severity ERROR or worse, and of severity WARNING."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        # The limit is for servers, which may run for months; a build logs far fewer messages.
        self.warnings: deque[str] = deque(maxlen=MAX_LOG)

    def logger(self, trt: ModuleType) -> trt.ILogger:
        """Return a logger for TensorRT that writes to this object."""
        messages, base = self, trt.ILogger

        class Logger(base):  # type: ignore[misc,valid-type]
            def __init__(self) -> None:
                base.__init__(self)

            def log(self, severity: object, message: str) -> None:
                if severity in (base.ERROR, base.INTERNAL_ERROR):
                    messages.errors.append(message)
                elif severity == base.WARNING:
                    messages.warnings.append(message)

        return Logger()


class _Failure(NamedTuple):
    """A known failure: pattern of its message, and the error for the user."""

    pattern: str
    field: str
    rule: str
    remedy: str


_NO_GPU = _Failure(
    r"CUDA initialization failure|no CUDA-capable device|driver version is insufficient",
    "GPU",
    "is missing, and TensorRT needs one to build and run engines",
    "Run on a machine with an NVIDIA GPU and its driver: `triptych engine NAME`, or `make "
    "engine-in-container NAME=…` in a clone of Triptych",
)
# The order matters: a failure for lack of memory often also reports "no implementation".
_FAILURES = (
    _NO_GPU,
    _Failure(
        r"insufficient workspace|do not have sufficient workspace",
        "core.engine.workspace_mib",
        "is too small for every kernel of some layer",
        "Raise it, or remove it",
    ),
    _Failure(
        r"OutOfMemory|[Oo]ut of memory|insufficient memory|could not be allocated",
        "GPU memory",
        "is too small for the engine's weights and scratch memory during the build",
        "Stop other programs on the GPU, lower core.max_batch_size or core.engine.workspace_mib, "
        "or use a larger GPU",
    ),
    _Failure(
        r"HW-specific datatypes",
        "core.precision",
        "is a type that the GPU does not support",
        "Set it to fp16, or use a newer GPU",
    ),
    _Failure(
        r"Could not find any implementation for node|no implementation available",
        "core.precision",
        "leaves TensorRT without a kernel for some layer on this GPU",
        "Set it to fp16 or fp32, or use another GPU or release of TensorRT",
    ),
    _Failure(
        r"MIN<=OPT<=MAX|no optimization profile has been defined|kOPT values are not "
        r"self-consistent|invalid shape profile|OptProfileSelector",
        "plan.engine.profiles",
        "do not match the graph",
        "Run `triptych build` again; if that does not help, report it",
    ),
    _Failure(
        r"Version tag does not match|not compatible with this version of TensorRT",
        "model.plan",
        "was built by another release of TensorRT",
        "Run `triptych engine` again, in the image that serves",
    ),
    _Failure(
        r"generated on an incompatible device|not compatible with this hardware-compatible engine",
        "model.plan",
        "was built for another kind of GPU",
        "Run `triptych engine` again on this GPU, or set core.engine.hardware",
    ),
    _Failure(
        r"[Nn]o space left on device",
        "disk",
        "has no space for the engine",
        "Free disk space",
    ),
)


def no_gpu(given: object) -> UserError:
    """Return the error for a machine without a usable GPU."""
    return UserError(_NO_GPU.field, _NO_GPU.rule, given=given, remedy=_NO_GPU.remedy)


def failure(messages: Messages, doing: str) -> UserError:
    """Return the error for TensorRT's failure to do something, such as ``build the engine``.

    `messages` contains the messages of the failed call; warnings often contain more than errors.
    """
    said = [*messages.errors, *messages.warnings]
    for known in _FAILURES:
        for message in said:
            if re.search(known.pattern, message):
                given = _short(message)
                return UserError(known.field, known.rule, given=given, remedy=known.remedy)
    return UserError(
        "tensorrt",
        f"cannot {doing}",
        given=_short("; ".join(messages.errors)) or "no reason",
        remedy="Try another core.precision or release of TensorRT",
    )


def parser_failure(parser: trt.OnnxParser, onnx: Path, api: Api) -> UserError:
    """Return the error for a graph that an `OnnxParser` rejects.

    It contains the first error, which names a node, and the number of errors.
    """
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    if not errors:
        return UserError(
            onnx.name,
            "is rejected by TensorRT's parser",
            given="no reason",
            remedy="Set core.backend to onnxruntime, and report it",
        )
    first = errors[0]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    given = f"{_node_of(first, onnx)}: {_short(str(first.desc()))}{more}"
    code = getattr(first.code(), "name", str(first.code()))
    if code.startswith("UNSUPPORTED_") or "No importer registered" in first.desc():
        return UserError(
            onnx.name,
            f"has operators that {api.name} does not support",
            given=given,
            remedy="Use a newer release of TensorRT, or core.backend: onnxruntime",
        )
    return UserError(
        onnx.name,
        f"is rejected by the parser of {api.name}",
        given=f"{code}, {given}",
        remedy="Run `triptych build` again; if that does not help, set core.backend to onnxruntime",
    )


def _node_of(error: trt.ParserError, onnx: Path) -> str:
    """Return name, operator and position of the node that an error is about."""
    import onnx as library

    if int(error.node()) < 0:
        return "the graph"
    name = error.node_name()
    position = describe_position(library.load(onnx, load_external_data=False).graph, name)
    return f"node {name} ({error.node_operator()})" + (f", {position}" if position else "")


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= MAX_QUOTE else words[: MAX_QUOTE - 1] + "…"
