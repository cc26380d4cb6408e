"""Definition of a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from triptych.base.errors import UserError
from triptych.base.tensors import DType, Tensor
from triptych.models.info import Activation, Loader, ModelInfo
from triptych.tasks.compare import Compare, Comparison, Outputs
from triptych.tasks.labeled import LabeledMetric
from triptych.tasks.metric import Metric
from triptych.tasks.results import BestClasses, Elements, Results

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

Reads = Literal["pooled", "vectors", "row", "mask", "tokens", "image", "graph"]
"""Input of the head: the vectors of all tokens, of which `Task.head` makes one result for each row
(``pooled``) or for each token (``vectors``), what the model's own head reads of a row, such as its
first token (``row``), the mask token, every token, an image, or the inputs of the user's own graph.
"""

Returns = Literal[
    "vector",
    "several",
    "logits",
    "scores",
    "choices",
    "token_vectors",
    "token_choices",
    "token_scores",
    "spans",
    "arrays",
]
"""Output of the core per row: a vector; the results of several heads, each for a row or for each
token (``several``); logits; scores (activated logits); the best classes with scores, best first
(``choices``). Per token: a vector; the best class with its score
(``token_choices``); scores of all classes (``token_scores``); logits of a span's start and end
(``spans``). For the user's own graph: its outputs (``arrays``).
"""

Parameters = Mapping[str, Any]
"""Request parameters with the pipeline's defaults."""

ViewKind = Literal[
    "choices", "entities", "answer", "boxes", "vectors", "terms", "matches", "outputs"
]
"""View of outputs on the demo page: labels with bars for their scores; `text` with its entities
marked; `text_pair` with the answer marked; the image with its boxes; vectors and their
similarity; tokens with their weights; tokens of a query with those of a document that they match;
or plain outputs.
"""


@dataclass(frozen=True)
class Core:
    """Computation and outputs of the core."""

    auto_class: str  # Class of transformers that loads the model with its head
    reads: Reads  # Input of the head
    returns: Returns  # Kind of output
    # Output tensors without the batch dimension, in the order of `returns`.
    outputs: tuple[Tensor, ...]
    activation: Activation | None = None  # Function from logits to scores; None for the model's

    @property
    def token_outputs(self) -> tuple[Tensor, ...]:
        """Outputs that have an entry for each token of a row."""
        if self.returns == "arrays":
            return ()
        return tuple(tensor for tensor in self.outputs if "tokens" in tensor.dims)

    @property
    def per_token(self) -> tuple[bool, ...]:
        """Whether each result of the head has an entry for each token; one unless ``several``."""
        flags = tuple(tensor in self.token_outputs for tensor in self.outputs)
        return flags if self.returns == "several" else flags[:1]

    @property
    def has_task_head(self) -> bool:
        """Whether `Task.head` computes the results, from the vectors of all tokens."""
        return self.reads in ("pooled", "vectors")

    @property
    def results(self) -> Results:
        """Form in which the outputs are held against those of the reference."""
        if self.returns in ("choices", "token_choices"):
            return BestClasses(self.outputs)
        if self.returns == "vector":
            return Elements(self.outputs, "vector")
        has_classes = self.returns in ("logits", "scores", "token_scores")
        return Elements(self.outputs, "classes" if has_classes else "values")


class HeadContext(NamedTuple):
    """Model that the head of a task belongs to."""

    model: PreTrainedModel  # Model, as `Core.auto_class` loads it
    info: ModelInfo  # Information about the model
    folder: Path  # Folder of the model


MakeHead = Callable[[HeadContext], "nn.Module"]
"""Function that makes a head: its `forward` takes the vectors of tokens, FP32 ``[R, N, H]``, and
their `heads.RowMembership`, and returns FP32 ``[B, K]``, or ``[R, N, K]`` for each token, or a
tuple of such results."""


def sentence_head(context: HeadContext) -> nn.Module:
    """Return the pooling of sentence-transformers with the modules behind it."""
    from triptych.tasks.heads import SentenceHead  # imports torch

    return SentenceHead(context.info, context.folder)


@dataclass(frozen=True)
class Rule:
    """Rule for a request parameter, checked by `runtime.triton_io`."""

    type: Literal["bool", "int", "float", "str", "list"]  # Type of the value
    # Value if neither request nor pipeline gives one; None for none.
    default: bool | int | float | str | tuple[str, ...] | None = None
    min: float | None = None  # Smallest number
    max: float | None = None  # Largest number
    choices: tuple[str, ...] = ()  # Allowed values

    def tensor(self, name: str) -> Tensor:
        """Return the optional input of the ensemble for the parameter `name`."""
        dtypes: dict[str, DType] = {"bool": "BOOL", "int": "INT32", "float": "FP32"}
        dims: tuple[int | str, ...] = ("items",) if self.type == "list" else (1,)
        return Tensor(name, dtypes.get(self.type, "BYTES"), dims, optional=True)

    def as_dict(self) -> dict[str, object]:
        """Return data for a step's parameters, without fields that do not apply."""
        choices = list(self.choices) or None
        fields = {"type": self.type, "min": self.min, "max": self.max, "choices": choices}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class View:
    """View of a task's outputs on the demo page."""

    kind: ViewKind
    # Parameters that the page sends if its user gives none, within the pipeline's limits.
    asks: Mapping[str, int] = field(default_factory=dict)


