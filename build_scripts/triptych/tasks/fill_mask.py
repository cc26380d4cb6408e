"""fill-mask: the likeliest tokens in place of a text's mask token."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.errors import UserError
from triptych.model.facts import ModelFacts
from triptych.tasks.parts import TEXT, choosing_core, top_k
from triptych.tasks.task import LARGEST_TOP_K, Core, Parameters, Rule, Task
from triptych.tensors import Tensor


def _core(facts: ModelFacts, parameters: Parameters) -> Core:
    return choosing_core("AutoModelForMaskedLM", "mask", LARGEST_TOP_K)


def _parameters(facts: ModelFacts) -> Mapping[str, Rule]:
    return top_k(LARGEST_TOP_K, default=5)


def _settings(facts: ModelFacts) -> Mapping[str, object]:
    return {"mask_token": facts.mask_token, "mask_token_id": facts.mask_token_id}


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
    rows="rows_mask.py",
    decode="postprocess_fill_mask.py",
    core=_core,
    parameters=_parameters,
    settings=_settings,
    decodes_tokens=True,
    check=_check,
)
