"""How close answers are to the original model's: metrics, limits by precision, a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from triptych.building.generation.inputs import Prompt
from triptych.building.generation.reference import Reference
from triptych.repository.records import GateResult, Verdict, WorstRow
from triptych.runtime.text_stream import BROKEN
from triptych.spec.tasks.metrics_labelled import LabelledResult

_LONGEST_SHOWN = 80


class GenerationMetric(NamedTuple):
    """What is measured; `better` is the side on which a limit is kept."""

    name: str
    better: str
    words: str


METRICS = (
    GenerationMetric("prompt_agreement", "higher", "prompts whose ids are the reference's"),
    GenerationMetric("stream_agreement", "higher", "streamed answers that are the whole text"),
    GenerationMetric("logprob_difference", "lower", "mean difference of log-probabilities"),
    GenerationMetric("p99_logprob_difference", "lower", "99th percentile of it"),
    GenerationMetric("perplexity_ratio", "lower", "engine's by reference's, on its answers"),
    GenerationMetric("exact_prefix", "higher", "greedy tokens before the first that differs"),
    GenerationMetric("margin_at_difference", "lower", "how sure the reference was of that token"),
    GenerationMetric("invariance", "higher", "answers that are the same alone and among others"),
)
_8_BITS = {
    "logprob_difference": 0.3,
    "p99_logprob_difference": 1.5,
    "perplexity_ratio": 1.1,
    "margin_at_difference": 1.6,
}
LIMITS: Mapping[str, Mapping[str, float]] = {
    "fp32": {
        "logprob_difference": 1e-4,
        "p99_logprob_difference": 1e-3,
        "perplexity_ratio": 1.001,
        "exact_prefix": 1.0,
        "margin_at_difference": 1e-3,
        "invariance": 1.0,
    },
    "fp16": {
        "logprob_difference": 0.01,
        "p99_logprob_difference": 0.05,
        "perplexity_ratio": 1.01,
        "margin_at_difference": 0.1,
    },
    "bf16": {
        "logprob_difference": 0.05,
        "p99_logprob_difference": 0.25,
        "perplexity_ratio": 1.05,
        "margin_at_difference": 0.5,
    },
    "int8": _8_BITS,
    "fp8": _8_BITS,
    "fp8kv": {
        "logprob_difference": 0.2,
        "p99_logprob_difference": 1.0,
        "perplexity_ratio": 1.1,
        "margin_at_difference": 1.1,
    },
}
"""By precision of the core, and of a KV cache that has its own. A first difference where the
reference was sure is a fault, not rounding. They are about twice what SmolLM2-135M had here:
pipelines/reference.md has the figures."""
EVERY = {"prompt_agreement": 1.0, "stream_agreement": 1.0}


def limits_of(precision: str) -> dict[str, float]:
    """Those of a core by `GenerationInputs.judged_as`: of weights and KV cache the wider one.

    Args:
        precision: of the weights, and after a ``+`` of the KV cache where it has its own.
    """
    own, _, cache = precision.partition("+")
    limits = LIMITS[own]
    if not cache:
        return dict(limits)
    other = LIMITS[cache]
    return {name: max(limits[name], other[name]) for name in limits.keys() & other.keys()}


@dataclass(frozen=True)
class Answered:
    """What became of the same prompts elsewhere, a value a prompt each.

    Attributes:
        prompts: their ids.
        alone: ids of the answer to each when nothing else ran.
        together: the same among others; several runs one after the other.
        forced: logarithms of probability of the reference's tokens, behind its own tokens before
            them; of as many as are known.
        streamed: the text that a stream shows.
        whole: what it should be.
    """

    prompts: Sequence[Sequence[int]]
    alone: Sequence[Sequence[int]]
    together: Sequence[Sequence[Sequence[int]]]
    forced: Sequence[Sequence[float]]
    streamed: Sequence[str]
    whole: Sequence[str]


def judge(
    precision: Any,
    prompts: Sequence[Prompt],
    wanted: Sequence[Reference],
    found: Answered,
    tokenizer: Tokenizer,
    *,
    other_limits: Mapping[str, float | None] = MappingProxyType({}),
    labelled: LabelledResult | None = None,
    accept: str = "",
) -> GateResult:
    """The verdict on what answered, held to the limits of its precision.

    Each adapter has figures of its own, behind the model's: ``exact_prefix[sql]``.

    Args:
        precision: of the core.
        prompts: those that were asked.
        wanted: of each the reference.
        found: what answered.
        tokenizer: of the model.
        other_limits: instead of those of the precision; None for no limit. What cannot be measured
            and has none is left out.
        labelled: the result on rows with right answers; None where there are none.
        accept: see `generation.build`.
    """
    prefixes = [common_length(one.ids, got) for one, got in zip(wanted, found.alone, strict=True)]
    differences = _differences(wanted, found)
    limits = {**EVERY, **limits_of(precision), **other_limits}
    verdicts: list[Verdict] = []
    failures: tuple[str, ...] = ()
    for adapter in dict.fromkeys(prompt.adapter for prompt in prompts):
        rows = [row for row, prompt in enumerate(prompts) if prompt.adapter == adapter]
        values = _figures(wanted, found, prefixes, differences, rows)
        values |= {} if adapter else _text_figures(wanted, found)
        own, told = (f"[{adapter}]", f" (adapter {adapter})") if adapter else ("", "")
        for metric in METRICS:
            value = values.get(metric.name, math.nan)
            if metric.name not in values or (
                limits.get(metric.name) is None and not math.isfinite(value)
            ):
                continue
            verdict = _verdict(metric, value, limits)
            verdicts.append(replace(verdict, metric=metric.name + own))
            if not verdict.passed:
                words = f"{metric.words}{told}: {verdict.value:.6g}, limit {verdict.limit:g}"
                failures = (*failures, words)
    if labelled is not None and labelled.failure:
        failures = (*failures, labelled.failure)
    largest = [max(map(abs, row), default=math.nan) for row in differences]
    answers = zip(prompts, wanted, found.alone, prefixes, largest, strict=True)
    worst = tuple(
        WorstRow(
            shown=next(iter(prompt.sent.values()))[:_LONGEST_SHOWN],
            badness=1 - length / len(one.ids),
            difference=difference,
            wanted=one.text,
            got=tokenizer.decode(list(ids), skip_special_tokens=True),
        )
        for prompt, one, ids, length, difference in answers
        if length < len(one.ids)
    )
    return GateResult(
        precision=precision,
        rows=len(prompts),
        edge_rows=0,
        finite=all(math.isfinite(value) for row in found.forced for value in row),
        verdicts=tuple(verdicts),
        failures=failures,
        worst=tuple(sorted(worst, key=lambda row: -row.badness)),
        row_differences=tuple(largest),
        labelled=labelled,
        accepted=accept if failures else "",
    )


def _differences(wanted: Sequence[Reference], found: Answered) -> list[list[float]]:
    """Of each prompt: by how much the reference found its tokens likelier, each as a logarithm."""
    return [
        [a - b for a, b in zip(one.logprobs, forced, strict=False)]
        for one, forced in zip(wanted, found.forced, strict=True)
    ]


def _figures(
    wanted: Sequence[Reference],
    found: Answered,
    prefixes: Sequence[int],
    differences: Sequence[Sequence[float]],
    rows: Sequence[int],
) -> dict[str, float]:
    """By metric, of these rows: what the weights that answer decide."""
    likelier = [one for row in rows for one in differences[row]]
    every = sorted(map(abs, likelier))
    margins = [
        wanted[row].margins[prefixes[row]] for row in rows if prefixes[row] < len(wanted[row].ids)
    ]
    if every and all(map(math.isfinite, every)):
        mean, p99 = fmean(every), every[min(len(every) - 1, int(0.99 * len(every)))]
        ratio = math.exp(fmean(likelier))
    else:
        mean = p99 = ratio = math.nan
    return {
        "logprob_difference": mean,
        "p99_logprob_difference": p99,
        "perplexity_ratio": ratio,
        "exact_prefix": sum(prefixes[row] for row in rows)
        / sum(len(wanted[row].ids) for row in rows),
        "margin_at_difference": max(margins, default=0.0),
        "invariance": fmean(
            list(found.alone[row]) == list(run[row]) for run in found.together for row in rows
        ),
    }


def _text_figures(wanted: Sequence[Reference], found: Answered) -> dict[str, float]:
    """By metric, of all rows: what the tokenizer decides, whatever weights answer."""
    prompts = zip(wanted, found.prompts, strict=True)
    return {
        "prompt_agreement": fmean(list(one.prompt) == list(ids) for one, ids in prompts),
        "stream_agreement": fmean(map(_agree, found.streamed, found.whole)),
    }


def _agree(streamed: str, whole: str) -> bool:
    """Whether a stream shows a text. What bytes that are no text become depends on what follows."""
    certain, broken, _ = whole.partition(BROKEN)
    return streamed.startswith(certain) if broken else streamed == whole


def _verdict(metric: GenerationMetric, value: float, limits: Mapping[str, float | None]) -> Verdict:
    limit = limits.get(metric.name)
    if limit is None:
        return Verdict(metric.name, value, None, True)
    passed = value >= limit if metric.better == "higher" else value <= limit
    return Verdict(metric.name, value, limit, passed)


def common_length(wanted: Sequence[int], got: Sequence[int]) -> int:
    """Tokens at the beginning that are the same."""
    same = (a == b for a, b in zip(wanted, got, strict=False))
    return next(
        (place for place, equal in enumerate(same) if not equal), min(len(wanted), len(got))
    )
