"""Suites and clients of others, unchanged, against a gateway; pytest collects them here.

``python gateway_suites.py ADDRESS KIND`` runs in an environment of `gateway_clients.txt`, with the
pipelines of the gateway's tests. KIND is ``texts``, or ``chat`` for a model that generates text and
calls tools. The addresses of HTTP and gRPC of a Triton server with ``texts`` follow.
"""

import inspect
import json
import os
import sys
from typing import Any

import cohere
import litellm
import numpy as np
import openai
import pytest
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, Document
from haystack.utils import Secret
from haystack_integrations.components.rankers.cohere import CohereRanker
from huggingface_hub import InferenceClient
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests
from llama_index.core.llms import ChatMessage as LlamaMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

KEY = "none"
ADDRESS = os.environ.get("GATEWAY_ADDRESS", "")
API = f"{ADDRESS}/v1"
TRITON = os.environ.get("TRITON_ADDRESSES", " ").split(" ")
TEXTS = ["my delivery is late", "refunds take a week", "where is my parcel?"]
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", **fields}}}
    for name, fields in (
        (
            "get_weather",
            {"properties": {"location": {"type": "string"}}, "required": ["location"]},
        ),
        (
            "add",
            {
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        ),
    )
]
EXPECTED = {
    "test_json_mode": "the model is too small to write the keys for which the question asks"
}
"""Reasons of the tests of langchain-tests that must fail."""


class TestLangChainEmbeddingsTexts(EmbeddingsIntegrationTests):  # type: ignore[misc]
    embeddings_class = OpenAIEmbeddings
    embedding_model_params = {  # noqa: RUF012
        **{"model": "minilm", "base_url": API, "api_key": KEY},
        "check_embedding_ctx_length": False,
    }


class TestLangChainChat(ChatModelIntegrationTests):  # type: ignore[misc]
    chat_model_class = ChatOpenAI
    chat_model_params = {  # noqa: RUF012
        **{"model": "chat", "base_url": API, "api_key": KEY, "temperature": 0},
        # Without the penalty, this model repeats itself without an end.
        **{"max_tokens": 200, "stream_usage": True, "frequency_penalty": 1},
    }
    model_override_value = "chat"
    has_tool_choice = True
    supports_json_mode = True


class City(BaseModel):
    name: str
    country: str


def vectors() -> Any:
    made = openai.OpenAI(base_url=API, api_key=KEY).embeddings.create(model="minilm", input=TEXTS)
    return np.array([each.embedding for each in made.data])


def same(found: Any) -> bool:
    return bool(np.abs(np.array(found) - vectors()).max() < 1e-5)


def test_embeddings_of_texts() -> None:
    made = litellm.embedding(model="openai/minilm", input=TEXTS, api_base=API, api_key=KEY)
    assert made.usage.prompt_tokens > len(TEXTS)
    assert same([each["embedding"] for each in made.data])
    llama = OpenAILikeEmbedding(model_name="minilm", api_base=API, api_key=KEY)
    assert same(llama.get_text_embedding_batch(TEXTS))
    llama = TextEmbeddingsInference(model_name="minilm", base_url=ADDRESS)
    assert same(llama.get_text_embedding_batch(TEXTS))
    hub = InferenceClient(model=f"{ADDRESS}/tei/minilm", token=KEY)
    assert same([hub.feature_extraction(text, truncate=True)[0] for text in TEXTS])
    key = Secret.from_token(KEY)
    haystack = OpenAITextEmbedder(api_key=key, model="minilm", api_base_url=API)
    assert same([haystack.run(text)["embedding"] for text in TEXTS])


async def test_kserve_of_texts() -> None:
    rest, grpc = InferenceRESTClient(RESTConfig(protocol="v2")), InferenceGRPCClient(TRITON[1])
    url = f"http://{TRITON[0]}"
    assert await grpc.is_server_ready()
    with pytest.raises(json.JSONDecodeError):  # Triton's answer has no body
        await rest.is_server_ready(url)
    for ready in (rest.is_model_ready(url, "minilm"), grpc.is_model_ready("minilm")):
        assert await ready

    def make(is_binary: bool, size: int) -> InferRequest:
        sent = InferInput("text", [len(TEXTS), 1], "BYTES")
        sent.set_data_from_numpy(np.array(TEXTS, object)[:, None], binary_data=is_binary)
        return InferRequest("minilm", [sent], parameters={"dimensions": size})

    for is_binary, size in ((False, 384), (True, 384), (True, 8), (False, 8)):
        over_http = await rest.infer(url, make(is_binary, size), model_name="minilm")
        over_grpc = await grpc.infer(make(is_binary, size))
        one, other = (each.outputs[0].as_numpy() for each in (over_http, over_grpc))
        assert one.shape == (len(TEXTS), size)
        assert np.abs(one - other).max() < 1e-6
        assert size == 8 or same(one)
    await rest.close()
    await grpc.close()


