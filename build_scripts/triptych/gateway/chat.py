"""OpenAI's API of text generation: chat completions and completions, whole or streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator
from pydantic_core import to_json

from triptych.client import AsyncGeneration, Chunk, InferenceError, Sampling, Usage
from triptych.client.flows import CALL_PARAMETERS
from triptych.client.generation import Logprob
from triptych.gateway.errors import OPENAI, from_inference, invalid
from triptych.gateway.http import WHOLE, Body, No, One, Operation, Stream
from triptych.gateway.openai import TokenUsage
from triptych.gateway.pipelines import Endpoints, Text, spend_tokens
from triptych.gateway.tools import CallSplitter, FoundCall, NamedTool, Tool, ToolCall, choose_tools
from triptych.runtime.sampling_parameters import MAX_STOP_CHARACTERS, MAX_STOPS, NUMBERS

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "adapter"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos"),
)
_ANY_OBJECT: dict[str, object] = {"type": "object"}


class StreamOptions(Body):
    """Options of a stream.

    Attributes:
        include_usage: Whether a last chunk has the numbers of tokens.
        continuous_usage_stats: Whether each chunk has those up to there, as in vLLM; that of the
            prompt is known at the end.
        include_obfuscation: Ignored.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class TextPart(Body):
    """Text as a part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """Message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    audio: None = None
    function_call: None = None
    annotations: list[dict[str, object]] | None = None  # The prompt lacks those of an answer.

    @model_validator(mode="after")
    def _is_complete(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role} must have content")
        if self.tool_call_id is None and self.role == "tool":
            raise ValueError("a message of the role tool must have tool_call_id")
        return self

    def plain(self) -> dict[str, object]:
        """Return the message as chat templates need it: arguments of calls as objects."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        given = {"name": self.name, "tool_call_id": self.tool_call_id}
        made: dict[str, object] = {
            name: value for name, value in given.items() if value is not None
        }
        if self.tool_calls:
            made["tool_calls"] = [call.plain() for call in self.tool_calls]
        return {"role": self.role, "content": text, **made}


class JsonSchema(Body):
    """JSON schema that an answer satisfies."""

    name: str
    schema_: dict[str, object] = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Body):
    """Form of an answer: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def _range(name: str) -> object:
    """Return the range of a sampling parameter."""
    rule = NUMBERS[name]
    if rule.above:
        return Field(gt=rule.minimum, le=rule.maximum)
    return Field(ge=rule.minimum, le=rule.maximum)


_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_STOPS = Field(max_length=MAX_STOPS, fail_fast=True)


