"""A failed gate ends with something to do that was not tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from triptych.core.gate.cached import GateFailure
from triptych.repository.records import GateResult, Verdict
from triptych.spec.spec import PipelineSpec


def said(precision: Any, **fields: Any) -> str:
    given = {"name": "p", "task": "text-embedding", "model": {"source": "m"}, **fields}
    spec = PipelineSpec.model_validate(given)
    plan: Any = SimpleNamespace(spec=spec)
    verdicts = (Verdict("min_cosine", 0.5, 0.9, passed=False), Verdict("mean_cosine", 1, 0, True))
    gate = GateResult(precision, 1, 0, True, verdicts, ("bad",), ())
    return str(GateFailure(plan.spec.name, gate, plan))


def test_the_remedy_fits_what_was_asked_for() -> None:
    for precision, fields, words, other in (
        ("fp32", {}, "remove rows from traffic.jsonl", "core."),
        ("fp32", {"core": {"layout": "bucketed"}}, "--accept-failed-gate REASON", "layout"),
        ("fp32", {"core": {"precision": "auto"}}, "worst rows", "auto"),
        ("int8", {"core": {"precision": "int8"}}, "to fp16, which loses less, or fp32", "int8"),
        ("fp16", {"core": {"precision": "fp16"}}, "core.precision to fp32", "fp16"),
        ("int8", {"core": {"shared_from": "q"}}, "Remove core.shared_from", "fp16"),
        ("fp32", {"accuracy": {"min_cosine": 1}}, "Loosen accuracy.min_cosine", "traffic"),
        ("fp32", {"accuracy": {"mean_cosine": 1}}, "remove rows from traffic.jsonl", "Loosen"),
    ):
        message = said(precision, **fields)
        assert message.startswith("p failed the accuracy gate: bad. ")
        assert words in message, (precision, fields)
        assert other not in message, (precision, fields)
