"""fill-mask: the likeliest tokens in place of a text's mask token."""

from __future__ import annotations

from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.spec.model_facts import ModelFacts
from triptych.spec.tasks.compare import compare_tokens
from triptych.spec.tasks.metrics_labeled import TOKEN_ACCURACY
from triptych.spec.tasks.task import BEST_CHOICES, MAX_TOP_K, TEXT, Task, choosing_core, top_k


def _check(facts: ModelFacts) -> None:
    if facts.mask_token_id is None:
        raise UserError(
            "model.source",
            "must have a mask token",
            given=f"{facts.architecture} with a tokenizer without one",
            remedy="Choose a masked language model",
        )


FILL_MASK = Task(
    name="fill-mask",
    inputs=(TEXT,),
    outputs=(Tensor("token", "BYTES", ("choices",)), Tensor("score", "FP32", ("choices",))),
    rows="rows_text.MaskRowMaker",
    decode="decode_rows.MaskDecoder",
    core=lambda facts, _: choosing_core("AutoModelForMaskedLM", "mask", MAX_TOP_K),
    metrics=("top_k_overlap", "label_agreement"),
    compare_outputs=compare_tokens,
    labeled=TOKEN_ACCURACY,
    parameters=lambda facts: top_k(MAX_TOP_K, default=5),
    settings=lambda facts: {"mask_token": facts.mask_token, "mask_token_id": facts.mask_token_id},
    decodes_tokens=True,
    view=BEST_CHOICES,
    check=_check,
)
