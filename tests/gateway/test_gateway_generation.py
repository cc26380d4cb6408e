"""Chat completions and completions of the gateway, with the unchanged `openai` client."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest

from tests.support.client_toy import wait_until
from tests.support.gateway_environment import run_with_clients, run_with_node
from tests.support.generation_cases import TEXTS
from tests.support.generation_served import build_both, build_caller, gauges
from tests.support.hostile_bodies import send_hostile
from tests.support.processes import repeated
from tests.support.served_command import gateway
from triptych.building.generation import build as stages
from triptych.client import Client
from triptych.repository.records import GateResult
from triptych.serving.server import Server

pytestmark = pytest.mark.server
MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": TEXTS[1]}]},
]
TOOLS: Any = [{"type": "function", "function": {"name": "find"}}]
HELD = 9_876_543_210
"""Seed of a request that the fake engine never ends, as in `fake_engine`."""
PLAIN = [MESSAGES[0], {"role": "user", "content": TEXTS[1]}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(build_both(tmp_path_factory.mktemp("generation"))) as server:
        yield server


@pytest.fixture(scope="module")
def address(server: Server) -> Iterator[str]:
    with gateway("quick", "slow", "--url", server.grpc_url) as address:
        yield address


@pytest.fixture(scope="module")
def api(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_and_completions_are_those_of_the_grpc_client(
    server: Server, api: openai.OpenAI
) -> None:
    with Client("quick", server.grpc_url) as client:
        chat = client.chat(PLAIN, max_tokens=200).whole()
        prompt = client.generate(TEXTS[0], max_tokens=5).whole()
        reversed_ = client.generate(TEXTS[0], adapter="terse").whole()
    made = api.chat.completions.create(model="quick", messages=MESSAGES, max_tokens=200)
    (choice,) = made.choices
    assert (choice.message.role, choice.message.content) == ("assistant", chat.text)
    assert choice.finish_reason == chat.finish_reason == "stop"
    assert chat.usage is not None
    assert made.usage is not None
    assert made.usage.prompt_tokens == chat.usage.prompt_tokens
    assert made.usage.completion_tokens == chat.usage.completion_tokens

    def complete(**words: Any) -> Any:
        (choice,) = api.completions.create(model="quick", prompt=TEXTS[0], **words).choices
        return choice

    short = complete(max_tokens=5)
    assert (short.text, short.finish_reason) == (prompt.text, "length")
    assert complete(extra_body={"adapter": "terse"}).text == reversed_.text
    cut = complete(stop=["jumps"])
    assert "brown fox " in cut.text
    assert "jumps" not in cut.text
    assert cut.finish_reason == "stop"
    made = api.chat.completions.create(
        model="quick", messages=PLAIN, logprobs=True, top_logprobs=1, max_tokens=3
    )
    logprobs: Any = made.choices[0].logprobs
    assert [each.logprob for each in logprobs.content] == [0.0, -1.0, -2.0]
    assert all(len(each.top_logprobs) == 1 for each in logprobs.content)


def test_streams_have_the_parts_of_the_whole(api: openai.OpenAI) -> None:
    words: dict[str, Any] = {"model": "slow", "messages": PLAIN, "max_completion_tokens": 40}
    whole = api.chat.completions.create(**words)
    words_of_stream: Any = {"stream": True, "stream_options": {"include_usage": True}}
    parts = list(api.chat.completions.create(**words, **words_of_stream))
    assert parts[0].choices[0].delta.role == "assistant"
    texts = [part.choices[0].delta.content or "" for part in parts if part.choices]
    assert sum(map(bool, texts)) > 1  # tokens share a part where the client is slow
    assert "".join(texts) == whole.choices[0].message.content
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "length"
    assert whole.usage is not None
    assert (parts[-1].choices, parts[-1].usage) == ([], whole.usage)
    assert len({part.id for part in parts}) == 1
    prompt: dict[str, Any] = {"model": "slow", "prompt": TEXTS[0], "max_tokens": 20}
    streamed = api.completions.create(**prompt, stream=True)
    stopped = api.completions.create(**prompt)
    assert "".join(part.choices[0].text for part in streamed) == stopped.choices[0].text


def test_calls_of_tools_are_answers_and_parts_of_a_conversation(api: openai.OpenAI) -> None:
    """The fake engine repeats the prompt: the tools, and what the user writes."""
    call = '<tool_call>{"name": "find", "arguments": {"id": 7}}</tool_call>'
    words: dict[str, Any] = {"model": "quick", "tools": TOOLS}
    asked: list[Any] = [{"role": "user", "content": f"Find 7. {call}"}]
    (choice,) = api.chat.completions.create(**words, messages=asked).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content.startswith('[{"type": "function", "function": {"name": "find"}}]')
    assert "<user> Find 7.\n<assistant>" in choice.message.content
    (made,) = choice.message.tool_calls
    assert (made.function.name, made.function.arguments) == ("find", '{"id": 7}')
    with api.chat.completions.stream(**words, messages=asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.content == choice.message.content
    assert streamed.finish_reason == "tool_calls"
    assert [each.function.arguments for each in streamed.message.tool_calls] == ['{"id": 7}']
    parts = [
        part.choices[0]
        for part in api.chat.completions.create(**words, messages=asked, stream=True)
    ]
    assert all(
        part.finish_reason or part.delta.role or part.delta.content or part.delta.tool_calls
        for part in parts
    )
    result = {"role": "tool", "tool_call_id": made.id, "content": "It is here."}
    asked = [PLAIN[0], choice.message, result]
    (last,) = api.chat.completions.create(**words, messages=asked).choices
    assert [each.function.arguments for each in last.message.tool_calls] == ['{"id": 7}']
    assert "<tool> It is here." in last.message.content
    none = api.chat.completions.create(**words, messages=asked, tool_choice="none").choices[0]
    assert "<tool_call>" in none.message.content
    assert none.message.tool_calls is None


def test_what_a_pipeline_cannot_do_is_refused(api: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("json_schema", {"response_format": schema}),  # the fake engine follows none
        ("messages[0].role", {"messages": [{"role": "critic", "content": "a"}]}),
        ("content", {"messages": [{"role": "user"}]}),
        ("tool_call_id", {"messages": [*PLAIN, {"role": "tool", "content": "a"}]}),
        ("messages", {"messages": [{"role": "user", "content": [picture]}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("json_schema", {"tools": TOOLS, "tool_choice": "required"}),
        ("temperature", {"temperature": 3}),
        ("min_tokens", {"extra_body": {"min_tokens": -1, "ignore_eos": True}}),
        ("`n`", {"n": 2}),
        ("max_tokens", {"max_tokens": 100_000}),
        ("messages", {"messages": []}),
    ]
    for name, words in cases:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                api.chat.completions.create(
                    **{"model": "quick", "messages": PLAIN, "stream": stream, **words}
                )
            assert name in caught.value.message, (words, caught.value.message)
    with pytest.raises(openai.BadRequestError, match="text-embedding"):
        api.embeddings.create(model="quick", input="a")
    with pytest.raises(openai.BadRequestError, match="generates text"):
        api.post("/pipelines/quick", body={"rows": [{"text_input": "a"}]}, cast_to=object)


def test_examples_are_answered_and_hostile_json_gets_a_short_error(address: str) -> None:
    with httpx2.Client(base_url=address, timeout=300) as client:
        paths = client.get("/openapi.json").json()["paths"]
        for path in ("/v1/chat/completions", "/v1/completions"):
            (content,) = paths[path]["post"]["requestBody"]["content"].values()
            body = {**content["example"], "model": "quick"}
            assert client.post(path, json=body).status_code == 200, path
            assert send_hostile(client, path, "quick") > 100


@pytest.mark.long
def test_generated_requests_fit_the_published_documents(address: str) -> None:
    run_with_clients("gateway_properties.py", address, "completions")


@pytest.mark.long
def test_suites_and_clients_of_others_call_tools_of_a_real_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2 on vLLM, which `make setup-generation` installs; its gate has a test of its own."""
    passed = GateResult("fp32", 0, 0, True, (), ())
    monkeypatch.setattr(stages, "check_generation", lambda *_, **__: passed)
    server = Server(build_caller(tmp_path))
    try:
        server.start()
        server.wait_ready(timeout_s=900)
        with gateway("chat", "--url", server.grpc_url) as address:
            assert " passed" in run_with_clients("gateway_suites.py", address, "chat")
            found = run_with_node("gateway_clients.mjs", address, "chat")
    finally:
        server.stop()
    assert all(found.values())
    assert found["openai"] == found["openai_stream"] == found["vercel"] == found["vercel_stream"]
    for made in (*found["vercel_tools"], found["vercel_object"]):
        assert set(made) == {"name", "country"}


