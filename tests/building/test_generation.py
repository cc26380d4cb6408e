"""A pipeline that generates text: its streams, `verify`, page, metrics and `bench`, on a server."""

import json
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaForCausalLM
from typer.testing import CliRunner

from tests.support.demo_pages import ask, open_demo, open_events
from tests.support.deploy_cases import options
from tests.support.generation_cases import (
    TEXTS,
    Answer,
    Streams,
    byte_pairs,
    read_answer,
    responses_of,
    take,
    write_tiny_model,
)
from tests.support.generation_served import DEADLINE_S, LONG, build_both, wait_until
from tests.support.mistakes import check_refused
from tests.support.processes import eventually
from tests.support.project import quiet
from triptych.base.errors import UserError
from triptych.base.explained import plain
from triptych.building.generation.bench import bench_generation
from triptych.building.generation.gate import EVERY, METRICS
from triptych.building.generation.inputs import read_generation
from triptych.building.generation.live import verify_generation
from triptych.building.generation.model import GenerationInfo, read_generation_model
from triptych.building.generation.weights import load_model
from triptych.container.lock_check import check_repository
from triptych.core.gate.verify import LiveOptions, describe_verification
from triptych.deploy.targets import make_manifests
from triptych.interface.cli import app
from triptych.interface.cli.plan_text import describe_text_generation
from triptych.repository.lint.checks import run_checks
from triptych.repository.manifest import CompiledManifest, read_manifest
from triptych.serving.bench import measure as measuring
from triptych.serving.bench.bench import Bench, BenchOptions
from triptych.serving.bench.measure import NO_ANSWER, STREAM_ERROR
from triptych.serving.bench.resources import read_metrics
from triptych.serving.bench.results import Measurement, OfferedLoad
from triptych.serving.server import Server
from triptych.spec.generation_fields import load_generation_spec
from triptych.spec.slo import GenerationSlo

pytestmark = pytest.mark.server
FIRST_OF_HELD = 5
HELD: dict[str, object] = {"text_input": LONG, "sampling_parameters": {"seed": 9_876_543_210}}
"""A request that the fake engine answers with `FIRST_OF_HELD` tokens, and ends when canceled."""


def hold(server: Server, slow: Streams) -> list[Any]:
    """Open two calls that take both places of `slow` until `release`."""
    wait_until(server, "slow", in_flight=0)
    calls = [slow.open(HELD) for _ in range(2)]
    wait_until(server, "slow", running=2)
    return calls


def release(calls: list[Any]) -> None:
    for call in calls:
        call.cancel()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_both(tmp_path_factory.mktemp("generation"))


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
    check_refused("is not supported by this", read_manifest, repository, "quick", CompiledManifest)
    lock = json.loads((repository / "quick/triptych.lock.json").read_bytes())
    assert list(lock["adapters"]) == ["terse"]
    inputs = read_generation(load_generation_spec(repository.parent / "quick"), quiet)
    described = describe_text_generation(inputs)
    assert described["model"]["adapters"] == {"terse": "LoRA of rank 4, from ../adapters/terse"}
    # 2 layers with 2 heads of 8 numbers, keys and values, 2 bytes each: 128 bytes a token.
    assert described["core"]["kv_cache"].startswith("2 MiB: 32 requests of max_model_len, a MiB")
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
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    answer = quick.ask(messages=messages)
    assert answer.text == "<user> Hi\n<assistant> Ho\n<assistant> "
    assert answer.ids == byte_pairs().encode("<s>" + answer.text, add_special_tokens=False).ids


