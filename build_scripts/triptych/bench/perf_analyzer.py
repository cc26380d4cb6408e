"""NVIDIA's perf_analyzer run on real requests: what it is given, and what goes wrong with it.

Usage: ``run(server.grpc_url, "minilm", texts, concurrency=32).throughput_per_s``.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from triptych.bench.perf_binary import DEFAULT_CACHE, find_perf_analyzer
from triptych.bench.perf_output import (
    LoadResult,
    Percentile,
    StepLoad,
    Window,
    read_export,
    read_result,
)
from triptych.errors import UserError

__all__ = ["Distribution", "LoadError", "LoadResult", "Request", "StepLoad", "Window", "run"]

# perf_analyzer takes the first three windows for stable and merges them: `run` judges them itself,
# because an unstable measurement makes perf_analyzer exit without a single number.
_ANY_SPREAD = "1e6"

Request = str | Mapping[str, str | bytes]
Distribution = Literal["constant", "poisson", "burst"]


class LoadError(UserError):
    """perf_analyzer gave no measurement: a request was answered with an error, or it failed itself.

    Attributes:
        errors: the different errors that the server answered with; empty where there was none.
        is_late: whether answers were still missing when the time was over.
        output: everything that perf_analyzer wrote.
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
    ) -> None:
        self.errors = errors
        self.is_late = is_late
        self.output = output
        super().__init__("load", rule, given=given, remedy=remedy)


def run(
    grpc_url: str,
    model: str,
    requests: Sequence[Request],
    *,
    concurrency: int | None = None,
    request_rate_per_s: float | None = None,
    distribution: Distribution = "poisson",
    burst: int = 1,
    window_s: float = 5.0,
    request_count: int | None = None,
    warmup_requests: int = 0,
    percentile: Percentile = 99,
    stability_percent: float = 10.0,
    attempts: int = 1,
    timeout_s: float = 900.0,
    exports: bool = False,
    cache: Path = DEFAULT_CACHE,
) -> LoadResult:
    """Load `model` over gRPC and measure it from the client.

    All requests are sent in turn, over and over. One measurement is three windows one after the
    other; where they disagree it is repeated, up to `attempts` times, and the last one is returned.

    Args:
        grpc_url: ``host:port``.
        model: the model or ensemble.
        requests: what to send; a text stands for ``{"text": text}``. Each value becomes a BYTES
            tensor of shape ``[1]``, exactly as it is.
        concurrency: closed loop: clients that each send a request when the last one is answered.
        request_rate_per_s: open loop: requests a second, whatever comes back. Give one of the two.
        distribution: of the time between the requests of an open loop; ``burst`` sends `burst` of
            them at once, in even steps.
        burst: requests sent at once; the mean rate stays `request_rate_per_s`.
        window_s: length of a window, in seconds; an open loop stretches it a little.
        request_count: send so many requests and stop, in place of windows. perf_analyzer looks
            once a second whether they are done: the throughput is low by up to a second's worth.
        warmup_requests: sent before, and not counted.
        percentile: whose latency must be stable, besides the throughput.
        stability_percent: how far the highest window may lie above the lowest.
        attempts: measurements at most.
        timeout_s: for everything together, in seconds.
        exports: also read the times of every single request, into `LoadResult.export`. The file
            that carries them has all inputs and outputs too (8 KiB a request with 384 numbers,
            0.3 MiB with an image of 100 kB): nothing in it can be switched off, and perf_analyzer
            takes some 10 s a GB to write it, but after the last window. It is removed at once.
        cache: where a fetched perf_analyzer is kept.

    Raises:
        UserError: an argument out of range, or no perf_analyzer.
        LoadError: a failed request, a model that is not there, no answer in time.
    """
    _check(requests, concurrency, request_rate_per_s, attempts, percentile, burst)
    deadline = time.monotonic() + timeout_s
    analyzer = find_perf_analyzer(cache)
    windows = [f"--measurement-interval={round(window_s * 1000)}"]
    if request_count is not None:
        windows = [f"--request-count={request_count}"]
    with tempfile.TemporaryDirectory(prefix="triptych-load-") as name:
        scratch = Path(name)
        data, report, times = (scratch / name for name in ("data.json", "report.csv", "times.json"))
        _write_requests(requests, data)
        load = _load(concurrency, request_rate_per_s, distribution, burst, scratch)
        command = [
            str(analyzer.binary.resolve()),
            *("-m", model, "-u", grpc_url, "-i", "grpc", f"--input-data={data}", *load),
            # Its threads share the cores with the server where both run on one machine.
            *("--async", f"--max-threads={max(1, (os.cpu_count() or 2) // 2)}"),
            *("-v", f"--percentile={percentile}", f"--stability-percentage={_ANY_SPREAD}"),
        ]
        variables = analyzer.environment(grpc_url)
        if warmup_requests:
            _measure([*command, f"--request-count={warmup_requests}"], variables, deadline)
        files = ["-f", str(report)]
        if exports:
            files.append(f"--profile-export-file={times}")
        for attempt in range(1, attempts + 1):
            output = _measure([*command, *windows, *files], variables, deadline)
            result = read_result(
                output,
                report.read_text(encoding="utf-8"),
                model=model,
                concurrency=concurrency,
                request_rate_per_s=request_rate_per_s,
                percentile=percentile,
                stability_percent=stability_percent,
                export=read_export(times) if exports else None,
            )
            if result.is_stable is not False or attempt == attempts:
                break
            report.unlink()
    return result


