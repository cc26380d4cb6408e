"""Read perf_analyzer's exported times of each request, and compute metrics of streamed answers."""

from __future__ import annotations

import math
import mmap
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from triptych.serving.bench.results import Part, Streamed, Times
from triptych.spec.slo import PERCENTILES, GenerationSlo

PERCENTILE = 99
"""Percentile of the latency that must be stable, besides the throughput."""

STABILITY_PERCENT = 10.0
"""Maximum difference of the highest and lowest window, in percent of the lowest."""

BIN_GROWTH = 1.1
"""Ratio of the widths of consecutive bins of a latency histogram."""

# Inside a string of the export every quote is escaped, so these are its own fields.
_INPUTS = b',"request_inputs":'
_ANSWERED = b'"response_timestamps":['
_NEW_TOKENS = re.compile(rb'"num_output_tokens":(\d+)')
_FINISH = re.compile(rb'"finish_reason":"(\w*)"')
_BOUNDARIES = b'"window_boundaries":['
_DIGITS = 24


@dataclass(frozen=True)
class Window:
    """Throughput and latency (at `PERCENTILE`) of one measurement window."""

    throughput_per_s: float
    latency_us: float


@dataclass(frozen=True)
class StreamedAnswer:
    """Times of a streamed answer: the request, and each response with tokens."""

    sent_ns: int
    arrived_ns: tuple[int, ...]
    tokens: int

    @property
    def ttft_us(self) -> float:
        """Time from the request to the first token, in microseconds."""
        return (self.arrived_ns[0] - self.sent_ns) / 1000

    @property
    def itl_us(self) -> list[float]:
        """Times between consecutive responses, in microseconds."""
        return [(after - before) / 1000 for before, after in pairwise(self.arrived_ns)]

    @property
    def e2e_us(self) -> float:
        """Time from the request to the last token, in microseconds."""
        return (self.arrived_ns[-1] - self.sent_ns) / 1000


@dataclass(frozen=True)
class LoadResult:
    """Times of each request answered within the windows of a load by perf_analyzer."""

    boundaries_ns: tuple[int, ...]  # start of each window and end of the last, as Unix time
    answered_ns: tuple[int, ...]  # time of each answer, ascending
    latencies_us: tuple[float, ...]  # latencies in the same order
    answers: tuple[StreamedAnswer, ...] = ()  # streamed answers; empty without text generation
    warnings: tuple[str, ...] = ()  # warnings of perf_analyzer
    sent_per_s: float | None = None  # actual rate of an open loop; None in a closed loop

    @property
    def requests(self) -> int:
        return len(self.latencies_us)

    @property
    def seconds(self) -> float:
        return (self.boundaries_ns[-1] - self.boundaries_ns[0]) / 1e9

    @property
    def throughput_per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def mean_us(self) -> float:
        return math.fsum(self.latencies_us) / self.requests

    def percentiles_us(self, *percents: float) -> list[float]:
        """Return the latency of the request closest to each percentile rank."""
        return percentiles(self.latencies_us, *percents)

    def percentile_us(self, percent: float) -> float:
        """Return the latency of the request closest to a percentile rank."""
        return percentiles(self.latencies_us, percent)[0]

    def windows(self) -> tuple[Window, ...]:
        """Return throughput and latency of each window; 0 without answers."""
        found = []
        for start, end in zip(self.boundaries_ns, self.boundaries_ns[1:], strict=False):
            first, last = bisect_left(self.answered_ns, start), bisect_left(self.answered_ns, end)
            part = replace(self, latencies_us=self.latencies_us[first:last])
            latency = part.percentile_us(PERCENTILE) if last > first else 0.0
            found.append(Window((last - first) / ((end - start) / 1e9), latency))
        return tuple(found)


def percentiles(values: Sequence[float], *percents: float) -> list[float]:
    """Return the value closest to the rank of each percentile."""
    ranked = sorted(values)
    return [ranked[int(percent / 100 * (len(ranked) - 1) + 0.5)] for percent in percents]


