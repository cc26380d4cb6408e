"""Photograph-like images to classify: smooth colors with noise, in the sizes of telephones."""

from __future__ import annotations

import io

import numpy as np

SIZES = ((640, 480), (480, 640), (800, 600), (320, 240), (512, 512), (1024, 768))


def photographs(count: int = 48) -> list[bytes]:
    """`count` JPEG files."""
    from PIL import Image

    generator = np.random.default_rng(0)
    encoded = []
    for number in range(count):
        small = generator.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize(SIZES[number % len(SIZES)], Image.Resampling.BICUBIC)
        noise = generator.normal(0, 6, (image.height, image.width, 3))
        pixels = np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=88)
        encoded.append(buffer.getvalue())
    return encoded