def test_chunks_get_longer_where_the_engine_is_faster_than_its_client(quick: Streams) -> None:
    """Nothing waits in line before the client, and no token is lost or comes twice."""
    texts = [" ".join([text] * 4) for text in TEXTS] * 3
    tokens = chunks = 0
    for text, call in [(text, quick.open({"text_input": text})) for text in texts]:
        answer = read_answer(call)
        assert answer.text == text
        assert answer.ids == byte_pairs().encode(text).ids
        tokens += len(answer.ids)
        chunks += len(answer.chunks)
    assert chunks < 0.9 * tokens


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
    """Names and types of `_create_vllm_generate_request` in python/openai of Triton's server.

    The parameters are the defaults of a chat at commit e1db8a6 (August 2026), with `max_tokens`.
    """
    penalties = {"frequency_penalty": 0, "presence_penalty": 0}
    parameters = {"n": 1, "temperature": 0.7, "top_p": 1, **penalties, "ignore_eos": False}
    parameters["max_tokens"] = 4
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
    address = f"http://{server.http_url}/v2/models/quick"

    def answers(path: str, **more: object) -> list[dict[str, Any]]:
        data = json.dumps({"text_input": TEXTS[0], **more}).encode()
        with urllib.request.urlopen(f"{address}/{path}", data) as reply:
            lines = filter(None, reply.read().decode().splitlines())
            return [json.loads(line.removeprefix("data: ")) for line in lines]

    short = json.dumps({"max_tokens": 3})
    wanted = quick.ask(text_input=TEXTS[0], sampling_parameters=short)
    (whole,) = answers("generate", stream=False, sampling_parameters=short)
    # As other backends have it: beside the inputs.
    (named,) = answers("generate", stream=False, max_tokens=3, temperature=0.5)
    assert (whole["text_output"], whole["token_ids"]) == (wanted.text, wanted.ids)
    assert named["token_ids"] == wanted.ids
    events = answers("generate_stream", max_tokens=3)
    assert "".join(one["text_output"] for one in events) == wanted.text
    assert [one["finish_reason"] for one in events] == [""] * (len(events) - 1) + ["length"]
    assert len(events) > 1
    for wrong, message in (
        ({"parameters": {"temperature": 3}}, "temperature` must be a number from 0 to 2"),
        ({"sampling_parameters": "{"}, "must be JSON"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            answers("generate", stream=False, **wrong)
        assert refused.value.code == 400
        assert message in refused.value.read().decode()


def test_what_nobody_waits_for_ends_in_the_engine(server: Server, slow: Streams) -> None:
    """Running and waiting ones, streamed or not: three calls for two places."""
    calls = [slow.open(HELD)]
    next(responses_of(calls[0]))
    calls.append(slow.open({**HELD, "stream": False}))
    wait_until(server, "slow", running=2)
    calls.append(slow.open(HELD))
    wait_until(server, "slow", running=2, waiting=1, above_0="kv_cache_usage_ratio")
    calls[2].cancel()  # it has no token yet
    wait_until(server, "slow", running=2, waiting=0)
    calls[0].cancel()
    calls[1].cancel()
    wait_until(server, "slow", running=0, waiting=0, kv_cache_usage_ratio=0)


def test_a_request_gives_up_another_by_its_id(server: Server, slow: Streams) -> None:
    """And none whose id is too short to be its own, nor a neighbor."""
    name = "a name that nobody else has"
    unharmed = slow.open({"text_input": TEXTS[0], "id": "another name, as long"})
    running = slow.open({**HELD, "id": name}, {"cancel": name})
    early = slow.open({"cancel": f"{name}, too"}, {**HELD, "id": f"{name}, too"})
    for call in (running, early):
        answers: dict[str, Answer] = {}
        for response in call:  # it ends: the server has answered both requests
            take(answers.setdefault(response.infer_response.id, Answer()), response)
        assert {one.finish for one in answers.values()} == {"cancelled"}
        assert sum(len(one.ids) for one in answers.values()) <= FIRST_OF_HELD
    short = Answer()
    said = ""
    for response in slow.open({"text_input": TEXTS[0], "id": "1"}, {"cancel": "1"}):
        said += response.error_message
        take(short, response)
    assert "must be a request id of 16 to 128 characters" in said
    assert short.text == read_answer(unharmed).text == TEXTS[0]
    wait_until(server, "slow", running=0, waiting=0, kv_cache_usage_ratio=0)


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


def test_a_tokenizer_that_its_class_changes_and_weights_without_a_use_are_refused(
    tmp_path: Path,
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "GPT2Tokenizer"  # which reads no normalizer
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    rows: tuple[dict[str, Any], ...]
    rows = {"text_input": "A PARCEL"}, {"messages": [{"role": "user", "content": "A PARCEL"}]}

    def read(number: int, row: dict[str, Any], **tokenizer: str) -> Any:
        pipeline = tmp_path / f"{tokenizer.get('source', 'p')}{number}"
        pipeline.mkdir()
        spec = {"task": "text-generation", "model": {"source": str(folder)}, "tokenizer": tokenizer}
        (pipeline / "pipeline.yaml").write_text(json.dumps(spec))
        (pipeline / "traffic.jsonl").write_text(json.dumps(row))
        inputs = read_generation(load_generation_spec(pipeline), quiet)
        return inputs.model.decoding().decode(inputs.prompts[0].ids)

    for number, row in enumerate(rows):
        check_refused(["tokenizer.source", "by the file", "by the class"], read, number, row)
        assert "a parcel" in read(number, row, source="file")
        assert "A PARCEL" in read(number, row, source="class")

    model = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    load_model(folder)
    name = "model.layers.1.self_attn.q_proj.lora_A"
    weights = model.state_dict() | {name: model.lm_head.weight[:4].clone()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    check_refused(["model.source", name, "merge_and_unload"], load_model, folder)


def test_verify_passes_what_is_right_and_sees_other_prompts(
    repository: Path, server: Server
) -> None:
    options = [f"--pipelines={repository.parent}", f"--repository={repository}"]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "answers": ["user Hi assistant"]}
    lines = [{"text_input": "The dog sleeps", "answers": ["no", "The dog sleeps on"]}, chat]
    (repository.parent / "quick/eval.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["verify", "quick", f"--url={server.grpc_url}", "--json", *options]
    done = CliRunner().invoke(app, words)  # in this process, which knows the fake engine
    assert done.exit_code == 0, (done.output, done.exception)
    result = json.loads(done.stdout)
    assert result["passed"]
    figures = {one["metric"] for one in result["gate"]["verdicts"]}
    assert figures == {
        *(one.name for one in METRICS),
        *(f"{one.name}[terse]" for one in METRICS if one.name not in EVERY),
    }
    # F1 of three words of four, and of three of three.
    assert result["gate"]["labeled"]["candidate"] == pytest.approx((6 / 7 + 1) / 2)

    inputs = read_generation(load_generation_spec(repository.parent / "quick"), quiet)
    # As if the server put one beginning too many before each prompt.
    others = tuple(replace(one, ids=one.ids[1:]) for one in inputs.prompts)
    live = LiveOptions(repository, nullcontext(server), quiet, clients=4, timeout_s=DEADLINE_S)
    found = verify_generation(replace(inputs, prompts=others), live)
    failed = {one.metric for one in found.verdicts if not one.passed}
    assert {"prompt_agreement", "margin_at_difference"} <= failed
    assert not found.passed
    assert any("failed" in line for line, _ in describe_verification(found))


def test_a_page_streams_a_chat_and_leaving_it_ends_the_answer(
    repository: Path, server: Server, slow: Streams
) -> None:
    folder = repository.parent / "slow"
    spec = load_generation_spec(folder)
    with open_demo(spec, folder, repository, server.grpc_url) as page:
        held = hold(server, slow)
        said = " ".join(["<b>a</b>"] * 5)
        job = page.submit(said, 30, "", api_name="/answer")
        wait_until(server, "slow", in_flight=3)
        release(held)
        shown = list(job)
        pieces = [text for text, _ in shown]
        assert len(pieces) > 10
        assert all(after.startswith(text) for text, after in pairwise(pieces))
        assert "30 tokens (length); first token after " in shown[-1][1]

        assert "must be a number from 0 to 2" in ask(page, "Hi", None, "9")[1]
        text, _ = ask(page, "Ho", None, "")  # the answer: the prompt, without what got no answer
        assert text.startswith(f"<user> {said}\n<assistant> {pieces[-1]}\n<user> Ho")

        with open_events(page, LONG, None, None, "") as reply:
            while b"process_generating" not in reply.readline():
                pass
        wait_until(server, "slow", running=0, kv_cache_usage_ratio=0)


def test_what_deploy_asks_for_is_on_the_metrics_page(
    server: Server, repository: Path, slow: Streams, tmp_path: Path
) -> None:
    """Rules, autoscaler and dashboard; first tokens that come after the limit are counted so."""
    for folder in repository.glob("slow*"):
        shutil.copytree(folder, tmp_path / "alone" / folder.name)
    files = make_manifests(tmp_path / "alone", "slow", options(name="slow"), tmp_path).files
    asked = json.dumps([plain(document) for document in files.values()]).replace("\\", "")
    selected = {
        (name, tuple(sorted(re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', where))))
        for name, where in re.findall(r"((?:nv_inference|triptych_generation)_\w+)\{(.*?)\}", asked)
    }
    assert {name.removeprefix("triptych_generation_") for name, _ in selected} >= {
        *("in_flight", "running", "waiting", "kv_cache_usage_ratio", "requests_total"),
        "preprocess_errors_total",
        *("ttft_seconds_bucket", "itl_seconds_bucket", "e2e_seconds_bucket"),
        "ttft_seconds_count",
    }
    held = hold(server, slow)
    short: dict[str, object] = {"text_input": TEXTS[0], "sampling_parameters": {"max_tokens": 8}}
    late = [slow.open(short) for _ in range(2)]
    wait_until(server, "slow", waiting=2)
    time.sleep(0.12)
    release(held)
    assert [len(read_answer(call).ids) for call in late] == [8, 8]
    assert "Given: -1" in slow.ask(text_input="a", sampling_parameters={"max_tokens": -1}).error
    wait_until(server, "slow", in_flight=0, running=0)

    page = series(server)

    def counted(name: str, **labels: str) -> float:
        wanted = {"pipeline": "slow", **labels}.items()
        return sum(
            value
            for one, has, value in page
            if one == f"triptych_generation_{name}" and wanted <= has.items()
        )

    def is_counted() -> bool:
        nonlocal page
        page = series(server)
        refused = counted("preprocess_errors_total", outcome="refused")
        return counted("requests_total", outcome="length") >= 2 and refused >= 1

    assert eventually(is_counted)
    for name, matchers in selected:
        assert any(one == name and fits(has, matchers) for one, has, _ in page), (name, matchers)
    answers = counted("ttft_seconds_count")
    assert answers - counted("ttft_seconds_bucket", le="0.12") >= 2
    assert counted("ttft_seconds_bucket", le="+Inf") == answers
    assert counted("itl_seconds_count") >= 2
    assert counted("tokens", kind="new") >= 2 * 8
    assert counted("requests_total", outcome="error") == 0


def series(server: Server) -> list[tuple[str, dict[str, str], float]]:
    """Name, labels and value of all that is on the metrics page."""
    with urllib.request.urlopen(server.metrics_url) as page:
        return read_metrics(page.read().decode())


def fits(labels: dict[str, str], matchers: tuple[tuple[str, str, str], ...]) -> bool:
    """Whether a selector takes a series; what Prometheus adds to it is not looked at."""
    return all(
        (
            re.fullmatch(value, labels.get(label, "")) is not None
            if kind == "=~"
            else (labels.get(label) == value) == (kind == "=")
        )
        for label, kind, value in matchers
        if label not in ("namespace", "pod")
    )


def test_bench_measures_every_response(
    server: Server, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two places, 20 ms a token, answers of 8: no first token comes within 10 ms."""
    folder = repository.with_name("slow")
    lines = [{"text_input": text, "sampling_parameters": {"max_tokens": 8}} for text in TEXTS]
    (folder / "traffic.jsonl").write_text("\n".join(map(json.dumps, lines)))
    inputs = read_generation(load_generation_spec(folder), quiet)
    slo = GenerationSlo(ttft_p99="10ms")

    def typical(load: OfferedLoad, seconds: float = 0.6) -> Measurement:
        bench = Bench(loads=(load,), rounds=1, seconds=seconds, slo=slo)
        options = BenchOptions(
            repository=repository,
            progress=quiet,
            bench=bench,
            url=server.grpc_url,
            metrics_url=server.metrics_url,
        )
        return bench_generation(inputs, options).points[0].typical

    # Streams that ended with an error are waited for, and an empty window is repeated with twice
    # its time: not for a minute each here.
    for name in ("STREAMS_END_S", "EMPTY_S", "MIN_WINDOW_DOUBLINGS"):
        monkeypatch.setattr(measuring, name, 1)
    refused = typical(OfferedLoad("constant", 200), seconds=1.8)
    # perf_analyzer hears of it where its windows end before its streams have.
    assert refused.errors
    known = (STREAM_ERROR, NO_ANSWER, "The limit of N requests")
    assert all(any(one in said for one in known) for said in refused.errors)
    monkeypatch.undo()
    wait_until(server, "slow", in_flight=0)
    with pytest.raises(UserError, match=r"`--concurrency` must be at most .*max_in_flight 12"):
        typical(OfferedLoad("concurrency", 13))
    four = typical(OfferedLoad("concurrency", 4))
    assert four.streamed is not None
    assert four.streamed.tokens == 8 * four.requests
    assert four.streamed.ttft.samples == four.requests
    # Where the machine is busy, several tokens may come as one response.
    assert 0 < four.streamed.itl.samples <= 7 * four.requests
    assert four.streamed.itl.p50_us < four.p50_us
    assert four.latencies_us["ttft_p50"] >= 20_000
    assert four.goodput_per_s == 0 < four.throughput_per_s


def test_a_full_queue_refuses_and_the_others_are_answered(server: Server, slow: Streams) -> None:
    held = hold(server, slow)
    short: dict[str, object] = {"text_input": TEXTS[0], "sampling_parameters": {"max_tokens": 3}}
    waiting = [slow.open(short) for _ in range(10)]
    wait_until(server, "slow", in_flight=12)
    for _ in range(2):
        assert "The limit of 12 requests in flight is reached" in slow.ask(**short).error
    release(held)
    assert [len(read_answer(call).ids) for call in waiting] == [3] * 10


def test_a_server_that_stops_answers_what_is_in_flight(repository: Path) -> None:
    with Server(repository, models=["slow"]) as server, ThreadPoolExecutor(1) as pool:
        streams = Streams(server.grpc_url, "slow")
        responses = responses_of(streams.open({"text_input": LONG}))
        answer = Answer()
        take(answer, next(responses))  # the request is in flight
        stopping = pool.submit(server.stop)
        for response in responses:
            take(answer, response)
        stopping.result()
        streams.close()
    assert (answer.error, answer.text) == ("", LONG)
