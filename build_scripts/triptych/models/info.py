"""Information about a model from its own files; see `models.source`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, NamedTuple

from triptych.base.tensors import Tensor

Activation = Literal["softmax", "sigmoid", "none"]
Loader = Literal["SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder", ""]
Resize = Literal["none", "exact", "shorter"]


@dataclass(frozen=True)
class ImageInfo:
    """Settings of an image processor, with defaults filled in.

    An RGB image becomes the model's input by these steps: resize, crop, reverse channels (in
    `runtime.rows_image.to_pixels`), then rescale and normalize (in `image_core.ImageCore`).
    """

    # Meaning of `edges`: both sides exactly, the shorter side with the aspect ratio kept, or no
    # resizing.
    resize: Resize
    edges: tuple[int, ...]  # Sides in pixels: height and width, the shorter side, or empty
    resample: str  # Name of Pillow's filter in lower case
    # Height and width cut from the center, padded with zeros for smaller images; None for no crop.
    crop: tuple[int, int] | None
    reverse_channels: bool  # Whether the model's channels are blue, green, red
    rescale_factor: float | None  # Factor for pixel values from 0 to 255; None for no rescaling
    mean: tuple[float, ...] | None  # Value subtracted from each channel; None for no normalization
    std: tuple[float, ...] | None  # Divisor of each channel; None for no normalization
    height: int  # Height of the model's input in pixels
    width: int  # Width of the model's input in pixels
    channels: int = 3


@dataclass(frozen=True)
class Dense:
    """Linear layer after pooling."""

    folder: str  # Folder of the weights, relative to the model
    in_features: int
    out_features: int
    bias: bool
    activation: str  # Dotted name of the torch module applied to the result
    residual: bool = False  # Whether its input, or a product with it, is added to the result


@dataclass(frozen=True)
class Normalize:
    """Scaling of each vector to length 1."""


@dataclass(frozen=True)
class Truncate:
    """Removal of all but the first `size` numbers of each vector."""

    size: int


@dataclass(frozen=True)
class Role:
    """Tokens of the texts of a role, such as queries, for a model with a vector for each token."""

    max_length: int  # Maximum number of tokens of a text
    skipped: tuple[int, ...] = ()  # Ids of the tokens that have no vector
    width: int = 0  # Number of tokens up to which shorter texts are filled
    fill: int = 0  # Id of the token that fills them
    attended: bool = True  # Whether the other tokens attend to those


@dataclass(frozen=True)
class LogitScore:
    """Logit of a token, less that of another one if it is given, of a model that generates text."""

    true_id: int
    false_id: int | None = None


HeadModule = Dense | Normalize | Truncate | LogitScore
"""Module behind the pooling of a model."""


@dataclass(frozen=True)
class OwnInterface:
    """Tensors of the user's own model and the functions around it, without the batch dimension."""

    inputs: tuple[Tensor, ...]  # Inputs of the core
    outputs: tuple[Tensor, ...]  # Outputs of the core
    # Tensors that `preprocess` or the step sends to postprocess past the core.
    past_core: tuple[Tensor, ...] = ()
    has_counts: bool = False  # Whether `preprocess` returns the number of core rows of each row
    # Whether `postprocess` or another function behind a core takes the inputs of the request.
    takes_rows: bool = False
    # Smallest and largest value of each element of an input that indexes a table, as two numbers or
    # nested lists; None without a limit.
    ranges: Mapping[str, object] = field(default_factory=dict, hash=False)
    # Texts of the labels of each output of the core whose values are their numbers.
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)

    def padded(self, axis: str) -> dict[str, int]:
        """Return the number of a named axis for each input that has it, with the batch as 0."""
        return {t.name: t.dims.index(axis) + 1 for t in self.inputs if axis in t.dims}


class ModelNames(NamedTuple):
    """Names of the arrays of one of several models."""

    model: str  # Name of the model
    inputs: Mapping[str, str]  # Array that `OwnStage.function` makes for each input of the graph
    outputs: Mapping[str, str]  # Array that the function behind gets for each output of the graph


@dataclass(frozen=True)
class OwnStage:
    """A function of an own pipeline with several models, and the models that it feeds."""

    function: str  # Name of the function
    own: OwnInterface  # The arrays that the function makes, and that its models return
    models: tuple[ModelNames, ...]  # Names of the arrays of each model


@dataclass(frozen=True)
class Space:
    """Vector space of both sides of a model of texts and images, and the scores in it."""

    id: str  # Class and hash of the weights, which both sides have
    scale: float  # Factor of a cosine in the model's logits
    # Summand of the logits of a model whose scores are their sigmoid; None for a softmax.
    bias: float | None