def _check(
    requests: Sequence[Request],
    concurrency: int | None,
    request_rate_per_s: float | None,
    attempts: int,
    percentile: int,
    burst: int,
) -> None:
    if not requests:
        raise UserError("requests", "must not be empty", remedy="Add lines to the traffic file")
    if (concurrency is None) == (request_rate_per_s is None):
        raise UserError("load", "must be either a concurrency or a request rate")
    if concurrency is not None and concurrency < 1:
        raise UserError("concurrency", "must be at least 1", given=concurrency)
    if request_rate_per_s is not None and request_rate_per_s <= 0:
        raise UserError("request_rate_per_s", "must be above 0", given=request_rate_per_s)
    if attempts < 1:
        raise UserError("attempts", "must be at least 1", given=attempts)
    if burst < 1:
        raise UserError("burst", "must be at least 1", given=burst)
    if percentile not in get_args(Percentile):
        raise UserError("percentile", f"must be one of {get_args(Percentile)}", given=percentile)


def _load(
    concurrency: int | None,
    request_rate_per_s: float | None,
    distribution: Distribution,
    burst: int,
    scratch: Path,
) -> list[str]:
    """The arguments that say what is offered."""
    if request_rate_per_s is None:
        return [f"--concurrency-range={concurrency}"]
    if distribution == "burst":
        intervals = scratch / "intervals_us.txt"
        pause_us = max(1, round(burst / request_rate_per_s * 1e6))
        intervals.write_text("0\n" * (burst - 1) + f"{pause_us}\n", encoding="ascii")
        return [f"--request-intervals={intervals}"]
    return [
        f"--request-rate-range={request_rate_per_s:g}",
        f"--request-distribution={distribution}",
    ]


def _write_requests(requests: Sequence[Request], path: Path) -> None:
    """Writes perf_analyzer's input data.

    Strings go in base64, length first, as on the wire: given plainly, perf_analyzer cuts them at
    the first NUL.
    """
    rows = []
    for request in requests:
        tensors = {"text": request} if isinstance(request, str) else request
        row = {}
        for name, value in tensors.items():
            raw = value.encode() if isinstance(value, str) else value
            wire = base64.b64encode(struct.pack("<I", len(raw)) + raw).decode("ascii")
            row[name] = {"content": {"b64": wire}, "shape": [1]}
        rows.append(row)
    path.write_text(json.dumps({"data": rows}), encoding="ascii")


def _measure(command: Sequence[str], variables: Mapping[str, str], deadline: float) -> str:
    """What perf_analyzer printed. Raises `LoadError` where it did not end well, or not in time."""
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
        is_late="No valid requests recorded" in output,
    )
