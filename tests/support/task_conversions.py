"""Conversions of a core to each precision, and synthetic traffic for each task."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from conftest import traffic_texts
from triptych.core.precision import float16, quantize
from triptych.repository.records import Conversion
from triptych.spec.backends import Precision

CONVERT: dict[Precision, Callable[..., Conversion]] = {
    "int8": quantize.convert_int8,
    "int8_dynamic": quantize.convert_int8,
    "fp8": quantize.convert_fp8,
    "fp16": float16.convert,
    "bf16": float16.convert,
}


def traffic_of(task: str, folder: Path) -> list[dict[str, Any]]:
    """So many rows that calibration has some."""
    texts = traffic_texts()[:40]
    if task == "image-classification":
        return [{"image": image(folder / f"{number}.png", number)} for number in range(72)]
    if task == "question-answering":
        return [{"text": "Where is my order?", "text_pair": text} for text in texts]
    if task == "reranking":
        return [{"text": "refund", "text_pair": text} for text in texts]
    return [{"text": f"[MASK] {text}" if task == "fill-mask" else text} for text in texts]


def image(path: Path, seed: int) -> str:
    """Write a picture of noise over one color; returns its name."""
    from PIL import Image

    random = np.random.default_rng(seed)
    pixels = random.integers(0, 200, 3) + random.integers(0, 56, (40, 40, 3))
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    path.write_bytes(file.getvalue())
    return path.name
