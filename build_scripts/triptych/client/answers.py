"""Values that typed calls return, in the forms of libraries and stores, and scores of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych.base.max_similarity import max_similarity

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Vectors = NDArray[Any]
"""float32, or int8 or uint8 where an encoding says so."""


class Choice(NamedTuple):
    """A label with its `score` from 0 to 1."""

    label: str
    score: float


class TokenChoice(NamedTuple):
    """A token for a masked word with its `score` from 0 to 1."""

    token: str
    score: float


class Entity(NamedTuple):
    """A named entity in a text.

    Attributes:
        entity: Kind of the entity; with aggregation `none` the token's label, such as ``B-PER``.
        text: Text of the entity.
        score: Score from 0 to 1; NaN if the model returned no number.
        start: Index of its first character.
        end: Index after its last character.
    """

    entity: str
    text: str
    score: float
    start: int
    end: int


class Answer(NamedTuple):
    """Span of a context that answers a question; an empty text for no answer.

    `score` is from 0 to 1; `start` and `end` are the character range in the context.
    """

    answer: str
    score: float
    start: int
    end: int


class Ranked(NamedTuple):
    """Passage at `index` of the caller's list with its `score`; higher is better."""

    index: int  # type: ignore[assignment]  # instead of the tuple's method
    score: float


class SparseVector(NamedTuple):
    """Terms of a text with their weights, the highest weight first.

    Attributes:
        indices: Index of each term in the model's vocabulary, int32 ``[terms]``.
        values: Weight of each term, float32 ``[terms]``.
    """

    indices: NDArray[np.int32]
    values: NDArray[np.float32]

    def for_qdrant(self) -> dict[str, list[Any]]:
        """Return the vector as Qdrant takes it: lists of ``indices`` and of ``values``."""
        return {"indices": self.indices.tolist(), "values": self.values.tolist()}

    def for_elasticsearch(self) -> dict[str, float]:
        """Return the vector as Elasticsearch's ``sparse_vector`` and OpenSearch take it.

        Names are the indices of terms as text, because there they must not be numbers.
        """
        return dict(zip(map(str, self.indices.tolist()), self.values.tolist(), strict=True))


class HybridEmbedding(NamedTuple):
    """Embeddings of a text by one pass of a model; None for those that were not asked for.

    Attributes:
        dense: Vector of the text, float32 ``[dimensions]``.
        sparse: Terms of the text with their weights.
        vectors: Vectors of the tokens for `maxsim`, float32 ``[tokens, dimensions]``.
    """

    dense: NDArray[np.float32] | None = None
    sparse: SparseVector | None = None
    vectors: NDArray[np.float32] | None = None


def sparse_matrix(vectors: Sequence[SparseVector], vocabulary: int) -> csr_array:
    """Return sparse vectors as the rows of a `scipy.sparse.csr_array`.

    Args:
        vectors: Vectors of the texts.
        vocabulary: Number of tokens in the model's vocabulary.

    Raises:
        ImportError: scipy is not installed.
    """
    from scipy.sparse import csr_array

    ends = np.cumsum([0, *(len(vector.indices) for vector in vectors)])
    shape = (len(vectors), vocabulary)
    if not vectors:
        return csr_array(shape, dtype=np.float32)
    columns = np.concatenate([vector.indices for vector in vectors])
    return csr_array((np.concatenate([each.values for each in vectors]), columns, ends), shape)


def maxsim(queries: Sequence[Vectors], documents: Sequence[Vectors]) -> NDArray[np.float32]:
    """Return the MaxSim score of each query with each document.

    It is the sum over the query's vectors of the largest dot product with a document's vector
    (ColBERT, https://arxiv.org/abs/2004.12832).

    Args:
        queries: Vectors of each query, ``[tokens, dimensions]`` of float32 or float16.
        documents: Vectors of each document.

    Returns:
        float32 ``[queries, documents]``; -1e9 for a document without vectors.
    """
    singles = [[each.astype(np.float32, copy=False) for each in s] for s in (queries, documents)]
    scores: NDArray[np.float32] = max_similarity(*singles)
    return scores
