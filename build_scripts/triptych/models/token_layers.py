"""Linear layers of BGE-M3 on the vectors of tokens, which lie beside the model's own weights.

Source: `BGEM3ForInference` of FlagEmbedding 1.4.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.base.errors import UserError
from triptych.models.checks import check_finite

if TYPE_CHECKING:
    from torch import nn

WEIGHTS_LAYER, VECTORS_LAYER = "sparse_linear.pt", "colbert_linear.pt"
"""Files of the layers that compute the weight and the vector of each token."""

TOKEN_LAYERS = (WEIGHTS_LAYER, VECTORS_LAYER)


def load_layer(folder: Path, name: str, in_features: int, out_features: int) -> nn.Linear:
    """Return a layer in fp32 with the weights of the file `name`.

    Raises:
        UserError: The file is missing, is no file of weights, or has a layer of other sizes.
    """
    import torch

    layer = torch.nn.Linear(in_features, out_features)
    try:
        weights = torch.load(folder / name, map_location="cpu", weights_only=True)
        layer.load_state_dict(weights)
    except (OSError, RuntimeError, TypeError, AttributeError, pickle.UnpicklingError) as error:
        raise UserError(
            str(folder / name),
            f"must have the weights of a linear layer from {in_features} to {out_features} numbers",
            given=" ".join(str(error).split())[:200],
            remedy="Download the model again, or choose task text-embedding",
        ) from error
    check_finite(layer)
    return layer.eval()
