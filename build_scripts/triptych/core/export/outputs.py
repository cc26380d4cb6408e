"""Torch modules that convert the results of a head to the outputs of the core.

B, N, K and R are those of `tasks.heads`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from triptych.models.info import Activation
from triptych.tasks.task import Returns


class Returned(nn.Module):
    """Converts the head's results to the core's outputs."""

    def __init__(
        self, returns: Returns, activation: Activation, *, kept: int, flatten: Sequence[bool]
    ) -> None:
        """Set the form; `flatten` says which results of the head are packed tokens."""
        super().__init__()
        self.returns = returns
        self.activation = activation
        self.kept = kept
        self.flatten = flatten

    def forward(self, result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the core's outputs for vectors or logits, FP32 ``[B, K]`` or ``[R, N, K]``."""
        if isinstance(result, tuple):
            return tuple(
                part[0] if flat else part for part, flat in zip(result, self.flatten, strict=True)
            )
        if self.flatten[0]:
            result = result[0]
        if self.returns in ("vector", "token_vectors", "logits"):
            return (result,)
        if self.returns == "spans":
            return result[..., 0], result[..., 1]
        if self.returns == "token_scores":
            return (result.softmax(-1),)
        if self.returns == "token_choices":
            best = result.argmax(-1)
            return best.to(torch.int32), result.softmax(-1).amax(-1)
        if self.activation == "softmax":
            result = result.softmax(-1)
        elif self.activation == "sigmoid":
            result = result.sigmoid()
        if self.returns == "scores":
            return (result,)
        top = torch.topk(result, self.kept, dim=-1, sorted=True)
        return top.indices.to(torch.int32), top.values


class CoreGraph(nn.Module):
    """Module to export. Adapts the graph's input order to the arguments of `compute`.

    An entry of `order` is None for an argument that the graph does not have.
    """

    def __init__(
        self, compute: nn.Module, returned: Returned, order: tuple[int | None, ...]
    ) -> None:
        super().__init__()
        self.compute = compute
        self.returned = returned
        self.order = order

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        arguments = [None if i is None else inputs[i] for i in self.order]
        result: tuple[Tensor, ...] = self.returned(self.compute(*arguments))
        return result
