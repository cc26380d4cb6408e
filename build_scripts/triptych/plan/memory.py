"""Memory that a batch of a text core takes while it is computed: an estimate from shapes."""

from __future__ import annotations

from triptych.model.facts import ModelFacts
from triptych.plan.cost import USUAL_HEAD_SIZE, USUAL_WIDENING
from triptych.runtime.packed_rows import MULTIPLE

ELEMENT_BYTES = {"fp32": 4}
"""Bytes of an element of activations by precision; 2 in all others. On a CPU they are fp32."""

MEASURED_SHARE = 1.1
"""Memory that ONNX Runtime took, divided by that of the tensors which are alive at once. Measured
on BERT, RoBERTa and MiniLM in fp32, batches of 8 and 32 rows of 128 to 512 tokens: 1.0 to 1.17."""


def rounded(tokens: int) -> int:
    """Return the slots that the core makes for a longest row of so many tokens."""
    return -(-tokens // MULTIPLE) * MULTIPLE


def batch_mib(facts: ModelFacts, *, rows: int, tokens: int, precision: str, on_gpu: bool) -> float:
    """Return the MiB that a batch of `rows` rows of `tokens` tokens each takes beside the weights.

    Alive at once are either two tensors of attention scores and four of the hidden size, or three
    of the feed-forward size and two of the hidden size. An encoder with an attention bias of its
    own takes more: the build measures each core.
    """
    size = ELEMENT_BYTES.get(precision, 2) if on_gpu else 4
    slots, hidden = rounded(tokens), facts.hidden_size
    heads = facts.heads or max(1, hidden // USUAL_HEAD_SIZE)
    widened = facts.intermediate_size or USUAL_WIDENING * hidden
    attention = rows * slots * (2 * heads * slots + 4 * hidden)
    forward = rows * slots * (3 * widened + 2 * hidden)
    return MEASURED_SHARE * size * max(attention, forward) / 2**20


def rows_within(
    facts: ModelFacts, *, limit_mib: float, tokens: int, precision: str, on_gpu: bool
) -> int:
    """Return how many rows of `tokens` tokens a batch within `limit_mib` may have, at least 1."""
    each = batch_mib(facts, rows=1, tokens=tokens, precision=precision, on_gpu=on_gpu)
    return max(1, int(limit_mib / each))
