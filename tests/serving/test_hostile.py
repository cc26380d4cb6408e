"""What a hostile or careless user sends: refused at once, and nobody else notices."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import build_into, traffic_texts, write_pipeline
from processes import mark_of, regions
from task_models import cross_encoder, inference_model, reader, text_classifier
from triptych.client import Client, InvalidRequestError
from triptych.runtime.request_errors import RequestError
from triptych.runtime.row_types import RowInputs
from triptych.serving.orphan_cleanup import SHM

pytestmark = pytest.mark.build

PROMPT_S = 1.0
"""Longest that a request of a few kilobytes may keep preprocess from the others."""

STRIDE, MAX_QUESTION = 128, 252
"""Of 384 tokens a row: three are special, 128 overlap, and a window has to move on by one."""

HOOKS = """
import sys


def before(rows):
    for row in rows:
        if row["text"] == "leave":
            sys.exit(0)
        if row["text"] == "mumble":
            raise ValueError("no \\ud800 text")
        if row["text"] == "nul":
            raise ValueError("a\\0b")
    return rows
"""
MAKERS = {
    "answers": ("question-answering", reader),
    "hypotheses": ("zero-shot-classification", inference_model),
    "ranks": ("reranking", cross_encoder),
    "topics": ("text-classification", text_classifier),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {n: make(base / n, minilm_folder, traffic_texts()) for n, (_, make) in MAKERS.items()}


def write(folder: Path, model: Path, task: str, **fields: Any) -> Path:
    """A pipeline of `model` with three rows of traffic."""
    write_pipeline(folder, task=task, model={"source": str(model)}, **fields)
    row = {"text": "where is my parcel", "text_pair": "It is on its way to you."}
    (folder / "traffic.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    return folder


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    base = tmp_path_factory.mktemp("hostile")
    for name, (task, _) in MAKERS.items():
        fields = (
            {"parameters": {"candidate_labels": ["one", "two"]}} if name == "hypotheses" else {}
        )
        folder = write(base / "pipelines" / name, models[name], task, **fields)
        if name == "topics":
            (folder / "hooks.py").write_text(HOOKS)
        build_into(folder, base / "repository")
    return base / "repository"


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Any]:
    from triptych.serving.server import Server

    with Server(repository) as server:
        yield server


def maker(repository: Path, pipeline: str, kind: type[Any]) -> Any:
    """The row maker of a pipeline, on the tokenizer that is served."""
    file = next((repository / f"{pipeline}_preprocess").glob("*/tokenizer.json"))
    settings = {
        "inputs": ["text", "text_pair"],
        "max_core_rows": 32,
        "lowercase": False,
        "max_length": 384,
        "overflow": "truncate",
        "pad_token_id": 0,
        "segments": True,
        "pairs": True,
        "vocabulary": None,
        "bucket_edges": [],
    }
    return kind(settings, file.parent)


def rows_made(made: Any) -> int:
    """Core rows of one request."""
    if isinstance(made, Exception):
        raise made
    return len(made.tensors["input_ids"])


@pytest.mark.parametrize("question", [0, 1, MAX_QUESTION - 1, MAX_QUESTION])
def test_windows_at_every_edge(repository: Path, question: int) -> None:
    from triptych.runtime.rows_spans import WindowRowMaker

    windows = maker(repository, "answers", WindowRowMaker)
    room = 384 - 3 - question
    for context in (1, STRIDE, room - 1, room, room + 1, 2 * room - STRIDE, 2 * room - STRIDE + 1):
        text = "q " * question or "\x00"  # not blank, and yet no token
        made = windows.make([RowInputs({"text": [text], "text_pair": ["a " * context]}, {})])[0]
        beyond = max(0, context - room)
        assert rows_made(made) == 1 + -(-beyond // (room - STRIDE))


@pytest.mark.parametrize("context", [1, 200, 900])
def test_windows_are_those_that_the_tokenizer_makes(repository: Path, context: int) -> None:
    """Question and context are tokenized once each, by themselves."""
    from triptych.runtime.rows_spans import WindowRowMaker

    windows = maker(repository, "answers", WindowRowMaker)
    question, text = "Größe, or not?", "naïve words, and ﷺ " * context
    made = windows.make([RowInputs({"text": [question], "text_pair": [text]}, {})])[0]
    whole = windows.tokenizer.encode(question, text)
    assert rows_made(made) == 1 + len(whole.overflowing)
    for number, encoding in enumerate([whole, *whole.overflowing]):
        length = made.tensors["row_length"][number, 0]
        assert made.tensors["input_ids"][number, :length].tolist() == encoding.ids
        assert made.tensors["first_segment"][number, 0] == length - sum(encoding.type_ids)


def test_a_question_that_leaves_no_room_is_refused_before_it_is_cut(repository: Path) -> None:
    from triptych.runtime.rows_spans import WindowRowMaker

    windows = maker(repository, "answers", WindowRowMaker)
    for question in (MAX_QUESTION + 1, 255, 380, 381, 382, 5000):
        ask = RowInputs({"text": ["q " * question], "text_pair": ["a " * 3000]}, {})
        with pytest.raises(RequestError, match="at most 252 tokens"):
            rows_made(windows.make([ask])[0])


def test_many_windows_are_refused_before_they_are_made(repository: Path) -> None:
    from triptych.runtime.rows_spans import WindowRowMaker

    windows = maker(repository, "answers", WindowRowMaker)
    ask = RowInputs({"text": ["q " * MAX_QUESTION], "text_pair": ["!" * 6000]}, {})
    began = time.thread_time()
    with pytest.raises(RequestError, match="32 rows"):
        rows_made(windows.make([ask])[0])
    assert time.thread_time() - began < PROMPT_S


def test_two_long_halves_cost_no_more_than_their_lengths(repository: Path) -> None:
    from triptych.runtime.rows_text import PlainTextRowMaker

    pairs = maker(repository, "ranks", PlainTextRowMaker)

    def seconds(tokens: int) -> float:
        began = time.monotonic()
        text = ["!" * tokens]
        assert rows_made(pairs.make([RowInputs({"text": text, "text_pair": text}, {})])[0]) == 1
        return time.monotonic() - began

    seconds(1000)
    # 8 times the length: 64 times the seconds if it were each place by each.
    assert min(seconds(24000) for _ in range(3)) < 32 * min(seconds(3000) for _ in range(5))


@pytest.mark.server
def test_labels_come_back_as_they_were_sent(server: Any) -> None:
    labels = ["{}", "{0.__class__}", 'a\n"b"', 'a\n"b"', "%s", "\x00", "🙂", "y" * 20000]
    with Client("hypotheses", server.grpc_url) as client:
        found = client.classify_zero_shot(
            ["where is it"], labels, hypothesis_template="{} {x} {0} %d {}"
        )[0]
    assert sorted(choice.label for choice in found) == sorted(labels)
    assert sum(choice.score for choice in found) == pytest.approx(1, abs=1e-5)
    twins = [choice.score for choice in found if choice.label == 'a\n"b"']
    assert twins[0] == pytest.approx(twins[1], abs=1e-6)


@pytest.mark.server
@pytest.mark.parametrize(("words", "fits"), [(507, True), (508, False), (509, False), (600, False)])
def test_a_hypothesis_leaves_room_for_the_text(server: Any, words: int, fits: bool) -> None:
    parameters = {"candidate_labels": "b", "hypothesis_template": "a " * words + "{}"}
    with Client("hypotheses", server.grpc_url) as client:
        if fits:
            answer = client.infer({"text": ["where is it"]}, parameters=parameters)
            assert answer["label"].tolist() == [[b"b"]]
            return
        with pytest.raises(InvalidRequestError):
            client.infer({"text": ["where is it"]}, parameters=parameters)


PARAMETERS: list[Any] = [
    {f"p{i}": i for i in range(300)},
    {"": 1},
    {"top_k": "1"},
    {"top_k": True},
    {"top_k": 2**63 - 1},
    {"top\nk": 1},
    {"TOP_K": 1},
    pytest.param({"top-k": 1}, id="a dash is silently ignored"),
]


@pytest.mark.server
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_wrong_parameters(server: Any, parameters: Mapping[str, Any]) -> None:
    with Client("topics", server.grpc_url) as client, pytest.raises(InvalidRequestError):
        client.infer({"text": ["a"]}, parameters=dict(parameters))


@pytest.mark.server
@pytest.mark.parametrize(
    "parameters",
    [
        {"candidate_labels": '["\\ud800"]'},
        {"candidate_labels": '["a", 1]'},
        {"candidate_labels": "[[1]]"},
        pytest.param({"candidate_labels": "[" * 5000}, id="RecursionError"),
        pytest.param(
            {"candidate_labels": "x " * 2000, "hypothesis_template": "{} " * 200},
            id="800 KB of hypothesis, called a text the tokenizer does not take",
        ),
    ],
)
def test_labels_that_will_not_do(server: Any, parameters: dict[str, Any]) -> None:
    with (
        Client("hypotheses", server.grpc_url) as client,
        pytest.raises(InvalidRequestError) as caught,
    ):
        client.infer({"text": ["a"]}, parameters=parameters)
    if "hypothesis_template" in parameters:
        assert "parameter" in str(caught.value)


@pytest.mark.server
@pytest.mark.parametrize(
    "bad",
    [
        "nul",
        "mumble",
        "leave",
    ],
)
def test_a_hook_that_gives_up_fails_one_request(server: Any, bad: str) -> None:
    with Client("topics", server.grpc_url) as client, ThreadPoolExecutor(48) as pool:

        def send(text: str) -> Any:
            try:
                return client.infer({"text": [text]})
            except Exception as error:
                return error

        texts = [bad if i % 8 == 3 else f"parcel {i % 5} is late" for i in range(800)]
        answers = list(pool.map(send, texts))
    for text, answer in zip(texts, answers, strict=True):
        assert isinstance(answer, Exception) == (text == bad)


@pytest.mark.server
def test_under_load_with_bad_requests(server: Any) -> None:
    labels = {"candidate_labels": "one,two,three"}
    good: list[tuple[str, dict[str, list[Any]], dict[str, Any]]] = []
    for i, text in enumerate(traffic_texts()[:24]):
        good += [
            ("topics", {"text": [text, text[:9]]}, {"top_k": 5}),
            ("ranks", {"text": [text[:30]], "text_pair": [text]}, {}),
            ("answers", {"text": ["who is it"], "text_pair": [text * (1 + i)]}, {}),
            ("hypotheses", {"text": [text]}, labels),
        ]
    bad: list[tuple[str, dict[str, list[Any]], dict[str, Any]]] = [
        ("topics", {"text": [b"\xff"]}, {}),
        ("ranks", {"text": ["a"], "text_pair": [" "]}, {}),
        ("answers", {"text": ["q " * 300], "text_pair": ["c"]}, {}),
        ("hypotheses", {"text": ["a"]}, {"candidate_labels": "[bad"}),
    ]
    clients = {name: Client(name, server.grpc_url) for name in MAKERS}
    memory = shared_memory(server)
    expected = [clients[n].infer(rows, parameters=p) for n, rows, p in good]
    end = time.monotonic() + 5

    def attack(seed: int) -> int:
        random = np.random.default_rng(seed)
        right = 0
        while time.monotonic() < end:
            if random.random() < 0.2:
                name, rows, parameters = bad[random.integers(len(bad))]
                with pytest.raises(InvalidRequestError):
                    clients[name].infer(rows, parameters=parameters)
            index = int(random.integers(len(good)))
            name, rows, parameters = good[index]
            answer = clients[name].infer(rows, parameters=parameters)
            for key, values in answer.items():
                wanted = expected[index][key]
                if values.dtype == object:
                    assert values.tolist() == wanted.tolist()
                else:
                    assert np.allclose(values, wanted, atol=1e-4)
            right += 1
        return right

    with ThreadPoolExecutor(32) as pool:
        assert min(pool.map(attack, range(32))) > 0
    for client in clients.values():
        client.close()
    assert shared_memory(server) - memory < 64 << 20


def shared_memory(server: Any) -> int:
    """Bytes that the server's regions hold."""
    return sum((SHM / name).stat().st_blocks * 512 for name in regions(mark_of(server.pid)))
