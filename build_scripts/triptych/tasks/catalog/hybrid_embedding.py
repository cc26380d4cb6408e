"""Task `hybrid-embedding`: a vector, terms and vectors of tokens of a text from one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.models.info import ModelInfo, Normalize
from triptych.models.token_layers import TOKEN_LAYERS, VECTORS_LAYER, WEIGHTS_LAYER, load_layer
from triptych.tasks.catalog import multi_vector_embedding, sparse_embedding
from triptych.tasks.compare import Comparison, Outputs
from triptych.tasks.labeled import SIMILARITY_CORRELATION
from triptych.tasks.metrics_vectors import compare_vectors
from triptych.tasks.prompts import prompt_rules, prompt_settings
from triptych.tasks.task import TEXT, Core, HeadContext, Parameters, Rule, Task, View

if TYPE_CHECKING:
    from torch import nn

TOKEN_VECTORS = "token_embedding"


def _head(context: HeadContext) -> nn.Module:
    from torch import nn

    from triptych.tasks.heads import SentenceHead, SeveralHeads, UnitLength

    info, folder, size = context.info, context.folder, context.info.hidden_size
    weigh = nn.Sequential(load_layer(folder, WEIGHTS_LAYER, size, 1), nn.ReLU())
    project = nn.Sequential(load_layer(folder, VECTORS_LAYER, size, size), UnitLength())
    return SeveralHeads(SentenceHead(info, folder), (weigh, project))


def _core(info: ModelInfo, parameters: Parameters) -> Core:
    size = info.hidden_size
    outputs = (
        Tensor("sentence_embedding", "FP32", (size,)),
        Tensor("token_weight", "FP32", ("tokens", 1)),
        Tensor("token_vector", "FP32", ("tokens", size)),
    )
    return Core("AutoModel", reads="vectors", returns="several", outputs=outputs)


def _check(info: ModelInfo) -> None:
    if info.pooling != ("cls",) or info.head != (Normalize(),):
        raise UserError(
            "model.source",
            f"must be a BGE-M3 model, with {' and '.join(TOKEN_LAYERS)}, and modules.json that "
            "names Pooling of the first token and Normalize",
            given=f"{info.architecture} with pooling {', '.join(info.pooling)}",
            remedy="Choose BAAI/bge-m3 or a model fine-tuned from it, or task text-embedding",
        )


def _part(rows: Sequence[Outputs], names: Mapping[str, str]) -> list[Outputs]:
    """Return the outputs of one kind under the names that its own task gives them."""
    return [{own: row[name] for name, own in names.items() if name in row} for row in rows]


_PARTS = (
    (compare_vectors, {"embedding": "embedding"}),
    (sparse_embedding.compare_sparse, {"token_id": "token_id", "weight": "weight"}),
    (
        multi_vector_embedding.compare_token_vectors,
        {TOKEN_VECTORS: "embedding", "token_count": "token_count"},
    ),
)


def _compare(
    got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
) -> Comparison:
    """Return the metrics of all kinds; of one that several have, the worst value.

    Badness is that of the worst kind.
    """
    better = {metric.name: metric.better for metric in _METRICS}
    values: dict[str, float] = {}
    badness = []
    for compare, names in _PARTS:
        part = compare(_part(got, names), _part(wanted, names), queries)
        badness.append(part.badness)
        for name, value in part.values.items():
            worse = min if better[name] == "higher" else max
            values[name] = worse(value, values.get(name, value))
    return Comparison(values, np.max(badness, axis=0).tolist())


_METRICS = tuple(
    dict.fromkeys((*sparse_embedding.TASK.metrics, *multi_vector_embedding.TASK.metrics))
)


def _parameters(info: ModelInfo) -> Mapping[str, Rule]:
    return {
        "max_active_dims": Rule("int", min=1),
        "threshold": Rule("float", default=0.0, min=0.0),
        **prompt_rules(info),
    }


def _settings(info: ModelInfo) -> Mapping[str, object]:
    # As FlagEmbedding, which names the tokens that begin, end and fill a text, and the unknown one.
    return {
        **prompt_settings(info),
        "special_ids": sorted({*info.special_ids} - {info.mask_token_id}),
    }


TASK = Task(
    name="hybrid-embedding",
    loader="SentenceTransformer",
    inputs=(TEXT,),
    outputs=(
        Tensor("embedding", "FP32", ("dimensions",)),
        Tensor("token_id", "INT32", ("terms",)),
        Tensor("weight", "FP32", ("terms",)),
        Tensor(TOKEN_VECTORS, "FP32", ("tokens", "dimensions")),
        Tensor("token_count", "INT32", (1,)),
    ),
    rows="rows_identified.IdentifiedRowMaker",
    decode="decode_hybrid.HybridDecoder",
    core=_core,
    head=_head,
    metrics=_METRICS,
    compare_outputs=_compare,
    labeled=SIMILARITY_CORRELATION,
    parameters=_parameters,
    settings=_settings,
    has_row_metadata=True,
    view=View("terms"),
    check=_check,
)
