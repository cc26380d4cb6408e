"""question-answering: the span of a context that answers a question, over windows where long."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.model.facts import ModelFacts
from triptych.tasks.parts import TEXT, TEXT_PAIR, any_model
from triptych.tasks.task import Core, Parameters, Rule, Task
from triptych.tensors import Tensor


def _core(facts: ModelFacts, parameters: Parameters) -> Core:
    spans = Tensor("start_logit", "FP32", ("tokens",)), Tensor("end_logit", "FP32", ("tokens",))
    return Core("AutoModelForQuestionAnswering", reads="tokens", returns="spans", outputs=spans)


def _parameters(facts: ModelFacts) -> Mapping[str, Rule]:
    return {
        "max_answer_tokens": Rule("int", default=15, min=1, max=512),
        "impossible_answer": Rule("bool", default=False),
    }


QUESTION_ANSWERING = Task(
    name="question-answering",
    inputs=(TEXT, TEXT_PAIR),
    outputs=(
        Tensor("answer", "BYTES", (1,)),
        Tensor("score", "FP32", (1,)),
        Tensor("start", "INT32", (1,)),
        Tensor("end", "INT32", (1,)),
    ),
    rows="rows_windows.py",
    decode="postprocess_question_answering.py",
    pairs=True,
    core=_core,
    parameters=_parameters,
    carries=True,
    expansion=8,
    max_length=384,  # as transformers' pipeline has it
    check=any_model,
)