def test_tasks_of_hugging_face_with_texts() -> None:
    likes = InferenceClient(model=f"{ADDRESS}/tei/minilm").sentence_similarity(TEXTS[0], TEXTS[1:])
    assert np.abs(np.array(likes) - vectors()[1:] @ vectors()[0]).max() < 1e-5
    # As with TEI itself, whose answer to one text is no nested list, it returns the best label.
    best = InferenceClient(model=f"{ADDRESS}/tei/topics").text_classification(TEXTS[0])
    again = InferenceClient(model=f"{ADDRESS}/predict").text_classification(TEXTS[0], top_k=2)
    assert best == again
    assert best.score > 0.2


def test_rerankers_of_texts() -> None:
    words: Any = {"query": "refund", "documents": TEXTS}
    order = [
        each.index
        for each in cohere.ClientV2(KEY, base_url=ADDRESS).rerank(model="ranks", **words).results
    ]
    assert sorted(order) == [0, 1, 2]
    v1 = cohere.Client(KEY, base_url=ADDRESS).rerank(
        model="ranks",
        **words,
        top_n=3,
        rank_fields=["text"],
        return_documents=True,
        max_chunks_per_doc=1,
    )
    assert [each.index for each in v1.results] == order
    assert next(each.document.text for each in v1.results if each.document) == TEXTS[order[0]]
    for vendor, path in (
        ("cohere", "/v2/rerank"),
        ("jina_ai", "/v1/rerank"),
        ("infinity", ""),
        ("hosted_vllm", ""),
        ("huggingface", "/tei/ranks"),
    ):
        # LiteLLM reads documents of Infinity as plain texts; Jina and vLLM have objects.
        wanted = {"return_documents": False} if vendor == "infinity" else {}
        found = litellm.rerank(
            model=f"{vendor}/ranks",
            **words,
            api_base=ADDRESS + path,
            api_key=KEY,
            top_n=3,
            **wanted,
        )
        assert [each["index"] for each in found.results] == order, vendor
    documents = [Document(content=text) for text in TEXTS]
    ranker = CohereRanker(model="ranks", api_key=Secret.from_token(KEY), api_base_url=ADDRESS)
    found = ranker.run(query="refund", documents=documents)
    assert [TEXTS.index(each.content) for each in found["documents"]] == order


def test_the_client_of_cohere_embeds() -> None:
    wanted = openai.OpenAI(base_url=API, api_key=KEY).embeddings.create(
        model="minilm", input=TEXTS, extra_body={"input_type": "query"}
    )
    vectors = np.array([each.embedding for each in wanted.data])
    defaults: dict[str, Any] = {
        **{"texts": TEXTS, "images": [], "inputs": [], "embedding_types": ["float"]},
        **{"max_tokens": 128_000, "output_dimension": 384, "truncate": "END", "priority": 0},
    }
    common: Any = {"model": "minilm", "input_type": "search_query", "texts": TEXTS}
    v2, v1 = (make(KEY, base_url=ADDRESS) for make in (cohere.ClientV2, cohere.Client))
    fields = inspect.signature(v2.embed).parameters
    assert set(fields) - {"model", "input_type", "request_options"} == set(defaults)
    for extra in ({}, {name: None for name in defaults if name != "texts"}, defaults):
        made = v2.embed(**common | extra)
        assert np.abs(np.array(made.embeddings.float_) - vectors).max() < 1e-5
    assert np.abs(np.array(v1.embed(**common).embeddings) - vectors).max() < 1e-5
    kinds = ["int8", "uint8", "binary", "ubinary", "base64"]
    for client in (v1, v2):
        found = client.embed(**common, embedding_types=kinds[: 4 if client is v1 else 5])
        assert np.array(found.embeddings.uint8).shape == (3, 384)
        assert np.array(found.embeddings.int8).min() < 0
        bits = np.array(found.embeddings.ubinary, np.uint8)
        assert ((np.array(found.embeddings.binary, np.int8).view(np.uint8) ^ 0x80) == bits).all()
        assert (np.unpackbits(bits, axis=1) == (vectors > 0)).mean() > 0.99
    with pytest.raises(cohere.UnprocessableEntityError, match="`images`: is not supported"):
        v2.embed(model="minilm", input_type="image", images=["data:image/png;base64,"])


