"""text-embedding: one vector a text, pooled and normalised as the model's own modules say."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.model_facts import ModelFacts
from triptych.tasks.task import Task, Thresholds
from triptych.tensors import Tensor


def _core_outputs(facts: ModelFacts) -> tuple[Tensor, ...]:
    # Not called `embedding`: the exporter uses that name for a value inside the graph.
    return (Tensor("sentence_embedding", "FP32", (facts.embedding_size,)),)


def _outputs(facts: ModelFacts) -> tuple[Tensor, ...]:
    # A variable axis: the request parameter `dimensions` shortens it.
    return (Tensor("embedding", "FP32", ("dimensions",)),)


def _request_parameters(facts: ModelFacts) -> Mapping[str, Mapping[str, object]]:
    rules: dict[str, Mapping[str, object]] = {
        "dimensions": {"type": "int", "min": 1, "max": facts.embedding_size}
    }
    if facts.prompts:
        rules["prompt_name"] = {"type": "str", "choices": sorted(facts.prompts)}
    return rules


TEXT_EMBEDDING = Task(
    name="text-embedding",
    inputs=(Tensor("text", "BYTES", (1,)),),
    core_outputs=_core_outputs,
    outputs=_outputs,
    postprocess="postprocess_text_embedding.py",
    request_parameters=_request_parameters,
    thresholds=Thresholds(min_cosine=0.99999, max_difference=1e-5),
)