def leave(server: Server, address: str, way: str) -> None:
    """Begin a generation that the engine never ends, and disconnect after its first token."""
    sampling = {"seed": HELD}
    if way == "client":
        with (
            Client("slow", server.grpc_url) as client,
            client.generate(TEXTS[0], seed=HELD) as all_,
        ):
            assert next(all_).token_ids
    elif way == "HTTP":
        inputs = {"text_input": TEXTS[0], "messages": "", "stream": True}
        path = f"http://{server.http_url}/v2/models/slow/generate_stream"
        read_first_line(path, {**inputs, "sampling_parameters": json.dumps(sampling)})
    elif way == "gateway":
        body = {"model": "slow", "prompt": TEXTS[0], "stream": True, **sampling}
        read_first_line(f"{address}/v1/completions", body)
    else:
        body = {"model": "slow", "prompt": TEXTS[0], **sampling}
        with suppress(httpx2.ReadTimeout):
            waits = httpx2.Timeout(300, read=1)
            httpx2.post(f"{address}/v1/completions", json=body, timeout=waits)


def read_first_line(url: str, body: dict[str, Any]) -> None:
    with httpx2.stream("POST", url, json=body, timeout=300) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert next(response.iter_lines()).startswith("data: {")


def open_things(server: Server) -> dict[str, int]:
    """Threads and open files of the server and its steps."""
    process = psutil.Process(server.pid)
    all_ = [process, *process.children(recursive=True)]
    return {
        "threads": sum(each.num_threads() for each in all_),
        "files": sum(each.num_fds() for each in all_),
    }


