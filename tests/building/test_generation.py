"""Answers of a pipeline that generates text, over real streams to a real server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from conftest import quiet
from generation_cases import (
    TEXTS,
    Answer,
    Streams,
    byte_pairs,
    responses_of,
    take,
    write_tiny_model,
)
from generation_served import LONG, build_both, wait_until
from triptych.base.errors import UserError
from triptych.building.generation.inputs import read_generation
from triptych.building.generation.model import GenerationInfo, read_generation_model
from triptych.client import Client
from triptych.container.lock_check import check_repository
from triptych.interface.cli.plan_text import describe_text_generation
from triptych.repository.lint.checks import run_checks
from triptych.repository.manifest import EncoderManifest, read_manifest
from triptych.serving.server import Server
from triptych.spec.generation_fields import load_generation_spec

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_both(tmp_path_factory.mktemp("generation"))


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with Server(repository) as server:
        yield server


@pytest.fixture(scope="module")
def quick(server: Server) -> Iterator[Streams]:
    streams = Streams(server.grpc_url, "quick")
    yield streams
    streams.close()


@pytest.fixture(scope="module")
def slow(server: Server) -> Iterator[Streams]:
    streams = Streams(server.grpc_url, "slow")
    yield streams
    streams.close()


def test_what_was_built_is_in_order(repository: Path) -> None:
    assert run_checks(repository) == []
    assert check_repository(repository, None) == []
    lock = json.loads((repository / "quick/triptych.lock.json").read_bytes())
    with pytest.raises(UserError, match="is not supported by this command"):
        read_manifest(repository, "quick", EncoderManifest)
    assert lock["spec"]["core"]["backend"] == "fake_0ms"
    assert lock["gate"]["rows"] == 0
    assert list(lock["adapters"]) == ["terse"]
    inputs = read_generation(load_generation_spec(repository.parent / "quick"), quiet)
    described = describe_text_generation(inputs, Path())
    assert set(described["models"]) == {path.parent.name for path in repository.glob("quick*/1")}
    # 2 layers with 2 heads of 8 numbers, keys and values, 2 bytes each: 128 bytes a token.
    assert described["model"]["adapters"] == {"terse": "LoRA of rank 4, from ../adapters/terse"}
    assert described["core"]["kv_cache"].startswith(
        "2 MiB: 32 requests of max_model_len, a MiB for"
    )
    assert described["core"]["max_num_seqs"].endswith("512 tokens of KV cache each")


def test_a_streamed_answer_is_the_whole_one(quick: Streams) -> None:
    ids = {text: byte_pairs().encode(text).ids for text in TEXTS}
    for text in TEXTS:
        streamed, whole = quick.ask(text_input=text), quick.ask(text_input=text, stream=False)
        assert streamed.text == whole.text == text
        assert streamed.ids == whole.ids == ids[text]
        assert (len(whole.chunks), whole.finish) == (1, "stop")
        assert 1 < len(streamed.chunks) <= len(ids[text])
        assert not any("\ufffd" in chunk for chunk in streamed.chunks)
        count = len(ids[text])
        assert streamed.usage == whole.usage
        assert streamed.usage == {
            "prompt_tokens": count,
            "completion_tokens": count,
            "cached_tokens": 0,
        }


def test_what_an_engine_makes_too_fast_for_its_client_comes_in_longer_chunks(
    quick: Streams,
) -> None:
    """Nothing waits in line before the client, and no token is lost or comes twice."""
    texts = [" ".join([text] * 4) for text in TEXTS]
    calls = [(text, quick.open({"text_input": text})) for text in texts * 4]
    for text, call in calls:
        answer = Answer()
        for response in responses_of(call):
            take(answer, response)
        assert answer.text == text
        assert answer.ids == byte_pairs().encode(text).ids
        assert len(answer.chunks) < len(answer.ids) / 2


def test_answers_end_where_the_request_says(quick: Streams) -> None:
    short = quick.ask(text_input=TEXTS[0], sampling_parameters={"max_tokens": 3, "logprobs": 1})
    assert (len(short.ids), short.finish) == (3, "length")
    assert [one["logprob"] for one in short.logprobs] == [0.0, -1.0, -2.0]
    assert short.logprobs[1]["token_id"] == short.ids[1]
    for stream in (True, False):
        stopped = quick.ask(
            text_input=TEXTS[0], stream=stream, sampling_parameters={"stop": ["fox j", "zzz"]}
        )
        assert (stopped.text, stopped.finish) == ("The quick brown ", "stop")
        assert stopped.usage["completion_tokens"] == len(stopped.ids)


def test_a_conversation_is_as_the_template_has_it(quick: Streams) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    answer = quick.ask(messages=messages)
    assert answer.text == "<user> Hi\n<assistant> Ho\n<assistant> "
    assert answer.ids == byte_pairs().encode("<s>" + answer.text, add_special_tokens=False).ids


def test_an_adapter_answers_where_a_request_names_it(
    server: Server, quick: Streams, slow: Streams
) -> None:
    """The fake engine, which has no weights, then repeats the prompt backwards."""
    ids = byte_pairs().encode(TEXTS[0]).ids
    for name, wanted in (("terse", ids[::-1]), ("", ids)):
        assert quick.ask(text_input=TEXTS[0], sampling_parameters={"adapter": name}).ids == wanted
    with Client("quick", server.grpc_url) as client:
        assert client.generate(TEXTS[0], adapter="terse").whole().token_ids == tuple(ids[::-1])
    refused = slow.ask(text_input="a", sampling_parameters={"adapter": "terse"})
    assert "adapter` must be left out, because the pipeline has no adapters" in refused.error


def test_a_request_at_fault_is_refused_alone(quick: Streams) -> None:
    bad: tuple[tuple[dict[str, object], str], ...] = (
        ({"stream": True}, "Given: neither"),
        ({"text_input": "a", "messages": [{"role": "user", "content": "b"}]}, "Given: both"),
        ({"text_input": b"\xff"}, "must be valid UTF-8"),
        ({"text_input": "a", "sampling_parameters": {"max_tokens": -1}}, "from 1 to 1000000"),
        ({"text_input": "a", "sampling_parameters": "{"}, "must be JSON"),
        # What the engine refuses, not the steps before it.
        ({"text_input": "a", "sampling_parameters": {"json_schema": {}}}, "follows none"),
        ({"text_input": "a", "sampling_parameters": {"adapter": "x"}}, "the pipeline's: terse"),
        ({"text_input": "dog " * 600}, "must have 1 to 511 tokens"),
        ({"messages": [{"role": "robot", "content": "b"}]}, "no such role: robot"),
        ({"text_input": "a", "exclude_input_in_output": False}, "must be true"),
    )
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(quick.ask, text_input=text) for text in TEXTS * 2]
        for values, said in bad:
            assert said in quick.ask(**values).error
        assert [one.result().text for one in good] == [*TEXTS * 2]


def test_it_takes_what_tritons_openai_frontend_sends(quick: Streams) -> None:
    """Its `--backend vllm`: names and types of `_create_vllm_generate_request`, python/openai.

    The parameters are those of a chat that names none: every field of the request's schema that
    has a default, but those that the frontend leaves out (commit e1db8a6 of the server, August
    2026). It finds an ensemble's backend by that option, and `text_output` and the counts by name.
    """
    parameters = {
        "n": 1,
        "temperature": 0.7,
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "ignore_eos": False,
        "max_tokens": 4,
    }
    for stream in (True, False):
        answer = quick.ask(
            text_input="<s>" + TEXTS[0],
            stream=stream,
            exclude_input_in_output=True,
            return_logprobs=False,
            sampling_parameters=parameters,
            return_num_input_tokens=True,
            return_num_output_tokens=True,
        )
        assert not answer.error
        assert sum(answer.counted) == 4


def test_it_takes_tritons_generate_requests(server: Server, quick: Streams) -> None:
    """Plain HTTP with JSON, as a whole and as server-sent events."""
    body: dict[str, Any] = {
        "text_input": TEXTS[0],
        "sampling_parameters": json.dumps({"max_tokens": 3}),
    }
    address = f"http://{server.http_url}/v2/models/quick"

    def answers(path: str, **more: object) -> list[dict[str, Any]]:
        data = json.dumps({**body, **more}).encode()
        with urllib.request.urlopen(f"{address}/{path}", data) as reply:
            lines = filter(None, reply.read().decode().splitlines())
            return [json.loads(line.removeprefix("data: ")) for line in lines]

    wanted = quick.ask(**body)
    (whole,) = answers("generate", stream=False)
    assert (whole["text_output"], whole["token_ids"]) == (wanted.text, wanted.ids)
    # As other backends have it: beside the inputs.
    del body["sampling_parameters"]
    (named,) = answers("generate", stream=False, max_tokens=3, temperature=0.5)
    assert named["token_ids"] == wanted.ids
    with pytest.raises(urllib.error.HTTPError) as refused:
        answers("generate", stream=False, parameters={"temperature": 3})
    assert "temperature` must be a number from 0 to 2" in refused.value.read().decode()
    body["max_tokens"] = 3
    events = answers("generate_stream")
    assert "".join(one["text_output"] for one in events) == wanted.text
    assert [one["finish_reason"] for one in events] == [""] * (len(events) - 1) + ["length"]
    assert len(events) > 1
    with pytest.raises(urllib.error.HTTPError) as refused:
        answers("generate", stream=False, sampling_parameters="{")
    assert refused.value.code == 400
    assert "must be JSON" in refused.value.read().decode()


def test_what_nobody_waits_for_ends_in_the_engine(server: Server, slow: Streams) -> None:
    """Running and waiting ones, streamed or not: three calls for two places."""
    text = LONG * 2  # five seconds
    calls = [slow.open({"text_input": text})]
    next(responses_of(calls[0]))
    calls.append(slow.open({"text_input": text, "stream": False}))
    wait_until(server, "slow", running=2)
    calls.append(slow.open({"text_input": text}))
    wait_until(server, "slow", running=2, waiting=1, above_0="kv_cache_share")
    calls[2].cancel()  # it has no token yet
    wait_until(server, "slow", running=2, waiting=0)
    calls[0].cancel()
    calls[1].cancel()
    wait_until(server, "slow", running=0, waiting=0, kv_cache_share=0)


def test_a_request_gives_up_another_by_its_id(server: Server, slow: Streams) -> None:
    """And none whose id is too short to be its own, nor a neighbor."""
    name = "a name that nobody else has"
    unharmed = slow.open({"text_input": TEXTS[0], "id": "another name, as long"})
    neighbor = Answer()
    take(neighbor, next(unharmed))
    running = slow.open({"text_input": LONG, "id": name}, {"cancel": name})
    early = slow.open({"cancel": f"{name}, too"}, {"text_input": LONG, "id": f"{name}, too"})
    for call in (running, early):
        answers: dict[str, Answer] = {}
        for response in call:  # it ends: the server has answered both requests
            take(answers.setdefault(response.infer_response.id, Answer()), response)
        assert {one.finish for one in answers.values()} == {"cancelled"}
        assert sum(len(one.ids) for one in answers.values()) < len(LONG) / 4
    short = Answer()
    said = ""
    for response in slow.open({"text_input": TEXTS[0], "id": "1"}, {"cancel": "1"}):
        said += response.error_message
        take(short, response)
    assert "must be a request id of 16 to 128 characters" in said
    for response in unharmed:
        take(neighbor, response)
    assert short.text == neighbor.text == TEXTS[0]
    wait_until(server, "slow", running=0, waiting=0, kv_cache_share=0)


def test_a_model_is_read_as_others_read_it(tmp_path: Path) -> None:
    """What ends an answer, what the files suggest; what transformers does not read, in words."""
    folder = write_tiny_model(tmp_path / "model")
    changed = (folder / "config.json", folder / "tokenizer_config.json")
    plain = [path.read_text() for path in changed]

    def read(
        config: dict[str, Any], tokenizer: dict[str, Any], generation: str = "{}"
    ) -> GenerationInfo:
        for path, text, more in zip(changed, plain, (config, tokenizer), strict=True):
            path.write_text(json.dumps({**json.loads(text), **more}))
        (folder / "generation_config.json").write_text(generation)
        return read_generation_model(folder, quiet).info

    facts = read({}, {"eos_token": "<s>"}, '{"eos_token_id": [1], "top_k": 20, "top_p": 1.0}')
    assert (facts.stop_token_ids, facts.suggested) == ((1, 0), {"top_k": 20})
    assert facts.vocabulary == 300
    latent = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "num_hidden_layers": 3}
    deepseek = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], **latent}
    facts = read(deepseek, {})
    assert (facts.kv_values, facts.kv_heads) == (3 * 32, 1)
    for config, tokenizer, generation, said in (
        ({"model_type": "x"}, {}, "{}", "must have a config.json that transformers"),
        ({}, {}, '{"eos_token_id": "</s>"}', "eos_token_id is '</s>', and no number"),
        ({}, {"chat_template": "{{"}, "{}", "must have a chat template that Jinja can compile"),
    ):
        with pytest.raises(UserError, match=said):
            read(config, tokenizer, generation)


def test_a_full_queue_refuses_and_a_stopping_server_answers(server: Server, slow: Streams) -> None:
    """The last one: its server ends here."""
    wait_until(server, "slow", running=0, waiting=0)
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(slow.ask, text_input=TEXTS[0]) for _ in range(16)]
        answers = [one.result() for one in asked]
        refused = [one.error for one in answers if one.error]
        assert len(refused) in range(1, 5)
        assert all("The limit of 12 requests in flight is reached" in error for error in refused)
        assert all(one.text == TEXTS[0] for one in answers if not one.error)
        wait_until(server, "slow", running=0, waiting=0)
        last = pool.submit(slow.ask, text_input=LONG)
        wait_until(server, "slow", running=1)
        server.stop()
        answer = last.result()
        assert (answer.error, answer.text) == ("", LONG)
