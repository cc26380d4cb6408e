"""Tasks declared by a pipeline; `decode` in its ``hooks.py`` computes the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.models.info import ModelInfo
from triptych.spec.fields import Custom, CustomOutput
from triptych.tasks.classes import labels
from triptych.tasks.compare import LABEL_AGREEMENT, compare_anything
from triptych.tasks.metrics_vectors import COSINES
from triptych.tasks.task import TEXT, TEXT_PAIR, Core, Parameters, Task

RETURNS = {"row": ("logits", "scores"), "tokens": ("token_scores",), "pooled": ("vector",)}
"""Possible outputs of the core by the input of its head."""

METRICS = {
    "vector": COSINES,
    "scores": (LABEL_AGREEMENT,),
    "token_scores": (LABEL_AGREEMENT,),
    "logits": (),
}
"""Metrics by output of the core."""


def with_added_outputs(task: Task, outputs: Sequence[CustomOutput]) -> Task:
    """Return a task with the outputs that the pipeline's function `after` adds."""
    added = tuple(map(_tensor, outputs))
    names = tuple(tensor.name for tensor in added)
    return replace(task, outputs=(*task.outputs, *added), added=names)


def _tensor(output: CustomOutput) -> Tensor:
    dims = tuple("variable" if size == -1 else size for size in output.dims)
    return Tensor(output.name, output.dtype, dims)


def custom_task(custom: Custom) -> Task:
    """Return the task that a spec declares.

    Raises:
        UserError: Fields of the declaration contradict each other.
    """
    if custom.core_output not in RETURNS[custom.head_input]:
        raise UserError(
            "custom.core_output",
            f"must be {' or '.join(RETURNS[custom.head_input])} if custom.head_input is "
            f"{custom.head_input}",
            given=custom.core_output,
            remedy="Change one of the two",
        )

    pairs = "text_pair" in custom.inputs
    if "text" not in custom.inputs or (pairs and custom.head_input == "tokens"):
        raise UserError(
            "custom.inputs",
            "must be [text], or [text, text_pair] if custom.head_input is not tokens",
            given=", ".join(custom.inputs),
            remedy="Change one of the two",
        )

    for output in custom.outputs:
        if output.dtype == "BYTES" and len(output.dims) > 1:
            raise UserError(
                f"custom.outputs: {output.name}",
                "must have one dimension, because its dtype is BYTES",
                given=output.dims,
                remedy="Return nested data as a JSON text",
            )

    def core(info: ModelInfo, parameters: Parameters) -> Core:
        size = info.embedding_size if custom.head_input == "pooled" else len(info.labels)
        dims = ("tokens", size) if custom.head_input == "tokens" else (size,)
        # The exporter uses names such as `logits` for values inside the graph.
        output = Tensor(f"core_{custom.core_output}", "FP32", dims)
        return Core(custom.auto_class, custom.head_input, custom.core_output, (output,))

    def check(info: ModelInfo) -> None:
        if custom.head_input != "pooled" and not info.labels:
            raise UserError(
                "model.source",
                "must be a model with a classifying head (id2label in config.json)",
                given=info.architecture,
                remedy="Choose one, or set custom.head_input: pooled",
            )

    return Task(
        name="custom",
        loader="SentenceTransformer" if custom.head_input == "pooled" else "",
        inputs=(TEXT, TEXT_PAIR) if pairs else (TEXT,),
        outputs=tuple(map(_tensor, custom.outputs)),
        rows="rows_spans.OffsetRowMaker"
        if custom.head_input == "tokens"
        else "rows_text.PlainTextRowMaker",
        decode="decode_custom.CustomDecoder",
        pairs=pairs,
        core=core,
        metrics=METRICS[custom.core_output],
        compare_outputs=compare_anything,
        labeled=None,
        decodes_answers=False,
        settings=labels,
        has_row_metadata=custom.head_input == "tokens",
        check=check,
    )
