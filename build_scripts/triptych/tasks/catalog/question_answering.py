"""Task `question-answering`: the answer to a question in a context."""

from __future__ import annotations

from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.models.info import ModelInfo
from triptych.tasks.compare import compare_answers
from triptych.tasks.labeled import ANSWER_F1
from triptych.tasks.metric import Metric
from triptych.tasks.task import TEXT, TEXT_PAIR, Core, Rule, Task, View

_EXACT_MATCH = Metric(
    "exact_match",
    "higher",
    "same answer at the same position",
    limits=(1.0, 0.98, 0.95),
    probe=(0.96, 0.9),
)
_ANSWER_F1 = Metric(
    "answer_f1",
    "higher",
    "F1 of the answers' words against the reference's",
    limits=(1.0, 0.99, 0.97),
    probe=(0.98, 0.93),
)

_CORE = Core(
    "AutoModelForQuestionAnswering",
    reads="tokens",
    returns="spans",
    outputs=(Tensor("start_logit", "FP32", ("tokens",)), Tensor("end_logit", "FP32", ("tokens",))),
)


def _check(info: ModelInfo) -> None:
    if info.padding_side != "right":
        raise UserError(
            "padding_side in tokenizer_config.json",
            "must be right: otherwise transformers 4 puts the context before the question",
            given=info.padding_side,
            remedy="Set it to right in a copy, if the model was trained with the question first",
        )


TASK = Task(
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
    core=lambda info, _: _CORE,
    metrics=(_EXACT_MATCH, _ANSWER_F1),
    compare_outputs=compare_answers,
    labeled=ANSWER_F1,
    parameters=lambda info: {
        "max_answer_len": Rule("int", default=15, min=1, max=512),
        "handle_impossible_answer": Rule("bool", default=False),
    },
    has_row_metadata=True,
    view=View("answer"),
    max_length=384,  # as transformers' pipeline has it
    check=_check,
)