def make_histogram(latencies_us: Sequence[float]) -> dict[float, int]:
    """Return the number of latencies by lower bound of the bin, ascending, without empty bins."""
    bins = Counter(math.floor(math.log(max(us, 1.0), BIN_GROWTH)) for us in latencies_us)
    return {round(BIN_GROWTH**number, 1): bins[number] for number in sorted(bins)}


def read_export(path: Path, *, streaming: bool = False) -> LoadResult | None:
    """Return the times in a file of ``--profile-export-file``; None without answers.

    The file also contains all inputs and outputs and need not be valid JSON, so only the times are
    extracted.
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
    return LoadResult(
        boundaries_ns=boundaries,
        answered_ns=tuple(answered for answered, _ in times),
        latencies_us=tuple((answered - sent) / 1000 for answered, sent in times),
        answers=tuple(answers),
    )


def _read_times(text: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Yield the times of answer and request, without unanswered requests.

    The text is searched, not parsed, because images make it hundreds of megabytes long.
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


def _read_answers(text: mmap.mmap) -> Iterator[StreamedAnswer]:
    """Yield the answers that have a token and an end.

    A stream ends with an empty response, for which the export repeats stale memory; it is ignored.
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
                yield StreamedAnswer(sent, times, sum(count for _, count in responses))


def _numbers(text: mmap.mmap, start: int) -> tuple[int, ...]:
    """Return the numbers from `start` to the end of their list."""
    inside = text[start : text.find(b"]", start)]
    return tuple(int(one) for one in inside.split(b",") if one)


def check_stability(windows: Sequence[Window]) -> tuple[bool | None, list[str]]:
    """Return whether the windows agree (None for fewer than two), and a sentence per difference."""
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


def compute_streaming_metrics(result: LoadResult, slo: GenerationSlo) -> Streamed:
    """Return the metrics of all answers that ended within the windows.

    Answers in flight at the end are excluded; in return, answers in flight at the start count.
    """
    answers = result.answers
    tokens = sum(answer.tokens for answer in answers)
    return Streamed(
        tokens=tokens,
        tokens_per_s=tokens / result.seconds,
        goodput_per_s=sum(meets_limits(answer, slo) for answer in answers) / result.seconds,
        ttft=summarize_times([answer.ttft_us for answer in answers]),
        itl=summarize_times([us for answer in answers for us in answer.itl_us]),
    )


def meets_limits(answer: StreamedAnswer, slo: GenerationSlo) -> bool:
    """Return whether an answer meets every limit.

    First token and end are single values, so each must meet the largest of its percentile limits.
    Inter-token times have percentiles within the answer.
    """
    limits = slo.limits_us
    for moment, value in (("ttft", answer.ttft_us), ("e2e", answer.e2e_us)):
        own = [most for name, most in limits.items() if name.startswith(moment)]
        if own and value > max(own):
            return False
    between = {name: most for name, most in limits.items() if name.startswith("itl")}
    return not answer.itl_us or all(
        percentiles(answer.itl_us, float(name.removeprefix("itl_p")))[0] <= most
        for name, most in between.items()
    )


def summarize_times(values_us: Sequence[float]) -> Times:
    """Return mean and percentiles with the number of samples; all 0 without samples."""
    if not values_us:
        return Times(0)
    percents = [float(name[1:].replace("_", ".")) for name in PERCENTILES]
    return Times(
        len(values_us), math.fsum(values_us) / len(values_us), *percentiles(values_us, *percents)
    )


def split_answer_time(mean_us: float, streamed: Streamed) -> tuple[Part, ...]:
    """Split an answer's mean time at its first token, where the counts of the steps end."""
    first = min(streamed.ttft.mean_us, mean_us)
    return (
        Part("answer", "first token", first),
        Part("answer", "tokens after it", mean_us - first),
    )
