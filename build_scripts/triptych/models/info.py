"""Information about a model from its own files; see `models.source`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from triptych.base.tensors import Tensor

Activation = Literal["softmax", "sigmoid", "none"]
Loader = Literal["SentenceTransformer", "CrossEncoder", "SparseEncoder", ""]
Resize = Literal["none", "exact", "shorter"]


@dataclass(frozen=True)
class ImageInfo:
    """Settings of an image processor, with defaults filled in.

    An RGB image becomes the model's input by these steps: resize, crop, reverse channels (in
    `runtime.rows_image.to_pixels`), then rescale and normalize (in `image_core.ImageCore`).

    Attributes:
        resize: Meaning of `edges`: both sides exactly, the shorter side with the aspect ratio
            kept, or no resizing.
        edges: Sides in pixels: height and width, the shorter side, or empty.
        resample: Name of Pillow's filter in lower case.
        crop: Height and width cut from the center, padded with zeros for smaller images; None for
            no crop.
        reverse_channels: Whether the model's channels are blue, green, red.
        rescale_factor: Factor for pixel values from 0 to 255; None for no rescaling.
        mean: Value subtracted from each channel; None for no normalization.
        std: Divisor of each channel; None for no normalization.
        height: Height of the model's input in pixels.
        width: Width of the model's input in pixels.
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
    """Linear layer after pooling.

    Attributes:
        folder: Folder of the weights, relative to the model.
        activation: Dotted name of the torch module applied to the result.
    """

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class Normalize:
    """Scaling of each vector to length 1."""


@dataclass(frozen=True)
class Truncate:
    """Removal of all but the first `size` numbers of each vector."""

    size: int


@dataclass(frozen=True)
class LogitScore:
    """Logit of a token, less that of another one if it is given, of a model that generates text."""

    true_id: int
    false_id: int | None = None


@dataclass(frozen=True)
class OwnInterface:
    """Tensors of the user's own model and of the functions around it, without the batch dimension.

    Attributes:
        inputs: Inputs of the core.
        outputs: Outputs of the core.
        past_core: Tensors that `preprocess` or the step sends to postprocess past the core.
        has_counts: Whether `preprocess` returns the number of core rows of each row.
        takes_rows: Whether `postprocess` or another function behind a core takes the inputs of the
            request.
        ranges: Smallest and largest value of each element of an input that indexes a table, as two
            numbers or nested lists; None without a limit.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    past_core: tuple[Tensor, ...] = ()
    has_counts: bool = False
    takes_rows: bool = False
    ranges: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def padded(self, axis: str) -> dict[str, int]:
        """Return the number of a named axis for each input that has it, with the batch as 0."""
        return {t.name: t.dims.index(axis) + 1 for t in self.inputs if axis in t.dims}


class ModelNames(NamedTuple):
    """Names of the arrays of one of several models.

    Attributes:
        model: Name of the model.
        inputs: Array that `OwnStage.function` makes for each input of the graph.
        outputs: Array that the function behind gets for each output of the graph.
    """

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class OwnStage:
    """A function of an own pipeline with several models, and the models that it feeds.

    Attributes:
        function: Name of the function.
        own: The arrays that the function makes, and that its models return.
        models: Names of the arrays of each model.
    """

    function: str
    own: OwnInterface
    models: tuple[ModelNames, ...]


@dataclass(frozen=True)
class ModelInfo:
    """Information about a model; None for values that its config does not give.

    Attributes:
        sha256: Hash of names and contents of the files that determine the model's results.
        architecture: Class name in ``config.json``.
        hidden_size: Size of a token's vector.
        max_length: Maximum number of tokens in a row, including special tokens.
        library_length: Maximum number of tokens to which the reference cuts a text; None if its
            files give none.
        pad_token_id: Id of the padding token; it never affects results.
        lowercase: Whether sentence-transformers puts a lower-casing before the tokenizer's own
            normalization. Special tokens are found before it.
        pooling: Poolings of token vectors, concatenated in this order.
        head: Modules after pooling, in order.
        modules: Settings of the modules that the head of a task computes itself, by class name.
        max_active_dims: Largest number of terms of a sparse vector; None for no limit.
        include_prompt: Whether the tokens of a prompt are pooled.
        prompts: Text put before each input by name of the prompt.
        default_prompt: Name of the prompt for requests that name none; None for no prompt.
        free_prompt: Whether a request may send the text of a prompt instead of a name.
        labels: Label of each output of a classifying head, by index.
        entailment: Index that transformers' zero-shot pipeline takes for the label ``entailment``;
            None if the config has no ``label2id``.
        activation: Function from logits to scores, as transformers' pipelines choose it.
        relevance: Function from the one logit of a cross-encoder to its score, as
            sentence-transformers chooses it.
        logit_score: Score of a reranker that generates text; None for other models.
        pair_template: Rendered chat template of such a reranker, without a prompt and with one; see
            `runtime.rows_template`. Empty without a template, None for one of another form.
        segments: Number of token types that the model distinguishes; 1 for none.
        mask_token: Token for the word to be filled in; None if the tokenizer has none.
        vocabulary: Number of tokens in the vocabulary.
        special_ids: Ids of the tokenizer's special tokens.
        unk_token_id: Id of the token for unknown text; None if every text is known.
        padding_side: Side on which the tokenizer pads: ``right`` or ``left``.
        image: Settings of the image processor; None for text models.
        layers: Number of layers in the encoder.
        heads: Number of attention heads in a layer.
        intermediate_size: Size between the two feed-forward products of a layer.
        own: Tensors of the user's own model; None for models of transformers.
    """

    sha256: str
    architecture: str
    hidden_size: int
    max_length: int
    pad_token_id: int
    library_length: int | None = None
    lowercase: bool = False
    pooling: tuple[str, ...] = ("mean",)
    head: tuple[Dense | Normalize | Truncate | LogitScore, ...] = ()
    modules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_active_dims: int | None = None
    include_prompt: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    free_prompt: bool = False
    labels: tuple[str, ...] = ()
    entailment: int | None = None
    activation: Activation = "softmax"
    relevance: Activation = "sigmoid"
    logit_score: LogitScore | None = None
    pair_template: tuple[tuple[str, ...], ...] | None = ()
    segments: int = 1
    mask_token: str | None = None
    mask_token_id: int | None = None
    vocabulary: int | None = None
    special_ids: tuple[int, ...] = ()
    unk_token_id: int | None = None
    padding_side: str = "right"
    image: ImageInfo | None = None
    layers: int | None = None
    heads: int | None = None
    intermediate_size: int | None = None
    own: OwnInterface | None = None

    @property
    def of_core(self) -> dict[str, Any]:
        """Fields that affect the core, as plain data, without prompts and estimates of cost."""
        aside = {"prompts", "default_prompt", "free_prompt", "special_ids", "pair_template"}
        aside |= {"layers", "heads", "intermediate_size", "library_length", "entailment"}
        aside |= {"padding_side", "max_active_dims"} | ({"own"} if self.own is None else set())
        aside |= set() if self.modules else {"modules"}
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
