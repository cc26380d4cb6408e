"""question-answering: the span of a context that answers a question, over windows where long."""

from __future__ import annotations

from triptych.base.tensors import Tensor
from triptych.spec.tasks.compare import compare_answers
from triptych.spec.tasks.metrics_labeled import ANSWER_F1
from triptych.spec.tasks.task import TEXT, TEXT_PAIR, Core, Rule, Task, View

_CORE = Core(
    "AutoModelForQuestionAnswering",
    reads="tokens",
    returns="spans",
    outputs=(Tensor("start_logit", "FP32", ("tokens",)), Tensor("end_logit", "FP32", ("tokens",))),
)

QUESTION_ANSWERING = Task(
    name="question-answering",
    inputs=(TEXT, TEXT_PAIR),
    outputs=(
        Tensor("answer", "BYTES", (1,)),
        Tensor("score", "FP32", (1,)),
        Tensor("start", "INT32", (1,)),
        Tensor("end", "INT32", (1,)),
    ),
    rows="rows_spans.WindowRowMaker",
    decode="decode_answers.AnswerDecoder",
    pairs=True,
    core=lambda facts, _: _CORE,
    metrics=("exact_match", "answer_f1"),
    compare_outputs=compare_answers,
    labeled=ANSWER_F1,
    parameters=lambda facts: {
        "max_answer_tokens": Rule("int", default=15, min=1, max=512),
        "impossible_answer": Rule("bool", default=False),
    },
    carries=True,
    view=View("answer"),
    max_length=384,  # as transformers' pipeline has it
)
