"""Definition of a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from triptych.base.tensors import DType, Tensor
from triptych.models.info import Activation, Loader, ModelInfo
from triptych.tasks.compare import Compare, Comparison, Outputs
from triptych.tasks.labeled import LabeledMetric
from triptych.tasks.metric import Metric
from triptych.tasks.results import BestClasses, Elements, Results

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

Reads = Literal["pooled", "row", "mask", "tokens", "image", "graph"]
"""Input of the head: the vectors of all tokens, of which `Task.head` makes one result for each row
(``pooled``), what the model's own head reads of a row, such as its first token (``row``), the mask
token, every token, an image, or the inputs of the user's own graph.
"""

Returns = Literal[
    "vector", "logits", "scores", "choices", "token_choices", "token_scores", "spans", "arrays"
]
"""Output of the core per row: a vector; logits; scores (activated logits); the best classes with
scores, best first (``choices``). Per token: the best class with its score (``token_choices``);
scores of all classes (``token_scores``); logits of a span's start and end (``spans``). For the
user's own graph: its outputs (``arrays``).
"""

Parameters = Mapping[str, Any]
"""Request parameters with the pipeline's defaults."""

ViewKind = Literal["choices", "entities", "answer", "boxes", "vectors", "outputs"]
"""View of outputs on the demo page: labels with bars for their scores; `text` with its entities
marked; `text_pair` with the answer marked; the image with its boxes; vectors and their
similarity; or plain outputs.
"""


@dataclass(frozen=True)
class Core:
    """Computation and outputs of the core.

    Attributes:
        auto_class: Class of transformers that loads the model with its head.
        reads: Input of the head.
        returns: Kind of output.
        outputs: Output tensors without the batch dimension, in the order of `returns`.
        activation: Function from logits to scores; None for the model's.
    """

    auto_class: str
    reads: Reads
    returns: Returns
    outputs: tuple[Tensor, ...]
    activation: Activation | None = None

    @property
    def per_token(self) -> bool:
        """Whether the outputs have an entry for each token of a row."""
        return self.returns in ("token_choices", "token_scores", "spans")

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
    """Model that the head of a task belongs to.

    Attributes:
        model: Model, as `Core.auto_class` loads it.
        info: Information about the model.
        folder: Folder of the model.
    """

    model: PreTrainedModel
    info: ModelInfo
    folder: Path


MakeHead = Callable[[HeadContext], "nn.Module"]
"""Function that makes a head: its `forward` takes the vectors of tokens, FP32 ``[R, N, H]``, and
their `heads.RowMembership`, and returns FP32 ``[B, K]``."""


def sentence_head(context: HeadContext) -> nn.Module:
    """Return the pooling of sentence-transformers with the modules behind it."""
    from triptych.tasks.heads import SentenceHead  # imports torch

    return SentenceHead(context.info, context.folder)


@dataclass(frozen=True)
class Rule:
    """Rule for a request parameter, checked by `runtime.triton_io`.

    Attributes:
        type: Type of the value.
        default: Value if neither request nor pipeline gives one; None for none.
        min: Smallest number.
        max: Largest number.
        choices: Allowed values.
    """

    type: Literal["bool", "int", "float", "str", "list"]
    default: bool | int | float | str | tuple[str, ...] | None = None
    min: float | None = None
    max: float | None = None
    choices: tuple[str, ...] = ()

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
    """View of a task's outputs on the demo page.

    Attributes:
        asks: Parameters that the page sends if its user gives none, within the pipeline's limits.
    """

    kind: ViewKind
    asks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """Definition of a task: inputs, outputs, core, parameters and metrics.

    Attributes:
        name: Name in the spec.
        inputs: Inputs of the ensemble, without the batch dimension.
        outputs: Outputs of the ensemble.
        rows: Module and class in `triptych.runtime` of the batch encoder.
        decode: Module and class in `triptych.runtime` of the decoder.
        core: Returns the core for a model and the pipeline's parameters.
        metrics: Metrics besides `metric.CORE_METRICS`.
        head: Makes the head of a core that reads ``pooled``.
        compare_outputs: Computes the metrics of decoded outputs.
        labeled: Measure on labeled rows; None if there can be none.
        decodes_answers: Whether the gate compares decoded outputs. If only the pipeline knows
            their
            meaning, the gate compares the core alone.
        parameters: Rules of request parameters by name.
        settings: Further settings of both classes, as JSON values.
        pairs: Whether a model row has two segments.
        loader: Class of sentence-transformers that loads the model for the reference; empty for
            transformers' own pipelines.
        modules: Modules of sentence-transformers that the head computes itself.
        has_row_metadata: Whether each model row has row metadata (`tensors.ROW_METADATA`).
        decodes_tokens: Whether postprocess needs the tokenizer.
        max_length: Default maximum number of tokens in a model row; None for the model's limit.
        request_rows: Maximum number of rows in a request; None for the batch size.
        view: View of outputs on the demo page.
        example: Example of a row's value for outputs with JSON, for `triptych test`.
        check: Raises `UserError` if a model does not fit the task.
        added: Names of the outputs that the pipeline's function `after` adds.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    rows: str
    decode: str
    core: Callable[[ModelInfo, Parameters], Core]
    metrics: tuple[Metric, ...]
    compare_outputs: Compare
    labeled: LabeledMetric | None
    decodes_answers: bool = True
    head: MakeHead = sentence_head
    parameters: Callable[[ModelInfo], Mapping[str, Rule]] = lambda info: {}
    settings: Callable[[ModelInfo], Mapping[str, object]] = lambda info: {}
    check: Callable[[ModelInfo], None] = lambda info: None
    pairs: bool = False
    loader: Loader = ""
    modules: tuple[str, ...] = ()
    has_row_metadata: bool = False
    decodes_tokens: bool = False
    request_rows: int | None = None
    max_length: int | None = None
    view: View = View("outputs")
    example: Mapping[str, object] = field(default_factory=dict)
    added: tuple[str, ...] = ()

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