def same_form(task: Task, info: ModelInfo, given: Parameters) -> Task:
    """Return the task as it is, for a task that has one form."""
    return task


@dataclass(frozen=True)
class Task:
    """Definition of a task: inputs, outputs, core, parameters and metrics."""

    name: str  # Name in the spec
    inputs: tuple[Tensor, ...]  # Inputs of the ensemble, without the batch dimension
    outputs: tuple[Tensor, ...]  # Outputs of the ensemble
    rows: str  # Module and class in `triptych.runtime` of the batch encoder
    decode: str  # Module and class in `triptych.runtime` of the decoder
    # Returns the core for a model and the pipeline's parameters.
    core: Callable[[ModelInfo, Parameters], Core]
    metrics: tuple[Metric, ...]  # Metrics besides `metric.CORE_METRICS`
    compare_outputs: Compare  # Computes the metrics of decoded outputs
    labeled: LabeledMetric | None  # Measure on labeled rows; None if there can be none
    # Whether the gate compares decoded outputs. If only the pipeline knows their meaning, the gate
    # compares the core alone.
    decodes_answers: bool = True
    head: MakeHead = sentence_head  # Makes the head of a core that reads ``pooled``
    # Rules of request parameters by name.
    parameters: Callable[[ModelInfo], Mapping[str, Rule]] = lambda info: {}
    # Further settings of both classes, as JSON values.
    settings: Callable[[ModelInfo], Mapping[str, object]] = lambda info: {}
    # Raises `UserError` if a model does not fit the task.
    check: Callable[[ModelInfo], None] = lambda info: None
    # Returns the form of the task for a model and the parameters that the spec gives.
    form: Callable[[Task, ModelInfo, Parameters], Task] = same_form
    pairs: bool = False  # Whether a model row has two segments
    # Class of sentence-transformers that loads the model for the reference; empty for transformers'
    # own pipelines.
    loader: Loader = ""
    modules: tuple[str, ...] = ()  # Modules of sentence-transformers that the head computes itself
    # Whether each model row has row metadata (`tensors.ROW_METADATA`).
    has_row_metadata: bool = False
    model_rows: int = 1  # Number of model rows of each row, which limits the rows of a request
    # Whether a result is a vector of an image, whose size only the class of the model knows.
    reads_image_vectors: bool = False
    decodes_tokens: bool = False  # Whether postprocess needs the tokenizer
    request_rows: int | None = None  # Maximum number of rows in a request; None for the batch size
    # Default maximum number of tokens in a model row; None for the model's limit.
    max_length: int | None = None
    view: View = View("outputs")  # View of outputs on the demo page
    # Example of a row's value for outputs with JSON, for `triptych test`.
    example: Mapping[str, object] = field(default_factory=dict)
    added: tuple[str, ...] = ()  # Names of the outputs that the pipeline's function `after` adds

    @property
    def output_settings(self) -> list[dict[str, Any]]:
        """Outputs as postprocess, decoders and `runtime.hooking.RowForm` read them."""
        return [
            {
                "name": t.name,
                "dtype": t.dtype,
                "dims": t.config_dims,
                "json": t.content == "json",
                "optional": t.optional,
            }
            for t in self.outputs
        ]

    def compare(
        self, got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
    ) -> Comparison:
        """Compare decoded outputs of the same requests.

        Args:
            got: Outputs of the candidate, one item per request, each ``[1, ...]``.
            wanted: Outputs of the reference.
            queries: Input ``text`` of each request, by which passages are grouped.

        Raises:
            ValueError: The numbers of items differ.
        """
        if not len(got) == len(wanted) == len(queries):
            raise ValueError(
                f"{len(got)} candidates, {len(wanted)} references and {len(queries)} queries"
            )
        return self.compare_outputs(got, wanted, queries) if got else Comparison({}, [])


TEXT = Tensor("text", "BYTES", (1,))
TEXT_PAIR = Tensor("text_pair", "BYTES", (1,))
IMAGE = Tensor("image", "BYTES", (1,), content="image")


def has_image_processor(info: ModelInfo) -> None:
    """Raise a `UserError` if the model has no image processor."""
    if info.image is None:
        raise UserError(
            "model.source",
            "must hold an image processor (preprocessor_config.json)",
            given=f"{info.architecture} without one",
            remedy="Save the model's image processor into the folder",
        )
