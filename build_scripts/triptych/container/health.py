"""The health check: the server is up, and every ensemble answers a request or is busy.

Usage: ``python3 -m triptych.container.health``. One line; exit code 0 healthy, 1 not. The models'
own readiness is not enough: it reports a dead Python step only since Triton 25.12, and a frozen
step never. The request is a row of the pipeline's own traffic. A pipeline that generates text has
to generate one token of it, unless its engine makes progress with other requests.

A pipeline that does not answer in time, or refuses the request for overload, may compute other
requests. It is busy, and healthy, as long as each of its models finishes executions. It is stuck if
one of them has finished none for longer than `container.progress` allows.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from triptych.base.errors import UserError
from triptych.container.device_check import unchecked_mark
from triptych.container.flags import RESPONSE_CACHE, mentions
from triptych.container.manifests import ServedPipeline, check_readable, find_pipelines
from triptych.container.progress import Executions, ProgressLog, read_executions
from triptych.container.settings import read_settings
from triptych.runtime.error_messages import read_step_error
from triptych.runtime.rejections import OVERLOADED

QUESTION_FILE = "health.request"
"""File in an ensemble's folder with a request for Triton's HTTP API; the first line is JSON."""
PROMPT_FILE = "health.generate"
"""File in the folder of an ensemble that generates text: JSON for Triton's generate extension."""

COMMAND = ("python3", "-I", "-m", "triptych.container.health")
"""Command of the image's health check and of an orchestrator's probes."""

WORK_FIELD = "x_triptych_work"
"""Parameter in the JSON of `QUESTION_FILE`: tokens of the largest batch, by those of the row."""

STATE_FILE = Path(f"/dev/shm/triptych-health-{os.getuid()}.json")
"""File in which the checks of a container keep what they saw."""

_TIMEOUT_S = 3.0
_LENGTH_BYTES = 4
_METRICS_BYTES = 1 << 24


class HealthCheck:
    """The health check of the server of these pipelines, with their files as they are now.

    Args:
        pipelines: Pipelines to check.
        metrics_url: Address of the server's metrics. Without them a pipeline that does not answer
            in time is not known to be busy.
        state: File that keeps the progress for the checks of later processes.
    """

    def __init__(
        self,
        pipelines: Sequence[ServedPipeline],
        metrics_url: str | None = None,
        state: Path | None = None,
    ) -> None:
        self._models = dict.fromkeys(name for p in pipelines for name in (p.name, *p.steps))
        self._questions = [question for p in pipelines if (question := _read_question(p))]
        self._metrics_url = metrics_url
        self._progress = ProgressLog(state)

    def find_fault(self, url: str) -> str | None:
        """Return the fault of the server at `url` in a few words; None if it is healthy."""
        fault = find_server_fault(url)
        for name in self._models:
            fault = fault or _find_fault(name, f"{url}/v2/models/{name}/ready")
        if fault:
            return fault
        answers = self._ask_all(url)
        try:
            with _open(self._metrics_url or "") as metrics:
                executions = read_executions(metrics.read(_METRICS_BYTES))
        except (OSError, ValueError, http.client.HTTPException):
            executions = {}
        busy = sum(fault is not None for _, fault in answers)
        faults = [self._judge(asked, fault, executions, busy) for asked, fault in answers]
        self._progress.write()
        return next(filter(None, faults), None)

    def ask(self, url: str) -> list[str]:
        """Send each pipeline its request; return those whose core fails it."""
        return [asked.pipeline for asked, fault in self._ask_all(url) if fault and fault.is_of_core]

    def _ask_all(self, url: str) -> list[tuple[_Question, _Fault | None]]:
        with ThreadPoolExecutor(len(self._questions) or 1) as pool:
            return list(pool.map(lambda asked: (asked, asked.ask(url)), self._questions))

    def _judge(
        self,
        asked: _Question,
        fault: _Fault | None,
        executions: Mapping[str, Executions],
        busy: int,
    ) -> str | None:
        """Return the fault of a pipeline, from its answer and the progress of its models."""
        models = {name: executions[name] for name in asked.models if name in executions}
        stuck = self._progress.update(models, asked.work, answered=fault is None, busy=busy)
        if fault is None:
            return None
        if not fault.may_be_busy or not models:
            return None if fault.is_refusal else fault.text
        return stuck and f"{fault.text}, and {stuck}"


def find_server_fault(url: str) -> str | None:
    """Return the fault of the server itself, which is ready once all models are loaded."""
    live = _find_fault("the server", f"{url}/v2/health/live")
    return live or _find_fault("the server", f"{url}/v2/health/ready")


class _Fault(NamedTuple):
    """Fault in a few words."""

    text: str
    may_be_busy: bool = False  # Whether a server that computes other requests may show it, too
    is_refusal: bool = False  # Whether a step refused the request because of overload
    is_of_core: bool = False  # Whether neither a step nor a full queue refused the request


