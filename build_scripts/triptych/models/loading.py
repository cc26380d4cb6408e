"""Load a model of transformers in PyTorch, with the class that a task names, and check it."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.base.errors import UserError
from triptych.models.checks import check_model, check_unused
from triptych.models.text import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

RESULTS = (
    *("last_hidden_state", "logits", "start_logits", "end_logits"),
    *("image_embeds", "text_embeds"),
)
"""Fields that are read from a model's output, whatever its class."""


def load_model(folder: Path, auto_class: str) -> PreTrainedModel:
    """Return the model that `save_pretrained` wrote, in PyTorch, fp32 and evaluation mode.

    transformers' class `auto_class` loads it, with its head. For an encoder-decoder without a head,
    only the encoder is returned if transformers has an encoder class for it, if the full model
    needs decoder inputs, or if the full model lacks weights.

    Raises:
        UserError: transformers cannot load the model with that class, or weights are missing.
    """
    import torch
    import transformers
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        with quiet():
            model, report = _loader(folder, auto_class).from_pretrained(
                folder,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=False,
                return_dict=True,  # whatever the config says
                **_own_settings(folder, auto_class),
            )
    except Exception as error:
        raise UserError(
            "model.source",
            f"is not a model that transformers can load ({auto_class})",
            given=one_line(error),
            remedy="Check config.json and the weights",
        ) from error
    if report["mismatched_keys"]:
        raise _mismatch(model.config, sorted(report["mismatched_keys"])[0])
    model = model.eval()
    check_unused(model, report["unexpected_keys"])
    check_model(model)
    missing = _learned(model, report["missing_keys"])
    refused = bool(missing) and _matter(model, missing)
    if auto_class == "AutoModel" and getattr(model.config, "is_encoder_decoder", False):
        encoder = None if not refused and _runs(model) else _encoder_of(model)
        if encoder is not None:
            missing = _missing_of(encoder, model, missing)
            model, refused = encoder, bool(missing) and _matter(encoder, missing)
    if refused:
        raise UserError(
            "model.source",
            f"lacks weights of {type(model).__name__}",
            given=f"{len(missing)} missing: {', '.join(missing[:4])}",
            remedy="Choose a model fine-tuned for this task",
        )
    if isinstance(model, transformers.PreTrainedModel) and hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    for module in model.modules():
        if getattr(module, "rope_type", "") == "dynamic":  # differs only beyond the longest text
            module.rope_type = "default"
    return model


def read_logit_terms(folder: Path) -> tuple[float, float | None]:
    """Return the factor and the summand, if any, of the logits of a model of texts and images."""
    import torch
    import transformers
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            names = {"logit_scale", "logit_bias"} & {*weights.keys()}
            found |= {name: weights.get_tensor(name).float() for name in names}
    if not found:  # other formats are read as a whole
        with quiet():
            model = transformers.AutoModel.from_pretrained(
                folder, dtype=torch.float32, trust_remote_code=False
            )
        found = dict(model.named_parameters())
    bias = found.get("logit_bias")
    return found["logit_scale"].exp().item(), None if bias is None else bias.item()


def model_class(folder: Path, auto_class: str) -> type[PreTrainedModel]:
    """Return the class that transformers' class `auto_class` loads a folder with."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    found = getattr(transformers, auto_class)
    mapping = getattr(found, "_model_mapping", None)  # a class of one family has none
    chosen: type[PreTrainedModel] = found if mapping is None else mapping[type(config)]
    return chosen


def _mismatch(
    config: PreTrainedConfig, wrong: tuple[str, Sequence[int], Sequence[int]]
) -> UserError:
    """Return the error for weights whose size differs from the config."""
    name, held, wanted = wrong
    labels = list((config.id2label or {}).values())
    if wanted[0] == len(labels) != held[0]:
        return UserError(
            "id2label in config.json",
            "names another number of labels than the model's head has",
            given=f"{len(labels)} ({', '.join(map(str, labels))}), but `{name}` has {held[0]}",
            remedy=f"Name all {held[0]} there and in label2id, or train the head again",
        )
    return UserError(
        "config.json",
        "gives other sizes than the weights have",
        given=f"`{name}` has {list(held)}, and {list(wanted)} by config.json",
        remedy="Use config.json and weights of the same model",
    )


def one_line(error: Exception) -> str:
    """Return an error's message without line breaks and terminal colors, cut to 300 characters."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())[:300]


