"""NVIDIA's perf_analyzer: finding or fetching it, running it on real requests, reading its numbers.

Usage: ``run(server.grpc_url, "minilm", texts, concurrency=32).throughput_per_s``.
"""

from __future__ import annotations

import base64
import csv
import json
import os
import re
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from triptych.errors import UserError
from triptych.load.perf_binary import DEFAULT_CACHE, find_perf_analyzer

# perf_analyzer takes the first three windows for stable and merges them: `run` judges them itself,
# because an unstable measurement makes perf_analyzer exit without a single number.
_ANY_SPREAD = "1e6"

Request = str | Mapping[str, str | bytes]
Distribution = Literal["constant", "poisson"]
Percentile = Literal[50, 90, 95, 99]


class LoadError(UserError):
    """perf_analyzer gave no measurement: a request was answered with an error, or it failed itself.

    Attributes:
        errors: the different errors that the server answered with; empty where there was none.
        output: everything that perf_analyzer wrote.
    """

    def __init__(self, rule: str, given: str, remedy: str, errors: tuple[str, ...], output: str):
        self.errors = errors
        self.output = output
        super().__init__("load", rule, given=given, remedy=remedy)


@dataclass(frozen=True)
class StepLoad:
    """What one model did during the measurement, as the server counted it.

    Attributes:
        model: its name.
        inferences: rows that it answered.
        executions: batches in which it answered them.
        queue_us: mean time a request waited, in microseconds; so are the other three.
        compute_input_us: gathering the batch.
        compute_infer_us: running it.
        compute_output_us: handing out the results.
    """

    model: str
    inferences: int
    executions: int
    queue_us: float
    compute_input_us: float
    compute_infer_us: float
    compute_output_us: float

    @property
    def mean_batch(self) -> float:
        """Rows per execution."""
        return self.inferences / self.executions if self.executions else 0.0


@dataclass(frozen=True)
class Window:
    """One measurement window: its throughput, and its latency at the percentile asked for."""

    throughput_per_s: float
    latency_us: float


@dataclass(frozen=True)
class LoadResult:
    """A measurement without a single failed request; `run` raises `LoadError` otherwise.

    Attributes:
        model: what was asked.
        concurrency: clients, each with one request in flight; None in open loop.
        request_rate_per_s: requests sent a second whatever comes back; None in closed loop.
        requests: requests answered within the windows.
        throughput_per_s: requests answered a second.
        p50_us: latency percentiles seen by the client, in microseconds.
        p90_us: see `p50_us`.
        p95_us: see `p50_us`.
        p99_us: see `p50_us`.
        steps: the model itself, or the composing models of an ensemble in the server's order.
        windows: the windows that the above merges.
        is_stable: whether the windows agree; None where there is one only, so nothing to compare.
        warnings: what to know before the numbers are used, a sentence each.
    """

    model: str
    concurrency: int | None
    request_rate_per_s: float | None
    requests: int
    throughput_per_s: float
    p50_us: float
    p90_us: float
    p95_us: float
    p99_us: float
    steps: tuple[StepLoad, ...]
    windows: tuple[Window, ...]
    is_stable: bool | None
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """For JSON; each step also has its ``mean_batch``."""
        steps = [{**asdict(step), "mean_batch": step.mean_batch} for step in self.steps]
        return {**asdict(self), "steps": steps}


