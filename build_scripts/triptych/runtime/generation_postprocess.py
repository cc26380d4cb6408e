"""Run the postprocess step of text generation: from streamed token ids to text.

The step has one instance and no batching, so that it gets all chunks of a request in their order.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

from .generation_messages import (
    CANCELLED,
    DIED,
    LEFT,
    REFUSED,
    TOKENIZER_FILE,
    CancelSender,
    CoreChunk,
    Opening,
)
from .in_flight import InFlight
from .overflow import survive_overflow
from .text_stream import StopStrings, TextStream
from .triton_io import error_response, make_private, read_inputs, read_settings

CLIENT_CHECK_S = 0.1
"""Seconds between two checks of whether the client of a stream has left."""


class _Answer:
    """State of an answer; `checked_at` is the time of the last check of its client."""

    def __init__(self, tokenizer: Tokenizer, opening: Opening) -> None:
        self._tokenizer = tokenizer
        self._opening = opening
        self._text = TextStream(tokenizer, opening.context)
        self._stops = StopStrings(opening.stops)
        self._tokens = self._cached_tokens = 0
        self._unsent_text = ""
        self._unsent_ids: list[int] = []
        self._unsent_logprobs: list[dict[str, object]] = []
        self.checked_at = -math.inf

    @property
    def has_begun(self) -> bool:
        """Whether it has a token."""
        return self._tokens > 0

    def add(self, ids: list[int], chunk: CoreChunk) -> str:
        """Add a chunk; return the reason why the answer ends with it, or an empty text."""
        self._cached_tokens = max(self._cached_tokens, chunk.cached_tokens)
        logprobs = chunk.logprobs or ()
        # A stop string may end the answer before the last of several tokens.
        step = 1 if self._opening.stops else max(1, len(ids))
        for at in range(0, len(ids), step):
            new = ids[at : at + step]
            self._tokens += len(new)
            self._unsent_ids += new
            self._unsent_logprobs += [self._logprob(*entry) for entry in logprobs[at : at + step]]
            self._unsent_text += self._stops.add(self._text.add(new))
            if self._stops.stopped:
                return "stop"
        if chunk.finish:
            self._unsent_text += self._stops.add(self._text.finish())
            if self._stops.stopped:
                return "stop"
            self._unsent_text += self._stops.finish()
        return chunk.finish

    def response(self, finish: str) -> pb_utils.InferenceResponse | None:
        """Return the next response; None if there is nothing to send."""
        if not finish and (not self._opening.stream or not self._unsent_ids):
            return None
        usage = logprobs = ""
        if finish:
            usage = json.dumps(
                {
                    "prompt_tokens": self._opening.prompt_tokens,
                    "completion_tokens": self._tokens,
                    "cached_tokens": self._cached_tokens,
                }
            )
        if self._unsent_logprobs:
            logprobs = json.dumps(self._unsent_logprobs)
        # There are no lone surrogates, because decoding replaces invalid text by U+FFFD.
        texts = {
            "text_output": self._unsent_text,
            "finish_reason": finish,
            "usage": usage,
            "logprobs": logprobs,
        }
        ids = np.array(self._unsent_ids, np.int32)
        counts = {
            "index": self._tokens - len(ids),
            "num_input_tokens": self._opening.prompt_tokens,
            "num_output_tokens": len(ids),
        }
        self._unsent_text, self._unsent_ids, self._unsent_logprobs = "", [], []
        return pb_utils.InferenceResponse(
            [
                *(
                    pb_utils.Tensor(name, np.array([value.encode()], np.object_))
                    for name, value in texts.items()
                ),
                *(
                    pb_utils.Tensor(name, np.array([count], np.uint32))
                    for name, count in counts.items()
                ),
                pb_utils.Tensor("token_ids", ids),
            ]
        )

    def _logprob(
        self, token: int, value: float, likeliest: Sequence[tuple[int, float]]
    ) -> dict[str, object]:
        top = [self._token_logprob(*entry) for entry in likeliest]
        return {**self._token_logprob(token, value), "top_logprobs": top}

    def _token_logprob(self, token: int, value: float) -> dict[str, object]:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return {"token_id": token, "token": text, "logprob": value}


class TritonPythonModel:
    """Step that turns each chunk of the core into at most one response of the ensemble."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._tokenizer = Tokenizer.from_file(str(Path(__file__).parent / TOKENIZER_FILE))
        self._answers: dict[str, _Answer] = {}
        self._cancels = CancelSender()
        self._in_flight = InFlight(read_settings(Path(__file__).parent)["pipeline"])
        make_private()
        survive_overflow(args["model_config"])

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        """Process every chunk; an invalid chunk ends only its own request."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                response = self._take(request, sender)
            except Exception as error:
                response = error_response(error)
            if response is None:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            else:
                sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _take(
        self, request: pb_utils.InferenceRequest, sender: pb_utils.InferenceResponseSender
    ) -> pb_utils.InferenceResponse | None:
        inputs = read_inputs(request)
        chunk = CoreChunk.unpack(inputs["chunk"].as_numpy().ravel()[0])
        try:
            return self._respond(chunk, inputs["token_ids"].as_numpy().ravel().tolist(), sender)
        finally:
            # The core has received by then that the client has left.
            self._in_flight.acknowledge(*chunk.place)

    def _respond(
        self, chunk: CoreChunk, ids: list[int], sender: pb_utils.InferenceResponseSender
    ) -> pb_utils.InferenceResponse | None:
        if chunk.opening is not None:
            self._answers[chunk.key] = _Answer(self._tokenizer, chunk.opening)
        answer = self._answers.get(chunk.key)
        if answer is None:  # the answer ended here, and the core has not stopped yet
            if not chunk.finish:
                self._cancels.send(chunk.cancel_at, chunk.key)
            return None
        if chunk.error:
            del self._answers[chunk.key]
            kinds = pb_utils.TritonError
            special = {REFUSED: kinds.INVALID_ARG, DIED: kinds.UNAVAILABLE}
            kind = special.get(chunk.finish, kinds.INTERNAL)
            return pb_utils.InferenceResponse([], error=kinds(chunk.error, kind))
        is_first = bool(ids) and not answer.has_begun
        finish = answer.add(ids, chunk)
        # The core learns from all first tokens, also of answers that end with them.
        if (is_first or not finish) and self._has_left(answer, sender, now=is_first):
            finish = finish or CANCELLED
            self._cancels.send(chunk.cancel_at, LEFT + chunk.key)
        elif finish and not chunk.finish:
            self._cancels.send(chunk.cancel_at, chunk.key)
        if finish:
            del self._answers[chunk.key]
        return answer.response(finish)

    def _has_left(
        self, answer: _Answer, sender: pb_utils.InferenceResponseSender, *, now: bool
    ) -> bool:
        """Return whether the client has left; checked `now`, or after `CLIENT_CHECK_S`."""
        time_s = time.monotonic()
        if not now and time_s - answer.checked_at < CLIENT_CHECK_S:
            return False
        answer.checked_at = time_s
        return bool(sender.is_cancelled())