def _loader(folder: Path, auto_class: str) -> Any:
    """Return the class to load with.

    For models without a head it is the encoder's class if there is one, as in
    sentence-transformers.
    """
    import transformers

    if auto_class == "AutoModel":
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if type(config) in transformers.MODEL_FOR_TEXT_ENCODING_MAPPING:
            return transformers.AutoModelForTextEncoding
    return getattr(transformers, auto_class)


def _own_settings(folder: Path, auto_class: str) -> dict[str, int]:
    """Return settings of one side of a model of texts and images, which differ in its own config.

    The size of the projection is that of the whole model.
    """
    config = read_json(folder / "config.json")
    if auto_class.endswith("ModelWithProjection") and "projection_dim" in config:
        return {"projection_dim": config["projection_dim"]}
    return {}


def _learned(model: PreTrainedModel, missing: set[str]) -> list[str]:
    """Return those missing weights that training decides, unlike for example a table of sines."""
    import torch

    if not missing:
        return []
    with torch.device("meta"):
        unfilled = type(model)(model.config)
    frozen = {name for name, weight in unfilled.named_parameters() if not weight.requires_grad}
    return sorted(missing - frozen)


def _runs(model: PreTrainedModel) -> bool:
    """Check that an encoder-decoder runs on token ids alone."""
    import torch

    try:
        with torch.no_grad():
            model(input_ids=model.dummy_inputs["input_ids"])
    except Exception:  # a model may raise anything without its decoder's inputs
        return False
    return True


def _encoder_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the encoder of an encoder-decoder; None if it cannot run as a model of its own."""
    import transformers

    encoder = model.get_encoder()
    return encoder if isinstance(encoder, transformers.PreTrainedModel) else None


def _missing_of(encoder: PreTrainedModel, model: PreTrainedModel, missing: list[str]) -> list[str]:
    """Return the encoder's share of the model's missing weights, by their names in the encoder."""
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lacking = {id(weights[name]) for name in missing if name in weights}
    own = (*encoder.named_parameters(), *encoder.named_buffers())
    return sorted(name for name, weight in own if id(weight) in lacking)


def _matter(model: PreTrainedModel, missing: list[str]) -> bool:
    """Check whether weights that the checkpoint lacks influence a result.

    The weights are set to NaN for the check. If no result becomes NaN, they are set to 0: for
    example a pooler that no head reads.
    """
    import torch

    inputs = model.dummy_inputs
    if model.main_input_name == "pixel_values":
        side = getattr(model.config, "image_size", 224)
        height, width = (side, side) if isinstance(side, int) else side
        inputs = {"pixel_values": torch.full((1, 3, height, width), 0.5)}
    elif model.main_input_name != "input_ids":
        return True
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    chosen = [weights[name] for name in missing if name in weights]
    with torch.no_grad():
        for weight in chosen:
            weight.fill_(float("nan") if weight.is_floating_point() else 0)
        try:
            output = model(**inputs)
        except Exception:  # the model needs other inputs, so the check is not possible
            return True
        results = [output.get(name) for name in RESULTS if output.get(name) is not None]
        if not results or any(bool(result.isnan().any()) for result in results):
            return True
        for weight in chosen:
            weight.zero_()
    return False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress what libraries print, log and warn of while the block runs; errors are raised."""
    previous = logging.root.manager.disable
    # A failed export logs the whole graph as an error, and raises.
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
