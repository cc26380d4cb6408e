"""Reading what perf_analyzer writes: its report, and the times of each request that it exports."""

from __future__ import annotations

import csv
import math
import mmap
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

PERCENTILE = 99
"""Whose latency must be stable, besides the throughput."""

STABILITY_PERCENT = 10.0
"""How far the highest window may lie above the lowest."""

BIN_GROWTH = 1.1
"""Each bin of a latency histogram is a tenth wider than the one below it."""

# Inside a string of the export every quote is escaped, so these are its own fields.
_INPUTS = b',"request_inputs":'
_ANSWERED = b'"response_timestamps":['
_NEW_TOKENS = re.compile(rb'"num_output_tokens":(\d+)')
_FINISH = re.compile(rb'"finish_reason":"(\w*)"')
_BOUNDARIES = b'"window_boundaries":['
_DIGITS = 24
_DELAYED = re.compile(r"[\d.]+% of the requests were delayed")


@dataclass(frozen=True)
class Window:
    """One measurement window: its throughput, and its latency at `PERCENTILE`."""

    throughput_per_s: float
    latency_us: float


@dataclass(frozen=True)
class Answer:
    """A streamed answer: when it was asked for, and when each of its responses brought tokens."""

    sent_ns: int
    arrived_ns: tuple[int, ...]
    tokens: int

    @property
    def ttft_us(self) -> float:
        """From the request to its first token."""
        return (self.arrived_ns[0] - self.sent_ns) / 1000

    @property
    def itl_us(self) -> list[float]:
        """Between two responses, each."""
        return [(after - before) / 1000 for before, after in pairwise(self.arrived_ns)]

    @property
    def e2e_us(self) -> float:
        """From the request to its last token."""
        return (self.arrived_ns[-1] - self.sent_ns) / 1000


@dataclass(frozen=True)
class Export:
    """The requests answered within the windows, each by its own times."""

    boundaries_ns: tuple[int, ...]  # start of each window and end of the last, since the epoch
    answered_ns: tuple[int, ...]  # when each request was answered, ascending
    latencies_us: tuple[float, ...]  # of these requests, in the same order
    answers: tuple[Answer, ...] = ()  # of a pipeline that generates text: the same requests

    @property
    def seconds(self) -> float:
        return (self.boundaries_ns[-1] - self.boundaries_ns[0]) / 1e9

    @property
    def throughput_per_s(self) -> float:
        return len(self.latencies_us) / self.seconds

    @property
    def mean_us(self) -> float:
        return math.fsum(self.latencies_us) / len(self.latencies_us)

    def percentiles_us(self, *percents: float) -> list[float]:
        """One latency for each of `percents`: the request closest to that rank."""
        return percentiles(self.latencies_us, *percents)

    def windows(self) -> tuple[Window, ...]:
        """Each window by itself; one in which nothing was answered has a throughput of 0."""
        found = []
        for start, end in zip(self.boundaries_ns, self.boundaries_ns[1:], strict=False):
            first, last = bisect_left(self.answered_ns, start), bisect_left(self.answered_ns, end)
            part = replace(self, latencies_us=self.latencies_us[first:last])
            latency = part.percentiles_us(PERCENTILE)[0] if last > first else 0.0
            found.append(Window((last - first) / ((end - start) / 1e9), latency))
        return tuple(found)


def percentiles(values: Sequence[float], *percents: float) -> list[float]:
    """One of `values` for each of `percents`: the one closest to that rank."""
    ranked = sorted(values)
    return [ranked[int(percent / 100 * (len(ranked) - 1) + 0.5)] for percent in percents]


def histogram_of(latencies_us: Sequence[float]) -> dict[float, int]:
    """Lower edge of each bin that is not empty to the latencies in it, ascending."""
    bins = Counter(math.floor(math.log(max(us, 1.0), BIN_GROWTH)) for us in latencies_us)
    return {round(BIN_GROWTH**number, 1): bins[number] for number in sorted(bins)}


@dataclass(frozen=True)
class LoadResult:
    """A measurement without a single failed request, in perf_analyzer's own figures."""

    model: str
    concurrency: int | None  # clients, each with one request in flight; None in open loop
    request_rate_per_s: float | None  # sent whatever comes back; None in closed loop
    requests: int  # answered within the windows
    throughput_per_s: float
    p50_us: float  # latency percentiles seen by the client
    p90_us: float
    p95_us: float
    p99_us: float
    windows: tuple[Window, ...]  # that the above merges
    is_stable: bool | None  # whether the windows agree; None where there is one only
    warnings: tuple[str, ...]  # what to know before the numbers are used, a sentence each
    sent_per_s: float | None = None  # as it turned out; None in closed loop
    export: Export | None = None  # every request; None where it was not asked for

    def as_dict(self) -> dict[str, object]:
        plain = asdict(replace(self, export=None))
        del plain["export"]
        return plain


