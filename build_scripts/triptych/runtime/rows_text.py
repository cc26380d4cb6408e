"""Batch encoders of texts and text pairs: many requests in one tokenizer call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, normalizers

from .request_errors import RequestError
from .row_types import CoreRows, Row, RowInputs, find_class, make_int32

Input = str | tuple[str, str]


class TokenRowMaker(ABC):
    """Base of the row makers of all text tasks, which define `inputs` and `finish`."""

    strategy = "longest_first"
    """Truncation strategy of pairs, with the meaning of the tokenizers library."""

    offsets = False
    """Whether `finish` needs character offsets, which cost time."""

    stride = 0
    """Tokens that a window shares with the one before it."""

    special_tokens = True
    """Whether the tokenizer adds the tokens that begin and end a text."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self.settings = settings
        self.fields: list[str] = settings["inputs"]
        self.max_length: int = settings["max_length"]
        self.truncates = settings["overflow"] == "truncate"
        self.max_core_rows: int = settings["max_core_rows"]
        layout = "bucketing.PaddedLayout"
        if settings.get("layout") == "packed":
            layout = "packing.PackedLayout"
            if settings.get("row_span"):
                layout = "packing_spans.SpannedLayout"
        self._layout = find_class(layout)(settings)
        self.segments: bool = settings.get("segments", False)
        self.prompt_end_ids: list[int] | None = settings.get("prompt_end_ids")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.cut: str = (self.tokenizer.truncation or {}).get("direction", "right")
        self.tokenizer.no_truncation()
        self._limit = self.max_length
        self.configure()
        self._pairs: Any = None
        if settings.get("pairs") and not self.offsets:  # other pipelines do not have the module
            self._pairs = find_class("rows_pairs.PairEncoder")(self)
        known: int | None = settings.get("vocabulary")
        unknown = known is not None and self.tokenizer.get_vocab_size() > known
        self._vocabulary = known if unknown else None
        self._encode(["warm up"])

    def configure(self) -> None:
        self.cut_at(self.max_length)

    def cut_at(self, limit: int) -> None:
        """Cut longer texts to `limit` tokens, or refuse them."""
        self._limit = limit
        if self.truncates:
            self.tokenizer.enable_truncation(
                limit, stride=self.stride, strategy=self.strategy, direction=self.cut
            )

    @abstractmethod
    def inputs(self, request: RowInputs) -> list[Input]:
        """Return the texts or pairs to tokenize for one request.

        Raises:
            RequestError: The request is invalid.
        """

    def finish(self, inputs: Sequence[Input], encodings: Sequence[object]) -> list[Row]:
        """Return the model rows of one request; by default one for each input.

        Raises:
            RequestError: The request is invalid.
        """
        return [self.row(encoding) for encoding in encodings]

    def make(self, requests: Sequence[RowInputs]) -> list[CoreRows | Exception]:
        return [
            rows if isinstance(rows, Exception) else self.tensors(rows)
            for rows in self.token_rows(requests)
        ]

    def token_rows(self, requests: Sequence[RowInputs]) -> list[list[Row] | Exception]:
        """Return the model rows of each request, or its error; all are tokenized in one call."""
        texts: list[list[Input] | Exception] = [
            _attempt(self.inputs, request) for request in requests
        ]
        sizes = [0 if isinstance(inputs, Exception) else len(inputs) for inputs in texts]
        flat = [item for inputs in texts if not isinstance(inputs, Exception) for item in inputs]
        encodings = self._encode(flat)
        spans = pairwise(accumulate(sizes, initial=0))
        return [
            inputs if isinstance(inputs, Exception) else self._finish(inputs, encodings[i:j])
            for inputs, (i, j) in zip(texts, spans, strict=True)
        ]

    def row(self, encoding: Any, row_metadata: bytes = b"") -> Row:
        """Return an encoding as a model row; pairs are model rows already."""
        if isinstance(encoding, Row):
            return encoding
        ids = encoding.ids
        if not self.segments:
            return Row(ids, len(ids), row_metadata)
        return Row(ids, len(ids) - sum(encoding.type_ids), row_metadata)

    def _finish(
        self, inputs: Sequence[Input], encodings: Sequence[object]
    ) -> list[Row] | Exception:
        try:
            for number, encoding in enumerate(encodings):
                if isinstance(encoding, Exception):
                    if isinstance(encoding, RequestError):
                        raise encoding
                    raise RequestError(
                        "text", "cannot be tokenized", encoding, "Correct it", number
                    )
            rows = self.finish(inputs, encodings)
            self._check(rows)
        except Exception as error:
            return error
        return rows

    def check_count(self, rows: int) -> None:
        """Raise `RequestError` if a request needs more model rows than a batch holds."""
        if rows > self.max_core_rows:
            raise RequestError(
                "request",
                f"must need at most {self.max_core_rows} rows of the model",
                rows,
                "Send fewer rows in a request, or raise core.max_batch_size in the pipeline",
            )

    def _check(self, rows: Sequence[Row]) -> None:
        self.check_count(len(rows))
        for number, row in enumerate(rows):
            if self._vocabulary is not None and max(row.ids, default=0) >= self._vocabulary:
                raise RequestError(
                    "text",
                    f"must have tokens of the model, with ids below {self._vocabulary}",
                    f"a token with the id {max(row.ids)}",
                    "Leave out this token, or correct the model's tokenizer, which has more tokens",
                    number,
                )
            if len(row.ids) > self._limit:
                raise RequestError(
                    " and ".join(self.fields),
                    f"must have at most {self._limit} tokens",
                    f"{len(row.ids)} tokens",
                    "Shorten the text, or set tokenizer.truncation to truncate in the pipeline",
                    number,
                )

    def _encode(self, inputs: Sequence[Input]) -> list[Any]:
        """Return the encoding of each input, or its own exception."""
        if not inputs:
            return []
        try:
            return self._encode_all(inputs)
        except Exception:
            return [_attempt(lambda item: self._encode_all([item])[0], item) for item in inputs]

    def _encode_all(self, inputs: Sequence[object]) -> list[Any]:
        if self._pairs is not None and not isinstance(inputs[0], str):
            rows: list[Any] = self._pairs.encode(inputs)
            return rows
        tokenizer = self.tokenizer
        encode = tokenizer.encode_batch if self.offsets else tokenizer.encode_batch_fast
        encodings: list[Any] = encode(inputs, add_special_tokens=self.special_tokens)
        return encodings

    def tensors(self, rows: Sequence[Row]) -> CoreRows:
        """Return the tensors of one request with one or more model rows."""
        ids = [row.ids for row in rows]
        tensors: dict[str, NDArray[Any]] = self._layout.tensors(ids)
        tensors["row_length"] = make_int32([*map(len, ids)])
        if self.segments:
            tensors["first_segment"] = make_int32([row.first_segment for row in rows])
        if self.prompt_end_ids is not None:
            tensors["prompt_length"] = make_int32([row.prompt for row in rows])
        if rows[0].metadata:
            metadata = [row.metadata for row in rows]
            tensors["row_metadata"] = np.array(metadata, np.object_).reshape(-1, 1)
        width = tensors["input_ids"].shape[1]
        return CoreRows(tensors, width)


def _attempt(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        return error


class PlainTextRowMaker(TokenRowMaker):
    """Row maker of texts, with the model's prompt before them if it has one, and of pairs."""

    def __init__(self, settings: Mapping[str, object], folder: Path) -> None:
        super().__init__(settings, folder)
        self._prompts: Any = None
        if settings.get("prompts") or settings.get("free_prompt"):
            self._prompts = find_class("text_prompts.TextPrompts")(self)

    def configure(self) -> None:
        super().configure()
        if self.settings.get("lowercase"):
            own = self.tokenizer.normalizer
            steps = [own] if own is not None else []
            # The tokenizer finds special tokens in the text before it normalizes the rest.
            self.tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])

    def inputs(self, request: RowInputs) -> list[Input]:
        texts: list[str] = request.columns["text"]
        if self._prompts is not None:
            texts = self._prompts.add(request, texts)
        return list(texts) if self._pairs is None else self._pairs.inputs(request, texts)

    def token_rows(self, requests: Sequence[RowInputs]) -> list[list[Row] | Exception]:
        made = super().token_rows(requests)
        return made if self._prompts is None else self._prompts.mark(requests, made)
