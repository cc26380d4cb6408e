"""Task `sparse-embedding`: weights of the terms of a text, as `SparseEncoder` computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from triptych.base.errors import UserError
from triptych.base.tensors import Tensor
from triptych.models.info import ModelInfo
from triptych.tasks.compare import TIE, Comparison, Floats, Outputs, finite, numbers
from triptych.tasks.labeled import similarity_correlation
from triptych.tasks.metric import Metric
from triptych.tasks.metrics_vectors import (
    COSINES,
    NEIGHBORS,
    SIMILARITY_RANK_CORRELATION,
    compare_vectors,
)
from triptych.tasks.prompts import prompt_rules, prompt_settings
from triptych.tasks.task import TEXT, Core, HeadContext, Parameters, Rule, Task, View

if TYPE_CHECKING:
    from torch import Tensor as TorchTensor
    from torch import nn

POOLING = "SpladePooling"
MAX_TERMS = 1024
"""Maximum number of terms that the core returns for a text."""

TILE = 2048
"""Terms whose logits are computed together: 32 rows of 256 tokens then need 64 MiB."""

_TERM_OVERLAP = Metric(
    "term_overlap",
    "higher",
    "lowest share of the reference's weight on terms that are returned, too",
    limits=(0.9999, 0.999, 0.97),
    probe=(0.998, 0.9),
)
_PRODUCT_ERROR = Metric(
    "product_error",
    "lower",
    "largest error of a dot product of two texts, relative to the product of their lengths, each "
    "at least the median",
    limits=(1e-5, 2e-3, 0.05),
    probe=(5e-3, 0.2),
)


def _head(context: HeadContext) -> nn.Module:
    from torch.nn import functional

    from triptych.tasks.heads import RowMembership, VocabularyHead, weighted

    settings = context.info.modules.get(POOLING, {})
    is_sum = settings.get("pooling_strategy") == "sum"
    is_twice = settings.get("activation_function") == "log1p_relu"

    def weights(logits: TorchTensor) -> TorchTensor:
        once = functional.relu(logits).log1p()
        return once.log1p() if is_twice else once

    def pooled(logits: TorchTensor, rows: RowMembership) -> TorchTensor:
        """Return the weight of each term of a tile, ``[B, TILE]`` for ``[R, N, TILE]``."""
        if is_sum:
            return weighted(rows.member.to(logits.dtype), weights(logits))
        # The largest weight is that of the largest logit: the function increases.
        return weights(logits.amax(1))

    return VocabularyHead(context.model, pooled, TILE)


def _core(info: ModelInfo, parameters: Parameters) -> Core:
    kept = min(info.vocabulary or MAX_TERMS, MAX_TERMS)
    outputs = (Tensor("term_id", "INT32", (kept,)), Tensor("term_weight", "FP32", (kept,)))
    return Core("AutoModelForMaskedLM", "pooled", "choices", outputs, activation="none")


def _check(info: ModelInfo) -> None:
    if info.head or info.pooling != ("mean",):
        raise UserError(
            "model.source",
            f"must be a model of masked words with {POOLING} alone (modules.json)",
            given=f"{info.architecture} with other modules",
            remedy="Choose a SPLADE model, or task text-embedding",
        )


def compare_sparse(
    got: Sequence[Outputs], wanted: Sequence[Outputs], queries: Sequence[str]
) -> Comparison:
    """Return the metrics of sparse embeddings, as of vectors of all terms that a text has.

    Badness is one minus the cosine.
    """
    some, others = _dense(got, wanted)
    some = np.stack([_with_ties(*pair) for pair in zip(some, others, strict=True)])
    result = compare_vectors(
        [{"embedding": row} for row in some], [{"embedding": row} for row in others], queries
    )
    overlaps, lengths = [], np.linalg.norm(others, axis=1)
    # Of texts with little weight, rounding alone would be a large error.
    lengths = np.maximum(lengths, np.median(lengths))
    for row, other in zip(some, others, strict=True):
        total = other.sum()
        kept = other[row > 0].sum() if finite(row) else 0.0
        overlaps.append(kept / total if total else 1.0)
    with np.errstate(invalid="ignore"):
        off = np.abs(some @ some.T - others @ others.T)
    error = (off / np.maximum(np.outer(lengths, lengths), 1e-9)).max()
    values = {
        **result.values,
        _TERM_OVERLAP.name: float(min(overlaps)),
        _PRODUCT_ERROR.name: float(error) if np.isfinite(error) else np.inf,
    }
    return Comparison(values, result.badness)


def _dense(*several: Sequence[Outputs]) -> list[Floats]:
    """Return the weights of all terms that occur, ``[rows, terms]`` for each sequence of rows.

    A row without outputs, or with other numbers of terms and weights, is NaN.
    """
    ids = np.unique(np.concatenate([numbers(row, "token_id") for rows in several for row in rows]))

    def weights_of(outputs: Outputs) -> Floats:
        row, own, weights = (
            np.zeros(len(ids)),
            numbers(outputs, "token_id"),
            numbers(outputs, "weight"),
        )
        if "weight" not in outputs or len(own) != len(weights):
            return np.full(len(ids), np.nan)
        terms = weights != 0  # a row with fewer terms than others ends with zeros
        row[np.searchsorted(ids, own[terms])] = weights[terms]
        return row

    return [np.stack([weights_of(row) for row in rows]) for rows in several]


def _with_ties(row: Floats, other: Floats) -> Floats:
    """Return a row whose last terms are those of the reference where the weights tie.

    A row ends after `max_active_dims` terms, and rounding chooses among terms of equal weight.
    """
    if np.count_nonzero(row) != np.count_nonzero(other) or not finite(row) or not (row > 0).any():
        return row
    limit = max(row[row > 0].min(), other[other > 0].min()) + TIE
    differs = (row > 0) != (other > 0)
    return np.where(differs & (np.maximum(row, other) <= limit), other, row)


def _products(outputs: Sequence[Outputs], others: Sequence[Outputs]) -> Floats:
    """Return the dot product of the vectors of each two requests; -inf if it is not finite."""
    products = np.einsum("pt,pt->p", *_dense(outputs, others))
    return np.where(np.isfinite(products), products, -np.inf)


def _parameters(info: ModelInfo) -> Mapping[str, Rule]:
    most = min(info.vocabulary or MAX_TERMS, MAX_TERMS)
    usual = min(info.max_active_dims or most, most)
    rules = {
        "max_active_dims": Rule("int", default=usual, min=1, max=most),
        "threshold": Rule("float", default=0.0, min=0.0),
    }
    return {**rules, **prompt_rules(info)}


def _of_queries(task: Task, info: ModelInfo, given: Parameters) -> Task:
    """Return the task for a model whose queries need no transformer."""
    if not info.has_query_weights:
        return task
    return replace(
        task,
        rows="rows_queries.QueryTermsRowMaker",
        decode="decode_queries.QueryTermsDecoder",
        has_row_metadata=True,
    )


TASK = Task(
    name="sparse-embedding",
    loader="SparseEncoder",
    modules=(POOLING, "MLMTransformer"),
    inputs=(TEXT,),
    outputs=(Tensor("token_id", "INT32", ("terms",)), Tensor("weight", "FP32", ("terms",))),
    rows="rows_text.PlainTextRowMaker",
    decode="decode_sparse.SparseDecoder",
    core=_core,
    form=_of_queries,
    head=_head,
    metrics=(*COSINES, *NEIGHBORS, SIMILARITY_RANK_CORRELATION, _TERM_OVERLAP, _PRODUCT_ERROR),
    compare_outputs=compare_sparse,
    labeled=similarity_correlation(_products),
    parameters=_parameters,
    settings=prompt_settings,
    view=View("terms"),
    check=_check,
)
