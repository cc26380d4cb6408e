"""Memory that a batch of a text core takes while it is computed: an estimate from shapes."""

from __future__ import annotations

from triptych.runtime.packed_rows import slots_of
from triptych.spec.engine_plan import USUAL_HEAD_SIZE, USUAL_WIDENING
from triptych.spec.model_facts import ModelFacts

ELEMENT_BYTES = {"fp32": 4}
"""Bytes of an element of activations by precision; 2 in all others. On a CPU they are fp32."""

MEASURED_SHARE = 1.1
"""Memory that ONNX Runtime took, divided by that of the tensors which are alive at once. Measured
on BERT, RoBERTa and MiniLM in fp32, batches of 8 and 32 rows of 128 to 512 tokens: 1.0 to 1.17."""


SCORE_TENSORS = {True: 2, False: 4}
"""Tensors of attention scores that are alive at once, where rows are packed and where they are not:
the bucketed layout has PyTorch's own attention, whose scaling and masks take more."""


def batch_mib(
    facts: ModelFacts, *, rows: int, tokens: int, precision: str, on_gpu: bool, packed: bool
) -> float:
    """Return the MiB that a batch of `rows` rows of `tokens` tokens each takes beside the weights.

    Alive at once are either `SCORE_TENSORS` and four tensors of the hidden size, or three
    of the feed-forward size and two of the hidden size. Measured on a CPU, encoders with another
    attention take more: 1.5 times as much where masks or a bias differ from layer to layer
    (ModernBERT, MPNet, Qwen3), 4 times as much with DeBERTa's relative positions.
    """
    size = ELEMENT_BYTES.get(precision, 2) if on_gpu else 4
    slots, hidden = slots_of(tokens), facts.hidden_size
    heads = facts.heads or max(1, hidden // USUAL_HEAD_SIZE)
    widened = facts.intermediate_size or USUAL_WIDENING * hidden
    attention = rows * slots * (SCORE_TENSORS[packed] * heads * slots + 4 * hidden)
    forward = rows * slots * (3 * widened + 2 * hidden)
    return MEASURED_SHARE * size * max(attention, forward) / 2**20


def rows_within(
    facts: ModelFacts, *, limit_mib: float, tokens: int, precision: str, on_gpu: bool
) -> int:
    """Return how many rows of `tokens` tokens a batch within `limit_mib` may have, at least 1.

    It is the same number for both layouts: which one a model can have is known later.
    """
    each = batch_mib(facts, rows=1, tokens=tokens, precision=precision, on_gpu=on_gpu, packed=False)
    return max(1, int(limit_mib / each))
