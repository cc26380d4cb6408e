"""The health check: the server is up, and every ensemble answers a question in time.

Usage: ``python3 -m triptych.container.health``. One line; exit code 0 healthy, 1 not. The models'
own readiness is not enough: it reports a dead Python step only since Triton 25.12, and a frozen
step never. The request is a row of the pipeline's own traffic. A pipeline that generates text has
to generate one token of it, unless its engine makes progress with other requests.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from triptych.base.errors import UserError
from triptych.container.flags import RESPONSE_CACHE, mentions
from triptych.container.manifests import ServedPipeline, find_pipelines
from triptych.container.settings import read_settings
from triptych.runtime.request_errors import OVERLOADED, read_step_error

QUESTION_FILE = "health.request"
"""File in an ensemble's folder with a request for Triton's HTTP API; the first line is JSON."""
PROMPT_FILE = "health.generate"
"""File in the folder of an ensemble that generates text: JSON for Triton's generate extension."""

COMMAND = ("python3", "-m", "triptych.container.health")
"""Command of the image's health check and of an orchestrator's probes."""

_TIMEOUT_S = 3.0
_LENGTH_BYTES = 4


class HealthCheck:
    """The health check of the server of these pipelines, with their files as they are now."""

    def __init__(self, pipelines: Sequence[ServedPipeline]) -> None:
        self._models = dict.fromkeys(name for p in pipelines for name in (p.name, *p.steps))
        self._questions = [question for p in pipelines if (question := _read_question(p))]

    def find_fault(self, url: str) -> str | None:
        """Return the fault of the server at `url` in a few words; None if it is healthy."""
        fault = find_server_fault(url)
        for name in self._models:
            fault = fault or _fault(name, f"{url}/v2/models/{name}/ready")
        return fault or self.ask(url)

    def ask(self, url: str) -> str | None:
        """Send each pipeline its request; return the first fault, if any."""
        with ThreadPoolExecutor(len(self._questions) or 1) as pool:
            return next(filter(None, pool.map(lambda asked: asked.ask(url), self._questions)), None)


def find_server_fault(url: str) -> str | None:
    """Return the fault of the server itself, which is ready once all models are loaded."""
    live = _fault("the server", f"{url}/v2/health/live")
    return live or _fault("the server", f"{url}/v2/health/ready")


class _Question(NamedTuple):
    """Request to a pipeline; `is_cached` if a response cache may hold the answer."""

    pipeline: str
    body: bytes
    generates: bool = False
    is_cached: bool = False

    def ask(self, url: str) -> str | None:
        """Return the fault of the pipeline."""
        url = f"{url}/v2/models/{self.pipeline}"
        if self.generates:
            return _fault(self.pipeline, f"{url}/generate", self.body)
        body = _with_deadline(make_unique(self.body) if self.is_cached else self.body)
        headers = {"Inference-Header-Content-Length": str(body.index(b"\n") + 1)}
        return _fault(self.pipeline, f"{url}/infer", body, headers)


def _read_question(pipeline: ServedPipeline) -> _Question | None:
    """Return the question of a pipeline; None if it is not one of this project."""
    folder = pipeline.repository / pipeline.name
    if (prompt := folder / PROMPT_FILE).is_file():
        return _Question(pipeline.name, prompt.read_bytes(), generates=True)
    if not (file := folder / QUESTION_FILE).is_file():
        return None
    is_cached = mentions(folder, RESPONSE_CACHE)
    return _Question(pipeline.name, file.read_bytes(), is_cached=is_cached)


def _with_deadline(body: bytes) -> bytes:
    """Return a request that an overloaded pipeline rejects before the check ends.

    Without a deadline it may let the request wait for longer, which would look like a fault.
    """
    head, _, values = body.partition(b"\n")
    request = {**json.loads(head), "parameters": {"timeout": round(_TIMEOUT_S * 1e6)}}
    return json.dumps(request).encode() + b"\n" + values


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


def _fault(
    what: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> str | None:
    # The probe talks to its own machine; a proxy meant for the outside must not come between.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(
            urllib.request.Request(url, body, headers or {}), timeout=_TIMEOUT_S
        ) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        said = error.read(1000).decode("utf-8", "replace")
        if body is not None:
            # A pipeline that has as much work as it takes is a healthy one.
            busy = error_code(said) == OVERLOADED
            return None if busy else f"{what} does not answer (HTTP {error.code}: {said})"
        return f"{what} is not ready (HTTP {error.code})"
    except OSError as error:
        return f"{what} does not answer ({getattr(error, 'reason', error)})"
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
        pipelines = find_pipelines(settings.repository)
    except UserError as error:
        print(f"unhealthy: {error.message}")
        return 1
    fault = "the repository holds no ensemble"
    if pipelines:
        fault = HealthCheck(pipelines).find_fault(settings.health_url) or ""
    names = ", ".join(pipeline.name for pipeline in pipelines)
    print(f"unhealthy: {fault}" if fault else f"healthy: {names}")
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main())
