"""Find NVIDIA's perf_analyzer and run it with real requests.

Usage: ``run(url, "minilm", texts, OfferedLoad("concurrency", 32), Duration())``. The program comes
from PATH or from an older tritonclient wheel.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np

from triptych.base.errors import UserError
from triptych.base.extras import BASE, download_wheels, install_command
from triptych.base.files import os_errors_as_user_errors, scratch_folder, write_files
from triptych.serving.bench.perf_output import PERCENTILE, LoadResult, read_export
from triptych.serving.bench.results import OfferedLoad
from triptych.serving.embedded import find_wheel

# The last release whose binary runs on glibc 2.35, like the embedded server; later ones need 2.38.
VERSION = "2.51.0"
_WHEEL_SHA256 = "c485bb0123bdf310f90bc8b03d3489b28df2ffed55b30c7eee0b795b48113d52"
_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
DEFAULT_CACHE = Path(".cache") / "perf_analyzer"
_VERSION_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class PerfAnalyzer:
    binary: Path
    libraries: Path | None = None  # folder of libraries for the binary; None if the system has them

    def environment(self) -> dict[str, str]:
        variables = dict(os.environ)
        if self.libraries is not None:
            folders = [str(self.libraries.resolve()), os.environ.get("LD_LIBRARY_PATH", "")]
            variables["LD_LIBRARY_PATH"] = os.pathsep.join(folder for folder in folders if folder)
        return variables


def find_perf_analyzer(cache: Path = DEFAULT_CACHE) -> PerfAnalyzer:
    """Return the perf_analyzer on PATH if it runs, otherwise a copy fetched into `cache`.

    Raises:
        UserError: The program cannot be fetched, or does not run on this machine.
    """
    on_path = shutil.which("perf_analyzer")
    if on_path and not _complaint(PerfAnalyzer(Path(on_path))):
        return PerfAnalyzer(Path(on_path))
    folder = cache / VERSION
    found = PerfAnalyzer(folder / "perf_analyzer", folder / "lib")
    if not _is_whole(folder):
        _check_platform()
        _install(folder)
    complaint = _complaint(found)
    if complaint:
        raise UserError(
            "perf_analyzer",
            "must run on this machine",
            given=complaint,
            remedy="Install the library that it names, or put another perf_analyzer on PATH",
        )
    return found


def _complaint(analyzer: PerfAnalyzer) -> str:
    """Return the reason why the program does not run on this machine; empty if it runs."""
    try:
        done = subprocess.run(
            [analyzer.binary, "--version"],
            env=analyzer.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]


def _check_platform() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UserError(
            "perf_analyzer",
            "is published for x86-64 Linux only",
            given=f"{platform.machine()} {sys.platform}",
            remedy="Run the load from such a machine, or put a perf_analyzer of your own on PATH",
        )


def _is_whole(folder: Path) -> bool:
    links = [folder / "lib" / name for name in _LIBRARIES]
    return all(path.is_file() for path in (folder / "perf_analyzer", *links))


def _install(folder: Path) -> None:
    """Fetch the wheel and create `folder` atomically."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetching-") as name:
        scratch = Path(name)
        ready = scratch / "ready"
        ready.mkdir()
        _link_libraries(ready / "lib")
        binary = ready / "perf_analyzer"
        with zipfile.ZipFile(_fetch_wheel(scratch)) as wheel:
            member = next(n for n in wheel.namelist() if n.endswith("/data/bin/perf_analyzer"))
            binary.write_bytes(wheel.read(member))
        binary.chmod(0o755)
        if folder.exists():  # incomplete: its links point into a removed environment
            folder.rename(scratch / "stale")
        try:
            ready.rename(folder)
        except OSError:
            if not _is_whole(folder):  # else another process was faster
                raise


