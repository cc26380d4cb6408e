"""What a task is.

Parts that tasks share: inputs, outputs, cores that choose classes, checks of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.spec.model_facts import ModelFacts
from triptych.spec.tasks.compare import Compare, Comparison, Outputs
from triptych.spec.tasks.metrics_labeled import LabeledMetric

Reads = Literal["pooled", "row", "mask", "tokens", "image"]
"""What of the encoder's result the head works on: the pooled vector that sentence-transformers
files describe; what the model's own head reads of a row (its first token, say); the mask token;
every token; or an image instead of tokens."""

Returns = Literal["vector", "logits", "scores", "choices", "token_choices", "token_scores", "spans"]
"""What leaves the core, a row: a vector; the head's logits; their activation; the best classes and
their scores, best first; and a token: the best class and its score; the scores of all classes; the
logits of a span's start and of its end."""

Parameters = Mapping[str, Any]
"""Request parameters with a value each: the pipeline's own, where a request names none."""

ViewKind = Literal["choices", "entities", "answer", "vectors", "outputs"]
"""What a person sees of an answer: labels with bars for their scores; the text of `text` with its
entities marked; `text_pair` with the answer in it marked; vectors and how alike two are; or the
outputs as they are."""

MAX_TOP_K = 64
"""Most choices that leave the core: a request cannot ask for more."""


@dataclass(frozen=True)
class Core:
    """What the core computes and returns.

    Attributes:
        auto_class: class of transformers that loads the model with its head.
        reads: what of the encoder's result the head works on.
        returns: what leaves the core.
        outputs: by name, without the batch dimension, in the order `returns` says.
    """

    auto_class: str
    reads: Reads
    returns: Returns
    outputs: tuple[Tensor, ...]

    @property
    def per_token(self) -> bool:
        """Whether the outputs have an entry for each token of a row."""
        return self.returns in ("token_choices", "token_scores", "spans")

    @property
    def chooses(self) -> bool:
        """Whether the core returns the best classes instead of all."""
        return self.returns in ("choices", "token_choices")


@dataclass(frozen=True)
class Rule:
    """What a request parameter may be, as `runtime.parameters` checks it.

    Attributes:
        type: of its value.
        default: taken where neither the request nor the pipeline gives one; None for nothing.
        min: smallest number.
        max: largest number.
        choices: the values it may have.
    """

    type: Literal["bool", "int", "float", "str", "list"]
    default: bool | int | float | str | tuple[str, ...] | None = None
    min: float | None = None
    max: float | None = None
    choices: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """For a step's parameters; what does not apply is left out."""
        choices = list(self.choices) or None
        fields = {"type": self.type, "min": self.min, "max": self.max, "choices": choices}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class View:
    """How the demo page shows a task's answers.

    Attributes:
        kind: what is shown.
        asks: parameters that the page asks for where its user names none, as far as the pipeline's
            limits allow.
    """

    kind: ViewKind
    asks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One kind of inference.

    Attributes:
        name: as the spec writes it.
        inputs: of the ensemble, without the batch dimension.
        outputs: of the ensemble.
        rows: Module and class in `triptych.runtime` that make the model's rows from a request.
        decode: Module and class in `triptych.runtime` that make the outputs from the core's.
        core: what the core computes, from the model's facts and the pipeline's parameters.
        metrics: what is measured beside the core's own: names in `accuracy.METRICS`.
        compare_outputs: makes the metrics of decoded outputs.
        labeled: what is measured on labeled rows; None where there can be none.
        decodes_answers: whether the gate compares decoded answers. Where only the pipeline knows
            what they mean, the core alone is judged.
        parameters: what a request may ask for: name to rule.
        settings: more that the two files need to know, as JSON can hold it.
        pairs: whether a core row has two segments.
        carries: whether each core row brings data past the core (`tensors.CARRY`).
        decodes_tokens: whether postprocess needs the tokenizer.
        max_length: tokens of a core row unless the spec says otherwise; None for the model's own.
        request_rows: most rows of a request; None for as many as a batch holds.
        view: how the demo page shows an answer.
        example: of outputs whose JSON has a form: what one row may hold, for `triptych test`.
        check: raises `UserError` where a model does not fit the task.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    rows: str
    decode: str
    core: Callable[[ModelFacts, Parameters], Core]
    metrics: tuple[str, ...]
    compare_outputs: Compare
    labeled: LabeledMetric | None
    decodes_answers: bool = True
    parameters: Callable[[ModelFacts], Mapping[str, Rule]] = lambda facts: {}
    settings: Callable[[ModelFacts], Mapping[str, object]] = lambda facts: {}
    check: Callable[[ModelFacts], None] = lambda facts: None
    pairs: bool = False
    carries: bool = False
    decodes_tokens: bool = False
    request_rows: int | None = None
    max_length: int | None = None
    view: View = View("outputs")
    example: Mapping[str, object] = field(default_factory=dict)

    @property
    def output_settings(self) -> list[dict[str, Any]]:
        """The outputs as postprocess, decoders and `runtime.hooking.RowForm` read them."""
        return [
            {"name": t.name, "dtype": t.dtype, "dims": t.config_dims, "json": t.content == "json"}
            for t in self.outputs
        ]

    def compare(
        self, got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
    ) -> Comparison:
        """Compare the decoded outputs of the same requests.

        Args:
            got: the candidate's outputs, one a request, each ``[1, ...]``.
            wanted: the reference's.
            queries: the input ``text`` of each request, by which passages are grouped.

        Raises:
            ValueError: not as many of one as of the other.
        """
        if not len(got) == len(wanted) == len(queries):
            raise ValueError(
                f"{len(got)} candidates, {len(wanted)} references and {len(queries)} queries"
            )
        return self.compare_outputs(got, wanted, queries) if got else Comparison({}, [])


TEXT = Tensor("text", "BYTES", (1,))
TEXT_PAIR = Tensor("text_pair", "BYTES", (1,))
CHOICES = (Tensor("label", "BYTES", ("choices",)), Tensor("score", "FP32", ("choices",)))
BEST_CHOICES = View("choices", asks={"top_k": 5})
SEQUENCE_CLASSIFIER = "AutoModelForSequenceClassification"


def choosing_core(auto_class: str, reads: Reads, classes: int) -> Core:
    """A core that returns the best of `classes` with their scores, best first."""
    kept = min(classes, MAX_TOP_K)
    outputs = (Tensor("class_id", "INT32", (kept,)), Tensor("class_score", "FP32", (kept,)))
    return Core(auto_class=auto_class, reads=reads, returns="choices", outputs=outputs)


def top_k(classes: int, *, default: int) -> Mapping[str, Rule]:
    kept = min(classes, MAX_TOP_K)
    return {"top_k": Rule("int", default=min(default, kept), min=1, max=kept)}


def labels(facts: ModelFacts) -> Mapping[str, object]:
    return {"labels": list(facts.labels)}


def has_labels(facts: ModelFacts) -> None:
    if not facts.labels:
        raise UserError(
            "model.source",
            "must name its classes (id2label in config.json)",
            given=f"{facts.architecture} without any",
            remedy="Choose a model fine-tuned for this task",
        )