class _GenerationBody(Body):
    model: str
    max_tokens: Annotated[int, _range("max_tokens"), WHOLE] | None = None
    min_tokens: Annotated[int, _range("min_tokens"), WHOLE] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, _range("temperature")] | None = None
    top_p: Annotated[float, _range("top_p")] | None = None
    top_k: Annotated[int, _range("top_k"), WHOLE] | None = None
    min_p: Annotated[float, _range("min_p")] | None = None
    seed: Annotated[int, _range("seed"), WHOLE] | None = None
    stop: _Stop | Annotated[list[_Stop], _STOPS] | None = None
    repetition_penalty: Annotated[float, _range("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, _range("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _range("frequency_penalty")] | None = None
    adapter: str | None = None
    n: One = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    def sampling(self, **others: object) -> Sampling:
        """Return the given sampling parameters, and those of the key."""
        values = {name: getattr(self, name) for name in _SAMPLING} | others
        values |= CALL_PARAMETERS.get() or {}
        return {name: value for name, value in values.items() if value is not None}  # type: ignore[return-value]


class ChatRequest(_GenerationBody):
    """Request for the answer to a conversation; the pipeline's own defaults apply."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    max_completion_tokens: Annotated[int, _range("max_tokens"), WHOLE] | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, _range("logprobs"), WHOLE] | None = None
    parallel_tool_calls: bool | None = None
    # Fields that change no answer here.
    audio: None = None
    function_call: Literal["none", "auto"] | None = None
    functions: Annotated[list[dict[str, object]], Field(max_length=0)] | None = None
    metadata: dict[str, str] | None = None
    modalities: list[Literal["text"]] | None = None
    moderation: None = None
    prediction: dict[str, object] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, object] | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: Literal["none"] | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: No = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None


class CompletionRequest(_GenerationBody):
    """Request to continue a prompt; the pipeline's own defaults apply."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=1)]
    logprobs: Annotated[int, _range("logprobs"), WHOLE] | None = None
    best_of: One = None
    echo: No = None
    suffix: Literal[""] | None = None


class _Response(BaseModel):
    id: str
    created: int
    model: str
    choices: list[dict[str, object]]
    usage: TokenUsage | None


class ChatResponse(_Response):
    """Answer to a conversation, as the `message` of its only choice, with its number of tokens."""

    object: Literal["chat.completion"]


class CompletionResponse(_Response):
    """Continuation of a prompt, as the `text` of its only choice, with its number of tokens."""

    object: Literal["text_completion"]


class _ChatForm:
    """Parts of the responses to a conversation; `calls` finds the calls of tools in an answer."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"
    first: Mapping[str, object] | None = {"delta": {"role": "assistant", "content": ""}}

    def __init__(self, calls: CallSplitter | None) -> None:
        self._calls = calls

    def choice(self, text: str, finish: str) -> dict[str, object]:
        text, calls, finish = self._split(text, finish)
        message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {"message": message, "finish_reason": finish}

    def delta(self, text: str, finish: str) -> dict[str, object]:
        text, calls, finish = self._split(text, finish)
        delta: dict[str, object] = {"content": text} if text else {}
        if calls and self._calls is not None:
            first = self._calls.count - len(calls)
            delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(calls, first)]
        return {"delta": delta, "finish_reason": finish or None}

    def _split(self, text: str, finish: str) -> tuple[str, list[FoundCall], str]:
        return (text, [], finish) if self._calls is None else self._calls.add(text, finish)

    def logprobs(self, entries: tuple[Logprob, ...]) -> dict[str, object] | None:
        return {"content": [_chat_logprob(entry) for entry in entries]} if entries else None


class _CompletionForm:
    """Parts of the responses to a prompt."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"
    first: Mapping[str, object] | None = None

    def choice(self, text: str, finish: str) -> dict[str, object]:
        return {"text": text, "finish_reason": finish or None}

    delta = choice

    def logprobs(self, entries: tuple[Logprob, ...]) -> dict[str, object] | None:
        if not entries:
            return None
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {each["token"]: each["logprob"] for each in entry["top_logprobs"]}
                for entry in entries
            ],
        }


