"""A model of images that takes bytes: what the image processor does last runs on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from triptych.models.image_vectors import pooled
from triptych.models.info import ImageInfo


class ImageCore(nn.Module):
    """Pixels to logits, or to vectors by `image_vectors.pooled` if `pooling` is given.

    Rescaling and normalizing come before `model`, which takes ``pixel_values``.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, model: Any, image: ImageInfo, pooling: str = "") -> None:
        super().__init__()
        self.model = model
        self._pooling = pooling
        self._factor = image.rescale_factor
        self._normalizes = image.mean is not None and image.std is not None
        for name, values in (("mean", image.mean), ("std", image.std)):
            tensor = torch.tensor(values or (), dtype=torch.float32).reshape(-1, 1, 1)
            self.register_buffer(name, tensor, persistent=False)

    def values(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return UINT8 pixels, ``[rows, height, width, channels]``, as FP32 with channels first."""
        # To floats first: TensorRT takes bytes as an input, but nothing computes on them.
        values = pixels.to(torch.float32).permute(0, 3, 1, 2)
        # Not folded into one multiplication and addition: this is the processor's own order.
        if self._factor is not None:
            values = values * self._factor
        if self._normalizes:
            values = (values - self.mean) / self.std
        return values

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """UINT8 ``[rows, height, width, channels]`` to logits or vectors, FP32 ``[rows, n]``."""
        output = self.model(pixel_values=self.values(pixels))
        if self._pooling:
            return pooled(output, self._pooling)
        logits: torch.Tensor = output.logits
        return logits


def model_input(pixels: NDArray[np.uint8], image: ImageInfo) -> NDArray[np.float32]:
    """Return what the core passes to the model for UINT8 ``[rows, height, width, channels]``."""
    core = ImageCore(nn.Identity(), image)
    values: NDArray[np.float32] = core.values(torch.tensor(pixels)).numpy()
    return values
