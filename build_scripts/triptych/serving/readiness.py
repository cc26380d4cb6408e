"""Read loaded and failed models from a tritonserver's log, and probe a server by HTTP."""

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
    """Return whether ``GET path`` at ``host:port`` returns status 200."""
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
# Messages of a model that failed. They are matched from the start only, because a step may print
# similar text.
_DIED = [
    re.compile(r"failed to load '(?P<step>[^']+)' version \d+: (?P<reason>.*)", re.DOTALL),
    re.compile(r"failed to load model '(?P<step>[^']+)': (?P<reason>.*)", re.DOTALL),
    re.compile(r"Poll failed for model directory '(?P<step>[^']+)': (?P<reason>.*)", re.DOTALL),
    re.compile(r"Invalid argument: (?P<reason>(?:in )?ensemble '?(?P<step>[^' ,]+).*)", re.DOTALL),
    # The server waits for such a model forever; this line is the only message.
    re.compile(r".*: (?P<reason>Python model file not found in '.*/(?P<step>[^/]+)/\d+/[^/]+')"),
]
_PARSE_ERROR = re.compile(r"Error parsing text-format inference\.ModelConfig: (.*)")
_UNPARSED = "failed to read text proto"
# An ensemble that fails because a step failed adds no information.
_DEPENDENT = "which has no loaded version"
_CODE = re.compile(r"(?:Internal|Invalid argument|Not found|Unavailable|Unsupported|Unknown): ")
_FRAME = re.compile(r"  (?P<file>\S.*)\((?P<line>\d+)\): (?P<function>.+)")
_DEAD_STUB = re.compile(r"Stub process '[^']+' is not healthy")
# The second is of a server that was compiled without CUDA.
_NO_GPU = re.compile(
    r"specifies invalid or unsupported gpu id (?P<id>\d+)"
    r"|has kind KIND_GPU but server does not support GPUs"
)

_ERROR = re.compile(r"[EF]\d{4} |error: |failed to |.*tritonserver: |what\(\): ")

_STARVATION = "boost::interprocess::lock_exception"

# Messages of every machine without a GPU, which are never the reason of a failure.
_HARMLESS = (
    "CUDA driver version is insufficient",
    "CudaDriverHelper has not been initialized",
    "Failed to initialize NVML",
    "DCGM unable to start",
)


class ServerError(UserError):
    """Error of a server that did not become ready or crashed later; its log file is retained.

    Attributes:
        step: Model that failed; empty if the server itself failed.
        reason: Reason of the failure.
    """

    def __init__(self, step: str, rule: str, reason: str, log_file: Path) -> None:
        self.step = step
        self.reason = reason
        self.log_file = log_file
        super().__init__(
            step or "tritonserver", rule, given=reason, remedy=f"See the log: {log_file}"
        )


class Failure(NamedTuple):
    """A model that did not load, with the exception and its location, or the server's message."""

    step: str
    reason: str


class LoadState(NamedTuple):
    """State of the models according to a log; failed steps come before ensembles that use them."""

    loading: tuple[str, ...]
    loaded: tuple[str, ...]
    failures: tuple[Failure, ...]


def read_load_state(log: str, repository: Path) -> LoadState:
    """Return the state of the models in a log's text; paths are relative to the repository."""
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
    """Return why a server exited: its first error, or else the last line of its log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    relevant = [line for line in lines if not any(word in line for word in _HARMLESS)]
    errors = [line for line in relevant if _ERROR.match(line)]
    line = (errors or relevant[-1:] or ["nothing"])[0]
    reason = " ".join(_unquoted(_HEADER.sub("", line)).split())
    return f"{reason} ({STARVED})" if is_cpu_starved(log) else reason


def is_cpu_starved(log: str) -> bool:
    """Return whether the server ended because a step got no CPU for one second."""
    return _STARVATION in log


def _messages(log: str) -> Iterator[str]:
    """Yield the unescaped messages of log entries; lines without a header are printed by steps."""
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
    """Return an exception and its location as one sentence, without import frames."""
    text, _, stack = reason.partition("\n\nAt:\n")
    text = " ".join(_CODE.sub("", text, count=1).split()).rstrip(".")
    if _DEAD_STUB.search(text):
        text += ": its Python process died without a traceback, in native code or out of memory"
    if missing := _NO_GPU.search(text):
        number = missing["id"]
        lacks = (
            f"GPU {number}, which this machine lacks: serve it where that GPU is installed"
            if number
            else "a GPU, which this server does not support: serve it with a server for GPUs"
        )
        text = f"it needs {lacks}, or build it with core.backend onnxruntime and core.device cpu"
    locations = _find_locations(stack, repository)
    return f"{text} ({', called from '.join(locations)})" if locations else text


def _find_locations(stack: str, repository: Path) -> list[str]:
    """Return the locations of the innermost frame and of the innermost frame in the repository."""
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
