"""The verdict on generated text: scores, limits, each adapter by itself."""

import asyncio
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.generation_cases import byte_pairs, fake_engine
from tests.support.project import ROOT
from triptych.building.generation.gate import EVERY, LIMITS, METRICS, Answered, judge
from triptych.building.generation.inputs import Prompt
from triptych.building.generation.reference import Reference
from triptych.building.generation.worker_gate import EngineOrder, run_engine
from triptych.repository.records import GateResult
from triptych.runtime import engine_vllm
from triptych.tasks.compare import Outputs
from triptych.tasks.labeled import LabeledRow, compare_labeled
from triptych.tasks.metrics_generated import GENERATED, exact_match, rouge_l


def test_the_reference_states_the_limits() -> None:
    text = (ROOT / "build_scripts/documentation/guides/generation.md").read_text(encoding="utf-8")
    for metric in METRICS:
        (row,) = re.findall(rf"(?m)^\| `{metric.name}` \|.*$", text)
        stated = [cell.strip() for cell in row.split("|")[3:-1]]
        limits = [{**EVERY, **limits}.get(metric.name) for limits in LIMITS.values()]
        assert [float(cell) if cell else None for cell in stated] == limits, metric.name


def test_texts_are_scored_as_published() -> None:
    # Lin 2004, section 3.1: with beta 1, ROUGE-L of the two candidates is 3/4 and 2/4.
    reference = "police killed the gunman"
    for candidate, score in (
        ("police kill the gunman", 0.75),
        ("the gunman kill police", 0.5),
        ("Police, KILLED the gunman!", 1.0),
        ("", 0.0),
        ("nobody", 0.0),
    ):
        assert rouge_l(candidate, reference) == pytest.approx(score), candidate
    assert rouge_l("!", "?") == 1.0
    for got, wanted, score in (
        (" The answer is: Paris. ", "answer is paris", 1.0),
        ("Paris is", "is Paris", 0.0),
        ("the", "a", 1.0),
        ("?", "!", 0.0),
        ("", " ", 1.0),
    ):
        assert exact_match(got, wanted) == score, (got, wanted)


def test_a_worse_engine_fails_on_right_answers_and_chance_does_not() -> None:
    rows = [LabeledRow(n, ({"text_input": "a"},), {}, (f"answer {n}", "x")) for n in range(60)]
    right = [{"text_output": np.array([f"answer {n}"])} for n in range(60)]
    wrong: list[Outputs] = [{"text_output": np.array(["none"])}] * 12
    one: list[Outputs] = [{"text_output": np.array(["none"])}]
    for metric in GENERATED.values():
        worse = compare_labeled(metric, rows, [*wrong, *right[12:]], right, max_drop=0.05)
        assert metric.name in worse.failure
        assert worse.candidate == pytest.approx(0.8)
        for got in (right, [*one, *right[1:]]):
            assert not compare_labeled(metric, rows, got, right, max_drop=0).failure
        judged = verdict_of(*good_answers(), labeled=worse)
        assert judged.failures == (worse.failure,)


def good_answers() -> tuple[Reference, Answered]:
    """A reference, and what answers like it."""
    ids = tuple(byte_pairs().encode("The dog", add_special_tokens=False).ids)
    likely = (-0.5,) * len(ids)
    wanted = Reference((0, 40, 41), ids, "The dog", (2.0,) * len(ids), likely)
    return wanted, Answered(
        prompts=[(0, 40, 41)],
        alone=[ids],
        together=[[ids]],
        forced=[likely],
        streamed=["The dog"],
        whole=["The dog"],
    )


def verdict_of(
    wanted: Reference, found: Answered, precision: str = "fp32", **more: Any
) -> GateResult:
    prompt = Prompt({"messages": '[{"role": "user", "content": "Hi"}]'}, (0, 40, 41))
    return judge(precision, [prompt], [wanted], found, byte_pairs(), **more)