class Generate(Endpoints):
    """Endpoints of text generation."""

    tag = "OpenAI"

    @Operation(
        "/v1/chat/completions",
        ChatResponse,
        streams=True,
        example={
            **{"model": "chat", "max_tokens": 64},
            "messages": [{"role": "user", "content": "Where is my parcel?"}],
        },
    )
    async def chat(self, body: ChatRequest) -> dict[str, object] | Stream:
        """Answer a conversation."""
        client = (await self._pipelines.find(body.model).generating()).client
        sampling = body.sampling(
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            json_schema=_schema(body.response_format),
        )
        if body.top_logprobs and not body.logprobs:
            given = str(body.top_logprobs)
            raise invalid("top_logprobs", "needs logprobs", given, "Set `logprobs`")
        tools, calls = choose_tools(
            body.tools or [], body.tool_choice, only_first=body.parallel_tool_calls is False
        )
        if calls is not None and calls.schema is not None:
            sampling["json_schema"] = calls.schema
        messages = [message.plain() for message in body.messages]
        return await self._answer(
            client.chat(messages, tools=tools, **sampling), body, _ChatForm(calls)
        )

    @Operation(
        "/v1/completions",
        CompletionResponse,
        streams=True,
        example={"model": "chat", "prompt": "The parcel", "max_tokens": 64},
    )
    async def complete(self, body: CompletionRequest) -> dict[str, object] | Stream:
        """Continue a prompt."""
        prompt = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
        client = (await self._pipelines.find(body.model).generating()).client
        sampling = body.sampling(max_tokens=body.max_tokens, logprobs=body.logprobs)
        return await self._answer(client.generate(prompt, **sampling), body, _CompletionForm())

    async def _answer(
        self, generation: AsyncGeneration, body: _GenerationBody, form: _ChatForm | _CompletionForm
    ) -> dict[str, object] | Stream:
        """Return the response, or a stream whose first chunk has arrived."""
        self._limits.check_items("model", 1)
        head = {
            "id": f"{form.prefix}-{uuid.uuid4().hex}",
            "object": form.part if body.stream else form.whole,
            "created": int(time.time()),
            "model": body.model,
        }
        self._items.labels(self._pipelines.find(body.model).name).inc()
        if body.stream:
            first = await anext(generation, None)
            options = body.stream_options or StreamOptions()
            return Stream(_events(generation, first, head, form, options))
        async with generation:
            whole = await generation.whole()
        spend_tokens(_total(whole.usage))
        choice = {
            "index": 0,
            **form.choice(whole.text, whole.finish_reason),
            "logprobs": form.logprobs(whole.logprobs),
        }
        return {**head, "choices": [choice], "usage": _usage(whole.usage)}


async def _events(
    generation: AsyncGeneration,
    first: Chunk | None,
    head: Mapping[str, object],
    form: _ChatForm | _CompletionForm,
    options: StreamOptions,
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a stream; closing the iterator cancels the generation."""
    nothing: dict[str, object] = {"usage": None} if options.include_usage else {}
    usage: Usage | None = None
    chunks = 0
    async with generation:
        try:
            if form.first is not None:
                choice = {"index": 0, **form.first, "logprobs": None, "finish_reason": None}
                yield _event({**head, "choices": [choice], **nothing})
            chunk = first
            while chunk is not None:
                usage = chunk.usage or usage
                chunks += 1
                if options.continuous_usage_stats:
                    nothing = {
                        "usage": _usage(usage or Usage(0, chunk.index + len(chunk.token_ids)))
                    }
                choice = {
                    "index": 0,
                    **form.delta(chunk.text, chunk.finish_reason),
                    "logprobs": form.logprobs(chunk.logprobs),
                }
                is_empty = choice.get("delta") == {} and not choice["finish_reason"]
                if not is_empty or choice["logprobs"] or options.continuous_usage_stats:
                    yield _event({**head, "choices": [choice], **nothing})
                chunk = await anext(generation, None)
            if options.include_usage:
                yield _event({**head, "choices": [], "usage": _usage(usage)})
        except InferenceError as error:
            yield _event(OPENAI.body(from_inference(error, "messages")))
            return
        finally:  # also if the client disconnects, before the number of tokens is known
            spend_tokens(_total(usage) or chunks)
    yield b"data: [DONE]\n\n"


def _event(data: Mapping[str, object]) -> bytes:
    return b"data: " + to_json(data) + b"\n\n"


def _total(usage: Usage | None) -> int:
    return 0 if usage is None else usage.prompt_tokens + usage.completion_tokens


def _usage(usage: Usage | None) -> dict[str, object] | None:
    if usage is None:
        return None
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": _total(usage),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _schema(wanted: ResponseFormat | None) -> dict[str, object] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return _ANY_OBJECT
    if wanted.json_schema is None:
        raise invalid(
            "response_format.json_schema",
            "is required for the type json_schema",
            "",
            "Give name and schema",
        )
    return wanted.json_schema.schema_


def _chat_logprob(entry: Logprob) -> dict[str, object]:
    token = entry["token"]
    shown: dict[str, object] = {"token": token, "logprob": entry["logprob"]}
    shown["bytes"] = list(token.encode())
    if "top_logprobs" in entry:
        shown["top_logprobs"] = [_chat_logprob(each) for each in entry["top_logprobs"]]
    return shown
