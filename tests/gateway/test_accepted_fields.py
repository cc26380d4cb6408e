"""Fields that ask for nothing: null, the default of the original API, what happens anyway."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import ChatCompletionMessage
from openai.types.chat import completion_create_params as chat_params
from pydantic import ValidationError

from triptych.gateway.chat import ChatMessage, ChatRequest, CompletionRequest
from triptych.gateway.cohere import CohereEmbedRequest, RerankRequest
from triptych.gateway.http import Body
from triptych.gateway.openai import EmbeddingRequest
from triptych.gateway.tei import EmbedRequest, PredictRequest, TeiRerankRequest, TokenizeRequest
from triptych.gateway.tools import CallSplitter, Tool, choose_tools

CHAT = {"model": "a", "messages": [{"role": "user", "content": "b"}]}
PROMPT = {"model": "a", "prompt": "b"}
SHARED = {
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "max_tokens": 16,
    "n": 1,
    "presence_penalty": 0.0,
    "seed": 7,
    "stop": ["x"],
    "stream": False,
    "stream_options": {"include_usage": False, "include_obfuscation": True},
    "temperature": 1.0,
    "top_p": 1.0,
    "user": "c",
}
OF_CHAT: dict[str, Any] = SHARED | {
    "audio": None,
    "function_call": "auto",
    "functions": [],
    "logprobs": False,
    "max_completion_tokens": 16,
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "moderation": None,
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "b"},
    "prompt_cache_key": "a",
    "prompt_cache_options": {},
    "prompt_cache_retention": "in_memory",
    "reasoning_effort": "none",
    "response_format": {"type": "text"},
    "safety_identifier": "a",
    "service_tier": "auto",
    "store": False,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": None,
    "verbosity": "medium",
    "web_search_options": None,
}
OF_PROMPT: dict[str, Any] = SHARED | {"best_of": 1, "echo": False, "logprobs": 1, "suffix": ""}
OF_EMBEDDING = {"dimensions": 8, "encoding_format": "float", "user": "a"}
APIS: list[tuple[type[Body], Any, dict[str, Any], dict[str, Any]]] = [
    (ChatRequest, chat_params.CompletionCreateParamsNonStreaming, CHAT, OF_CHAT),
    (
        CompletionRequest,
        completion_create_params.CompletionCreateParamsNonStreaming,
        PROMPT,
        OF_PROMPT,
    ),
    (
        EmbeddingRequest,
        embedding_create_params.EmbeddingCreateParams,
        {"model": "a", "input": "b"},
        OF_EMBEDDING,
    ),
]


@pytest.mark.parametrize(("body", "params", "required", "defaults"), APIS)
def test_each_field_of_the_openai_client_is_accepted_if_it_asks_for_nothing(
    body: type[Body], params: Any, required: dict[str, Any], defaults: dict[str, Any]
) -> None:
    hints = get_type_hints(params)
    assert hints.keys() - required.keys() == defaults.keys()
    for name, default in defaults.items():
        assert body.model_validate(required | {name: default}), name
        if type(None) in get_args(hints[name]):
            assert body.model_validate(required | {name: None}), name
    assert body.model_validate(required | defaults)


def test_a_number_without_a_fraction_is_an_integer() -> None:
    chat = ChatRequest.model_validate(CHAT | {"max_tokens": 5.0, "n": 1.0, "seed": 7.0})
    assert (chat.max_tokens, type(chat.max_tokens), chat.n, chat.seed) == (5, int, 1, 7)
    embedding = EmbeddingRequest.model_validate_json('{"model": "a", "input": [5.0, 7]}')
    assert embedding.input == [5, 7]
    for wrong in ("5.5", "true", '"5"', "0.0"):
        with pytest.raises(ValidationError):
            ChatRequest.model_validate_json(json.dumps(CHAT)[:-1] + f', "max_tokens": {wrong}}}')


REFUSED: list[tuple[type[Body], dict[str, Any], dict[str, Any]]] = [
    (ChatRequest, CHAT, {"store": True}),
    (ChatRequest, CHAT, {"store": 0}),
    (ChatRequest, CHAT, {"modalities": ["audio"]}),
    (ChatRequest, CHAT, {"reasoning_effort": "high"}),
    (ChatRequest, CHAT, {"logit_bias": {"7": 1.0}}),
    (ChatRequest, CHAT, {"functions": [{"name": "a"}]}),
    (ChatRequest, CHAT, {"function_call": {"name": "a"}}),
    (ChatRequest, CHAT, {"service_tier": "priority"}),
    (ChatRequest, CHAT, {"web_search_options": {}}),
    (ChatRequest, CHAT, {"no_such_field": None}),
    (CompletionRequest, PROMPT, {"echo": True}),
    (CompletionRequest, PROMPT, {"best_of": 2}),
    (CompletionRequest, PROMPT, {"suffix": "a"}),
]


@pytest.mark.parametrize(("body", "required", "field"), REFUSED)
def test_a_field_that_would_change_the_answer_is_refused(
    body: type[Body], required: dict[str, Any], field: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        body.model_validate(required | field)


def test_an_answer_is_a_message_of_the_next_turn() -> None:
    message = ChatCompletionMessage(role="assistant", content="a")
    assert ChatMessage.model_validate(message.model_dump()).plain() == {
        "role": "assistant",
        "content": "a",
    }


def test_a_rerank_request_may_have_the_fields_of_cohere() -> None:
    words = {"model": "a", "query": "b", "documents": ["c", {"text": "d", "id": 7}]}
    nothing = ("top_n", "return_documents", "rank_fields", "priority", "max_tokens_per_doc")
    for name in (*nothing, "max_chunks_per_doc"):
        assert RerankRequest.model_validate(words | {name: None})
    usual = {"rank_fields": ["text"], "priority": 0, "max_chunks_per_doc": 1}
    found = RerankRequest.model_validate(words | usual).documents[1]
    assert not isinstance(found, str)
    assert found.model_dump() == {"text": "d", "id": 7}
    for other in ({"rank_fields": ["title"]}, {"priority": 1}, {"max_chunks_per_doc": 2}):
        with pytest.raises(ValidationError):
            RerankRequest.model_validate(words | other)


def test_an_embed_request_may_have_the_fields_of_cohere() -> None:
    words = {"model": "a", "texts": ["b"]}
    usual = {"embedding_types": [], "priority": 0, "truncate": "END", "images": [], "inputs": []}
    for name in (*usual, "input_type", "max_tokens", "output_dimension"):
        assert CohereEmbedRequest.model_validate(words | {name: None})
    assert CohereEmbedRequest.model_validate(words | usual)
    for other in ({"priority": 1}, {"truncate": "START"}, {"embedding_types": ["int4"]}):
        with pytest.raises(ValidationError):
            CohereEmbedRequest.model_validate(words | other)


def test_unknown_fields_are_ignored_where_tei_ignores_them() -> None:
    bodies: list[tuple[type[Body], dict[str, Any]]] = [
        (EmbedRequest, {"inputs": "a"}),
        (PredictRequest, {"inputs": "a"}),
        (TokenizeRequest, {"inputs": "a"}),
        (TeiRerankRequest, {"query": "a", "texts": ["b"]}),
    ]
    for body, required in bodies:
        assert body.model_validate(required | {"parameters": {}, "top_n": 3, "model": "a"})
    with pytest.raises(ValidationError):
        PredictRequest.model_validate({"inputs": "a", "raw_scores": True})


def test_only_the_first_call_is_kept_without_parallel_calls() -> None:
    calls = '<tool_call>{"name": "a", "arguments": {}}</tool_call>' * 2
    for only_first, count in ((False, 2), (True, 1)):
        text, found, finish = CallSplitter(None, only_first=only_first).add(calls, "stop")
        assert (text, len(found), finish) == ("", count, "tool_calls")


def test_a_tool_without_parameters_has_none() -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "now"}})
    _, calls = choose_tools([tool], "required")
    assert calls is not None
    assert calls.schema is not None
    arguments = calls.schema["anyOf"][0]["properties"]["arguments"]
    assert arguments == {"type": "object", "properties": {}, "additionalProperties": False}