class _Question(NamedTuple):
    """Request to a pipeline."""

    pipeline: str
    body: bytes
    # Names of the models of the ensemble whose progress shows that it is busy; none if it generates
    # text.
    models: Sequence[str] = ()
    work: float = 1.0  # Tokens of the largest batch, by those of the request
    is_cached: bool = False  # Whether a response cache may hold the answer

    def ask(self, url: str) -> _Fault | None:
        """Return the fault of the pipeline."""
        url = f"{url}/v2/models/{self.pipeline}"
        if not self.models:
            return _fault(self.pipeline, f"{url}/generate", self.body)
        head, _, values = (make_unique(self.body) if self.is_cached else self.body).partition(b"\n")
        # With a deadline, a pipeline that cannot answer in time need not compute the request.
        request = {**json.loads(head), "parameters": {"timeout": round(_TIMEOUT_S * 1e6)}}
        head = json.dumps(request).encode() + b"\n"
        headers = {"Inference-Header-Content-Length": str(len(head))}
        return _fault(self.pipeline, f"{url}/infer", head + values, headers)


def _read_question(pipeline: ServedPipeline) -> _Question | None:
    """Return the question of a pipeline; None if it is not one of this project."""
    folder = pipeline.repository / pipeline.name
    if (prompt := folder / PROMPT_FILE).is_file():
        return _Question(pipeline.name, prompt.read_bytes())
    if not (file := folder / QUESTION_FILE).is_file():
        return None
    body, is_cached = file.read_bytes(), mentions(folder, RESPONSE_CACHE)
    work = json.loads(body.partition(b"\n")[0]).get("parameters", {}).get(WORK_FIELD, 1.0)
    return _Question(pipeline.name, body, pipeline.steps, work, is_cached=is_cached)


def make_unique(body: bytes) -> bytes:
    """Return a request that no response cache has answered: white space follows its last value.

    Tokenizers drop the white space, and decoders of images ignore what follows an image. A request
    whose last input has numbers is not changed.
    """
    head, _, values = body.partition(b"\n")
    request = json.loads(head)
    if request["inputs"][-1]["datatype"] != "BYTES":
        return body
    parameters = request["inputs"][-1]["parameters"]
    size = parameters["binary_data_size"]
    value = values[len(values) - size + _LENGTH_BYTES :]
    value += f"{time.time_ns():b}".translate({ord("0"): " ", ord("1"): "\n"}).encode()
    parameters["binary_data_size"] = _LENGTH_BYTES + len(value)
    length = len(value).to_bytes(_LENGTH_BYTES, "little")
    before = values[: len(values) - size]
    return json.dumps(request).encode() + b"\n" + before + length + value


def _find_fault(what: str, url: str) -> str | None:
    fault = _fault(what, url)
    return None if fault is None else fault.text


def _open(url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Any:
    # The probe talks to its own machine; a proxy meant for the outside must not come between.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(urllib.request.Request(url, body, headers or {}), timeout=_TIMEOUT_S)


def _fault(
    what: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> _Fault | None:
    try:
        with _open(url, body, headers) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        said = error.read(1000).decode("utf-8", "replace")
        if body is None:
            return _Fault(f"{what} is not ready (HTTP {error.code})")
        code = error_code(said)
        # Triton itself refuses requests with this status if a queue is full or a wait too long.
        by_triton = code is None and error.code == HTTPStatus.SERVICE_UNAVAILABLE
        text = f"{what} does not answer (HTTP {error.code}: {said})"
        is_of_core = code is None and not by_triton
        return _Fault(text, by_triton or code == OVERLOADED, code == OVERLOADED, is_of_core)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        is_slow = isinstance(reason, TimeoutError)
        return _Fault(f"{what} does not answer ({reason})", is_slow and body is not None)
    return None


def error_code(body: str) -> str | None:
    """Return the code of a step's error in the body of an HTTP response; None if it has none."""
    try:
        message = json.loads(body)["error"]
    except (ValueError, LookupError, TypeError):
        return None
    error = read_step_error(str(message))
    return None if error is None else error.code


def main() -> int:
    """Print one line and return the exit code."""
    try:
        settings = read_settings()
        check_readable(settings.repository)
        pipelines = find_pipelines(settings.repository)
    except UserError as error:
        print(f"unhealthy: {error.message}")
        return 1
    fault = "the repository holds no ensemble"
    if pipelines:
        check = HealthCheck(pipelines, settings.metrics_url, STATE_FILE)
        # Looked at first: a server that fails the gate ends before its mark does.
        is_unchecked = unchecked_mark(settings.http_port).exists()
        fault = check.find_fault(settings.health_url) or ""
        if is_unchecked:
            fault = fault or "the accuracy gate still runs on this device"
    names = ", ".join(pipeline.name for pipeline in pipelines)
    print(f"unhealthy: {fault}" if fault else f"healthy: {names}")
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main())
