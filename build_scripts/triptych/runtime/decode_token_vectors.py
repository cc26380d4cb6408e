"""Decoder of models with a vector for each token: the vectors of the tokens that count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .decode_embeddings import RANGES_FILE, quantize
from .request_errors import RequestError
from .row_metadata import OUTSIDE
from .row_types import Arrays, Metadata, Parameters

ENCODINGS = ("float", "float16", "int8", "uint8", "binary", "ubinary")
"""Output types of vectors, with the names of sentence-transformers except for float32."""

_OUTPUTS = {"float": "embedding", "float16": "embedding_float16"}


class TokenVectorDecoder:
    """``token_embedding`` FP32 ``[n, T, dim]`` to one of the outputs ``embedding…``."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        sizes: list[int] = settings.get("range_sizes", [])
        self._ranges: NDArray[np.float32] | None = None
        if sizes:
            self._ranges = np.load(folder / RANGES_FILE)[:, : max(sizes)]

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Return the vectors of the tokens that `row_metadata` marks, encoded as asked.

        Returns:
            ``token_count`` INT32 ``[n, 1]``, and the vectors of each row, which ends with zeros if
            it has fewer than another one: ``embedding`` FP32 or ``embedding_float16`` FP16
            ``[n, tokens, dim]``, or ``embedding_int8`` INT8 or ``embedding_uint8`` UINT8
            ``[n, tokens, dim]`` or, of bits, ``[n, tokens, dim / 8]``.

        Raises:
            RequestError: The build has no ranges for int8.
        """
        values, encoding = outputs["token_embedding"], parameters["encoding"]
        is_kept = np.zeros(values.shape[:2], np.bool_)
        for row, each in zip(is_kept, metadata, strict=True):
            row[: len(each.kinds)] = each.kinds != OUTSIDE
        counts = is_kept.sum(axis=1, dtype=np.int32)[:, None]
        vectors = self._encoded(values[is_kept], encoding)
        width = max(1, int(counts.max(initial=0)))
        rows = np.zeros((len(counts), width, vectors.shape[1]), vectors.dtype)
        rows[np.arange(width) < counts] = vectors
        name = _OUTPUTS.get(encoding, f"embedding_{vectors.dtype}")
        return {name: rows, "token_count": counts}

    def _encoded(self, vectors: NDArray[np.float32], encoding: str) -> NDArray[np.generic]:
        """Return vectors ``[tokens, dim]`` as `quantize_embeddings` encodes them."""
        if encoding in _OUTPUTS:
            return vectors.astype(np.float32 if encoding == "float" else np.float16)
        needs_ranges = encoding in ("int8", "uint8")
        if needs_ranges and self._ranges is None:
            raise RequestError(
                "parameter encoding",
                "must not be int8 or uint8, because the build has no ranges for them",
                encoding,
                "Build with two or more different texts in traffic.jsonl",
            )
        return quantize(vectors, encoding, self._ranges if needs_ranges else None)
