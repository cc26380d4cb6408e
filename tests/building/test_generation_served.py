"""Around a server that generates text: `verify`, the page, the metrics and `bench`."""

from __future__ import annotations

import asyncio
import html
import json
import re
import shutil
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from browser import open_tab
from conftest import quiet
from deploy_cases import options
from generation_cases import TEXTS, Streams
from generation_served import DEADLINE_S, LONG, build_both, wait_until
from http_pages import fetch, form, post
from triptych.base.errors import UserError
from triptych.base.explained import plain
from triptych.building.generation.bench import bench_generation
from triptych.building.generation.gate import EVERY, METRICS
from triptych.building.generation.inputs import read_generation
from triptych.building.generation.live import verify_generation
from triptych.core.gate.verify import describe_verification
from triptych.deploy.targets import make_manifests
from triptych.interface.cli import app
from triptych.interface.page.chat import ChatPage
from triptych.serving.bench import measure as measuring
from triptych.serving.bench.bench import Bench
from triptych.serving.bench.measure import STREAM_ERROR
from triptych.serving.bench.results import Measurement, OfferedLoad
from triptych.serving.server import Server
from triptych.spec.generation_fields import load_generation_spec
from triptych.spec.slo import GenerationSlo

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_both(tmp_path_factory.mktemp("generation"))


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with Server(repository) as server:
        yield server


@pytest.fixture(scope="module")
def slow(server: Server) -> Iterator[Streams]:
    streams = Streams(server.grpc_url, "slow")
    yield streams
    streams.close()


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
    found = verify_generation(
        replace(inputs, prompts=others),
        repository,
        nullcontext(server),
        quiet,
        clients=4,
        timeout_s=DEADLINE_S,
    )
    failed = {one.metric for one in found.verdicts if not one.passed}
    assert {"prompt_agreement", "margin_at_difference"} <= failed
    assert not found.passed
    assert any("failed" in line for line, _ in describe_verification(found))


@pytest.fixture(scope="module")
def chat_page(repository: Path, server: Server) -> Iterator[ChatPage]:
    folder = repository.parent / "slow"
    url = server.grpc_url
    spec = load_generation_spec(folder)
    with ChatPage(spec, folder, url, "127.0.0.1", 0, DEADLINE_S) as page:
        yield page


def test_a_page_streams_a_chat_and_leaving_it_ends_the_answer(
    server: Server, chat_page: ChatPage
) -> None:
    status, text = fetch(f"{chat_page.url}?example=1")
    assert status == 200
    assert f">\n{TEXTS[1]}</textarea>" in text
    sent = {"messages": "[]", "say": "<script>alert(1)</script>" * 4, "max_tokens": "100"}
    with urllib.request.urlopen(form(chat_page.url, sent)) as reply:
        pieces = iter(lambda: reply.read1(65536).decode(), "")
        text = ""
        while 'id="answer"' not in text:
            text += next(pieces)
        assert "</main>" not in text
        text += "".join(pieces)
    assert "&lt;script&gt;alert(1)" in text
    assert "<script" not in text
    assert "100 tokens (length)" in text
    history = json.loads(html.unescape(re.findall(r'name="messages" value="(.*?)"', text)[0]))
    assert [message["role"] for message in history] == ["user", "assistant"]

    status, text = post(chat_page.url, {"messages": "[]", "say": "Hi", "temperature": "9"})
    assert "must be a number from 0 to 2" in text
    assert post(chat_page.url, {"messages": "{", "say": "Hi"})[0] == 422
    assert post(chat_page.url, {"say": "Hi"}, Origin="https://else.where")[0] == 404
    wait_until(server, "slow", running=0)
    reply = urllib.request.urlopen(form(chat_page.url, {"messages": "[]", "say": LONG}))
    wait_until(server, "slow", running=1)
    reply.close()
    wait_until(server, "slow", running=0, kv_cache_share=0)


@pytest.mark.long
def test_a_browser_shows_a_conversation(repository: Path, server: Server) -> None:
    folder = repository.parent / "quick"
    spec, url = load_generation_spec(folder), server.grpc_url

    async def talk() -> dict[str, Any]:
        async with open_tab() as tab:
            await tab.go(page.url)
            for said in ("Hi <i>there</i>", "Ho"):
                await tab.type("textarea", said)
                await tab.submit("button")
            return {
                "turns": await tab.run(
                    "[...document.querySelectorAll('#talk p.raw')].map(it => it.innerText)"
                ),
                "told": await tab.run("document.querySelector('#summary').innerText"),
                "scripts": await tab.run("document.scripts.length"),
                "requested": tab.requested,
            }

    with ChatPage(spec, folder, url, "127.0.0.1", 0, DEADLINE_S) as page:
        seen = asyncio.run(talk())
    assert seen["turns"][0] == "Hi <i>there</i>"
    assert seen["turns"][1].strip() == "<user> Hi <i>there</i>\n<assistant>"
    assert seen["turns"][2] == "Ho"
    assert seen["turns"][3].strip().endswith("<user> Ho\n<assistant>")
    assert "tokens (stop)" in seen["told"]
    assert seen["scripts"] == 0
    assert all(url.startswith(page.url) for url in seen["requested"])