def run(
    grpc_url: str,
    model: str,
    requests: Sequence[Request],
    *,
    concurrency: int | None = None,
    request_rate_per_s: float | None = None,
    distribution: Distribution = "poisson",
    window_s: float = 5.0,
    request_count: int | None = None,
    warmup_requests: int = 0,
    percentile: Percentile = 99,
    stability_percent: float = 10.0,
    attempts: int = 1,
    timeout_s: float = 900.0,
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
        distribution: of the time between the requests of an open loop.
        window_s: length of a window, in seconds; an open loop stretches it a little.
        request_count: send so many requests and stop, in place of windows. perf_analyzer looks
            once a second whether they are done: the throughput is low by up to a second's worth.
        warmup_requests: sent before, and not counted.
        percentile: whose latency must be stable, besides the throughput.
        stability_percent: how far the highest window may lie above the lowest.
        attempts: measurements at most.
        timeout_s: for everything together, in seconds.
        cache: where a fetched perf_analyzer is kept.

    Raises:
        UserError: an argument out of range, or no perf_analyzer.
        LoadError: a failed request, a model that is not there, no answer in time.
    """
    _check(requests, concurrency, request_rate_per_s, attempts, percentile)
    deadline = time.monotonic() + timeout_s
    analyzer = find_perf_analyzer(cache)
    if concurrency is not None:
        load = [f"--concurrency-range={concurrency}"]
    else:
        load = [
            f"--request-rate-range={request_rate_per_s:g}",
            f"--request-distribution={distribution}",
        ]
    windows = [f"--measurement-interval={round(window_s * 1000)}"]
    if request_count is not None:
        windows = [f"--request-count={request_count}"]
    with tempfile.TemporaryDirectory(prefix="triptych-load-") as name:
        scratch = Path(name)
        data, report = scratch / "requests.json", scratch / "report.csv"
        _write_requests(requests, data)
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
        for attempt in range(1, attempts + 1):
            output = _measure([*command, *windows, "-f", str(report)], variables, deadline)
            result = _read(
                output,
                report.read_text(encoding="utf-8"),
                model=model,
                concurrency=concurrency,
                request_rate_per_s=request_rate_per_s,
                percentile=percentile,
                stability_percent=stability_percent,
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
    if percentile not in get_args(Percentile):
        raise UserError("percentile", f"must be one of {get_args(Percentile)}", given=percentile)


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
            (),
            (expired.stdout or b"").decode(errors="replace"),
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
            errors,
            output,
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
        (),
        output,
    )


def _read(
    output: str,
    report: str,
    *,
    model: str,
    concurrency: int | None,
    request_rate_per_s: float | None,
    percentile: Percentile,
    stability_percent: float,
) -> LoadResult:
    row = next(csv.DictReader(report.splitlines()))
    windows = tuple(
        Window(float(throughput), float(latency))
        for throughput, latency in re.findall(
            rf"Pass \[\d+\] throughput: (\S+) infer/sec\. p{percentile} latency: (\d+) usec", output
        )
    )
    warnings = [line.strip() for line in output.splitlines() if "[WARNING]" in line]
    is_stable: bool | None = None
    if len(windows) > 1:
        spreads = {
            "throughput": _spread_percent([window.throughput_per_s for window in windows]),
            f"p{percentile}": _spread_percent([window.latency_us for window in windows]),
        }
        unstable = {name: s for name, s in spreads.items() if s > stability_percent}
        is_stable = not unstable
        warnings += [
            f"unstable: {name} of the windows differs by {spread:.0f} %"
            f" (limit {stability_percent:g} %)"
            for name, spread in unstable.items()
        ]
    counted = re.search(r"Request count: (\d+)", output)
    return LoadResult(
        model=model,
        concurrency=concurrency,
        request_rate_per_s=request_rate_per_s,
        requests=int(counted[1]) if counted else 0,
        throughput_per_s=float(row["Inferences/Second"]),
        p50_us=float(row["p50 latency"]),
        p90_us=float(row["p90 latency"]),
        p95_us=float(row["p95 latency"]),
        p99_us=float(row["p99 latency"]),
        steps=_read_steps(output, model),
        windows=windows,
        is_stable=is_stable,
        warnings=tuple(warnings),
    )


def _spread_percent(values: Sequence[float]) -> float:
    lowest = min(values)
    return (max(values) / lowest - 1) * 100 if lowest > 0 else float("inf")


def _read_steps(output: str, model: str) -> tuple[StepLoad, ...]:
    """Reads the server's part of the report: the composing models, else the model itself."""
    _, _, server = output.partition("  Server:")
    own, _, composing = server.partition("Composing models:")
    parts = re.split(r"^\s+(\S+), version: \S*\s*$", composing, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True)) or {model: own}
    return tuple(_read_step(name, text) for name, text in sections.items())


def _read_step(name: str, text: str) -> StepLoad:
    counts = {what: int(n) for what, n in re.findall(r"(Inference|Execution) count: (\d+)", text)}
    times = {what: float(us) for what, us in re.findall(r"([a-z]+(?: [a-z]+)?) (\d+) usec", text)}
    return StepLoad(
        model=name,
        inferences=counts.get("Inference", 0),
        executions=counts.get("Execution", 0),
        queue_us=times.get("queue", 0.0),
        compute_input_us=times.get("compute input", 0.0),
        compute_infer_us=times.get("compute infer", 0.0),
        compute_output_us=times.get("compute output", 0.0),
    )
