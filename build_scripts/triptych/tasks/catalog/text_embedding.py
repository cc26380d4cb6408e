"""Task `text-embedding`: a vector of each text, as `SentenceTransformer` computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from triptych.base.tensors import Tensor
from triptych.models.info import ModelInfo
from triptych.tasks.labeled import SIMILARITY_CORRELATION
from triptych.tasks.metrics_vectors import (
    COSINES,
    NEIGHBORS,
    SIMILARITY_RANK_CORRELATION,
    compare_vectors,
)
from triptych.tasks.prompts import prompt_rules, prompt_settings
from triptych.tasks.task import TEXT, Core, Parameters, Rule, Task, View


def _core(info: ModelInfo, parameters: Parameters) -> Core:
    # Not called `embedding`: the exporter uses that name for a value inside the graph.
    vector = Tensor("sentence_embedding", "FP32", (info.embedding_size,))
    return Core(auto_class="AutoModel", reads="pooled", returns="vector", outputs=(vector,))


ENCODINGS = ("float", "int8", "uint8", "binary", "ubinary")
"""Output types of embeddings, with the names of sentence-transformers except for float32."""


def vector_parameters(info: ModelInfo) -> Mapping[str, Rule]:
    """Return the rules of the parameters that `EmbeddingDecoder` reads."""
    return {
        "dimensions": Rule("int", min=1, max=info.embedding_size),
        "normalize_embeddings": Rule("bool"),
        "encoding": Rule("str", default="float", choices=ENCODINGS),
    }


def _parameters(info: ModelInfo) -> Mapping[str, Rule]:
    return {**vector_parameters(info), **prompt_rules(info)}


TASK = Task(
    name="text-embedding",
    loader="SentenceTransformer",
    inputs=(TEXT,),
    # Variable axes and one of the outputs: the options `dimensions` and `encoding` decide.
    outputs=(
        Tensor("embedding", "FP32", ("dimensions",), optional=True),
        Tensor("embedding_int8", "INT8", ("bytes",), optional=True),
        Tensor("embedding_uint8", "UINT8", ("bytes",), optional=True),
    ),
    rows="rows_text.PlainTextRowMaker",
    decode="decode_embeddings.EmbeddingDecoder",
    core=_core,
    metrics=(*COSINES, *NEIGHBORS, SIMILARITY_RANK_CORRELATION),
    compare_outputs=compare_vectors,
    labeled=SIMILARITY_CORRELATION,
    parameters=_parameters,
    view=View("vectors"),
    settings=prompt_settings,
)


FLOAT_EMBEDDING = replace(
    TASK,
    outputs=(Tensor("embedding", "FP32", ("dimensions",)),),
    parameters=lambda info: {
        **_parameters(info),
        "encoding": Rule("str", default="float", choices=ENCODINGS[:1]),
    },
)
"""Text embedding of pipelines with a response cache, whose requests must not choose the output."""