def test_clients_of_chat() -> None:
    client = openai.OpenAI(base_url=API, api_key=KEY)
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    said = client.chat.completions.create(model="chat", messages=messages, max_tokens=20)
    text = said.choices[0].message.content
    assert text
    messages.append(said.choices[0].message.model_dump())
    assert client.chat.completions.create(model="chat", messages=messages).choices
    words: Any = {"model": "openai/chat", "api_base": API, "api_key": KEY, "max_tokens": 20}
    asked = [{"role": "user", "content": "Hello"}]
    assert litellm.completion(messages=asked, **words).choices[0].message.content == text
    parts = litellm.completion(messages=asked, stream=True, **words)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    words["model"] = "text-completion-openai/chat"
    assert litellm.text_completion(prompt="Hello", **words).choices[0].text
    llama = OpenAILike(
        **{"model": "chat", "api_base": API, "api_key": KEY, "max_tokens": 20},
        **{"is_chat_model": True, "is_function_calling_model": True},
    )
    question = LlamaMessage(role="user", content="Hello")
    assert llama.chat([question]).message.content == text
    assert list(llama.stream_chat([question]))[-1].message.content == text
    assert llama.complete("Hello").text == text
    tool = FunctionTool.from_defaults(fn=lambda a, b: a + b, name="add", description="Add.")
    called = llama.chat_with_tools([tool], user_msg="What is add(3, 4)?", tool_required=True)
    (call,) = llama.get_tool_calls_from_response(called)
    assert (call.tool_name, set(call.tool_kwargs)) == ("add", {"a", "b"})
    haystack = OpenAIChatGenerator(
        api_key=Secret.from_token(KEY),
        model="chat",
        api_base_url=API,
        generation_kwargs={"max_tokens": 20},
    )
    assert haystack.run([ChatMessage.from_user("Hello")])["replies"][0].text == text


def test_openai_calls_tools_in_chat() -> None:
    client = openai.OpenAI(base_url=API, api_key=KEY, max_retries=0)
    weather: dict[str, Any] = {
        **{"model": "chat", "temperature": 0, "max_tokens": 60, "tools": TOOLS},
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    }
    add = {"type": "function", "function": {"name": "add"}}
    called: list[Any] = []
    for choice, name in (("auto", "get_weather"), ("required", "get_weather"), (add, "add")):
        made = client.chat.completions.create(**weather, tool_choice=choice).choices[0]
        with client.chat.completions.stream(**weather, tool_choice=choice) as stream:
            streamed = stream.get_final_completion().choices[0]
        for each in (made, streamed):
            (call,) = each.message.tool_calls
            assert (each.finish_reason, call.function.name) == ("tool_calls", name)
            assert not each.message.content
            called.append(json.loads(call.function.arguments))
    assert called[:4] == [{"location": "Paris"}] * 4
    assert called[4] == called[5]
    assert all(isinstance(called[4][each], int) for each in ("a", "b"))
    plain = client.chat.completions.create(**weather, tool_choice="none").choices[0].message
    assert plain.content
    assert not plain.tool_calls
    made = client.chat.completions.create(**weather).choices[0].message
    result = {"role": "tool", "tool_call_id": made.tool_calls[0].id, "content": "It is sunny."}
    weather["messages"] += [made.model_dump(), result]
    assert client.chat.completions.create(**weather).choices[0].finish_reason == "stop"
    asked: dict[str, Any] = {
        **{"model": "chat", "temperature": 0, "max_tokens": 60},
        "messages": [{"role": "user", "content": "Paris is the capital of France."}],
    }
    parsed = client.chat.completions.parse(**asked, response_format=City).choices[0].message.parsed
    assert isinstance(parsed, City)
    tool = openai.pydantic_function_tool(City)
    made = client.chat.completions.parse(**asked, tools=[tool], tool_choice="required")
    assert isinstance(made.choices[0].message.tool_calls[0].function.parsed_arguments, City)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        reason = EXPECTED.get(item.originalname)
        # As a plugin, this module is another one than that of the tests.
        if reason and item.cls.__name__ == TestLangChainChat.__name__:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


if __name__ == "__main__":
    os.environ["GATEWAY_ADDRESS"] = sys.argv[1]
    os.environ["TRITON_ADDRESSES"] = " ".join(sys.argv[3:])
    options = [
        "-q",
        "-ra",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        "/",
        "-o",
        "asyncio_mode=auto",
    ]
    sys.exit(pytest.main([__file__, *options, "-k", sys.argv[2], "-p", "gateway_suites"]))
