"""What TensorRT says while it works, collected, and every known failure as one `UserError`.

The patterns searched for are messages in the libraries of 8.6 and 10, and in logs that users of 10
and 11 reported.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from triptych.base.errors import UserError
from triptych.base.onnx_graph import node_name
from triptych.core.engine.api import Api
from triptych.core.engine.graph import place_of

MAX_QUOTE = 400
MAX_LOG = 10_000
TELL_EVERY_S = 5.0
Tell = Callable[[str], None]


def now_and_then(tell: Tell) -> Tell:
    """`tell` for frequent lines: one every `TELL_EVERY_S`, the others left out."""
    told = time.monotonic()

    def sometimes(line: str) -> None:
        nonlocal told
        if time.monotonic() - told >= TELL_EVERY_S:
            told = time.monotonic()
            tell(line)

    return sometimes


class Messages:
    """A log of TensorRT: messages of the severity ERROR or worse, and those of WARNING."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        # A server may run for months; a build logs far fewer.
        self.warnings: deque[str] = deque(maxlen=MAX_LOG)

    def logger(self, trt: Any, tell: Tell | None = None) -> Any:
        """A logger for TensorRT that writes here; `tell` gets INFO messages now and then."""
        messages, base = self, trt.ILogger
        tell_sometimes = now_and_then(lambda text: tell(_short(text))) if tell else None

        class Logger(base):  # type: ignore[misc,valid-type]
            def __init__(self) -> None:
                base.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (base.ERROR, base.INTERNAL_ERROR):
                    messages.errors.append(message)
                elif severity == base.WARNING:
                    messages.warnings.append(message)
                elif tell_sometimes is not None and severity == base.INFO:
                    tell_sometimes(message)

        return Logger()


class _Failure(NamedTuple):
    """A known failure: what its message looks like, and what to tell the user."""

    pattern: str
    field: str
    rule: str
    remedy: str


_NO_GPU = _Failure(
    r"CUDA initialization failure|no CUDA-capable device|driver version is insufficient",
    "GPU",
    "must be there for TensorRT to build and run engines",
    "Run on a machine with an NVIDIA GPU and its driver: `make engine-in-container NAME=…`",
)
# In this order: what runs out of memory often ends in "no implementation", too.
_FAILURES = (
    _NO_GPU,
    _Failure(
        r"insufficient workspace|do not have sufficient workspace",
        "core.engine.workspace_mib",
        "must be enough for some kernel of every layer",
        "Raise it, or leave it out",
    ),
    _Failure(
        r"OutOfMemory|[Oo]ut of memory|insufficient memory|could not be allocated",
        "GPU memory",
        "must hold the engine's weights and scratch memory while it is built",
        "End what else runs on the GPU, lower core.max_batch_size or core.engine.workspace_mib, "
        "or take a larger GPU",
    ),
    _Failure(
        r"obeys? (?:the )?(?:requested )?(?:precision |type )?constraints",
        "core.precision",
        "must be one that this GPU computes every layer in",
        "Take fp32, or TensorRT 10 or newer",
    ),
    _Failure(
        r"HW-specific datatypes",
        "core.precision",
        "must be one that the GPU computes in",
        "Take fp16, or a newer GPU",
    ),
    _Failure(
        r"Could not find any implementation for node|no implementation available",
        "core.precision",
        "must leave TensorRT a kernel for every layer on this GPU",
        "Take fp16 or fp32, or another GPU or release of TensorRT",
    ),
    _Failure(
        r"MIN<=OPT<=MAX|no optimization profile has been defined|kOPT values are not "
        r"self-consistent|invalid shape profile|OptProfileSelector",
        "plan.engine.profiles",
        "must be ones that the graph accepts",
        "Run `triptych build` again; if that does not help, report it",
    ),
    _Failure(
        r"Version tag does not match|not compatible with this version of TensorRT",
        "model.plan",
        "must be loaded by the release of TensorRT that built it",
        "Run `triptych engine` again, in the image that serves",
    ),
    _Failure(
        r"generated on an incompatible device|not compatible with this hardware-compatible engine",
        "model.plan",
        "must be loaded on the kind of GPU that it was built for",
        "Run `triptych engine` again on this GPU, or set core.engine.hardware",
    ),
    _Failure(
        r"[Nn]o space left on device",
        "disk",
        "must have room for the engine",
        "Free some space",
    ),
)


def no_gpu(given: object) -> UserError:
    return UserError(_NO_GPU.field, _NO_GPU.rule, given=given, remedy=_NO_GPU.remedy)


def failure(messages: Messages, doing: str) -> UserError:
    """Why TensorRT failed to do something, as ``build the engine``.

    The messages are those of the time it failed in; warnings often say more than errors.
    """
    said = [*messages.errors, *messages.warnings]
    for known in _FAILURES:
        for message in said:
            if re.search(known.pattern, message):
                given = _short(message)
                return UserError(known.field, known.rule, given=given, remedy=known.remedy)
    return UserError(
        "tensorrt",
        f"must be able to {doing}",
        given=_short("; ".join(messages.errors)) or "it gave no reason",
        remedy="Try another core.precision or release of TensorRT",
    )


def parser_failure(parser: Any, onnx: Path, api: Api) -> UserError:
    """Why an `OnnxParser` refuses a graph: the first error that names a node, and their number."""
    errors = [parser.get_error(place) for place in range(parser.num_errors)]
    if not errors:
        return UserError(
            onnx.name, "must be a graph that TensorRT reads", given="it gave no reason"
        )
    first = errors[0]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    given = f"{_node_of(first, onnx)}: {_short(str(first.desc()))}{more}"
    code = getattr(first.code(), "name", str(first.code()))
    if code.startswith("UNSUPPORTED_") or "No importer registered" in first.desc():
        return UserError(
            onnx.name,
            f"must have only operators that {api.name} runs",
            given=given,
            remedy="Take a newer release of TensorRT, or core.backend: onnxruntime",
        )
    return UserError(
        onnx.name,
        f"must be a graph that {api.name} reads",
        given=f"{code}, {given}",
        remedy="Run `triptych build` again; if that does not help, take core.backend: onnxruntime",
    )


def _node_of(error: Any, onnx: Path) -> str:
    """Node, operator and place that an error is about; 8.6 names a node by its number only."""
    import onnx as library

    number = int(error.node())
    if number < 0:
        return "the graph"
    graph = library.load(onnx, load_external_data=False).graph
    if hasattr(error, "node_name"):
        name, operator = error.node_name(), error.node_operator()
    elif number < len(graph.node):
        name, operator = node_name(graph.node[number]), graph.node[number].op_type
    else:
        return "the graph"
    place = place_of(graph, name)
    return f"node {name} ({operator})" + (f", {place}" if place else "")


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= MAX_QUOTE else words[: MAX_QUOTE - 1] + "…"
