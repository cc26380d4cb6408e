"""Metrics of streamed answers: time to first token, inter-token latency, goodput."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from triptych.serving.bench.perf_output import Export, StreamedAnswer, percentiles
from triptych.serving.bench.results import Part, Streamed, Times
from triptych.spec.slo import PERCENTILES, GenerationSlo


def compute_streaming_metrics(export: Export, promise: GenerationSlo) -> Streamed:
    """Return the metrics of all answers that ended within the windows.

    Answers in flight at the end are excluded; in return, answers in flight at the start count.
    """
    answers = export.answers
    tokens = sum(answer.tokens for answer in answers)
    return Streamed(
        tokens=tokens,
        tokens_per_s=tokens / export.seconds,
        goodput_per_s=sum(meets_limits(answer, promise) for answer in answers) / export.seconds,
        ttft=summarize_times([answer.ttft_us for answer in answers]),
        itl=summarize_times([us for answer in answers for us in answer.itl_us]),
    )


def meets_limits(answer: StreamedAnswer, promise: GenerationSlo) -> bool:
    """Return whether an answer meets every limit.

    First token and end are single values, so each must meet the largest of its percentile limits.
    Inter-token times have percentiles within the answer.
    """
    limits = promise.limits_us
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
        len(values_us), fsum(values_us) / len(values_us), *percentiles(values_us, *percents)
    )


def split_answer_time(mean_us: float, streamed: Streamed) -> tuple[Part, ...]:
    """Split an answer's mean time at its first token, where the counts of the steps end."""
    first = min(streamed.ttft.mean_us, mean_us)
    return (
        Part("answer", "first token", first),
        Part("answer", "tokens after it", mean_us - first),
    )
