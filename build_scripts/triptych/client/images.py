"""Images of callers as the bytes of files, which the pipelines take."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from triptych.client.errors import InvalidRequestError

if TYPE_CHECKING:
    from PIL.Image import Image

Images = Sequence["bytes | str | Path | Image | NDArray[Any]"]
"""Bytes of files, paths, images of Pillow, or arrays UINT8 ``[height, width]`` of gray or
``[height, width, 3 or 4]`` of RGB or RGBA."""


def encode_images(images: Images) -> list[bytes]:
    """Return the bytes of each image; images of Pillow and arrays become PNG files.

    A value that is no image, or the error of one that cannot be read, stays in its place, so that
    `encode_rows` refuses that row alone.

    Raises:
        InvalidRequestError: `images` is one image.
    """
    is_one = isinstance(images, bytes | str | Path) or hasattr(images, "getexif")
    if isinstance(images, np.ndarray):  # of rows of pixels
        is_one = images.ndim < 3 or (images.ndim == 3 and images.shape[2] in (3, 4))
    if is_one:
        raise InvalidRequestError(
            f"`images` must be a sequence of images. Given: one {type(images).__name__}. "
            "Put the image into a list."
        )
    return [_encode(image) for image in images]


def _encode(image: Any) -> Any:
    if isinstance(image, bytes):
        return image
    try:
        if isinstance(image, str | Path):
            return Path(image).read_bytes()
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8:
                raise TypeError(f"an array of {image.dtype} instead of uint8")
            from PIL import Image

            image = Image.fromarray(image)
        if not hasattr(image, "getexif"):
            return image
        file = io.BytesIO()
        image.save(file, "PNG", exif=image.getexif())
    except (ImportError, OSError, TypeError, ValueError) as error:
        return error
    return file.getvalue()