def _link_libraries(folder: Path) -> None:
    wheel = find_wheel()
    folder.mkdir()
    for name, pattern in _LIBRARIES.items():
        found = sorted(wheel.libraries.glob(pattern)) if wheel is not None else []
        if not found:
            raise UserError(
                "perf_analyzer",
                f"needs {name}, which comes with the `nvidia-pytriton` wheel",
                given="a wheel without it" if wheel else "no such wheel",
                remedy=f"Run `{install_command(BASE, ['nvidia-pytriton'])}`, "
                "or put a perf_analyzer on PATH",
            )
        (folder / name).symlink_to(found[0].resolve())


def _fetch_wheel(folder: Path) -> Path:
    wanted = f"tritonclient=={VERSION}"
    remedy = "Check the connection to the package index, or put perf_analyzer on PATH"
    complaint = download_wheels([wanted], folder, "--platform=manylinux1_x86_64")
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        raise UserError(
            "perf_analyzer",
            f"must be on PATH, or `pip download {wanted}` must work",
            given=complaint,
            remedy=remedy,
        )
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != _WHEEL_SHA256:
        raise UserError(
            wanted, f"must have the SHA-256 {_WHEEL_SHA256}", given=digest, remedy=remedy
        )
    return wheel


__all__ = ["Distribution", "LoadError", "LoadResult", "Request", "run"]

WINDOWS_SPAN = 3.6
"""Actual duration of perf_analyzer's three windows, relative to the requested one of each."""

# With this tolerance, perf_analyzer accepts and merges the first three windows. It would report
# nothing for unstable windows, so `check_stability` judges their stability.
_ANY_SPREAD = "1e6"

# Messages of perf_analyzer for a window without a response, at the client or in server statistics.
_NOTHING_ANSWERED = ("No valid requests recorded", "failed to find the requested model version")

_DELAYED = re.compile(r"[\d.]+% of the requests were delayed")

Request = str | Mapping[str, Any]
Distribution = Literal["poisson", "constant", "burst"]


