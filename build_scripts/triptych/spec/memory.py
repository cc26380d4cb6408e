"""Estimate the memory of a batch of a text core from its shapes."""

from __future__ import annotations

from triptych.runtime.row_types import count_slots
from triptych.spec.engine_plan import USUAL_HEAD_SIZE, USUAL_WIDENING
from triptych.spec.model_info import ModelInfo

ELEMENT_BYTES = {"fp32": 4}
"""Size of an activation in bytes by precision; 2 for all others. On a CPU activations are fp32."""

MEASURED_SHARE = 1.1
"""Ratio of the memory of ONNX Runtime to that of the live tensors. Measured with BERT, RoBERTa
and MiniLM in fp32, batches of 8 and 32 rows of 128 to 512 tokens: 1.0 to 1.17.
"""


SCORE_TENSORS = {True: 2, False: 4}
"""Number of live tensors of attention scores, for packed rows (True) and padded rows (False).
PyTorch's own attention, used by the bucketed layout, needs more for scaling and masks.
"""


def batch_mib(
    facts: ModelInfo, *, rows: int, tokens: int, precision: str, on_gpu: bool, packed: bool
) -> float:
    """Return the memory in MiB of a batch of rows of equal length, without the weights.

    Live tensors are either `SCORE_TENSORS` and four tensors of the hidden size, or three of the
    feed-forward size and two of the hidden size. Measured on a CPU, encoders with other attention
    need more: 1.5 times if masks or a bias differ between layers (ModernBERT, MPNet, Qwen3), 4
    times with DeBERTa's relative positions.
    """
    size = ELEMENT_BYTES.get(precision, 2) if on_gpu else 4
    slots, hidden = count_slots(tokens), facts.hidden_size
    heads = facts.heads or max(1, hidden // USUAL_HEAD_SIZE)
    widened = facts.intermediate_size or USUAL_WIDENING * hidden
    attention = rows * slots * (SCORE_TENSORS[packed] * heads * slots + 4 * hidden)
    forward = rows * slots * (3 * widened + 2 * hidden)
    return MEASURED_SHARE * size * max(attention, forward) / 2**20


def rows_within(
    facts: ModelInfo, *, limit_mib: float, tokens: int, precision: str, on_gpu: bool
) -> int:
    """Return the maximum number of rows of `tokens` tokens in a batch within `limit_mib`.

    The result is at least 1. It is the same for both layouts, because the
    layout is chosen later.
    """
    each = batch_mib(facts, rows=1, tokens=tokens, precision=precision, on_gpu=on_gpu, packed=False)
    return max(1, int(limit_mib / each))
