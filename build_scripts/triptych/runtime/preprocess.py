"""The preprocess step: texts to token ids, all waiting requests in one tokenizer call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

from .admission import Door, Ledger
from .stub_io import (
    Overloaded,
    RequestError,
    check_parameters,
    error_response,
    pad_rows,
    parameters_of,
    read_texts,
)


class TritonPythonModel:
    """``text`` BYTES ``[n, 1]`` to ``input_ids`` INT32 ``[n, L]`` and ``row_length`` ``[n, 1]``.

    L is the longest row of the request (packed) or the bucket edge that holds it (bucketed).
    ``ticket`` INT64 ``[n, 1]`` goes past the core to postprocess.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer that lies beside this file."""
        settings = parameters_of(json.loads(args["model_config"]))
        self._max_length = int(settings["max_length"])
        self._max_text_bytes = int(settings["max_text_bytes"])
        self._pad_token_id = int(settings["pad_token_id"])
        self._edges = json.loads(settings["bucket_edges"])
        self._lowercase = settings["lowercase"] == "true"
        self._rules = json.loads(settings["request_parameters"])
        self._prompts = json.loads(settings["prompts"])
        self._default_prompt = settings["default_prompt"]
        self._tokenizer = Tokenizer.from_file(str(Path(__file__).with_name("tokenizer.json")))
        if settings["overflow"] == "truncate":
            self._tokenizer.enable_truncation(self._max_length)
        self._tokenizer.encode_batch_fast(["warm up"])
        self._limit = int(settings["max_requests"])
        self._door = Door(Ledger(settings["pipeline"]), self._limit)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer every request; a request at fault gets its own error."""
        responses: list[Any] = [None] * len(requests)
        texts: list[str] = []
        readable: list[tuple[int, int, int]] = []
        room = self._door.room()
        for index, request in enumerate(requests):
            try:
                if len(readable) >= room:
                    raise Overloaded(
                        f"`queue` must have at most {self._limit} requests under way. Given: one "
                        "more. Try again later, or raise serving.queue.max_size in the pipeline."
                    )
                rows = self._read(request)
            except Exception as error:
                responses[index] = error_response(error)
                continue
            readable.append((index, len(texts), len(texts) + len(rows)))
            texts += rows
        encoded = self._encode(texts)
        widths: dict[int, int] = {}
        for index, start, stop in readable:
            try:
                responses[index], widths[index] = self._respond(encoded[start:stop])
            except Exception as error:
                responses[index] = error_response(error)
        if not self._edges:
            return responses
        return self._release_by_bucket(requests, responses, widths)

    def _read(self, request: Any) -> list[str]:
        parameters = check_parameters(request.parameters(), self._rules)
        texts = read_texts(request, "text", self._max_text_bytes)
        name = parameters.get("prompt_name", self._default_prompt)
        if name:
            texts = [self._prompts[name] + text for text in texts]
        if self._lowercase:
            texts = [text.lower() for text in texts]
        return texts

    def _encode(self, texts: Sequence[str]) -> list[Any]:
        """Token ids a text, or the exception that this text alone raised."""
        if not texts:
            return []
        try:
            return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]
        except Exception:
            return [self._encode_alone(text) for text in texts]

    def _encode_alone(self, text: str) -> Any:
        try:
            return self._tokenizer.encode(text).ids
        except Exception as error:
            return error

    def _respond(self, rows: Sequence[Any]) -> tuple[Any, int]:
        longest = 1  # a tensor needs one place even where a tokenizer makes no token
        for number, row in enumerate(rows):
            if isinstance(row, Exception):
                raise RequestError(
                    "text", "must be text the tokenizer takes", row, "Correct the text", number
                )
            if len(row) > self._max_length:
                raise RequestError(
                    "text",
                    f"must have at most {self._max_length} tokens",
                    f"{len(row)} tokens",
                    "Shorten the text, or set tokenizer.overflow to truncate in the pipeline",
                    number,
                )
            longest = max(longest, len(row))
        if self._edges:
            longest = next(edge for edge in self._edges if edge >= longest)
        lengths = np.array([[len(row)] for row in rows], dtype=np.int32)
        response = pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("input_ids", pad_rows(rows, longest, self._pad_token_id)),
                pb_utils.Tensor("row_length", lengths),
                pb_utils.Tensor("ticket", np.full((len(rows), 1), self._door.admit())),
            ]
        )
        return response, longest

    def _release_by_bucket(
        self, requests: Sequence[Any], responses: Sequence[Any], widths: Mapping[int, int]
    ) -> list[Any]:
        """Send the responses in the order of their buckets.

        Triton joins only neighbours of equal shape into one batch of the core: released in this
        order, equal shapes stand side by side in its queue.
        """
        for index in sorted(range(len(requests)), key=lambda index: widths.get(index, 0)):
            requests[index].get_response_sender().send(
                responses[index], flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            )
        return [None] * len(requests)
