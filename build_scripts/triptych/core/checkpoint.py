"""Checks of a checkpoint's files against the pipeline: its class, and its ``tokenizer.json``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError
from triptych.base.tensors import TokenRow
from triptych.core.gate_rows import GateRows
from triptych.core.reader import RequestReader
from triptych.models.fields import EncoderSource
from triptych.models.text import read_json

HEAD = re.compile(r"(For[A-Z]\w*|(With)?LMHeadModel)$")
"""End of the name of a class of transformers with a head."""

TASKS_OF_HEADS: Mapping[str, str] = {
    "ForSequenceClassification": "text-classification, reranking or zero-shot-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForConditionalGeneration": "text2text-generation",
}
"""Beginning of a head's name to the tasks of a model with it; any model fits text-embedding."""

MASKED = ("ForPreTraining", "WithLMHeadModel", "ForConditionalGeneration")
"""Other heads that predict a masked token in some families, and lack no weight there."""

LONGROPE = ("longrope", "su")
"""Names of the rope type whose factors depend on the longest text; the second is an older one."""


def check_architecture(auto_class: str, architecture: str, model: EncoderSource) -> None:
    """Check that the `architecture` in ``config.json`` has the head that `auto_class` loads.

    A head of another class may have weights of the same names and shapes.
    """
    wanted, named = auto_class.removeprefix("AutoModel"), HEAD.search(architecture)
    if model.accept_architecture or not wanted or named is None or named[0].startswith(wanted):
        return
    if wanted == "ForMaskedLM" and named[0] in MASKED:
        return
    fitting = [task for head, task in TASKS_OF_HEADS.items() if named[0].startswith(head)]
    raise UserError(
        "task",
        f"does not fit the class in the model's config.json: it needs a head {wanted}",
        given=architecture,
        remedy=f"Use task {(fitting or ['text-embedding'])[0]}, or choose a model fine-tuned for "
        "the task. If the class in config.json is wrong, set model.accept_architecture: true",
    )


def check_rope(folder: Path, max_length: int) -> None:
    """Check that no text of up to `max_length` tokens changes the positions of its batch.

    Models with ``longrope`` rotate all texts of a batch by other factors if one of them has more
    tokens than the texts of the first training.
    """
    config: Mapping[str, Any] = read_json(folder / "config.json")
    found: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    name = "original_max_position_embeddings"
    for rope in (found, *found.values()):  # of all layers, or of each kind of layer
        if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) not in LONGROPE:
            continue
        short = config.get(name) or rope.get(name) or config.get("max_position_embeddings")
        if short and short < max_length:
            raise UserError(
                "tokenizer.max_length",
                f"is at most {short} ({name} in config.json) for a model with the rope type "
                "longrope, whose result for a text depends on the longest text of its batch",
                given=max_length,
                remedy=f"Set it to {short}, or choose another model",
            )


def check_tokenizer(from_file: RequestReader, gate: GateRows) -> None:
    """Check that a reader with the ``tokenizer.json`` makes the rows that the gate has."""
    requests = (*gate.requests, *gate.probe)
    for request, made in zip(requests, from_file.with_rows(requests), strict=True):
        rows = () if isinstance(made, Exception) else made.rows
        if rows != request.rows:
            raise tokens_differ(request.preview, _show(rows), _show(request.rows))


def tokens_differ(text: str, by_file: str, by_class: str) -> UserError:
    """Return the error that a text has other tokens by the model's file than by its class."""
    return UserError(
        "tokenizer.source",
        "must say which tokenizer of the model is right: its tokenizer.json or its class in "
        "transformers, which ignores parts of the file",
        given=f"{text!r} has the tokens {by_file} by the file, {by_class} by the class",
        remedy="Set it to `file` (as the tokenizers library and TEI read the model) or `class` "
        "(as transformers 5 does)",
    )


def _show(rows: Sequence[object]) -> str:
    found = [row for row in rows if isinstance(row, TokenRow)]
    return " ".join(f"{list(row.ids[:32])} ({row.first_segment} of type 0)" for row in found)
