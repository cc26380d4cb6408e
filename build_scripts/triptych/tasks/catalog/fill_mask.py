"""Task `fill-mask`: the best tokens for a masked word."""

from __future__ import annotations

from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.models.info import ModelInfo
from triptych.tasks.classes import BEST_CHOICES, MAX_TOP_K, choosing_core, top_k
from triptych.tasks.compare import LABEL_AGREEMENT, compare_tokens
from triptych.tasks.labeled import TOKEN_ACCURACY
from triptych.tasks.metric import Metric
from triptych.tasks.task import TEXT, Task

_TOP_K_OVERLAP = Metric(
    "top_k_overlap",
    "higher",
    "fraction of the reference's tokens that are returned",
    limits=(1.0, 0.95, 0.9),
    probe=(0.95, 0.85),
)


def _check(info: ModelInfo) -> None:
    if info.mask_token_id is None:
        raise UserError(
            "model.source",
            "must have a mask token",
            given=f"{info.architecture} with a tokenizer without one",
            remedy="Choose a masked language model",
        )


TASK = Task(
    name="fill-mask",
    inputs=(TEXT,),
    outputs=(Tensor("token", "BYTES", ("choices",)), Tensor("score", "FP32", ("choices",))),
    rows="rows_mask.MaskRowMaker",
    decode="decode_masks.MaskDecoder",
    core=lambda info, _: choosing_core("AutoModelForMaskedLM", "mask", MAX_TOP_K),
    metrics=(_TOP_K_OVERLAP, LABEL_AGREEMENT),
    compare_outputs=compare_tokens,
    labeled=TOKEN_ACCURACY,
    parameters=lambda info: top_k(MAX_TOP_K, default=5),
    settings=lambda info: {"mask_token": info.mask_token, "mask_token_id": info.mask_token_id},
    decodes_tokens=True,
    view=BEST_CHOICES,
    check=_check,
)
