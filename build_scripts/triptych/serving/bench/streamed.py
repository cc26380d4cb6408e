"""What a round says of streamed answers: first tokens, the times between tokens, goodput."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from triptych.serving.bench.perf_output import Answer, Export, percentiles
from triptych.serving.bench.results import Part, Streamed, Times
from triptych.spec.slo import PERCENTILES, GenerationSlo


def streamed_of(export: Export, promise: GenerationSlo) -> Streamed:
    """The figures of all answers that ended within the windows.

    Tokens a second are those of these answers: what is under way at the end is left out, as what
    was under way at the beginning is counted.
    """
    answers = export.answers
    tokens = sum(answer.tokens for answer in answers)
    return Streamed(
        tokens=tokens,
        tokens_per_s=tokens / export.seconds,
        goodput_per_s=sum(keeps(answer, promise) for answer in answers) / export.seconds,
        ttft=times_of([answer.ttft_us for answer in answers]),
        itl=times_of([us for answer in answers for us in answer.itl_us]),
    )


def keeps(answer: Answer, promise: GenerationSlo) -> bool:
    """Whether one answer keeps every limit.

    It has one first token and one end: each must keep the loosest of its limits, which nearly all
    answers have to. Of the times between its responses each limited percentile is its own.
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


def times_of(values_us: Sequence[float]) -> Times:
    """Percentiles with the number of samples; all 0 of none."""
    if not values_us:
        return Times(0)
    percents = [float(name[1:].replace("_", ".")) for name in PERCENTILES]
    return Times(
        len(values_us), fsum(values_us) / len(values_us), *percentiles(values_us, *percents)
    )


def answer_parts(mean_us: float, streamed: Streamed) -> tuple[Part, ...]:
    """An answer's mean time: the steps' own counts end where its first token is asked for."""
    first = min(streamed.ttft.mean_us, mean_us)
    return (
        Part("answer", "first token", first),
        Part("answer", "tokens after it", mean_us - first),
    )
