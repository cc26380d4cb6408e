"""Task `late-interaction-reranking`: the MaxSim score of a passage for a query (ColBERT).

The reference is `MultiVectorEncoder`. The vectors of tokens stay on the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from triptych.base.tensors import Tensor
from triptych.models.info import ModelInfo
from triptych.tasks.catalog import multi_vector_embedding, reranking
from triptych.tasks.compare import compare_scores
from triptych.tasks.labeled import RECIPROCAL_RANK
from triptych.tasks.task import TEXT, TEXT_PAIR, View


def _settings(info: ModelInfo) -> Mapping[str, object]:
    means = info.similarity == "meanmaxsim"
    return {**multi_vector_embedding.TASK.settings(info), "mean_scores": means}


TASK = replace(
    multi_vector_embedding.TASK,
    name="late-interaction-reranking",
    inputs=(TEXT, TEXT_PAIR),
    outputs=(Tensor("score", "FP32", (1,)),),
    rows="rows_passages.QueryPassageRowMaker",
    model_rows=2,  # A query and a passage
    decode="decode_max_similarity.MaxSimilarityDecoder",
    metrics=(reranking.RANK_CORRELATION, reranking.TOP1_AGREEMENT),
    compare_outputs=compare_scores,
    labeled=RECIPROCAL_RANK,
    parameters=lambda info: {},
    settings=_settings,
    view=View("outputs"),
)