def test_the_verdict_passes_what_is_right_and_names_each_fault() -> None:
    wanted, good = good_answers()
    assert verdict_of(wanted, good).passed
    other = (*wanted.ids[:-1], 5)
    count = len(other)
    numbers = {"logprob_difference", "p99_logprob_difference", "perplexity_ratio"}
    parted = {"exact_prefix", "margin_at_difference", "invariance"}
    faults: tuple[tuple[dict[str, Any], set[str]], ...] = (
        ({"prompts": [(0, 0, 40, 41)]}, {"prompt_agreement"}),
        ({"streamed": ["The  dog"]}, {"stream_agreement"}),
        # What half a character becomes, at the end as a rule, depends on what follows it.
        ({"streamed": ["The\n\ufffd"], "whole": ["The\ufffd\ufffd"]}, set()),
        ({"streamed": ["he\n\ufffd"], "whole": ["The\ufffd\ufffd"]}, {"stream_agreement"}),
        ({"together": [good.alone, [other]]}, {"invariance"}),
        ({"alone": [other]}, parted),
        # No answer at all: nothing is known of log-probabilities.
        ({"alone": [()], "forced": [()]}, parted | numbers),
        ({"forced": [(-0.52,) * count]}, numbers),
        ({"forced": [(float("nan"),) * count]}, numbers),
    )
    for changed, metrics in faults:
        gate = verdict_of(wanted, replace(good, **changed))
        assert {one.metric for one in gate.verdicts if not one.passed} == metrics, changed
        assert gate.passed is not bool(metrics)
        assert len(gate.failures) == len(metrics)
    # Rounding may change a token where the reference was not sure, and only there.
    parting = replace(good, alone=[other])
    assert verdict_of(replace(wanted, margins=(0.04,) * count), parting, "bf16").passed
    assert not verdict_of(wanted, parting, "bf16").passed


def test_each_adapter_is_judged_by_itself() -> None:
    """One that differs does not hide among the answers of the model and of others."""
    wanted, good = good_answers()
    one = Prompt({"text_input": "Hi"}, (0, 40, 41))
    prompts = [one, one, replace(one, adapter="a"), replace(one, adapter="b")]
    doubled = {
        name: [*getattr(good, name)] * 4
        for name in ("prompts", "alone", "forced", "streamed", "whole")
    }
    found = Answered(**doubled, together=[[*good.alone] * 4])
    gate = judge("bf16", prompts, [wanted] * 4, found, byte_pairs())
    assert gate.passed
    assert len(gate.verdicts) == len(METRICS) + 2 * (len(METRICS) - len(EVERY))
    worse = (-0.58,) * len(wanted.ids)
    gate = judge(
        "bf16",
        prompts,
        [wanted] * 4,
        replace(found, forced=[*found.forced[:3], worse]),
        byte_pairs(),
    )
    failed = [verdict.metric for verdict in gate.verdicts if not verdict.passed]
    assert failed == ["logprob_difference[b]", "perplexity_ratio[b]"]
    assert "mean difference of log-probabilities (adapter b): 0.08" in gate.failures[0]


FakeEngine = fake_engine()


class FakeVllm(FakeEngine):  # type: ignore[misc, valid-type]
    """In place of vLLM: the fake engine; a token is as likely as its adapter's name is long."""

    async def score(
        self, key: str, prompt: list[int], answer: list[int], adapter: str
    ) -> list[float]:
        return [float(len(adapter))] * len(answer)


def test_the_gate_asks_each_prompt_of_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_vllm, "Engine", FakeVllm)
    order: EngineOrder = {
        "engine": "engine_vllm",
        "weights": "",
        "settings": {"token_delay_ms": 0.0, "max_sequences": 4, "max_length": 10},
        "prompts": [[7, 8, 9], [7, 8, 9], [5, 6]],
        "adapters": ["", "sql", "sql"],
        "wanted": [[7], [9, 8], [6]],
        "max_tokens": [3, 2, 3],
        "labeled": [([1, 2], 2, ""), ([1, 2], 2, "sql")],
    }
    found = asyncio.run(run_engine(order))
    assert found["alone"] == found["together"] == [[7, 8, 9], [9, 8], [6, 5]]
    assert found["forced"] == [[0.0], [3.0, 3.0], [3.0]]
    assert found["labeled"] == [[1, 2], [2, 1]]
