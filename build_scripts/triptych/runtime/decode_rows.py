"""Decoders of tasks with one result per row: vectors, labels, tokens, scores, custom outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .hooking import Row, RowForm, call_hook, find_hook
from .request_errors import RequestError
from .row_types import Arrays, Metadata, Parameters

THRESHOLD = 0.5
"""Score above which a multi-label model's label is returned, without parameters."""

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
        if encoding in ("int8", "uint8"):
            steps = to_steps(vectors, self._ranges(vectors.shape[1], is_unit))
        else:
            steps = np.packbits(vectors > 0, axis=1)
        if encoding in ("uint8", "ubinary"):
            return {**result, "embedding_uint8": steps}
        return {**result, "embedding_int8": (steps ^ np.uint8(0x80)).view(np.int8)}

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


def to_steps(vectors: NDArray[np.float32], ranges: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the index of each element among 255 equal steps from its minimum to its maximum.

    Args:
        vectors: FP32 ``[n, d]``.
        ranges: Minimum and maximum of each element, FP32 ``[2, d]``.
    """
    steps = (ranges[1] - ranges[0]) / np.float32(255)
    steps = np.where(steps == 0, np.float32(1), steps)
    index = np.clip(np.floor((vectors - ranges[0]) / steps), 0, 255)
    return np.asarray(index, dtype=np.uint8)


class ClassDecoder:
    """``class_id`` INT32 and ``class_score`` FP32 ``[n, K]`` to ``label`` and ``score``."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        self._labels = np.array([label.encode("utf-8") for label in settings["labels"]], object)
        self._gives_all = settings.get("class_scores", False)

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Return the ``top_k`` best: ``label`` BYTES ``[n, k]`` and ``score`` FP32 ``[n, k]``.

        With a ``threshold``, or without ``top_k``, only those with a higher score are returned. A
        row with fewer labels than another one ends with empty labels of score 0, and k is at least
        1. With `serving.class_scores` also ``scores`` FP32 ``[n, labels]``, in the labels' order.
        """
        kept, threshold = parameters.get("top_k"), parameters.get("threshold")
        ids, scores = outputs["class_id"], outputs["class_score"]
        result = {
            "label": self._labels[ids[:, :kept]],
            "score": np.ascontiguousarray(scores[:, :kept]),
        }
        if threshold is not None or kept is None:
            limit = THRESHOLD if threshold is None else threshold
            passes = ~(result["score"] <= limit)  # a score that is no number stays in sight
            passes = passes[:, : max(1, int(passes.sum(axis=1).max(initial=0)))]
            width = passes.shape[1]
            result = {
                "label": np.where(passes, result["label"][:, :width], b""),
                "score": np.where(passes, result["score"][:, :width], np.float32(0)),
            }
        if self._gives_all:
            result["scores"] = np.empty_like(scores)
            np.put_along_axis(result["scores"], ids.astype(np.int64), scores, axis=1)
        return result


class ZeroShotDecoder:
    """``inference_logits`` FP32 ``[n * L, C]``, label by label, to ``label`` and ``score``."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        self._entailment: int = settings["entailment"]
        self._contradiction: int = settings["contradiction"]

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Return all labels, best first: ``label`` BYTES ``[n, L]`` and ``score`` FP32 ``[n, L]``.

        With ``multi_label``, or one label, a score is the softmax of entailment and contradiction;
        otherwise the scores are the softmax of the entailment of all labels.
        """
        names = np.array(
            [label.encode("utf-8") for label in parameters["candidate_labels"]], object
        )
        logits = outputs["inference_logits"]
        entailment = logits[:, self._entailment].reshape(-1, len(names))
        if parameters["multi_label"] or len(names) == 1:
            contradiction = logits[:, self._contradiction].reshape(-1, len(names))
            scores = _softmax(np.stack((contradiction, entailment), axis=-1))[..., 1]
        else:
            scores = _softmax(entailment)
        order = scores.argsort(axis=1)[:, ::-1]
        return {"label": names[order], "score": np.take_along_axis(scores, order, axis=1)}


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: NDArray[np.float32] = powers / powers.sum(axis=-1, keepdims=True)
    return shares


class ScoreDecoder:
    """``relevance`` FP32 ``[n, 1]`` to ``score`` FP32 ``[n, 1]``."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        pass

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        return {"score": outputs["relevance"]}


class MaskDecoder:
    """``class_id`` INT32 and ``class_score`` FP32 ``[n, K]`` to ``token`` and ``score``."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        from tokenizers import Tokenizer  # other tasks need no tokenizer here

        self._texts = _TokenTexts(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Return the ``top_k`` best: ``token`` BYTES ``[n, k]`` and ``score`` FP32 ``[n, k]``."""
        kept = parameters["top_k"]
        ids = outputs["class_id"][:, :kept]
        texts = np.array([self._texts[token_id] for token_id in ids.ravel().tolist()], object)
        scores = np.ascontiguousarray(outputs["class_score"][:, :kept])
        return {"token": texts.reshape(ids.shape), "score": scores}


class _TokenTexts(dict[int, bytes]):
    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return self.setdefault(token_id, text.encode("utf-8"))


CORE_PREFIX = "core_"


class CustomDecoder:
    """Rows of what the core returned to rows of the declared outputs."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        tokenizer = settings.get("tokenizer_file")
        hook = find_hook(folder, "decode", settings.get("labels", ()), tokenizer)
        if hook is None:
            raise RuntimeError("a custom task needs a function `decode` in hooks.py")
        self._decode = hook
        self._form = RowForm(settings["outputs"])

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        count = len(next(iter(outputs.values())))
        rows: list[Row] = [
            {name.removeprefix(CORE_PREFIX): value[i] for name, value in outputs.items()}
            for i in range(count)
        ]
        for row, row_metadata in zip(rows[: len(metadata)], metadata, strict=True):
            tokens = len(row_metadata.kinds)
            for name in outputs:
                name = name.removeprefix(CORE_PREFIX)
                row[name] = row[name][:tokens]
            row.update(text=row_metadata.text, offsets=row_metadata.offsets)
        return self._form.tensors(call_hook("decode", self._decode, rows, self._form.names))
