"""Former names of fields of ``pipeline.yaml`` and of metrics, still read with a warning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych.base.errors import UserError, warn_renamed
from triptych.runtime.triton_io import FORMER_NAMES
from triptych.spec.kind import Kind, kind_of_task

METRICS = {
    "neighbour_effect": "batch_sensitivity",
    "nearest_neighbour_agreement": "nearest_neighbor_agreement",
    "mean_neighbour_loss": "mean_neighbor_loss",
    "max_neighbour_loss": "max_neighbor_loss",
}
"""Former name of a metric of the accuracy gate to its present name."""

_ENCODER = {
    "serving.queue.max_size": "serving.queue.max_in_flight",
    "serving.queue.max_wait_ms": "serving.queue.max_backlog_ms",
    "serving.max_inflight": "serving.max_inflight_requests",
    "serving.sample.keep_hours": "serving.sample.retention_hours",
    "core.share": "core.shared_from",
    "tokenizer.overflow": "tokenizer.truncation",
    "custom.reads": "custom.head_input",
    "custom.returns": "custom.core_output",
    "custom.model_class": "custom.auto_class",
    **{f"accuracy.{old}": f"accuracy.{new}" for old, new in METRICS.items()},
    **{f"parameters.{old}": f"parameters.{new}" for old, new in FORMER_NAMES.items()},
}
_GENERATION = {
    "serving.queue.max_size": "serving.queue.max_in_flight",
    "core.max_sequences": "core.max_num_seqs",
    "core.max_batched_tokens": "core.max_num_batched_tokens",
    "core.max_length": "core.max_model_len",
    "core.prefix_caching": "core.enable_prefix_caching",
    "core.tensor_parallel": "core.tensor_parallel_size",
    "core.pipeline_parallel": "core.pipeline_parallel_size",
    "core.kv_cache.precision": "core.kv_cache.dtype",
}
_TEXT2TEXT = {
    "serving.queue.max_size": "serving.queue.max_in_flight",
    "core.max_sequences": "core.max_num_seqs",
    "core.beams": "core.num_beams",
    "core.no_repeat_ngram": "core.no_repeat_ngram_size",
    "core.max_answer": "core.max_new_tokens",
    "core.min_answer": "core.min_new_tokens",
}
_FORMER: Mapping[Kind, Mapping[str, str]] = {
    Kind.ENCODER: _ENCODER,
    Kind.TEXT_GENERATION: _GENERATION,
    Kind.TEXT2TEXT: _TEXT2TEXT,
    Kind.MODEL: {},
}


def former_fields(task: str) -> Mapping[str, str]:
    """Return former dotted names of the fields of a task's specs, each with its present name."""
    return _FORMER[kind_of_task(task)]


def rename_fields(document: dict[str, Any], task: str, *, source: str = "", warn: bool) -> None:
    """Give the fields of a spec's document their present names.

    Args:
        document: The document, changed in place.
        task: Task of the pipeline.
        source: Prefix of the field's name in errors and warnings, for example a path.
        warn: Whether to warn of each former name.

    Raises:
        UserError: The document has both names of a field.
    """
    for old, new in former_fields(task).items():
        *parents, name = old.split(".")
        node: Any = document
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if not isinstance(node, dict) or name not in node:
            continue
        present = new.rpartition(".")[2]
        if present in node:
            raise UserError(
                f"{source}{old}",
                f"is the former name of {new}, which is also set",
                given=node[name],
                remedy=f"Remove `{old}`",
            )
        node[present] = node.pop(name)
        if warn:
            warn_renamed(f"{source}{old}", new)
