"""Artifacts for the gate, by what they return: right ones, and a way to damage a row of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.tensors import Tensor, TokenRow
from triptych.core.gate.check import GateCase, check
from triptych.core.gate.runs import RunBatch
from triptych.core.requests import GateRequest, Sample
from triptych.repository.records import GateResult
from triptych.tasks.accuracy import metrics_of, thresholds
from triptych.tasks.catalog import TASKS
from triptych.tasks.results import Expected, RowOutputs
from triptych.tasks.task import Core, Returns, Task

CLASSES = 7
KEPT = 3
SAMPLES: list[Sample] = [TokenRow(tuple(range(i, i + 3 + i % 4)), 3) for i in range(10)]
_TASKS: dict[Returns, str] = {
    "vector": "text-embedding",
    "logits": "zero-shot-classification",
    "scores": "reranking",
    "choices": "text-classification",
    "token_choices": "token-classification",
    "token_scores": "token-classification",
    "spans": "question-answering",
}


def task_of(returns: Returns) -> Task:
    """A task whose core returns that."""
    return TASKS[_TASKS[returns]]


OUTPUTS: dict[Returns, tuple[Tensor, ...]] = {
    "vector": (Tensor("vector", "FP32", (8,)),),
    "logits": (Tensor("logits", "FP32", (CLASSES,)),),
    "scores": (Tensor("score", "FP32", (1,)),),
    "choices": (Tensor("class_id", "INT32", (KEPT,)), Tensor("class_score", "FP32", (KEPT,))),
    "token_choices": (
        Tensor("token_class", "INT32", ("tokens",)),
        Tensor("token_score", "FP32", ("tokens",)),
    ),
    "token_scores": (Tensor("token_scores", "FP32", ("tokens", CLASSES)),),
    "spans": (Tensor("start_logit", "FP32", ("tokens",)), Tensor("end_logit", "FP32", ("tokens",))),
}
EVERY: list[Returns] = list(OUTPUTS)
FLOATS: tuple[Returns, ...] = ("vector", "logits", "scores", "token_scores", "spans")
CHOOSING: tuple[Returns, ...] = ("choices", "token_choices")


def softmax(logits: NDArray[Any]) -> NDArray[np.float32]:
    powers = np.exp(logits)
    scores: NDArray[np.float32] = (powers / powers.sum(-1, keepdims=True)).astype(np.float32)
    return scores


def expect(returns: Returns, sample: Sample, rng: np.random.Generator) -> Expected:
    tokens = len(sample[0])
    if returns == "spans":
        return tuple(rng.normal(0, 4, (2, tokens)).astype(np.float32))
    shapes = {"vector": (8,), "logits": (CLASSES,), "scores": (1,), "choices": (CLASSES,)}
    values = rng.normal(0, 1, shapes.get(returns, (tokens, CLASSES))).astype(np.float32)
    return (values if returns in ("vector", "logits", "scores") else softmax(values),)


def answer(core: Core, expected: Expected) -> RowOutputs:
    """The outputs of a right artifact."""
    names = [tensor.name for tensor in core.outputs]
    if core.returns in CHOOSING:
        kept = KEPT if core.returns == "choices" else 1
        ids = np.argsort(-expected[0], axis=-1, kind="stable")[..., :kept]
        scores = np.take_along_axis(expected[0], ids, axis=-1)
        if core.returns == "token_choices":
            ids, scores = ids[:, 0], scores[:, 0]
        return {names[0]: ids.astype(np.int32), names[1]: scores}
    return {name: values.copy() for name, values in zip(names, expected, strict=True)}


def requests_of(samples: Sequence[Sample], *, edges: int = 0) -> list[GateRequest]:
    """A request for each core row, the first ones made up."""
    return [
        GateRequest(
            sent={"text": f"text {i}"},
            inputs={"text": f"text {i}"},
            parameters={},
            rows=(sample,),
            metadata=(),
            edge=i < edges,
            preview=f"row {i}",
        )
        for i, sample in enumerate(samples)
    ]


@dataclass(frozen=True)
class Case:
    core: Core
    expected: list[Expected]

    def right(self, batch: Sequence[Sample]) -> list[RowOutputs]:
        return [answer(self.core, self.expected[SAMPLES.index(sample)]) for sample in batch]

    def check(self, run: RunBatch, limits: Mapping[str, float] | None = None) -> GateResult:
        task = task_of(self.core.returns)
        if limits is None:
            limits = thresholds(task, "fp32", {})
        return check(run, self.gate_case(limits), "fp32", metrics_of(task))

    def gate_case(
        self, limits: Mapping[str, float], samples: Sequence[Sample] = SAMPLES, *, edges: int = 0
    ) -> GateCase:
        """The case as the gate takes it."""
        return GateCase(
            requests=requests_of(samples, edges=edges),
            expected=self.expected,
            core=self.core,
            limits=limits,
            batch_size=4,
        )

    def damaging(self, damage: Callable[[RowOutputs], object], row: int | None = None) -> RunBatch:
        """An artifact that damages one row, whatever its batch, or all of them."""

        def run(batch: Sequence[Sample]) -> list[RowOutputs]:
            rows = self.right(batch)
            for sample, outputs in zip(batch, rows, strict=True):
                if row is None or sample == SAMPLES[row]:
                    damage(outputs)
            return rows

        return run

    def broken(self, damage: Callable[[RowOutputs], object]) -> GateResult:
        """The verdict on an artifact that damages one row."""
        return self.check(self.damaging(damage, 4))

    @property
    def names(self) -> list[str]:
        return [tensor.name for tensor in self.core.outputs]


def make(returns: Returns) -> Case:
    rng = np.random.default_rng(7)
    reads = "tokens" if returns.startswith(("token", "span")) else "row"
    core = Core("AutoModel", reads=reads, returns=returns, outputs=OUTPUTS[returns])  # type: ignore[arg-type]
    return Case(core, [expect(returns, sample, rng) for sample in SAMPLES])
