"""The real engine: vLLM answers behind a real server as transformers does, alone and among others.

It needs the environment of `make setup-generation`.
"""

import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from tests.support.builds import build
from tests.support.generation_cases import Answer, Streams, write_adapter
from tests.support.generation_served import wait_until
from tests.support.project import ROOT, quiet
from triptych.building.generation import build as stages
from triptych.building.generation import live
from triptych.building.generation.inputs import read_generation
from triptych.building.generation.live import verify_generation
from triptych.container.health import HealthCheck
from triptych.container.manifests import find_pipelines
from triptych.core.gate.verify import LiveOptions, describe_verification
from triptych.repository.records import GateResult
from triptych.serving.server import Server
from triptych.spec.generation_fields import load_generation_spec

pytestmark = [pytest.mark.server, pytest.mark.long]


def test_the_example_passes_its_gate_streams_and_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make demo-chat` as the README has it; then with an adapter, which answers beside others."""
    repository = tmp_path / "repository"
    command = ["make", "demo-chat", f"CHAT_REPOSITORY={repository}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ tokens: the first after \d+ ms, then [\d.]+ tokens/s", done.stdout)
    assert "server stopped" in done.stdout
    lock = json.loads((repository / "chat/triptych.lock.json").read_bytes())
    assert lock["gate"]["precision"] == "fp32"
    assert all(one["passed"] for one in lock["gate"]["verdicts"])
    figures = {one["metric"]: one["value"] for one in lock["gate"]["verdicts"]}
    assert figures["exact_prefix"] == figures["invariance"] == 1.0

    # The gate is left out here: `verify` does the same, live.
    passed = GateResult("fp32", 0, 0, True, (), ())
    monkeypatch.setattr(stages, "check_generation", lambda *_, **__: passed)
    monkeypatch.setattr(live, "PROMPTS", 2)
    folder = tmp_path / "chat"
    shutil.copytree(ROOT / "pipelines/chat", folder)
    inputs = read_generation(load_generation_spec(folder), quiet)
    write_adapter(tmp_path / "pirate", inputs.weights, rank=8)
    words = ["adapters.pirate=../pirate", "serving.priority={levels: 3}", "core.max_num_seqs=4"]
    inputs = read_generation(load_generation_spec(folder, words), quiet)
    build(inputs, repository, quiet)
    server = Server(repository)
    try:
        server.start()
        server.wait_ready(timeout_s=900)
        options = LiveOptions(repository, nullcontext(server), quiet, clients=4, timeout_s=120.0)
        found = verify_generation(inputs, options)
        assert found.passed, list(describe_verification(found))
        figures = {one.metric: one.value for one in found.verdicts}
        for name in ("exact_prefix", "invariance"):
            assert figures[name] == figures[f"{name}[pirate]"] == 1
        chat = Streams(server.grpc_url, "chat")
        ask_by_schema(chat)
        story = {"text_input": "Once upon a time"}
        long: dict[str, object] = {
            **story,
            "sampling_parameters": {"max_tokens": 1500, "temperature": 1, "seed": 1},
        }
        calls = [chat.open(long), chat.open(long)]
        for call in calls:
            next(call)
        wait_until(server, "chat", running=2)
        calls[0].cancel()
        wait_until(server, "chat", running=1)
        calls[1].cancel()
        wait_until(server, "chat", running=0, kv_cache_usage_ratio=0)
        calls = [chat.open(long) for _ in range(4)]
        for call in calls:
            next(call)
        calls.append(chat.open(long))
        wait_until(server, "chat", running=4, waiting=1)
        urgent = chat.open({**long, "sampling_parameters": {"max_tokens": 1500, "priority": 1}})
        wait_until(server, "chat", running=4, waiting=2)
        calls[0].cancel()
        next(urgent)  # before the request of level 3 that came earlier
        wait_until(server, "chat", running=4, waiting=1)
        for call in (*calls, urgent):
            call.cancel()
        wait_until(server, "chat", running=0, waiting=0)
        kill_engine_core(server, chat, long)
        chat.close()
    finally:
        server.stop()


def kill_engine_core(server: Server, chat: Streams, long: dict[str, object]) -> None:
    """The stream and each request after it end with the reason, and the step ends."""
    health, url = HealthCheck(find_pipelines(server.repository)), f"http://{server.http_url}"
    assert health.find_fault(url) is None
    cores = {model: pid for pid, model in server.living_steps().items()}
    call = chat.open(long)
    next(call)
    assert health.find_fault(url) is None
    for process in psutil.Process(cores["chat_core"]).children(recursive=True):
        if "spawn_main" in " ".join(process.cmdline()):
            process.kill()
    *_, last = call
    assert "[engine_died]" in last.error_message
    assert "stack trace" not in last.error_message
    errors = [chat.ask(text_input="Once").error]
    while (crash := server.find_crash(0.05)) is None:
        errors.append(chat.ask(text_input="Once").error)
    assert crash.step == "chat_core"
    assert all("[engine_died]" in error or "is not healthy" in error for error in errors), errors


def ask_by_schema(chat: Streams) -> None:
    """An answer fits its schema; one that cannot be compiled is refused, and harms no neighbor."""
    question = [{"role": "user", "content": "Which city is the capital of France? Is it big?"}]
    city, big = {"enum": ["Paris", "Rome", "Oslo"]}, {"type": "boolean"}
    fine = {
        "type": "object",
        "properties": {"city": city, "big": big},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    # With white space between, this model never ends a list.
    numbers = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 3}

    def ask(schema: object, adapter: str = "") -> Answer:
        most = 64 if schema else 16
        sampling = {"max_tokens": most, "json_schema": schema, "adapter": adapter}
        return chat.ask(messages=question, sampling_parameters=sampling)

    plain = ask(None)
    assert len(plain.chunks) > 1
    with ThreadPoolExecutor(6) as pool:
        asked = [
            pool.submit(ask, *one)
            for one in (
                (None,),
                ({"type": "string", "pattern": "("},),
                (fine,),
                (fine, "pirate"),
                (None, "pirate"),
                (numbers,),
            )
        ]
        beside, broken, *guided, other, listed = [one.result() for one in asked]
    assert beside.ids == plain.ids != other.ids
    assert "sampling_parameters" in broken.error
    assert len(json.loads(listed.text)) in (2, 3)
    for answer in guided:
        said = json.loads(answer.text)
        assert set(said) == {"city", "big"}
        assert said["city"] in city["enum"]
        assert isinstance(said["big"], bool)
