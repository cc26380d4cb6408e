"""Text generation: what is sent, what its stream's responses say, and when it is sent again."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypedDict

from triptych.client.errors import (
    DeadlineExceededError,
    InferenceError,
    InvalidRequestError,
    PipelineFailedError,
)
from triptych.client.retry import Deadline, Retries
from triptych.client.wire import (
    cancelling_request,
    encode_rows,
    generation_request,
    read_outputs,
)


class Sampling(TypedDict, total=False):
    """How tokens are chosen; what is left out is the pipeline's. The server says what is allowed.

    Attributes:
        max_tokens: most tokens of the answer.
        temperature: 0 takes the likeliest token each time.
        top_p: the likeliest tokens that have this share of the probability together.
        top_k: the likeliest so many tokens.
        min_p: tokens at least this share as likely as the likeliest.
        seed: for the same answer again.
        stop: texts that end the answer, and are not part of it.
        repetition_penalty: above 1 makes tokens less likely that were in prompt or answer.
        presence_penalty: above 0 makes tokens less likely that were in the answer.
        frequency_penalty: the same, for each time.
        logprobs: how many likeliest tokens to tell with each.
        json_schema: that the answer is JSON of.
        adapter: of the pipeline's, that answers; empty for the model itself.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: str | Sequence[str]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: int
    json_schema: Mapping[str, Any]
    adapter: str


@dataclass(frozen=True)
class Usage:
    """Tokens of a generation; `cached_tokens` are those of the prompt that were not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Chunk:
    """What is new since the chunk before.

    Attributes:
        text: new text; may be empty.
        token_ids: new tokens.
        index: place of the first of them in the answer.
        finish_reason: why it ends here (``stop``, ``length``); empty on all chunks but the last.
        usage: on the last chunk.
        logprobs: of each new token, where they were asked for, as the pipeline tells them.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int
    finish_reason: str = ""
    usage: Usage | None = None
    logprobs: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Completion:
    """A whole answer; the fields are those of `Chunk`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage | None
    logprobs: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def join(cls, chunks: Iterable[Chunk]) -> Completion:
        """The answer that these chunks, at least one, are."""
        found = list(chunks)
        return cls(
            text="".join(chunk.text for chunk in found),
            token_ids=tuple(token for chunk in found for token in chunk.token_ids),
            finish_reason=found[-1].finish_reason,
            usage=found[-1].usage,
            logprobs=tuple(one for chunk in found for one in chunk.logprobs),
        )


class Asked(NamedTuple):
    """What is sent for a generation.

    Attributes:
        request: that asks for it.
        cancel: that gives it up.
        left_s: how many seconds the answer may take; None: any.
    """

    request: Any
    cancel: Any
    left_s: float | None


class Progress:
    """One generation, from its request to its last chunk; does no I/O.

    Attributes:
        finished: whether the last chunk was read.

    Args:
        pipeline: name of the ensemble.
        texts: the inputs of the request but `stream`.
        deadline: of the whole generation.
        retries: of the client.
    """

    def __init__(
        self, pipeline: str, texts: Mapping[str, bytes], deadline: Deadline, retries: Retries
    ) -> None:
        self._pipeline = pipeline
        self._texts = texts
        self._deadline = deadline
        self._retries = retries
        self._tried: tuple[str, ...] = ()
        self._chunks = self._tokens = 0
        self.finished = False

    def ask(self, *, stream: bool) -> Asked:
        """What to send, each time by another name.

        Raises:
            DeadlineExceededError: there is no time left to send it.
        """
        try:
            left_s = self._deadline.left_s()
        except DeadlineExceededError:
            raise self._too_late() from None
        name = secrets.token_hex(16)
        return Asked(
            generation_request(self._pipeline, self._texts, stream=stream, name=name),
            cancelling_request(self._pipeline, name),
            left_s,
        )

    def read(self, response: Any) -> Chunk:
        """The chunk of a ``ModelStreamInferResponse``.

        Raises:
            InvalidRequestError: it is not the answer of a generation.
            PipelineFailedError: tokens are missing before it, or come twice.
        """
        if not self._chunks:
            self._retries.answered()
        self._chunks += 1
        outputs = read_outputs(response.infer_response)
        try:
            texts = {
                name: outputs[name].reshape(-1)[0].decode()
                for name in ("text_output", "finish_reason", "usage", "logprobs")
            }
            chunk = Chunk(
                text=texts["text_output"],
                token_ids=tuple(outputs["token_ids"].reshape(-1).tolist()),
                index=int(outputs["index"].reshape(-1)[0]),
                finish_reason=texts["finish_reason"],
                usage=_usage(texts["usage"]),
                logprobs=tuple(json.loads(texts["logprobs"] or "[]")),
            )
        except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
            raise InvalidRequestError(
                "The pipeline must answer as one of the task text-generation. "
                f"Given: {', '.join(sorted(outputs))} ({type(error).__name__}: {error}). "
                "Make the call that fits its task."
            ) from error
        if chunk.index != self._tokens:
            raise PipelineFailedError(
                f"A chunk must go on where the one before ended. Given: token {chunk.index} after "
                f"{self._tokens}. This is a bug of the pipeline."
            )
        self._tokens += len(chunk.token_ids)
        self.finished = bool(chunk.finish_reason)
        return chunk

    def pause_s(self, error: InferenceError) -> float:
        """The pause before it is sent again after `error`.

        Raises:
            InferenceError: it is not, since it had begun, or as `Retries.pause_s` says.
        """
        if isinstance(error, DeadlineExceededError):
            raise self._too_late() from None
        if self._chunks:
            raise error.after(f"The answer broke off after {self._chunks} chunks.") from None
        self._tried = (*self._tried, error.address)
        return self._retries.pause_s(error, self._tried, self._deadline)

    def raise_ended(self) -> NoReturn:
        """Raises `PipelineFailedError`: the stream has ended before the last chunk."""
        raise PipelineFailedError(
            f"A stream must end with a finish reason. Given: an end after {self._chunks} "
            "chunks. This is a bug of the pipeline."
        )

    def _too_late(self) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"The deadline of {self._deadline.timeout_s:g} s passed after {self._chunks} chunks. "
            "Raise `timeout_s`, or lower `max_tokens`."
        )


def encode_order(
    prompt: str, messages: Sequence[Mapping[str, Any]] | None, sampling: Sampling
) -> dict[str, bytes]:
    """The inputs of a generation of a prompt, or of the answer to `messages`.

    Raises:
        InvalidRequestError: what cannot be sent.
    """
    texts = {
        "text_input": prompt,
        "messages": "" if messages is None else _json("messages", list(messages)),
        "sampling_parameters": _json("sampling_parameters", sampling) if sampling else "",
    }
    encoded = encode_rows({name: [text] for name, text in texts.items()})
    if encoded.refused:
        raise InvalidRequestError(encoded.refused[0].message)
    return {name: column[0] for name, column in encoded.columns.items()}


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"`{name}` must be plain data that JSON can say. Given: {error}. Convert it."
        ) from error


def _usage(text: str) -> Usage | None:
    if not text:
        return None
    counts = json.loads(text)
    return Usage(
        counts["prompt_tokens"], counts["completion_tokens"], counts.get("cached_tokens", 0)
    )