def test_clients_that_leave_free_their_places_and_neighbors_get_their_tokens(
    server: Server, address: str
) -> None:
    """The engine has two places, and would hold the requests of clients that left for ever.

    Calls of gRPC that are canceled may end Triton 24.10, so that clients send a request for it.
    """
    ways = ("client", "HTTP", "gateway", "gateway without a stream")

    def neighbor() -> str:
        with Client("slow", server.grpc_url, timeout_s=300) as client:
            return client.generate(TEXTS[0], max_tokens=3).whole().text

    expected, before = neighbor(), open_things(server)
    with repeated(neighbor) as answers, ThreadPoolExecutor(4) as pool:
        left = [pool.submit(leave, server, address, way) for _ in range(6) for way in ways]
        for each in left:
            each.result()
    assert set(answers) == {expected}
    wait_until(lambda: gauges(server, "slow")["in_flight"] == 0, "all places are free")
    # A connection of each way may still be closing.
    limit = {name: count + len(ways) for name, count in before.items()}
    wait_until(
        lambda: all(count < limit[name] for name, count in open_things(server).items()),
        f"nothing is left: {limit}",
    )
    counted = 'endpoint="/v1/completions",status="499"} 12.0'
    with httpx2.Client(base_url=address, timeout=300) as client:
        wait_until(lambda: counted in client.get("/metrics").text, "the work is canceled")
