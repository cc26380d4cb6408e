"""Decodes text-embedding: shorten the vectors and encode them as the request row_inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .carry import Arrays, Carries, Parameters


class Decoder:
    """``sentence_embedding`` FP32 ``[n, dim]`` to ``embedding`` and ``embedding_int8``."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        pass

    def decode(self, outputs: Arrays, carries: Carries, parameters: Parameters) -> Arrays:
        """Shorten, normalize and encode each vector.

        Returns:
            ``embedding`` FP32 ``[n, d]`` and ``embedding_int8`` INT8 ``[n, b]``: the encoding
            decides which of them has columns, the other has none.
        """
        vectors = outputs["sentence_embedding"]
        if parameters.get("dimensions") is not None:
            vectors = shorten(vectors, parameters["dimensions"])
        encoding = parameters["encoding"]
        if encoding == "float":
            rest = np.empty((len(vectors), 0), dtype=np.int8)
            return {"embedding": vectors, "embedding_int8": rest}
        encoded = to_int8(vectors) if encoding == "int8" else to_sign_bits(vectors)
        none = np.empty((len(vectors), 0), dtype=np.float32)
        return {"embedding": none, "embedding_int8": encoded}


def shorten(vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """The first `dimensions` elements of each row, scaled to length 1 (Matryoshka)."""
    kept = vectors[:, :dimensions]
    length = np.linalg.norm(kept, axis=1, keepdims=True)
    return np.ascontiguousarray(kept / np.maximum(length, 1e-12), dtype=np.float32)


def to_int8(vectors: NDArray[np.float32]) -> NDArray[np.int8]:
    """Each row scaled by itself so that its largest element is 127 or -127; zeros stay zeros."""
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    # A divisor first, a factor of 127 second: the factor alone overflows for tiny vectors.
    scaled = vectors / np.where(largest > 0, largest, 1) * np.float32(127)
    encoded: NDArray[np.int8] = np.rint(scaled).astype(np.int8)
    return encoded


def to_sign_bits(vectors: NDArray[np.float32]) -> NDArray[np.int8]:
    """One bit an element (set where above 0), 8 a byte from the highest down, minus 128.

    As the ``binary`` precision of sentence-transformers.
    """
    packed = np.packbits(vectors > 0, axis=1)
    return (packed ^ np.uint8(0x80)).view(np.int8)
