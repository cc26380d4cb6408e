"""Decoder of text embeddings: truncated, normalized and quantized vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .request_errors import RequestError
from .row_types import Arrays, Metadata, Parameters

RANGES_FILE = "ranges.npy"
"""FP32 ``[2, n]``: minimum and maximum of each element of the vectors of the traffic, end to end
for vectors as the core returns them, and for unit vectors of each size in `range_sizes`."""


class EmbeddingDecoder:
    """``sentence_embedding`` FP32 ``[n, dim]`` to one of the outputs ``embedding…``.

    Args:
        settings: `range_sizes`: sizes of unit vectors in the file; none without the file.
        folder: Folder of `RANGES_FILE`.
    """

    def __init__(self, settings: Parameters, folder: Path) -> None:
        sizes: list[int] = settings.get("range_sizes", [])
        self._own: NDArray[np.float32] | None = None
        self._of_units: dict[int, NDArray[np.float32]] = {}
        if sizes:
            self._own, *units = np.split(
                np.load(folder / RANGES_FILE), np.cumsum([max(sizes), *sizes])[:-1], axis=1
            )
            self._of_units = dict(zip(sizes, units, strict=True))

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Truncate, normalize and encode each vector as the request asks.

        The order and the values are those of `encode` and `quantize_embeddings` of
        sentence-transformers.

        Returns:
            ``embedding`` FP32 ``[n, d]``, ``embedding_int8`` INT8 and ``embedding_uint8`` UINT8
            ``[n, d]`` or, of bits, ``[n, d / 8]``: `encoding` decides which of them has columns,
            the others have none.

        Raises:
            RequestError: The build has no ranges for vectors of this size.
        """
        size, is_unit = parameters.get("dimensions"), parameters.get("normalize_embeddings")
        vectors = outputs["sentence_embedding"][:, :size]
        if is_unit is None:
            is_unit = size is not None
        if is_unit:
            vectors = to_unit_length(vectors)
        count, encoding = len(vectors), parameters["encoding"]
        result: dict[str, NDArray[np.generic]] = {
            "embedding": np.empty((count, 0), np.float32),
            "embedding_int8": np.empty((count, 0), np.int8),
            "embedding_uint8": np.empty((count, 0), np.uint8),
        }
        if encoding == "float":
            return {**result, "embedding": np.ascontiguousarray(vectors)}
        needs_ranges = encoding in ("int8", "uint8")
        ranges = self._ranges(vectors.shape[1], is_unit) if needs_ranges else None
        codes = quantize(vectors, encoding, ranges)
        return {**result, f"embedding_{codes.dtype}": codes}

    def _ranges(self, size: int, is_unit: bool) -> NDArray[np.float32]:
        if is_unit and size in self._of_units:
            return self._of_units[size]
        if not is_unit and self._own is not None:
            return self._own[:, :size]
        sizes = ", ".join(map(str, sorted(self._of_units)))
        raise RequestError(
            "parameter dimensions",
            f"must be one of {sizes} for int8 and uint8"
            if sizes
            else "has no ranges for int8 and uint8",
            size,
            "Send one of them, or another encoding"
            if sizes
            else "Build with two or more different texts in traffic.jsonl",
        )


def to_unit_length(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return each row scaled to length 1; zeros stay zeros."""
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(length, 1e-12), dtype=np.float32)


def quantize(
    vectors: NDArray[np.float32], encoding: str, ranges: NDArray[np.float32] | None
) -> NDArray[np.uint8] | NDArray[np.int8]:
    """Return vectors as `quantize_embeddings` of sentence-transformers encodes them.

    Args:
        vectors: FP32 ``[n, d]``.
        encoding: ``int8`` or ``uint8``, or of bits ``binary`` or ``ubinary``.
        ranges: Minimum and maximum of each element, FP32 ``[2, d]``, between which are 255 equal
            steps; None for bits.
    """
    if ranges is None:
        codes = np.packbits(vectors > 0, axis=1)
    else:
        steps = (ranges[1] - ranges[0]) / np.float32(255)
        steps = np.where(steps == 0, np.float32(1), steps)
        codes = np.clip(np.floor((vectors - ranges[0]) / steps), 0, 255).astype(np.uint8)
    return codes if encoding in ("uint8", "ubinary") else (codes ^ np.uint8(0x80)).view(np.int8)
