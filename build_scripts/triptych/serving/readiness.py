"""Reading a tritonserver's log: which models loaded, which died, and why in one sentence.

A question to a server over HTTP, of which only the status matters.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from triptych.base.errors import UserError
from triptych.container.supervisor import STARVED

_TIMEOUT_S = 2.0


def responds_ok(url: str, path: str) -> bool:
    """Whether a GET of `path` at ``host:port`` is answered with 200."""
    host, _, port = url.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


# `E1120 10:38:17.351952 5534 model_lifecycle.cc:642] "message"`, quoted and escaped.
_HEADER = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] ")
_LOADING = re.compile(r"^loading: (\S+):\d+$")
_LOADED = re.compile(r"successfully loaded '([^']+)'")
# What the server says when a model dies. Matched from the start of a message only: a step may
# print the like of it.
_DIED = [
    re.compile(r"failed to load '(?P<step>[^']+)' version \d+: (?P<reason>.*)", re.DOTALL),
    re.compile(r"failed to load model '(?P<step>[^']+)': (?P<reason>.*)", re.DOTALL),
    re.compile(r"Poll failed for model directory '(?P<step>[^']+)': (?P<reason>.*)", re.DOTALL),
    re.compile(r"Invalid argument: (?P<reason>(?:in )?ensemble '?(?P<step>[^' ,]+).*)", re.DOTALL),
    # The server goes on waiting for such a model for ever: this line is the only sign.
    re.compile(r".*: (?P<reason>Python model file not found in '.*/(?P<step>[^/]+)/\d+/[^/]+')"),
]
_PARSE_ERROR = re.compile(r"Error parsing text-format inference\.ModelConfig: (.*)")
_UNPARSED = "failed to read text proto"
# An ensemble that dies of a step's death says nothing new.
_DEPENDENT = "which has no loaded version"
_CODE = re.compile(r"(?:Internal|Invalid argument|Not found|Unavailable|Unsupported|Unknown): ")
_FRAME = re.compile(r"  (?P<file>\S.*)\((?P<line>\d+)\): (?P<function>.+)")
_DEAD_STUB = re.compile(r"Stub process '[^']+' is not healthy")
_NO_GPU = re.compile(r"specifies invalid or unsupported gpu id (?P<id>\d+)")

_ERROR = re.compile(r"[EF]\d{4} |error: |failed to |.*tritonserver: |what\(\): ")

_STARVATION = "boost::interprocess::lock_exception"

# What every machine without a GPU says: never the reason of anything.
_HARMLESS = (
    "CUDA driver version is insufficient",
    "CudaDriverHelper has not been initialized",
    "Failed to initialize NVML",
    "DCGM unable to start",
)


class ServerError(UserError):
    """A server that did not become ready, or died after it was; its `log_file` is kept.

    `step` is the model that died, empty where it was the server itself; `reason` says why.
    """

    def __init__(self, step: str, rule: str, reason: str, log_file: Path) -> None:
        self.step = step
        self.reason = reason
        self.log_file = log_file
        super().__init__(
            step or "tritonserver", rule, given=reason, remedy=f"The whole log: {log_file}"
        )


class Failure(NamedTuple):
    """A model (`step`) that did not load: the exception and its place, or the server's words."""

    step: str
    reason: str


class LoadState(NamedTuple):
    """What a log tells about the models; causes of failure before the ensembles that depend."""

    loading: tuple[str, ...]
    loaded: tuple[str, ...]
    failures: tuple[Failure, ...]


def read_load_state(log: str, repository: Path) -> LoadState:
    """Reads the log's text so far; places inside the repository are given relative to it."""
    loading: dict[str, None] = {}
    loaded: dict[str, None] = {}
    failures: dict[str, Failure] = {}
    parse_error = ""
    for message in _messages(log):
        if found := _LOADING.match(message):
            loading[found[1]] = None
        elif found := _LOADED.match(message):
            loaded[found[1]] = None
        elif found := _PARSE_ERROR.search(message):
            parse_error = found[1].strip()
        elif found := next((hit for died in _DIED if (hit := died.match(message))), None):
            reason = found["reason"]
            if _UNPARSED in reason and parse_error:
                reason = f"config.pbtxt {parse_error}"
            failure = Failure(found["step"], _sentence(reason, repository))
            failures.setdefault(failure.step, failure)
    causes_first = sorted(failures.values(), key=lambda failure: _DEPENDENT in failure.reason)
    still = [name for name in loading if name not in loaded and name not in failures]
    return LoadState(tuple(still), tuple(loaded), tuple(causes_first))


def find_exit_reason(log: str) -> str:
    """Why a server that exited did so: its first error, else the last line that it wrote."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    said = [line for line in lines if not any(word in line for word in _HARMLESS)]
    errors = [line for line in said if _ERROR.match(line)]
    line = (errors or said[-1:] or ["nothing"])[0]
    words = " ".join(_unquoted(_HEADER.sub("", line)).split())
    return f"{words} ({STARVED})" if is_cpu_starved(log) else words


def is_cpu_starved(log: str) -> bool:
    """Whether the server ended because a step got no CPU for a second."""
    return _STARVATION in log


def _messages(log: str) -> Iterator[str]:
    """The entries' messages, unescaped; lines without a header are what steps print."""
    for line in log.splitlines(keepends=True):
        # A line without an end is still being written.
        if line.endswith("\n") and (_HEADER.match(line) or line.startswith("[")):
            yield _unquoted(_HEADER.sub("", line[:-1], count=1))


def _unquoted(message: str) -> str:
    if not (message.startswith('"') and message.endswith('"')):
        return message
    try:
        return str(json.loads(message))
    except ValueError:
        return message[1:-1]


def _sentence(reason: str, repository: Path) -> str:
    """An exception with its place, without the stack of the import system."""
    said, _, stack = reason.partition("\n\nAt:\n")
    said = " ".join(_CODE.sub("", said, count=1).split()).rstrip(".")
    if _DEAD_STUB.search(said):
        said += ": its Python process died without a traceback, in native code or out of memory"
    if missing := _NO_GPU.search(said):
        said = (
            f"it runs on GPU {missing['id']}, which is not here: serve it where that is, or build "
            "it with core.backend onnxruntime and core.device cpu"
        )
    places = _places(stack, repository)
    return f"{said} ({', called from '.join(places)})" if places else said


def _places(stack: str, repository: Path) -> list[str]:
    """The innermost frame, and the innermost one of the repository where it is another."""
    frames = [found for line in stack.splitlines() if (found := _FRAME.fullmatch(line.rstrip()))]
    frames = [frame for frame in frames if not frame["file"].startswith("<")]
    own = [frame for frame in frames if Path(frame["file"]).is_relative_to(repository)]
    chosen = dict.fromkeys(
        f"{_relative(Path(frame['file']), repository)}:{frame['line']}"
        for frame in (*frames[:1], *own[:1])
    )
    return list(chosen)


def _relative(path: Path, repository: Path) -> Path:
    return path.relative_to(repository) if path.is_relative_to(repository) else path