def read_export(path: Path, *, streaming: bool = False) -> Export | None:
    """The times in a file of ``--profile-export-file``; None where no request was answered.

    The file also holds every input and output, byte for byte, and need not be valid JSON: only the
    times are picked out of it.
    """
    if not path.stat().st_size:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        if streaming:
            answers = sorted(_read_answers(text), key=lambda one: one.arrived_ns[-1])
            times = [(one.arrived_ns[-1], one.sent_ns) for one in answers]
        else:
            answers, times = [], sorted(_read_times(text))
        at = text.rfind(_BOUNDARIES)
        boundaries = _numbers(text, at + len(_BOUNDARIES)) if at >= 0 else ()
    if len(boundaries) < 2 or not times:
        return None
    return Export(
        boundaries_ns=boundaries,
        answered_ns=tuple(answered for answered, _ in times),
        latencies_us=tuple((answered - sent) / 1000 for answered, sent in times),
        answers=tuple(answers),
    )


def _read_times(text: mmap.mmap) -> Iterator[tuple[int, int]]:
    """When each request was answered and when it was sent; those without an answer are left out.

    Searched for rather than parsed: images make this a file of hundreds of megabytes.
    """
    end = 0
    while (at := text.find(_INPUTS, end)) >= 0:
        sent = int(text[max(0, at - _DIGITS) : at].rpartition(b":")[2])
        end = text.find(_ANSWERED, at) + len(_ANSWERED)
        if end < at:
            return
        answers = _numbers(text, end)
        if answers:
            yield answers[-1], sent


def _read_answers(text: mmap.mmap) -> Iterator[Answer]:
    """Each request with a token and an end, response by response.

    What comes after the end is the response without content that ends a stream on the wire: the
    export repeats stale memory for it.
    """
    at = text.find(_INPUTS)
    while at >= 0:
        following = text.find(_INPUTS, at + 1)
        span = text[at : following if following >= 0 else len(text)]
        sent = int(text[max(0, at - _DIGITS) : at].rpartition(b":")[2])
        arrived = _numbers(text, text.find(_ANSWERED, at) + len(_ANSWERED))
        new = [int(count) for count in _NEW_TOKENS.findall(span)]
        ends = [bool(reason) for reason in _FINISH.findall(span)]
        at = following
        if True in ends:
            responses = list(zip(arrived, new, strict=False))[: ends.index(True) + 1]
            times = tuple(time for time, count in responses if count)
            if times:
                yield Answer(sent, times, sum(count for _, count in responses))


def _numbers(text: mmap.mmap, start: int) -> tuple[int, ...]:
    """The numbers from `start` up to the end of their list."""
    inside = text[start : text.find(b"]", start)]
    return tuple(int(one) for one in inside.split(b",") if one)


def read_report(
    output: str,
    report: str,
    *,
    model: str,
    concurrency: int | None,
    request_rate_per_s: float | None,
    export: Export | None = None,
) -> LoadResult:
    """What perf_analyzer printed with ``-v`` (`output`) and wrote as CSV (`report`), for one load.

    The other arguments are those of `LoadResult`.
    """
    row = next(csv.DictReader(report.splitlines()))
    windows = tuple(
        Window(float(throughput), float(latency))
        for throughput, latency in re.findall(
            rf"Pass \[\d+\] throughput: (\S+) infer/sec\. p{PERCENTILE} latency: (\d+) usec", output
        )
    )
    is_stable, unstable = check_stability(windows)
    counted = re.search(r"Request count: (\d+)", output)
    sent = re.search(r"Avg send request rate: (\S+) infer/sec", output)
    # perf_analyzer counts a request as delayed that leaves microseconds late, so nearly all of a
    # burst: `sent_per_s` tells whether it keeps up.
    said = [line.strip() for line in output.splitlines() if "[WARNING]" in line]
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
        windows=windows,
        is_stable=is_stable,
        warnings=tuple([line for line in said if not _DELAYED.search(line)] + unstable),
        # It tells the rate only where it was late.
        sent_per_s=float(sent[1]) if sent else request_rate_per_s,
        export=export,
    )


def check_stability(windows: Sequence[Window]) -> tuple[bool | None, list[str]]:
    """Whether `windows` agree (None of fewer than two), and a sentence for each way they do not."""
    if len(windows) < 2:
        return None, []
    spreads = {
        "throughput": _spread_percent([window.throughput_per_s for window in windows]),
        f"p{PERCENTILE}": _spread_percent([window.latency_us for window in windows]),
    }
    unstable = [
        f"unstable: {name} of the windows differs by {spread:.0f} % (limit {STABILITY_PERCENT:g} %)"
        for name, spread in spreads.items()
        if spread > STABILITY_PERCENT
    ]
    return not unstable, unstable


def _spread_percent(values: Sequence[float]) -> float:
    lowest = min(values)
    return (max(values) / lowest - 1) * 100 if lowest > 0 else float("inf")
