"""What is known of a model from its own files, as `model.source` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Activation = Literal["softmax", "sigmoid", "none"]
Resize = Literal["none", "exact", "shorter"]


@dataclass(frozen=True)
class ImageFacts:
    """The settings of an image processor, its defaults filled in.

    From an RGB image to the model's input, in this order: resize, crop, reverse the channels (so
    far `runtime.rows_image.to_pixels`), rescale, normalize (`model.image_core.ImageCore`).

    Attributes:
        resize: what `edges` means: both edges exactly, the shorter edge with the longer one in
            proportion, or no resizing at all.
        edges: in pixels: height and width, the shorter edge alone, or nothing.
        resample: name of Pillow's filter, in lower case.
        crop: height and width cut out of the middle, filled up with zeros where the image is
            smaller; None for no crop.
        reverse_channels: whether the model's channels are blue, green, red.
        rescale_factor: multiplies the pixels, which count from 0 to 255; None for no rescaling.
        mean: subtracted from each channel after that; None for no normalization.
        std: divides each channel after that; None for no normalization.
        height: of every result, in pixels; likewise `width` and `channels`.
    """

    resize: Resize
    edges: tuple[int, ...]
    resample: str
    crop: tuple[int, int] | None
    reverse_channels: bool
    rescale_factor: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    height: int
    width: int
    channels: int = 3


@dataclass(frozen=True)
class Dense:
    """A linear layer after pooling.

    Attributes:
        folder: of its weights, relative to the model.
        activation: dotted name of the torch module applied after it.
    """

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class Normalize:
    """Scale each vector to length 1."""


@dataclass(frozen=True)
class ModelFacts:
    """A model as its files describe it; None stands for what its config does not say.

    Attributes:
        sha256: hash over names and contents of the files that decide the result.
        architecture: class name in ``config.json``.
        hidden_size: elements of a token's vector.
        max_length: tokens a row may have, special tokens included, by the model's own files.
        pad_token_id: fills a row up; its value never reaches a result.
        lowercase: texts are lower-cased before they are tokenized.
        pooling: ways a row's token vectors become one, concatenated in this order.
        head: what follows pooling, in order.
        prompts: name to text put before each input.
        default_prompt: name of the prompt used when a request names none; None for no prompt.
        labels: what each output of a classifying head stands for, by index.
        activation: turns a classifying head's logits into scores.
        segments: kinds of segment the model tells apart (token types); 1 where it does not.
        mask_token: stands for the word to be filled in; None where the tokenizer has none.
        vocabulary: tokens the model knows.
        unk_token_id: of what is not in the vocabulary; None where nothing is unknown.
        image: settings of the model's image processor; None for models of text.
        layers: of the encoder, one after the other.
        heads: of attention, in a layer.
        intermediate_size: elements between a layer's two feed-forward products.
    """

    sha256: str
    architecture: str
    hidden_size: int
    max_length: int
    pad_token_id: int
    lowercase: bool = False
    pooling: tuple[str, ...] = ("mean",)
    head: tuple[Dense | Normalize, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    labels: tuple[str, ...] = ()
    activation: Activation = "softmax"
    segments: int = 1
    mask_token: str | None = None
    mask_token_id: int | None = None
    vocabulary: int | None = None
    unk_token_id: int | None = None
    image: ImageFacts | None = None
    layers: int | None = None
    heads: int | None = None
    intermediate_size: int | None = None

    @property
    def of_core(self) -> dict[str, Any]:
        """All that decides the core, as plain data: prompts do not, nor do estimates of cost."""
        aside = ("prompts", "default_prompt", "layers", "heads", "intermediate_size")
        return {key: value for key, value in asdict(self).items() if key not in aside}

    @property
    def embedding_size(self) -> int:
        """Elements of the final vector."""
        sizes = [module.out_features for module in self.head if isinstance(module, Dense)]
        return sizes[-1] if sizes else self.hidden_size * len(self.pooling)
