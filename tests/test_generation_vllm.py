"""The real engine: vLLM answers behind a real server as transformers does, alone and among others.

It needs the environment of `make setup-generation`.
"""

from __future__ import annotations

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import ROOT
from generation_cases import Streams
from test_generation import silent, wait_until
from triptych.generation.inputs import read_generation
from triptych.pipeline.generation_spec import load_generation_spec
from triptych.server.server import Server

pytestmark = [pytest.mark.server, pytest.mark.long]
SAMPLING = {"max_tokens": 16}


def test_the_example_passes_its_gate_streams_and_gives_up(tmp_path: Path) -> None:
    """`make demo-chat` as the README has it; what it built then answers more questions."""
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

    inputs = read_generation(load_generation_spec(ROOT / "pipelines/chat"), silent)
    sent = [dict(prompt.sent) for prompt in inputs.prompts[:4]]
    server = Server(repository)
    try:
        server.start()
        server.wait_ready(timeout_s=900)
        chat = Streams(server.grpc_url, "chat")
        alone = [chat.ask(**one, sampling_parameters=SAMPLING) for one in sent]
        with ThreadPoolExecutor(len(sent)) as pool:
            among = list(pool.map(lambda one: chat.ask(**one, sampling_parameters=SAMPLING), sent))
        assert [one.ids for one in alone] == [one.ids for one in among]
        assert all(len(one.chunks) > 2 for one in alone)
        whole = chat.ask(**sent[0], stream=False, sampling_parameters=SAMPLING)
        assert whole.text == alone[0].text
        story = {"text_input": sent[0].get("text_input") or "Once upon a time"}
        long = {**story, "sampling_parameters": {"max_tokens": 1500, "temperature": 1, "seed": 1}}
        calls = [chat.open(long), chat.open(long)]
        for call in calls:
            next(call)
        wait_until(server, "chat", running=2)
        calls[0].cancel()
        wait_until(server, "chat", running=1)
        calls[1].cancel()
        wait_until(server, "chat", running=0, kv_cache_share=0)
        chat.close()
    finally:
        server.stop()
