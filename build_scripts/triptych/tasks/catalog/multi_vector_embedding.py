"""Task `multi-vector-embedding`: a vector for each token, as `MultiVectorEncoder` computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from triptych.base.errors import UserError
from triptych.base.max_similarity import max_similarity
from triptych.base.tensors import Tensor
from triptych.models.info import ModelInfo
from triptych.models.roles import DOCUMENT, ROLES
from triptych.models.text import MASK
from triptych.runtime.decode_token_vectors import ENCODINGS
from triptych.tasks.compare import Comparison, Floats, Outputs, finite, spearman
from triptych.tasks.labeled import similarity_correlation
from triptych.tasks.metric import Metric
from triptych.tasks.metrics_vectors import COSINES, NEIGHBOR_TOLERANCE, row_cosines
from triptych.tasks.prompts import ROLE
from triptych.tasks.task import TEXT, Core, HeadContext, Parameters, Rule, Task, View

if TYPE_CHECKING:
    from torch import nn

MAX_SCORED = 128
"""Maximum number of texts whose scores are compared, each as a query with each as a document."""

SCORE_ERROR = Metric(
    "score_error",
    "lower",
    "largest error of a MaxSim score, divided by the query's number of vectors",
    limits=(1e-5, 2e-3, 0.05),
    probe=(5e-3, 0.1),
)
FIRST_AGREEMENT = Metric(
    "first_document_agreement",
    "higher",
    "queries with the same first document, or an equally good one",
    limits=(1.0, 0.98, 0.97),
    probe=(0.98, 0.93),
)
SCORE_RANK_CORRELATION = Metric(
    "score_rank_correlation",
    "higher",
    "Spearman of the MaxSim scores of all pairs",
    limits=(0.9999, 0.999, 0.99),
    probe=(0.999, 0.985),
)


def _head(context: HeadContext) -> nn.Module:
    from triptych.tasks.heads import TokenHead

    return TokenHead(context.info, context.folder)


def _core(info: ModelInfo, parameters: Parameters) -> Core:
    vectors = Tensor("token_embedding", "FP32", ("tokens", info.embedding_size))
    return Core("AutoModel", reads="vectors", returns="token_vectors", outputs=(vectors,))


def _check(info: ModelInfo) -> None:
    if not info.roles:
        raise UserError(
            "model.source",
            f"must be a model that MultiVectorEncoder has saved, with {MASK} (modules.json)",
            given=info.architecture,
            remedy="Load the model with sentence_transformers.MultiVectorEncoder and save it, or "
            "choose task text-embedding",
        )


def compare_token_vectors(
    got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
) -> Comparison:
    """Return the metrics of vectors of tokens and of their MaxSim scores.

    The first `MAX_SCORED` texts are scored. Badness is one minus the lowest cosine.
    """
    pairs = [(_vectors(some), _vectors(other)) for some, other in zip(got, wanted, strict=True)]
    cosines = [
        row_cosines(some, other) if some.shape == other.shape else np.array([-1.0])
        for some, other in pairs
    ]
    lowest = [float(each.min(initial=1.0)) for each in cosines]
    values = {
        "min_cosine": min(lowest),
        "mean_cosine": float(np.concatenate([[1.0], *cosines]).mean()),
    }
    some, others = zip(*pairs[:MAX_SCORED], strict=True)
    scores, expected = _scores(some), _scores(others)
    error = np.abs(scores - expected).max()
    values[SCORE_ERROR.name] = float(error) if np.isfinite(error) else np.inf
    if len(expected) > 2:
        first = np.where(np.isfinite(scores), scores, -np.inf).argmax(1)
        lost = expected.max(1) - np.take_along_axis(expected, first[:, None], 1)[:, 0]
        values[FIRST_AGREEMENT.name] = float((lost <= NEIGHBOR_TOLERANCE).mean())
        correlation = spearman(scores.ravel(), expected.ravel())
        if correlation is not None:
            values[SCORE_RANK_CORRELATION.name] = correlation
    return Comparison(values, [1 - cosine for cosine in lowest])


def _vectors(outputs: Outputs) -> Floats:
    """Return the vectors of a text, ``[tokens, dim]``; none if an output is missing."""
    if "embedding" not in outputs or "token_count" not in outputs:
        return np.empty((0, 0))
    count = int(outputs["token_count"].ravel()[0])
    return outputs["embedding"][0, :count].astype(np.float64)


def _scores(texts: Sequence[Floats]) -> Floats:
    """Return the MaxSim score of each text as a query with each other one, ``[n, n]``.

    It is divided by the number of the query's vectors. A text itself has the score 0.
    """
    with np.errstate(invalid="ignore"):
        sums = max_similarity(texts, texts)
    scores: Floats = sums / np.array([[max(1, len(text))] for text in texts])
    np.fill_diagonal(scores, 0.0)
    return scores


def _pair_scores(outputs: Sequence[Outputs], others: Sequence[Outputs]) -> Floats:
    """Return the MaxSim score of each two texts; -inf if it is not finite."""
    scores = []
    for some, other in zip(outputs, others, strict=True):
        query, document = _vectors(some), _vectors(other)
        usable = len(query) and len(document) and finite(query) and finite(document)
        scores.append((query @ document.T).max(1).mean() if usable else -np.inf)
    return np.array(scores)


def _parameters(info: ModelInfo) -> Mapping[str, Rule]:
    return {
        ROLE: Rule("str", default=DOCUMENT, choices=ROLES),
        "encoding": Rule("str", default=ENCODINGS[0], choices=ENCODINGS),
    }


def _settings(info: ModelInfo) -> Mapping[str, object]:
    prompts = {role: info.prompts[role] for role in ROLES if info.prompts.get(role)}
    return {"prompts": prompts, "roles": {name: asdict(each) for name, each in info.roles.items()}}


TASK = Task(
    name="multi-vector-embedding",
    loader="MultiVectorEncoder",
    modules=(MASK,),
    inputs=(TEXT,),
    # One of the vectors: the option `encoding` decides.
    outputs=(
        Tensor("embedding", "FP32", ("tokens", "dimensions"), optional=True),
        Tensor("embedding_float16", "FP16", ("tokens", "dimensions"), optional=True),
        Tensor("embedding_int8", "INT8", ("tokens", "bytes"), optional=True),
        Tensor("embedding_uint8", "UINT8", ("tokens", "bytes"), optional=True),
        Tensor("token_count", "INT32", (1,)),
    ),
    rows="rows_roles.RoleRowMaker",
    decode="decode_token_vectors.TokenVectorDecoder",
    core=_core,
    head=_head,
    metrics=(*COSINES, SCORE_ERROR, FIRST_AGREEMENT, SCORE_RANK_CORRELATION),
    compare_outputs=compare_token_vectors,
    labeled=similarity_correlation(_pair_scores),
    parameters=_parameters,
    settings=_settings,
    has_row_metadata=True,
    view=View("matches"),
    check=_check,
)
