"""Task `text-embedding`: a vector of each text, as `SentenceTransformer` computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from triptych.base.tensors import Tensor
from triptych.models.image_vectors import TEXT_TOWERS
from triptych.models.info import ModelInfo
from triptych.tasks.labeled import SIMILARITY_CORRELATION
from triptych.tasks.metrics_vectors import (
    COSINES,
    NEIGHBORS,
    SIMILARITY_RANK_CORRELATION,
    compare_vectors,
)
from triptych.tasks.prompts import prompt_rules, prompt_settings
from triptych.tasks.task import TEXT, Core, HeadContext, Parameters, Rule, Task, View

if TYPE_CHECKING:
    from torch import nn


def _core(info: ModelInfo, parameters: Parameters) -> Core:
    # Not called `embedding`: the exporter uses that name for a value inside the graph.
    vector = Tensor("sentence_embedding", "FP32", (info.embedding_size,))
    return Core(auto_class="AutoModel", reads="pooled", returns="vector", outputs=(vector,))


def _of_text_tower(task: Task, info: ModelInfo, given: Parameters) -> Task:
    """Return the task for the text side of a model of texts and images, as transformers has it."""
    auto_class = TEXT_TOWERS.get(info.architecture, "")
    if not auto_class:
        return task

    def core(info: ModelInfo, parameters: Parameters) -> Core:
        return replace(_core(info, parameters), auto_class=auto_class)

    return replace(task, core=core, head=_tower_head, loader="")


def _tower_head(context: HeadContext) -> nn.Module:
    from triptych.tasks.heads import TowerHead

    return TowerHead(context.model)


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
    form=_of_text_tower,
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
