"""Text generation without I/O: requests, responses of a stream, and retries."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypedDict

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

if TYPE_CHECKING:
    from tritonclient.grpc import service_pb2


class Sampling(TypedDict, total=False):
    """Sampling parameters; the pipeline's defaults apply to omitted ones. The server checks them.

    Attributes:
        max_tokens: Maximum number of tokens in the response.
        temperature: Randomness; 0 always takes the most probable token.
        top_p: Probability that the candidate tokens have together.
        top_k: Number of most probable tokens that are candidates.
        min_p: Minimum probability of a candidate, relative to the most probable token.
        seed: Seed for a reproducible response.
        stop: Texts that end the response and are not part of it.
        repetition_penalty: Penalty for tokens in prompt or response; above 1 they are less
            probable.
        presence_penalty: Penalty for tokens in the response; above 0 they are less probable.
        frequency_penalty: Penalty for each occurrence of a token in the response.
        logprobs: Number of most probable tokens reported with each token.
        json_schema: JSON schema that the response satisfies.
        adapter: LoRA adapter of the pipeline; empty for the model itself.
        priority: Priority level, if the pipeline has levels (`serving.priority`); 1 goes first.
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
    json_schema: Mapping[str, object]
    adapter: str
    priority: int


class Logprob(TypedDict, total=False):
    """Log-probability of a token; `top_logprobs` are those of the most probable in its place."""

    token: str
    logprob: float
    top_logprobs: list[Logprob]


@dataclass(frozen=True)
class Usage:
    """Token counts of a generation; `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Chunk:
    """Part of a response after the previous chunk.

    Attributes:
        text: New text; may be empty.
        token_ids: New tokens.
        index: Position of the first new token in the response.
        finish_reason: Reason of the end (``stop``, ``length``); empty except on the last chunk.
        usage: Token counts, on the last chunk.
        logprobs: Log-probabilities of each new token if requested, as the pipeline reports them.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int
    finish_reason: str = ""
    usage: Usage | None = None
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A complete response; fields are those of `Chunk`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage | None
    logprobs: tuple[Logprob, ...] = ()

    @classmethod
    def join(cls, chunks: Iterable[Chunk]) -> Completion:
        """Return the response that one or more chunks form."""
        parts = list(chunks)
        return cls(
            text="".join(chunk.text for chunk in parts),
            token_ids=tuple(token for chunk in parts for token in chunk.token_ids),
            finish_reason=parts[-1].finish_reason,
            usage=parts[-1].usage,
            logprobs=tuple(entry for chunk in parts for entry in chunk.logprobs),
        )


class GenerationRequest(NamedTuple):
    """Messages of one attempt at a generation.

    Attributes:
        request: Request for the generation.
        cancel: Request that cancels it.
        remaining_s: Time left in seconds; None for no limit.
    """

    request: service_pb2.ModelInferRequest
    cancel: service_pb2.ModelInferRequest
    remaining_s: float | None


class GenerationState:
    """State of a generation from its request to its last chunk, without I/O.

    Attributes:
        finished: Whether the last chunk was read.

    Args:
        pipeline: Name of the ensemble.
        texts: Inputs of the request except `stream`.
        deadline: Deadline of the whole generation.
        retries: Retries of the client.
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

    def next_request(self, *, stream: bool) -> GenerationRequest:
        """Return the messages of the next attempt, with a new request id.

        Raises:
            DeadlineExceededError: The deadline has passed.
        """
        try:
            remaining_s = self._deadline.remaining_s()
        except DeadlineExceededError:
            raise self._deadline_error() from None
        name = secrets.token_hex(16)
        return GenerationRequest(
            generation_request(self._pipeline, self._texts, stream=stream, name=name),
            cancelling_request(self._pipeline, name),
            remaining_s,
        )

    def read(self, response: service_pb2.ModelStreamInferResponse) -> Chunk:
        """Return the chunk in a ``ModelStreamInferResponse``.

        Raises:
            InvalidRequestError: The response does not belong to a generation.
            PipelineFailedError: Tokens are missing or repeated.
        """
        if not self._chunks:
            self._retries.answered()
        self._chunks += 1
        outputs = read_outputs(response.infer_response)
        try:
            texts = {
                name: outputs[name].reshape(-1)[0]
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
                "The pipeline must respond as one of the task text-generation. "
                f"Given: {', '.join(sorted(outputs))} ({type(error).__name__}: {error}). "
                "Make the call that fits its task."
            ) from error
        if chunk.index != self._tokens:
            raise PipelineFailedError(
                f"A chunk must begin where the previous one ended. Given: token {chunk.index} "
                f"after {self._tokens}. This is a bug of the pipeline."
            )
        self._tokens += len(chunk.token_ids)
        self.finished = bool(chunk.finish_reason)
        return chunk

    def pause_s(self, error: InferenceError) -> float:
        """Return the pause in seconds before the next attempt after `error`.

        Raises:
            InferenceError: There is none, because a response had begun or `Retries.pause_s` says
                so.
        """
        if isinstance(error, DeadlineExceededError):
            raise self._deadline_error() from None
        if self._chunks:
            raise error.with_attempts(f"The response ended after {self._chunks} chunks.") from None
        self._tried = (*self._tried, error.address)
        return self._retries.pause_s(error, self._tried, self._deadline)

    def raise_ended(self) -> NoReturn:
        """Raise `PipelineFailedError`: the stream ended before the last chunk."""
        raise PipelineFailedError(
            f"A stream must end with a finish reason. Given: an end after {self._chunks} "
            "chunks. This is a bug of the pipeline."
        )

    def _deadline_error(self) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"The deadline of {self._deadline.timeout_s:g} s passed after {self._chunks} chunks. "
            "Raise `timeout_s`, or lower `max_tokens`."
        )


def encode_inputs(
    prompt: str,
    messages: Sequence[Mapping[str, object]] | None,
    sampling: Sampling,
    tools: Sequence[Mapping[str, object]] = (),
) -> dict[str, bytes]:
    """Return the inputs of a generation for a prompt or for `messages` with `tools`.

    Raises:
        InvalidRequestError: An input cannot be encoded.
    """
    chat: object = None if messages is None else list(messages)
    if tools:
        chat = {"messages": chat, "tools": list(tools)}
    texts = {
        "text_input": prompt,
        "messages": "" if chat is None else _json("messages", chat),
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
            f"`{name}` must be plain data that JSON supports. Given: {error}. Convert it."
        ) from error


def _usage(text: str) -> Usage | None:
    if not text:
        return None
    counts = json.loads(text)
    return Usage(
        counts["prompt_tokens"], counts["completion_tokens"], counts.get("cached_tokens", 0)
    )
