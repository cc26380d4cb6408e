"""text-embedding: one vector a text, pooled and normalized as the model's own modules say."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.base.tensors import Tensor
from triptych.spec.model_facts import ModelFacts
from triptych.spec.tasks.metrics_labeled import SIMILARITY_CORRELATION
from triptych.spec.tasks.metrics_vectors import COSINES, NEIGHBORS, compare_vectors
from triptych.spec.tasks.task import TEXT, Core, Parameters, Rule, Task, View


def _core(facts: ModelFacts, parameters: Parameters) -> Core:
    # Not called `embedding`: the exporter uses that name for a value inside the graph.
    vector = Tensor("sentence_embedding", "FP32", (facts.embedding_size,))
    return Core(auto_class="AutoModel", reads="pooled", returns="vector", outputs=(vector,))


def _parameters(facts: ModelFacts) -> Mapping[str, Rule]:
    rules = {
        "dimensions": Rule("int", min=1, max=facts.embedding_size),
        "encoding": Rule("str", default="float", choices=("float", "int8", "binary")),
    }
    if facts.prompts:
        names = tuple(sorted(facts.prompts))
        rules["prompt_name"] = Rule("str", default=facts.default_prompt, choices=names)
    return rules


TEXT_EMBEDDING = Task(
    name="text-embedding",
    inputs=(TEXT,),
    # Variable axes: the request parameters `dimensions` and `encoding` decide.
    outputs=(
        Tensor("embedding", "FP32", ("dimensions",)),
        Tensor("embedding_int8", "INT8", ("bytes",)),
    ),
    rows="rows_text.PlainTextRowMaker",
    decode="decode_rows.EmbeddingDecoder",
    core=_core,
    metrics=(*COSINES, *NEIGHBORS, "similarity_rank_correlation"),
    compare_outputs=compare_vectors,
    labeled=SIMILARITY_CORRELATION,
    parameters=_parameters,
    view=View("vectors"),
    settings=lambda facts: {"prompts": dict(facts.prompts)},
)
