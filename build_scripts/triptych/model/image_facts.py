"""How a model's own image processor makes pixels of an image: read once by `build.image_source`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Resize = Literal["none", "exact", "shorter"]


@dataclass(frozen=True)
class ImageFacts:
    """The settings of an image processor, its defaults filled in.

    From an RGB image to the model's input, in this order: resize, crop, reverse the channels (so
    far `runtime.rows_image.to_pixels`), rescale, normalise (`build.image_core.ImageCore`).

    Attributes:
        resize: what `edges` means: both edges exactly, the shorter edge with the longer one in
            proportion, or no resizing at all.
        edges: in pixels: height and width, the shorter edge alone, or nothing.
        resample: name of Pillow's filter, in lower case.
        crop: height and width cut out of the middle, filled up with zeros where the image is
            smaller; None for no crop.
        reverse_channels: whether the model's channels are blue, green, red.
        rescale_factor: multiplies the pixels, which count from 0 to 255; None for no rescaling.
        mean: subtracted from each channel after that; None for no normalisation.
        std: divides each channel after that; None for no normalisation.
        height: of every result, in pixels.
        width: of every result, in pixels.
        channels: of every result.
    """

    resize: Resize
    edges: tuple[int, ...]
    resample: str
    crop: tuple[int, int] | None
    reverse_channels: bool
    rescale_factor: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    height: int
    width: int
    channels: int = 3
