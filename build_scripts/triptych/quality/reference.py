"""The reference: the Hugging Face model in PyTorch fp32, one row at a time, nothing shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.build.export import load_encoder
from triptych.model_facts import Dense, ModelFacts, Normalize


def embed_reference(
    folder: Path, facts: ModelFacts, rows: Sequence[Sequence[int]]
) -> NDArray[np.float32]:
    """Embed rows of token ids: FP32 ``[len(rows), dim]``.

    Each row runs alone and unpadded, so no mask, no neighbour and no padding takes part. Pooling
    and head are written plainly here, apart from the exported ones they are to check.
    """
    import torch

    from triptych.build.packing import load_dense

    encoder = load_encoder(folder)
    dense = {
        index: load_dense(module, folder)
        for index, module in enumerate(facts.head)
        if isinstance(module, Dense)
    }
    vectors = []
    with torch.inference_mode():
        for row in rows:
            tokens = encoder(input_ids=torch.tensor([list(row)])).last_hidden_state[0]
            vector = torch.cat([_pool(mode, tokens) for mode in facts.pooling])[None]
            for index, module in enumerate(facts.head):
                if isinstance(module, Normalize):
                    vector = vector / vector.norm(dim=1, keepdim=True).clamp(min=1e-12)
                else:
                    vector = dense[index](vector)
            vectors.append(vector[0].numpy())
    result: NDArray[np.float32] = np.stack(vectors)
    return result


def _pool(mode: str, tokens: Any) -> Any:
    import torch

    if mode == "mean":
        return tokens.mean(0)
    if mode == "max":
        return tokens.max(0).values
    if mode == "cls":
        return tokens[0]
    if mode == "lasttoken":
        return tokens[-1]
    if mode == "mean_sqrt_len_tokens":
        return tokens.sum(0) / len(tokens) ** 0.5
    weight = torch.arange(1, len(tokens) + 1, dtype=tokens.dtype)
    return (weight[:, None] * tokens).sum(0) / weight.sum()
