"""What is known of a model from its own files: read once by `build.source`, used by everyone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from triptych.model.image_facts import ImageFacts

Activation = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True)
class Dense:
    """A linear layer after pooling.

    Attributes:
        folder: of its weights, relative to the model.
        in_features: size of its input vector.
        out_features: size of its output vector.
        bias: whether it adds one.
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
    """A model as its files describe it.

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
        activation: makes scores of a classifying head's logits.
        segments: kinds of segment the model tells apart (token types); 1 where it does not.
        mask_token: stands for the word to be filled in; None where the tokenizer has none.
        mask_token_id: its id.
        vocabulary: tokens the model knows; None where its config does not say.
        unk_token_id: of what is not in the vocabulary; None where nothing is unknown.
        image: how the model's image processor makes pixels; None for models of text.
        layers: of the encoder, one after the other; None where its config does not say.
        heads: of attention, in a layer; None likewise.
        intermediate_size: elements between a layer's two feed-forward products; None likewise.
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
        size = self.hidden_size * len(self.pooling)
        for module in self.head:
            if isinstance(module, Dense):
                size = module.out_features
        return size
