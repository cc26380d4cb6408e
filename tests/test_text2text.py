"""Summarising and translating: random T5, BART and Marian, as transformers has them, and served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from generation_cases import Streams, responses_of
from test_generation import wait_until
from text2text_cases import TEXTS, write_model, write_pipeline
from triptych.errors import UserError
from triptych.generation.build import build_generation
from triptych.generation.text2text import read_text2text
from triptych.lint.checks import run_checks
from triptych.pipeline.text2text_spec import load_text2text_spec
from triptych.server.server import Server

pytestmark = pytest.mark.server
CORES: dict[str, dict[str, object]] = {
    "t5": {"max_sequences": 2},
    "bart": {"beams": 3, "min_answer": 5},
    "marian": {"no_repeat_ngram": 2},
}


def silent(_stage: str, _line: str) -> None:
    pass


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built: so fp32 is the reference token by token, alone, among others, and streamed."""
    base = tmp_path_factory.mktemp("text2text")
    for kind, core in CORES.items():
        folder = write_pipeline(base / kind, write_model(kind, base / "models" / kind), **core)
        inputs = read_text2text(load_text2text_spec(folder), silent)
        built = build_generation(inputs, base / "repository", silent)
        assert built.gate is not None
        measured = {verdict.metric: verdict.value for verdict in built.gate.verdicts}
        assert measured["exact_prefix"] == measured["prompt_agreement"] == 1.0, kind
        assert not build_generation(inputs, base / "repository", silent).changed
    return base / "repository"


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with Server(repository) as server:
        yield server


def test_what_was_built_is_in_order(repository: Path) -> None:
    assert run_checks(repository) == []
    lock = json.loads((repository / "bart/triptych.lock.json").read_bytes())
    assert lock["spec"]["core"]["beams"] == 3
    assert set(lock["versions"]) >= {"ctranslate2", "transformers"}


def test_answers_stream_and_are_the_same_alone_and_together(server: Server) -> None:
    for kind in CORES:
        streams = Streams(server.grpc_url, kind)
        alone = [streams.ask(text_input=text) for text in TEXTS]
        with ThreadPoolExecutor(len(TEXTS)) as pool:
            asked = [pool.submit(streams.ask, text_input=text, stream=False) for text in TEXTS]
            whole = [one.result() for one in asked]
        assert [(one.text, one.ids) for one in alone] == [(one.text, one.ids) for one in whole]
        assert not any(one.error for one in alone)
        assert all(one.finish in ("stop", "length") for one in alone)
        # Several beams have no answer before the search has ended.
        pieces = [len(one.chunks) == len(one.ids) for one in alone]
        assert all(pieces) if kind != "bart" else {len(one.chunks) for one in alone} == {1}
        streams.close()


def test_a_request_at_fault_is_refused_alone(server: Server) -> None:
    streams = Streams(server.grpc_url, "t5")
    bad: tuple[tuple[dict[str, object], str], ...] = (
        ({"text_input": "dog " * 600}, "must have 1 to 128 tokens. Given"),
        ({"text_input": "a", "sampling_parameters": {"max_tokens": 41}}, "at most the 40 tokens"),
        ({"text_input": "a", "sampling_parameters": {"seed": 1}}, "no such parameter"),
        ({"messages": [{"role": "user", "content": "b"}]}, "has no chat template"),
    )
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(streams.ask, text_input=text) for text in TEXTS]
        for values, said in bad:
            assert said in streams.ask(**values).error, values
        assert not any(one.result().error for one in good)
    short = streams.ask(text_input=TEXTS[0], sampling_parameters={"max_tokens": 3, "logprobs": 0})
    assert (len(short.ids), short.finish, len(short.logprobs)) == (3, "length", 3)
    sampled = streams.ask(text_input=TEXTS[0], sampling_parameters={"temperature": 2.0})
    assert sampled.ids
    call = streams.open({"text_input": TEXTS[0]})
    next(responses_of(call))
    call.cancel()
    wait_until(server, "t5", running=0, waiting=0)
    streams.close()


def test_models_and_settings_that_will_not_do_are_named(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "sum", write_model("t5", tmp_path / "model"))
    for override, said in (
        ("core.beams=0", "greater than or equal to 1"),
        ("core.precision=fp8", "'fp32' or 'int8'"),
        ("core.kv_cache.memory_mib=4", "core.kv_cache"),
    ):
        with pytest.raises(UserError) as caught:
            load_text2text_spec(folder, [override])
        assert said in caught.value.message, override
    too_long = load_text2text_spec(folder, ["core.max_length=129"])
    with pytest.raises(UserError, match="the model's own limit of 128"):
        read_text2text(too_long, silent)
    config = json.loads((tmp_path / "model/config.json").read_bytes())
    config["architectures"] = ["M2M100ForConditionalGeneration"]
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="an encoder-decoder model that is known here"):
        read_text2text(load_text2text_spec(folder), silent)
