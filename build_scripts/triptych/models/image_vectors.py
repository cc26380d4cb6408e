"""Vectors of images: the result of a model that is the vector of an image, and its size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from triptych.base.errors import UserError
from triptych.models.info import ImageInfo, Space

if TYPE_CHECKING:
    from torch import Tensor

ImagePooling = Literal["pooler", "cls", "mean"]
"""Result that is the vector of an image: that of the model's pooler or projection, the vector of
the first token, or the mean of all tokens or of all places of a feature map."""

IMAGE_TOWERS = {"CLIPModel": "CLIPVisionModelWithProjection", "SiglipModel": "SiglipVisionModel"}
"""Class of the image side of each model of texts and images. Its results are those of
`get_image_features`."""


TEXT_TOWERS = {"CLIPModel": "CLIPTextModelWithProjection", "SiglipModel": "SiglipTextModel"}
"""Class of the text side of such a model. Its results are those of `get_text_features`."""

PADDED_TOWERS = ("SiglipModel",)
"""Models that read each text with its padding up to the maximum length, to which it is padded. The
vector of a text is that of the last token."""

EOS = "eos"
"""Pooling of the text side: the first token that ends a text."""


def read_space(folder: Path, architecture: str, hash_weights: Callable[[], str]) -> Space | None:
    """Return the space of a model of texts and images, by the hash of its weights; else None."""
    if architecture not in IMAGE_TOWERS:
        return None
    from triptych.models.loading import read_logit_terms

    return Space(f"{architecture} {hash_weights()[:16]}", *read_logit_terms(folder))


def image_class(architecture: str) -> str:
    """Return the class of transformers that loads a model for vectors of images."""
    return IMAGE_TOWERS.get(architecture, "AutoModel")


def pooled(output: Any, pooling: str) -> Tensor:
    """Return a vector for each image or text, FP32 ``[rows, size]``, of a model's `output`."""
    vectors: Tensor
    if pooling == "pooler":
        embeds = output.get("text_embeds", output.get("image_embeds"))
        vectors = output.pooler_output if embeds is None else embeds
        return vectors.flatten(1)  # a feature map of one place in models of convolutions
    hidden: Tensor = output.last_hidden_state
    if hidden.ndim == 4:  # [rows, size, height, width]
        hidden = hidden.flatten(2).transpose(1, 2)
    vectors = hidden[:, 0] if pooling == "cls" else hidden.mean(1)
    return vectors


def read_image_vectors(
    folder: Path, architecture: str, image: ImageInfo, chosen: ImagePooling | None
) -> tuple[ImagePooling, int]:
    """Return how the vectors of a model are pooled, and their size.

    By default it is the pooler if the model has one with weights, else the first token if the model
    has one for the class of an image, else the mean.

    Raises:
        UserError: transformers cannot load the model, or the model has no `chosen` pooling.
    """
    import torch

    from triptych.models.loading import load_model

    model = load_model(folder, image_class(architecture))
    pixels = torch.full((1, image.channels, image.height, image.width), 0.5)
    with torch.inference_mode():
        output = model(pixel_values=pixels)
    # `load_model` fills weights that the checkpoint lacks, and no other result reads, with 0.
    found = output.get("image_embeds", output.get("pooler_output"))
    has_pooler = found is not None and bool(found.any())
    has_class = any(name.endswith("cls_token") for name, _ in model.named_parameters())
    has_tokens = output.last_hidden_state.ndim == 3
    possible: list[ImagePooling] = ["pooler"] if has_pooler else []
    if architecture not in IMAGE_TOWERS:
        possible += ["cls", "mean"] if has_tokens and has_class else ["mean"]
    if chosen is not None and chosen not in possible:
        raise UserError(
            "image.pooling",
            f"must be one of {', '.join(possible)} for {type(model).__name__} with these weights",
            given=chosen,
            remedy=f"Remove it to take {possible[0]}",
        )
    pooling = chosen or possible[0]
    return pooling, pooled(output, pooling).shape[1]
