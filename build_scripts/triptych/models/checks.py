"""Checks of a loaded model: what would be served otherwise than it is meant is refused by name."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

from triptych.base.errors import UserError
from triptych.models.text import CLASSIFIES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXT_ALONE = {
    "bbox": "the box of each word on its page",
    "entity_ids": "the entities of a text",
    "image": "an image of the page",
    "pixel_values": "an image beside the text",
    "input_features": "sound beside the text",
    "xpath_tags_seq": "the place of each word in a page of HTML",
    "visual_embeds": "an image beside the text",
}
"""Inputs of models of more than texts, which a row of tokens cannot give, with their meaning."""


UNUSED = re.compile(
    r"(^|\.)(position_ids|inv_freq|mask_token|masked_bias|attn\.bias|attention\.bias|attn_mask"
    r"|relative_position_index|version|num_batches_tracked)$"
)
"""Weights within a base model that decide no result: buffers that older releases of transformers
saved and newer ones compute, and the vector of a masked patch."""

POSITIONS = "position_embedding_type"
"""Setting of which transformers 5 implements only ``absolute`` for BERT and its relatives. No other
one of texts or images that the code of 4.57 reads is ignored by the code of 5."""

_OTHER_POSITIONS = (
    f"Choose a model with absolute positions: transformers 4.57 is the last release with other "
    f"kinds of {POSITIONS} for BERT and its relatives"
)

CHUNKED = "GatedDeltaNet"
"""End of the name of layers with linear attention, of Qwen3-Next and others."""


def check_model(model: PreTrainedModel) -> None:
    """Check that a torch model can be served by its token ids or pixels alone.

    Raises:
        UserError: The model has another main input, weights that are not finite, a kind of
            positions that its class does not compute, or a head with another number of classes
            than the config names; it is a model
            of texts with other inputs or with layers that compute a text in chunks; or a text
            changes the model, so that its results depend on earlier texts.
    """
    check_finite(model)
    _check_positions(model)
    _check_labels(model)
    if model.main_input_name not in ("input_ids", "pixel_values"):
        raise UserError(
            "model.source",
            "is not a model of texts or images",
            given=f"{type(model).__name__}, which takes {model.main_input_name}",
            remedy="Choose another model",
        )
    if model.main_input_name == "input_ids":
        _check_inputs(model)
        _check_chunks(model)
        _check_state(model)


def check_unused(model: PreTrainedModel, unexpected: Collection[str]) -> None:
    """Check that a class uses every weight of a checkpoint that belongs to its base model.

    Other heads, other towers, and a pooler or decoder that the class does not have are no part of
    it; an adapter counts also in the head. `unexpected` are the weights that were not loaded.
    """
    parts = {name for name, _ in model.base_model.named_children()}
    modules = {name for name, _ in model.named_modules()}
    buffers = {_last(name) for name, _ in model.named_buffers()}
    unused = sorted(
        name
        for name in unexpected
        if name.removeprefix(f"{model.base_model_prefix}.").partition(".")[0] in parts
        or (".lora_" in name and name.partition(".lora_")[0] in modules)
        if _last(name) not in buffers and not UNUSED.search(name)
    )
    if not unused:
        return
    remedy = "Choose another model, or write the weights in use with `save_pretrained` of the class"
    if any("lora_" in name for name in unused):
        remedy = "Merge the adapter into the weights (PEFT: `merge_and_unload`), and save the model"
    elif getattr(model.config, POSITIONS, None) not in (None, "absolute"):
        remedy = _OTHER_POSITIONS
    raise UserError(
        "model.source",
        f"has weights of the base model that {type(model).__name__} does not use",
        given=f"{len(unused)} of them: {', '.join(unused[:4])}",
        remedy=remedy,
    )


def _check_positions(model: PreTrainedModel) -> None:
    """Check that the code of a model's class reads the kind of positions that its config names."""
    for part in model.modules():
        value = getattr(getattr(part, "config", None), POSITIONS, None)
        if value in (None, "absolute"):
            continue
        code = inspect.getsource(sys.modules[type(part).__module__])
        rotates = value in ("rope", "rotary") and "RotaryEmbedding" in code
        if not rotates and not (POSITIONS in code and f'"{value}"' in code):
            raise UserError(
                f"{POSITIONS} in config.json",
                f"is a setting that {type(part).__name__} of this transformers ignores",
                given=value,
                remedy=_OTHER_POSITIONS,
            )


def check_finite(model: PreTrainedModel) -> None:
    """Raise a `UserError` if a weight of a torch module is not finite."""
    import torch

    for name, weight in model.named_parameters():
        wrong = weight.numel() - int(torch.isfinite(weight).sum())
        if wrong:
            raise UserError(
                "model.source",
                "must have finite weights",
                given=f"{wrong} of {weight.numel()} numbers in `{name}` are NaN or infinite",
                remedy="Download the weights again, or choose another checkpoint of the training",
            )


def _check_labels(model: PreTrainedModel) -> None:
    """Check that the config names each class: that of PVT has a number beside the names."""
    names, count = model.config.id2label, model.config.num_labels
    if CLASSIFIES in type(model).__name__ and names and len(names) != count:
        raise UserError(
            "id2label in config.json",
            "names another number of labels than the model's head has",
            given=f"{len(names)} labels, and num_labels is {count}",
            remedy="Correct the wrong one of both",
        )


def _check_inputs(model: PreTrainedModel) -> None:
    """Check that a model of texts needs nothing besides."""
    for name in inspect.signature(model.forward).parameters:
        if name in TEXT_ALONE:
            raise UserError(
                "model.source",
                "must be a model of texts alone",
                given=f"{type(model).__name__}, which also reads `{name}`, {TEXT_ALONE[name]}",
                remedy="Choose a model of texts",
            )


def _check_chunks(model: PreTrainedModel) -> None:
    """Check that no layer loops over the chunks of a text: an export keeps their number."""
    for layer in model.modules():
        if type(layer).__name__.endswith(CHUNKED):
            raise UserError(
                "model.source",
                "must have no layer that computes a text in chunks of 64 tokens, one by one",
                given=f"{type(model).__name__} with {type(layer).__name__}",
                remedy="Choose a model without linear attention",
            )


def _check_state(model: PreTrainedModel) -> None:
    """Check that a short text leaves the model as it is."""
    import torch

    before = _state(model)
    try:
        with torch.no_grad():
            model(input_ids=torch.ones((1, 4), dtype=torch.int64))
    except Exception:  # the export reports a model that does not run
        return
    after = _state(model)
    changed = sorted(name for name, value in after.items() if before.get(name) != value)
    if not changed:
        return
    named = [name for name in changed if hasattr(model.config, _last(name))]
    remedy = "Choose another model"
    if named:
        remedy = (
            f"Set {_last(named[0])} to {after[named[0]]} in a copy of its config.json, to serve "
            "the model as it is after a short text"
        )
    raise UserError(
        "model.source",
        "must give results that do not depend on earlier texts",
        given=f"{type(model).__name__}, in which a text of 4 tokens changes "
        f"{', '.join(named or changed[:1])}",
        remedy=remedy,
    )


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _state(model: PreTrainedModel) -> dict[str, object]:
    """Return the classes of all modules and their settings that are texts, by dotted name."""
    state: dict[str, object] = {}
    for name, module in model.named_modules():
        state[f"{name}.class"] = type(module)
        for key, value in vars(module).items():
            if isinstance(value, str):
                state[f"{name}.{key}"] = value
    return state
