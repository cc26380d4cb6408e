"""Decoders of tasks with one result per row: vectors, labels, tokens, scores, custom outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .hooking import Row, RowForm, call_hook, find_hook
from .row_types import Arrays, Metadata, Parameters


class EmbeddingDecoder:
    """``sentence_embedding`` FP32 ``[n, dim]`` to ``embedding`` and ``embedding_int8``."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        pass

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Truncate each vector and encode it as the request's `dimensions` and `encoding` ask.

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
    """Return the first `dimensions` elements of each row, scaled to length 1 (Matryoshka)."""
    kept = vectors[:, :dimensions]
    length = np.linalg.norm(kept, axis=1, keepdims=True)
    return np.ascontiguousarray(kept / np.maximum(length, 1e-12), dtype=np.float32)


def to_int8(vectors: NDArray[np.float32]) -> NDArray[np.int8]:
    """Return each row scaled so that its largest element is 127 or -127; zeros stay zeros."""
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    # A divisor first, a factor of 127 second: the factor alone overflows for tiny vectors.
    scaled = vectors / np.where(largest > 0, largest, 1) * np.float32(127)
    encoded: NDArray[np.int8] = np.rint(scaled).astype(np.int8)
    return encoded


def to_sign_bits(vectors: NDArray[np.float32]) -> NDArray[np.int8]:
    """Return one bit per element, set if above 0, 8 per byte from the highest down, minus 128.

    The format is the ``binary`` precision of sentence-transformers.
    """
    packed = np.packbits(vectors > 0, axis=1)
    return (packed ^ np.uint8(0x80)).view(np.int8)


class ClassDecoder:
    """``class_id`` INT32 and ``class_score`` FP32 ``[n, K]`` to ``label`` and ``score``."""

    def __init__(self, settings: Parameters, folder: Path) -> None:
        self._labels = np.array([label.encode("utf-8") for label in settings["labels"]], object)
        self._gives_all = settings.get("class_scores", False)

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Return the ``top_k`` best: ``label`` BYTES ``[n, k]`` and ``score`` FP32 ``[n, k]``.

        With `serving.class_scores` also ``scores`` FP32 ``[n, labels]``, in the labels' order.
        """
        kept = parameters["top_k"]
        ids, scores = outputs["class_id"], outputs["class_score"]
        result = {
            "label": self._labels[ids[:, :kept]],
            "score": np.ascontiguousarray(scores[:, :kept]),
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
        hook = find_hook(folder, "decode")
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