class LoadError(UserError):
    """Failure of a measurement: failed requests, or a failure of perf_analyzer itself.

    Attributes:
        errors: Distinct errors of the server; empty without any.
        is_late: Whether responses were missing at the end of the time.
        is_empty: Whether a window was too short for a response.
        output: All output of perf_analyzer.
    """

    def __init__(
        self,
        rule: str,
        given: str,
        remedy: str,
        output: str,
        *,
        errors: tuple[str, ...] = (),
        is_late: bool = False,
        is_empty: bool = False,
    ) -> None:
        self.errors = errors
        self.is_late = is_late
        self.is_empty = is_empty or any(sign in output for sign in _NOTHING_ANSWERED)
        self.output = output
        super().__init__("load", rule, given=given, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class RequestForm:
    """Form in which requests are sent."""

    # Whether a request is a stream of responses, which ends with a finish reason.
    streaming: bool = False
    # HTTP path for POST requests to a server of another kind; each request is then the JSON text of
    # a body.
    http_path: str | None = None
    batch_size: int = 1  # Number of requests joined as the rows of one


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Duration of a measurement."""

    # Duration of each of three windows in seconds; longer by a little in an open loop.
    window_s: float = 5.0
    # Number of requests to send instead of windows. perf_analyzer checks for the end once per
    # second, so the throughput can be too low by one second.
    request_count: int | None = None
    warmup_requests: int = 0  # Number of uncounted requests before the measurement


TENSORS = RequestForm()
"""One request of unchanged tensors with one response."""


def run(
    url: str,
    model: str,
    requests: Sequence[Request],
    load: OfferedLoad,
    span: Duration,
    *,
    form: RequestForm = TENSORS,
    timeout_s: float = 900.0,
) -> LoadResult:
    """Load `model` over gRPC and measure it from the client.

    The requests are sent in turn and repeated, for three consecutive windows. perf_analyzer exports
    the times of each request together with all inputs and outputs into a temporary file: 8 KiB per
    request with 384 numbers, 0.3 MiB with a 100 kB image. It writes them after the last window, at
    10 s per GB.

    Args:
        url: ``host:port``.
        model: Name of a model or ensemble.
        requests: Requests; a text stands for ``{"text": text}``. Each value becomes an unchanged
            BYTES tensor ``[1]``.
        load: Closed or open loop. The mean rate of bursts, at constant intervals, is that of the
            load.
        span: Duration of the measurement.
        form: Form of the requests.
        timeout_s: Timeout of warm-up and measurement together, in seconds.

    Raises:
        UserError: An argument is out of range, or perf_analyzer is missing.
        LoadError: A request failed or none was answered, the model is missing, or the timeout
            expired.
    """
    _check(requests, load)
    deadline = time.monotonic() + timeout_s
    analyzer = find_perf_analyzer()
    host = url.rpartition(":")[0]  # requests to the server must bypass proxies
    variables = {**analyzer.environment(), "no_grpc_proxy": host, "NO_PROXY": host}
    service = ["-i", "grpc"]
    rows = [_row(request) for request in requests]
    if form.http_path is not None:
        # Only the service kind `openai` of perf_analyzer posts arbitrary JSON.
        service = ["--service-kind=openai", f"--endpoint={form.http_path}"]
        rows = [{"payload": [json.loads(str(request))]} for request in requests]
    with scratch_folder("triptych-load-") as scratch:
        data, times = scratch / "data.json", scratch / "times.json"
        data.write_text(json.dumps({"data": rows}), encoding="ascii")
        command = [
            str(analyzer.binary.resolve()),
            *("-m", model, "-u", url, *service, f"--input-data={data}", f"-b{form.batch_size}"),
            *_load_arguments(load, WINDOWS_SPAN * span.window_s, scratch),
            # A local server needs half of the cores.
            *(["--streaming"] if form.streaming else []),
            *("--async", f"--max-threads={max(1, (os.cpu_count() or 2) // 2)}"),
            *("-v", f"--percentile={PERCENTILE}", f"--stability-percentage={_ANY_SPREAD}"),
        ]
        if span.warmup_requests:
            _measure([*command, f"--request-count={span.warmup_requests}"], variables, deadline)
        command.append(f"--profile-export-file={times}")
        if span.request_count is not None:
            command.append(f"--request-count={span.request_count}")
        else:
            command.append(f"--measurement-interval={round(span.window_s * 1000)}")
        output = _measure(command, variables, deadline)
        result = read_export(times, streaming=form.streaming)
    if result is None:
        raise LoadError(
            "must be answered within the windows",
            "perf_analyzer exported no answer",
            "Measure for longer, or lower the load",
            output,
            is_late=True,
            is_empty=True,
        )
    # perf_analyzer prints the rate only if requests were late.
    sent = re.search(r"Avg send request rate: (\S+) infer/sec", output)
    # It counts requests as delayed that are microseconds late, which are nearly all of a burst.
    # `sent_per_s` shows whether it keeps up.
    warnings = [line.strip() for line in output.splitlines() if "[WARNING]" in line]
    wanted_per_s = None if load.kind == "concurrency" else load.value
    return replace(
        result,
        warnings=tuple(line for line in warnings if not _DELAYED.search(line)),
        sent_per_s=float(sent[1]) if sent else wanted_per_s,
    )


def _check(requests: Sequence[Request], load: OfferedLoad) -> None:
    if not requests:
        raise UserError("requests", "must not be empty", remedy="Add lines to the traffic file")
    if load.kind == "concurrency" and load.value < 1:
        raise UserError("concurrency", "must be at least 1", given=load.value, remedy="Raise it")
    if load.value <= 0:
        raise UserError("rate", "must be above 0", given=load.value, remedy="Raise it")
    if load.burst < 1:
        raise UserError("burst", "must be at least 1", given=load.burst, remedy="Raise it")


def _load_arguments(load: OfferedLoad, seconds: float, scratch: Path) -> list[str]:
    if load.kind == "concurrency":
        return [f"--concurrency-range={round(load.value)}"]
    if load.kind == "constant":
        return [f"--request-rate-range={load.value:g}", "--request-distribution=constant"]
    intervals_us = [0] * (load.burst - 1) + [max(1, round(load.burst / load.value * 1e6))]
    if load.kind == "poisson":
        intervals_us = draw_intervals_us(load.value, seconds)
    file = scratch / "intervals_us.txt"
    file.write_text("".join(f"{pause_us}\n" for pause_us in intervals_us), encoding="ascii")
    return [f"--request-intervals={file}"]


def draw_intervals_us(rate_per_s: float, seconds: float) -> list[int]:
    """Return the intervals of Poisson arrivals with the expected number of requests, in µs.

    A draw of perf_analyzer itself has another number of requests, 20 % less in a few seconds. The
    arrivals of a Poisson process, given their number, are independent uniform times, so the
    intervals of any draw may be scaled to the duration. perf_analyzer repeats them.

    Args:
        rate_per_s: Requests per second.
        seconds: Duration of the measurement.
    """
    count = max(1, round(rate_per_s * seconds))
    random = Random()
    drawn = [random.expovariate(1) for _ in range(count)]
    scale = count / rate_per_s * 1e6 / sum(drawn)
    return [max(1, round(scale * each)) for each in drawn]


def _row(request: Request) -> dict[str, object]:
    """Return a row of perf_analyzer's input data.

    Strings are base64 of their wire format (length, bytes), because perf_analyzer cuts plain
    strings at the first NUL.
    """
    tensors = {"text": request} if isinstance(request, str) else request
    row: dict[str, object] = {}
    for name, value in tensors.items():
        if isinstance(value, np.ndarray):
            content = {"b64": base64.b64encode(value.tobytes()).decode("ascii")}
            row[name] = {"content": content, "shape": list(value.shape)}
            continue
        raw = value.encode() if isinstance(value, str) else value
        wire = base64.b64encode(struct.pack("<I", len(raw)) + raw).decode("ascii")
        row[name] = {"content": {"b64": wire}, "shape": [1]}
    return row


def export_rows(file: Path, requests: Sequence[Request], settings: Mapping[str, Any]) -> None:
    """Write requests for ``perf_analyzer --input-data``, with every option in each row.

    With shared memory, perf_analyzer refuses rows without an option, which is an optional input.

    Args:
        file: File to write.
        requests: Requests, as for `run`.
        settings: Settings of a step, with the rules of the options and their defaults. An option
            without a default gets its largest number, false, or its first choice.
    """
    options: dict[str, object] = {}
    defaults = settings.get("parameters", {})
    for name, rule in settings.get("request_parameters", {}).items():
        first = rule.get("choices", [""])[0]
        value = defaults.get(name, {"bool": False, "str": first}.get(rule["type"], rule.get("max")))
        options[name] = [json.dumps(value) if rule["type"] == "list" else value]
    rows = [_row(request) | options for request in requests]
    with os_errors_as_user_errors(file.parent, "--export-perf"):
        write_files(file.parent, {file.name: json.dumps({"data": rows})})


def _measure(command: Sequence[str], variables: Mapping[str, str], deadline: float) -> str:
    """Return the output of perf_analyzer; raise `LoadError` if it fails or times out."""
    try:
        done = subprocess.run(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max(0.0, deadline - time.monotonic()),
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        raise LoadError(
            "must be answered in time",
            "perf_analyzer was still waiting",
            "Raise the timeout, or lower the load",
            (expired.stdout or b"").decode(errors="replace"),
            is_late=True,
        ) from None
    output = done.stdout.decode(errors="replace")
    if done.returncode == 0:
        return output
    errors = tuple(dict.fromkeys(re.findall(r"had error: (.*\S)", output)))
    if errors:
        raise LoadError(
            "must be answered without errors",
            "; ".join(errors),
            "perf_analyzer stops at the first one; the server's log may say more",
            output,
            errors=errors,
        )
    how = f"exit status {done.returncode}"
    if done.returncode < 0:
        how = f"signal {signal.Signals(-done.returncode).name}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    complaint = next((line for line in lines if line.lower().startswith("error:")), "")
    raise LoadError(
        "must be measured",
        f"perf_analyzer ended with {how}: {complaint or ' '.join(lines[-2:])}",
        "Check the model's name and the server; windows must be long enough to hold some requests",
        output,
        is_late=any(sign in output for sign in _NOTHING_ANSWERED),
    )