def test_what_deploy_asks_for_is_on_the_metrics_page(
    server: Server, repository: Path, slow: Streams, tmp_path: Path
) -> None:
    """Rules, autoscaler and dashboard; and first tokens that come late are counted so."""
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
    short = {"max_tokens": 8}
    with ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(slow.ask, text_input=TEXTS[0], sampling_parameters=short) for _ in range(4)
        ]
        assert [len(call.result().ids) for call in calls] == [8] * 4
    assert "Given: -1" in slow.ask(text_input="a", sampling_parameters={"max_tokens": -1}).error
    wait_until(server, "slow", under_way=0, running=0)

    def counted(name: str, **labels: str) -> float:
        where = {"pipeline": "slow", **labels}
        return sum(
            value for one, has, value in series(server) if one == name and where.items() <= has
        )

    began = time.monotonic()
    while counted("triptych_generation_requests_total", outcome="length") < 4:
        assert time.monotonic() < began + DEADLINE_S
        time.sleep(0.1)
    page = series(server)
    for name, matchers in selected:
        assert any(one == name and fits(has, matchers) for one, has, _ in page), (name, matchers)
    first = "triptych_generation_ttft_seconds"
    late = counted(f"{first}_count") - counted(f"{first}_bucket", le="0.12")
    assert 2 <= late < counted(f"{first}_bucket", le="+Inf") == counted(f"{first}_count")
    # 20 ms a token; where the machine is busy, two may come as one.
    assert counted("triptych_generation_ttft_ms_bucket", le="120") == counted(
        f"{first}_bucket", le="0.12"
    )
    gaps = counted("triptych_generation_itl_seconds_count")
    assert gaps >= 4 * 5
    assert counted("triptych_generation_itl_seconds_bucket", le="0.01") < gaps / 4
    assert counted("triptych_generation_tokens", kind="new") >= 4 * 8
    assert counted("triptych_generation_preprocess_errors_total", outcome="refused") >= 1
    assert counted("triptych_generation_requests_total", outcome="error") == 0


def series(server: Server) -> list[tuple[str, set[tuple[str, str]], float]]:
    """Name, labels and value of all that is on the metrics page."""
    with urllib.request.urlopen(server.metrics_url) as page:
        found = re.findall(r"(?m)^(\w+)\{(.*)\} (\S+)$", page.read().decode())
    return [
        (name, set(re.findall(r'(\w+)="(.*?)"', labels)), float(value))
        for name, labels, value in found
    ]


def fits(labels: set[tuple[str, str]], matchers: tuple[tuple[str, str, str], ...]) -> bool:
    """Whether a selector takes a series; what Prometheus adds to it is not looked at."""
    has = dict(labels)
    return all(
        (
            re.fullmatch(value, has.get(label, "")) is not None
            if kind == "=~"
            else (has.get(label) == value) == (kind == "=")
        )
        for label, kind, value in matchers
        if label not in ("namespace", "pod")
    )


def test_bench_measures_every_response(
    server: Server, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two places, 20 ms a token, answers of 8: four clients wait a whole answer for a place."""
    folder = repository.with_name("slow")
    lines = [{"text_input": text, "sampling_parameters": {"max_tokens": 8}} for text in TEXTS]
    (folder / "traffic.jsonl").write_text("\n".join(map(json.dumps, lines)))
    inputs = read_generation(load_generation_spec(folder), quiet)
    slo = GenerationSlo(ttft_p99="120ms")

    def typical(*loads: OfferedLoad) -> list[Measurement]:
        bench = Bench(loads=loads, rounds=1, seconds=3.6, slo=slo)
        result = bench_generation(
            inputs, repository, bench, quiet, url=server.grpc_url, metrics_url=server.metrics_url
        )
        return [point.typical for point in result.points]

    two, four = typical(OfferedLoad("concurrency", 2), OfferedLoad("concurrency", 4))
    # Streams that ended with an error are waited for: not for a minute here.
    monkeypatch.setattr(measuring, "STREAMS_END_S", 1.0)
    (refused,) = typical(OfferedLoad("constant", 60))

    with pytest.raises(UserError, match=r"`--concurrency` must be at most .*max_in_flight 12"):
        typical(OfferedLoad("concurrency", 13))
    for one in (two, four):
        assert one.streamed is not None
        assert one.streamed.tokens == 8 * one.requests
        assert one.streamed.ttft.samples == one.requests
        # Where the machine is busy, two tokens may come as one response.
        assert 5 * one.requests < one.streamed.itl.samples <= 7 * one.requests
        assert 15_000 < one.streamed.itl.p50_us < one.p50_us / 5
        assert 40 < one.streamed.tokens_per_s < 120
    assert four.latencies_us["ttft_p50"] > 130_000 > 2 * two.latencies_us["ttft_p50"]
    assert two.goodput_per_s > 2 * four.goodput_per_s
    # perf_analyzer hears of it where its windows end before its streams have.
    assert refused.errors
    assert all(said == STREAM_ERROR or "The limit of N requests" in said for said in refused.errors)
