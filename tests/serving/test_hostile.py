"""What a hostile or careless user sends: refused at once, and nobody else notices."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc

from benchmarks.fuzz import overflowing_requests
from tests.support.processes import mark_of, regions, running
from tests.support.project import build_into, traffic_texts
from tests.support.task_pipelines import write_task
from triptych.client import Client, InvalidRequestError
from triptych.repository.config import read_config
from triptych.runtime.request_errors import RequestError
from triptych.runtime.row_types import RowInputs
from triptych.runtime.rows_spans import WindowRowMaker
from triptych.runtime.rows_text import PlainTextRowMaker, TokenRowMaker
from triptych.serving.orphan_cleanup import SHM
from triptych.serving.server import Server

pytestmark = pytest.mark.build

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


PIPELINES = ("answers", "hypotheses", "topics")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    """A pipeline of each kind of rows, with three rows of traffic."""
    base = tmp_path_factory.mktemp("hostile")
    for name in PIPELINES:
        folder = write_task(base, name, minilm_folder, rows=3)
        if name == "topics":
            (folder / "hooks.py").write_text(HOOKS)
        build_into(folder, base / "repository")
    return base / "repository"


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Any]:
    with running(Server(repository)) as server:
        yield server


def write_tokenizer(minilm_folder: Path, folder: Path, **truncation: Any) -> Path:
    """Write MiniLM's tokenizer as a build does: without padding, and cut as `truncation` says."""
    tokenizer = json.loads((minilm_folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer |= {"padding": None, "truncation": truncation or None}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


@pytest.fixture
def windows(minilm_folder: Path, tmp_path: Path) -> WindowRowMaker:
    """The row maker of questions and contexts."""
    return WindowRowMaker(SETTINGS, write_tokenizer(minilm_folder, tmp_path))


SETTINGS: Mapping[str, Any] = {
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


def rows_of(maker: TokenRowMaker, text: str, pair: str) -> Mapping[str, Any]:
    """The tensors of a request of one pair; raises its error."""
    (made,) = maker.make([RowInputs({"text": [text], "text_pair": [pair]}, {})])
    if isinstance(made, Exception):
        raise made
    return made.tensors


def test_windows_at_every_edge(windows: WindowRowMaker) -> None:
    for question in (0, 1, MAX_QUESTION - 1, MAX_QUESTION):
        room = 384 - 3 - question
        edge = 2 * room - STRIDE
        for context in (1, STRIDE, room - 1, room, room + 1, edge, edge + 1):
            text = "q " * question or "\x00"  # not blank, and yet no token
            beyond = max(0, context - room)
            rows = len(rows_of(windows, text, "a " * context)["input_ids"])
            assert rows == 1 + -(-beyond // (room - STRIDE)), (question, context)
    # A question that leaves no room is refused before it is cut.
    for question in (MAX_QUESTION + 1, 255, 380, 381, 382, 5000):
        with pytest.raises(RequestError, match="at most 252 tokens"):
            rows_of(windows, "q " * question, "a " * 3000)


def test_windows_are_those_that_the_tokenizer_makes(windows: WindowRowMaker) -> None:
    """Question and context are tokenized once each, by themselves."""
    for context in (1, 200, 900):
        question, text = "Größe, or not?", "naïve words, and ﷺ " * context
        tensors = rows_of(windows, question, text)
        whole = windows.tokenizer.encode(question, text)
        assert len(tensors["input_ids"]) == 1 + len(whole.overflowing)
        for number, encoding in enumerate([whole, *whole.overflowing]):
            length = tensors["row_length"][number, 0]
            assert tensors["input_ids"][number, :length].tolist() == encoding.ids
            assert tensors["first_segment"][number, 0] == length - sum(encoding.type_ids)


def test_many_windows_are_refused_before_they_are_made(
    windows: WindowRowMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "tokenizer", None)  # it makes the windows
    with pytest.raises(RequestError, match="32 rows"):
        rows_of(windows, "q " * MAX_QUESTION, "!" * 6000)


def test_long_halves_are_not_cut_by_the_tokenizer(
    minilm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would make each combination of what it cuts off: quadratic in time and memory."""
    pairs = PlainTextRowMaker(SETTINGS, write_tokenizer(minilm_folder, tmp_path))
    monkeypatch.setattr(pairs, "tokenizer", None)  # the one that truncates
    assert rows_of(pairs, "!" * 24000, "!" * 24000)["row_length"].tolist() == [[384]]


def test_a_text_is_cut_on_the_side_that_its_tokenizer_names(
    minilm_folder: Path, tmp_path: Path
) -> None:
    cut = {"direction": "Left", "max_length": 384, "strategy": "LongestFirst", "stride": 0}
    pairs = PlainTextRowMaker(SETTINGS, write_tokenizer(minilm_folder, tmp_path, **cut))
    ids = rows_of(pairs, "end", "a " * 400 + "end")["input_ids"][0].tolist()
    assert ids[1] == ids[-2]
    assert len(ids) == 384


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


REFUSED: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "topics": [
        {f"p{i}": i for i in range(300)},
        {"": 1},
        {"top_k": "1"},
        {"top_k": True},
        {"top_k": 2**63 - 1},
        {"top\nk": 1},
        {"TOP_K": 1},
        {"top-k": 1},  # a dash is silently ignored
    ],
    "hypotheses": [
        {"candidate_labels": '["\\ud800"]'},
        {"candidate_labels": '["a", 1]'},
        {"candidate_labels": "[[1]]"},
        {"candidate_labels": "[" * 5000},  # RecursionError
        # 800 KB of hypothesis, called a text the tokenizer does not take
        {"candidate_labels": "x " * 2000, "hypothesis_template": "{} " * 200},
        # A hypothesis leaves room for the text.
        {"candidate_labels": "b", "hypothesis_template": "a " * 508 + "{}"},
        {"candidate_labels": "b", "hypothesis_template": "a " * 600 + "{}"},
    ],
}
"""Parameters that a pipeline must refuse."""


@pytest.mark.server
def test_parameters_that_will_not_do(server: Any) -> None:
    for name, refused in REFUSED.items():
        with Client(name, server.grpc_url) as client:
            for parameters in refused:
                with pytest.raises(InvalidRequestError) as caught:
                    client.infer({"text": ["a"]}, parameters=parameters)
                if len(parameters.get("candidate_labels", "")) == 4000:
                    assert "parameter" in str(caught.value)
    with Client("hypotheses", server.grpc_url) as client:
        fitting = {"candidate_labels": "b", "hypothesis_template": "a " * 507 + "{}"}
        answer = client.infer({"text": ["where is it"]}, parameters=fitting)
        assert answer["label"].tolist() == [["b"]]


@pytest.mark.server
def test_no_step_dies_of_a_shape_whose_size_overflows(server: Any, repository: Path) -> None:
    """Triton takes such an input as complete, and the stub's array of that shape cannot be made."""
    configs = [read_config(path) for path in sorted(repository.glob("*/config.pbtxt"))]
    requests = [request for config in configs for request in overflowing_requests(config)]
    assert {r.model_name for r in requests} > {f"{name}_core" for name in PIPELINES}
    texts = {"topics": {"text": ["late"]}, "answers": {"text": ["who"], "text_pair": ["I do"]}}
    with ExitStack() as stack:
        clients = {n: stack.enter_context(Client(n, server.grpc_url)) for n in texts}
        expected = {name: client.infer(texts[name]) for name, client in clients.items()}
        stub = service_pb2_grpc.GRPCInferenceServiceStub(
            stack.enter_context(grpc.insecure_channel(server.grpc_url))
        )
        for request in requests:
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(request, timeout=60)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
            for name, client in clients.items():
                assert_equal(client.infer(texts[name]), expected[name])
    assert server.find_crash(0) is None


@pytest.mark.server
def test_a_hook_that_gives_up_fails_one_request(server: Any) -> None:
    with (
        Client("topics", server.grpc_url, timeout_s=240) as client,
        ThreadPoolExecutor(48) as pool,
    ):

        def send(text: str) -> Any:
            try:
                return client.infer({"text": [text]})
            except Exception as error:
                return error

        bad = ("nul", "mumble", "leave")
        texts = [bad[i % 3] if i % 8 == 3 else f"parcel {i % 5} is late" for i in range(480)]
        answers = list(pool.map(send, texts))
    for text, answer in zip(texts, answers, strict=True):
        assert isinstance(answer, Exception) == (text in bad)


@pytest.mark.server
def test_under_load_with_bad_requests(server: Any) -> None:
    labels = {"candidate_labels": "one,two,three"}
    good: list[tuple[str, dict[str, list[Any]], dict[str, Any]]] = []
    for i, text in enumerate(traffic_texts()[:24]):
        good += [
            ("topics", {"text": [text, text[:9]]}, {"top_k": 5}),
            ("answers", {"text": ["who is it"], "text_pair": [text * (1 + i)]}, {}),
            ("hypotheses", {"text": [text]}, labels),
        ]
    bad: list[tuple[str, dict[str, list[Any]], dict[str, Any]]] = [
        ("topics", {"text": [b"\xff"]}, {}),
        ("answers", {"text": ["a"], "text_pair": [" "]}, {}),
        ("answers", {"text": ["q " * 300], "text_pair": ["c"]}, {}),
        ("hypotheses", {"text": ["a"]}, {"candidate_labels": "[bad"}),
    ]
    clients = {name: Client(name, server.grpc_url, timeout_s=240) for name in PIPELINES}
    memory = shared_memory(server)
    expected = [clients[n].infer(rows, parameters=p) for n, rows, p in good]

    def attack(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(12):
            if random.random() < 0.2:
                name, rows, parameters = bad[random.integers(len(bad))]
                with pytest.raises(InvalidRequestError):
                    clients[name].infer(rows, parameters=parameters)
            index = int(random.integers(len(good)))
            name, rows, parameters = good[index]
            assert_equal(clients[name].infer(rows, parameters=parameters), expected[index])

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(attack, range(32)))
    for client in clients.values():
        client.close()
    assert shared_memory(server) - memory < 64 << 20


def assert_equal(answer: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, values in answer.items():
        if values.dtype == object:
            assert values.tolist() == wanted[key].tolist()
        else:
            assert np.allclose(values, wanted[key], atol=1e-4)


def shared_memory(server: Any) -> int:
    """Bytes that the server's regions hold."""
    return sum((SHM / name).stat().st_blocks * 512 for name in regions(mark_of(server.pid)))