@dataclass(frozen=True)
class ModelInfo:
    """Information about a model; None for values that its config does not give."""

    sha256: str  # Hash of names and contents of the files that determine the model's results
    architecture: str  # Class name in ``config.json``
    hidden_size: int  # Size of a token's vector
    max_length: int  # Maximum number of tokens in a row, including special tokens
    pad_token_id: int  # Id of the padding token; it never affects results
    # Maximum number of tokens to which the reference cuts a text; None if its files give none.
    library_length: int | None = None
    # Whether sentence-transformers puts a lower-casing before the tokenizer's own normalization.
    # Special tokens are found before it.
    lowercase: bool = False
    pooling: tuple[str, ...] = ("mean",)  # Poolings of token vectors, concatenated in this order
    # Modules after pooling, in order.
    head: tuple[HeadModule, ...] = ()
    # Settings of the modules that the head of a task computes itself, by class name.
    modules: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    # How the texts of each role are read, for a model with a vector for each token.
    roles: Mapping[str, Role] = field(default_factory=dict)
    # Similarity of two texts that the model was trained for; None if its files name none.
    similarity: str | None = None
    # Largest number of terms of a sparse vector; None for no limit.
    max_active_dims: int | None = None
    # Whether the terms of a query have their weights in a table; see `routed`.
    has_query_weights: bool = False
    include_prompt: bool = True  # Whether the tokens of a prompt are pooled
    # Text put before each input by name of the prompt.
    prompts: Mapping[str, str] = field(default_factory=dict)
    # Name of the prompt for requests that name none; None for no prompt.
    default_prompt: str | None = None
    free_prompt: bool = False  # Whether a request may send the text of a prompt instead of a name
    labels: tuple[str, ...] = ()  # Label of each output of a classifying head, by index
    # Index that transformers' zero-shot pipeline takes for the label ``entailment``; None if the
    # config has no ``label2id``.
    entailment: int | None = None
    # Function from logits to scores, as transformers' pipelines choose it.
    activation: Activation = "softmax"
    # Function from the one logit of a cross-encoder to its score, as sentence-transformers chooses
    # it.
    relevance: Activation = "sigmoid"
    # Score of a reranker that generates text; None for other models.
    logit_score: LogitScore | None = None
    # Rendered chat template of such a reranker, without a prompt and with one; see
    # `runtime.rows_template`. Empty without a template, None for one of another form.
    pair_template: tuple[tuple[str, ...], ...] | None = ()
    segments: int = 1  # Number of token types that the model distinguishes; 1 for none
    # Token for the word to be filled in; None if the tokenizer has none.
    mask_token: str | None = None
    mask_token_id: int | None = None
    vocabulary: int | None = None  # Number of tokens in the vocabulary
    special_ids: tuple[int, ...] = ()  # Ids of the tokenizer's special tokens
    unk_token_id: int | None = None  # Id of the token for unknown text; None if every text is known
    padding_side: str = "right"  # Side on which the tokenizer pads: ``right`` or ``left``
    image: ImageInfo | None = None  # Settings of the image processor; None for text models
    layers: int | None = None  # Number of layers in the encoder
    heads: int | None = None  # Number of attention heads in a layer
    intermediate_size: int | None = None  # Size between the two feed-forward products of a layer
    # Vector space of texts and images; None for models of one of them.
    space: Space | None = None
    # Tensors of the user's own model; None for models of transformers.
    own: OwnInterface | None = None

    @property
    def of_core(self) -> dict[str, object]:
        """Fields that affect the core, as plain data, without prompts and estimates of cost."""
        aside = {"prompts", "default_prompt", "free_prompt", "special_ids", "pair_template"}
        aside |= {"layers", "heads", "intermediate_size", "library_length", "entailment"}
        aside |= {"padding_side", "max_active_dims", "roles", "similarity", "has_query_weights"}
        aside |= {"space"}
        aside |= {name for name in ("own", "modules") if not getattr(self, name)}
        return {key: value for key, value in asdict(self).items() if key not in aside}

    @property
    def embedding_size(self) -> int:
        """Size of the final vector."""
        size = self.hidden_size * len(self.pooling)
        for module in self.head:
            if isinstance(module, Dense):
                size = module.out_features
            elif isinstance(module, Truncate):
                size = min(size, module.size)
        return size


def info_of_interface(own: OwnInterface) -> ModelInfo:
    """Return the information on an own model of which only the interface is known yet."""
    return ModelInfo("", "", 0, 0, 0, own=own)
