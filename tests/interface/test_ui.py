"""The demo page: forms and answers of every task, its guards, and all of it in a real browser."""

import asyncio
import os
import re
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from browser import open_tab
from conftest import build_into, traffic_texts, write_pipeline
from http_pages import fetch, post
from processes import eventually
from served_command import TRIPTYCH, endpoints_of
from task_models import tagger
from triptych.base.formatting import figure
from triptych.base.tensors import Tensor
from triptych.client import Client, StepStatistics
from triptych.interface.cli import app
from triptych.interface.page.demo import DemoPage, RequestTimes, open_pipeline
from triptych.interface.page.form import (
    SECOND,
    Form,
    OutputView,
    ScoreBar,
    TextPiece,
    mark_spans,
    view_answer,
)
from triptych.interface.page.web import PageServer
from triptych.interface.page.web import _read as read_form
from triptych.spec.spec import load_spec
from triptych.tasks.catalog import TASKS

pytestmark = pytest.mark.build

HOSTILE = "</textarea><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>\u202e"
TEXT = f"Ada Lovelace of London wrote to Charles Babbage in Turin about {HOSTILE} parcels"


def test_a_form_has_what_a_task_takes_and_sends_what_is_typed() -> None:
    rules: dict[str, dict[str, Any]] = {
        "top_k": {"type": "int", "min": 1, "max": 3},
        "candidate_labels": {"type": "list"},
        "multi_label": {"type": "bool"},
        "kind": {"type": "str", "choices": ["a", "b"]},
    }
    defaults = {"top_k": 1, "multi_label": False, "candidate_labels": None}
    settings = {"request_parameters": rules, "parameters": defaults}
    options = {"top_k": "INT32", "candidate_labels": "BYTES", "multi_label": "BOOL"}
    form = Form.of(TASKS["text-classification"], {**options, "kind": "BYTES"}, settings)
    found = {field.label: (field.kind, field.choices, field.hint) for field in form.fields}
    assert found == {
        "text": ("text", (), ""),
        "top_k": ("number", (), "1"),
        "candidate_labels": ("line", (), ""),
        "multi_label": ("choice", ("true", "false"), "false"),
        "kind": ("choice", ("a", "b"), ""),
    }
    assert form.first_values(None) == {"parameter.top_k": "3"}  # as many as the pipeline has
    elsewhere = Form.of(TASKS["text-classification"], options, {})  # built on another machine
    assert [field.kind for field in elsewhere.fields] == ["text", "number", "line", "choice"]
    assert elsewhere.first_values(None) == {}
    sent = {"top_k": "two", "candidate_labels": "a, b", "multi_label": "true", "kind": ""}
    asked = form.read({"text": "x", **{f"parameter.{name}": sent[name] for name in sent}})
    assert asked.rows == ({"text": "x"},)
    # A number that is none goes as it is: the pipeline says what is wrong with it.
    assert asked.parameters == {"top_k": "two", "candidate_labels": "a, b", "multi_label": True}
    compares = Form.of(TASKS["text-embedding"], {}, {})
    assert [row["text"] for row in compares.read({"text": "x", SECOND: "y"}).rows] == ["x", "y"]
    assert [row["text"] for row in compares.read({"text": "x", SECOND: ""}).rows] == ["x"]
    kinds = {name: [f.kind for f in Form.of(task, {}, {}).fields] for name, task in TASKS.items()}
    assert kinds["image-classification"] == ["image"]
    assert kinds["reranking"] == kinds["question-answering"] == ["text", "text"]
    own = (
        Tensor("age", "INT64", (1,)),
        Tensor("weight", "FP32", (1,)),
        Tensor("box", "INT64", (4,)),
        Tensor("note", "BYTES", (1,)),
    )
    fields = Form(own, form.view, rules, {}).fields
    assert [field.kind for field in fields[:4]] == ["number", "number", "text", "text"]
    assert [field.label for field in fields if field.is_parameter] == [*rules]


def test_a_form_of_many_parts_or_of_none_is_refused() -> None:
    part = b'--x\r\nContent-Disposition: form-data; name="text"\r\n\r\nhello\r\n'
    kind = "multipart/form-data; boundary=x"
    assert read_form(kind, part + b"--x--\r\n") == {"text": b"hello"}
    assert read_form(kind, part * 100_000 + b"--x--\r\n") is None
    for malformed in ("", "text/plain", "multipart/form-data", 'multipart/form-data; boundary="'):
        assert not read_form(malformed, part)


class _PlainPage(PageServer):
    """A page that answers in pieces."""

    def page(self, example: str) -> str:
        return example + "x" * 100_000

    def answer(self, sent: Mapping[str, bytes]) -> tuple[HTTPStatus, Iterator[str]]:
        return HTTPStatus.OK, iter(["y" * 100_000] * 8)

    def end(self) -> None:
        pass


_HOST = b"Host: 127.0.0.1\r\n"
MALFORMED = (
    b"POST / HTTP/1.1\r\n" + _HOST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
    b"POST / HTTP/1.1\r\n" + _HOST + b"Content-Length: \xb2\r\n\r\n",
    b"POST / HTTP/1.1\r\n" + _HOST + b"Content-Length: 1000\r\n\r\nabc",
    b"GET / HTTP/1.1\r\n" + _HOST + b"\r\n",
    b"GET / HTTP/1.1\r\n" + _HOST + b"Origin: http://[\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: \xb2:\xb2\r\n\r\n",
    b"GET / HTTP/9.x\r\n\r\n",
    bytes(range(256)) + b"\r\n\r\n",
)


def test_malformed_and_abandoned_requests_to_a_page_print_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with _PlainPage("127.0.0.1", 0) as page:
        for request in MALFORMED:
            for leaves in (False, True):
                with socket.create_connection(("127.0.0.1", page.server_port)) as client:
                    client.sendall(request)
                    if leaves:  # the connection is reset
                        off = struct.pack("ii", 1, 0)
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, off)
                    else:
                        client.shutdown(socket.SHUT_WR)
                        while client.recv(1 << 16):
                            pass
        status, _ = fetch(page.url)
        assert status == HTTPStatus.OK
        assert eventually(
            lambda: not any("process_request" in thread.name for thread in threading.enumerate())
        )
    assert capfd.readouterr().err == ""


def test_answers_are_shown_as_their_tasks_have_them() -> None:
    one = [{"text": "Ada 🙂 in Köln", "text_pair": "It is in Köln."}]
    entity = {"entity": "LOC", "text": "Köln", "start": 9, "end": 13, "score": 0.5}
    shown = view_answer("entities", one, [{"entities": [entity]}])
    assert shown.pieces == (TextPiece("Ada 🙂 in "), TextPiece("Köln", "LOC", 0.5))
    assert "No entities" in view_answer("entities", one, [{"entities": []}]).lines[0]
    # What a hook's text moved is not marked elsewhere; of two that overlap the first is.
    moved = {**entity, "start": 0, "end": 4}
    assert "are not highlighted" in view_answer("entities", one, [{"entities": [moved]}]).lines[0]
    spans = [{**entity, "label": "LOC"}, {**entity, "start": 8, "text": " Köln", "label": "X"}]
    assert [piece.label for piece in mark_spans(one[0]["text"], spans)] == ["", "X"]

    answer = {"answer": "Köln", "score": 0.25, "start": 9, "end": 13}
    assert view_answer("answer", one, [answer]).pieces[1] == TextPiece("Köln", "answer", 0.25)
    assert "No answer" in view_answer("answer", one, [{**answer, "answer": ""}]).lines[0]
    choices = view_answer("choices", one, [{"token": ["a", "b"], "score": [0.75, float("nan")]}])
    assert choices.bars[0] == ScoreBar("a", 0.75, 0.75)
    assert choices.bars[1].share == 0.0
    rows = [{"embedding": [3.0, 4.0], "embedding_int8": []}, {"embedding": [4.0, 3.0]}]
    said = "Cosine similarity of both vectors: 0.9600"
    assert view_answer("vectors", one * 2, rows).lines == (said,)
    row = {"score": 0.5, "top": ["a", "b"], "chance": [0.75, 0.25], "note": ["[draft"]}
    row["boxes"] = [{"x": 1, "label": "cat"}, {"x": 2}]
    row["about"] = '{"team": "billing", "urgent": true}'
    (outputs,) = view_answer("outputs", one, [row]).outputs
    assert sorted(outputs, key=lambda view: view.name) == [
        OutputView("about", head=("team", "urgent"), rows=(("billing", "true"),)),
        OutputView("boxes", head=("x", "label"), rows=(("1", "cat"), ("2", ""))),
        OutputView("note", texts=("[draft",)),
        OutputView("score", texts=("0.5000",)),
        OutputView("top, chance", head=("top", "chance"), rows=(("a", "0.7500"), ("b", "0.2500"))),
    ]
    # An `after` of the pipeline's own may return another form.
    (outputs,) = view_answer("entities", one, [{"entities": "none"}]).outputs
    assert outputs == (OutputView("entities", texts=("none",)),)


def test_times_say_when_they_are_not_of_one_request_alone() -> None:
    def times(requests: int) -> RequestTimes:
        step = StepStatistics("core", requests, 0, requests, 1, 0.0, 0.0, 800.0 * requests, 0.0)
        return RequestTimes(1000.0, (step,), 1)

    assert (times(1).alone, times(1).outside_us, times(3).alone) == (True, 200.0, False)


@pytest.fixture(scope="module")
def page(minilm_server: Any, minilm_repository: Path) -> Iterator[DemoPage]:
    """The page of MiniLM."""
    folder = minilm_repository.parent / "pipelines/minilm_packed"
    url = minilm_server.grpc_url
    pipeline = open_pipeline(load_spec(folder), folder, minilm_repository, url, 120.0)
    with DemoPage(pipeline, "127.0.0.1", 0) as page:
        yield page


@pytest.mark.server
def test_a_page_answers_refuses_and_is_of_no_use_to_other_sites(page: DemoPage) -> None:
    status, text = fetch(page.url)
    assert status == 200
    assert text.count('<a href="/?example=') == 8
    status, text = fetch(f"{page.url}?example=1")
    assert f">\n{traffic_texts()[1]}</textarea>" in text

    texts = ["my delivery is late", "where is my parcel?"]
    status, text = post(page.url, {"text": texts[0], SECOND: texts[1]})
    assert status == 200
    similar = re.search(r"Cosine similarity of both vectors: (0\.\d+)", text)
    assert similar is not None
    with Client("minilm_packed", page.pipeline.client.url) as client:
        one, other = client.embed(texts)
    assert float(similar[1]) == pytest.approx(float(one @ other), abs=1e-4)
    assert text.count("384 numbers") == 2
    for step in ("preprocess", "core", "postprocess"):
        assert re.search(rf"minilm_packed_{step}</th>(<td class=\"n\">[\d.]+</td>){{5}}", text)

    status, text = post(page.url, {"text": "x", "parameter.dimensions": "0"})
    assert status == 422
    assert "must be an integer from 1 to 384" in text
    # Another site's form, and a name that was made to point here.
    assert post(page.url, {"text": "x"}, Origin="https://else.where")[0] == 404
    assert post(page.url, {"text": "x"}, Host="else.where:80")[0] == 404
    assert fetch(f"{page.url}etc/passwd")[0] == 404


@contextmanager
def command(*words: str) -> Iterator[subprocess.Popen[str]]:
    """`triptych ui --json` with these words; ended with the context."""
    environment = {name: given for name, given in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [TRIPTYCH, "ui", *words, "--port=0", "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.server
def test_the_verb_attaches_to_a_server_and_leaves_it_running(page: DemoPage) -> None:
    """Without a repository here: what the pipeline's folder says is enough."""
    grpc, folder = page.pipeline.client.url, page.pipeline.folder
    words = (folder.name, f"--pipelines={folder.parent}", f"--url={grpc}", "--repository=nowhere")
    busy = page.url.rstrip("/").rpartition(":")[2]
    refused = CliRunner().invoke(app, ["ui", *words, f"--port={busy}"])
    assert "`--port` must be a free port" in str(refused.exception)
    with command(*words) as process:
        told = endpoints_of(process)
        assert told["grpc"] == grpc
        assert post(told["page"], {"text": "x"})[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[1] == "stopped\n"
    assert process.returncode == 0
    assert post(page.url, {"text": "x"})[0] == 200


@pytest.fixture
def demo(tmp_path: Path, minilm_folder: Path) -> Iterator[subprocess.Popen[str]]:
    """`triptych ui` on a small tagger, built here."""
    model = tagger(tmp_path / "model", minilm_folder, traffic_texts())
    folder = write_pipeline(
        tmp_path / "pipelines/tags",
        task="token-classification",
        model={"source": str(model)},
        tokenizer={"max_text_bytes": 1000},
    )
    build_into(folder, tmp_path / "repository")
    options = [f"--pipelines={folder.parent}", f"--repository={tmp_path / 'repository'}"]
    with command("tags", *options) as process:
        yield process


@pytest.mark.server
@pytest.mark.long
def test_a_browser_shows_entities_times_and_errors_and_runs_nothing(
    demo: subprocess.Popen[str],
) -> None:
    addresses = endpoints_of(demo)
    with Client("tags", addresses["grpc"]) as client:
        (entities,) = client.entities([TEXT])
        assert entities
        seen = asyncio.run(browse(addresses["page"]))
    assert seen["marks"] == [[e.text, f"{e.entity} {figure(e.score)}"] for e in entities]
    assert seen["typed"] == TEXT
    steps = ["tags_preprocess", "tags_core", "tags_postprocess"]
    assert [step for step, _ in seen["times"]][:3] == steps
    assert all(float(together) >= 0 for _, together in seen["times"][:3])
    assert seen["error"].startswith("`text` must have at most 1000 bytes. Given: 1800 bytes.")
    assert seen["cut_on_a_phone"] == []
    assert seen["scripts"] == 0
    assert seen["ran"] is None
    assert seen["requested"]
    assert all(url.startswith((addresses["page"], "data:")) for url in seen["requested"])
    demo.send_signal(signal.SIGINT)
    _, said = demo.communicate(timeout=60)
    assert demo.returncode == 0, said
    assert "stopped (SIGINT)" in said
    with pytest.raises(ProcessLookupError):
        os.kill(addresses["pid"], 0)


async def browse(url: str) -> dict[str, Any]:
    """What somebody sees who types a text and submits it, and then one that is too long."""
    async with open_tab() as tab:
        await tab.go(url)
        await tab.type("textarea", TEXT)
        await tab.submit("button")
        seen = {
            "marks": await tab.run(
                "[...document.querySelectorAll('mark')].map(it =>"
                " [it.firstChild.textContent, it.querySelector('small').textContent])"
            ),
            "typed": await tab.run("document.querySelector('textarea').value"),
            "times": await tab.run(
                "[...document.querySelectorAll('table.times tbody tr')].map(it =>"
                " [it.cells[0].textContent, it.cells[5].textContent])"
            ),
            "ran": await tab.run("window.ran"),
            "scripts": await tab.run("document.scripts.length + document.images.length"),
        }
        phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        await tab.call("Emulation.setDeviceMetricsOverride", **phone)
        seen["cut_on_a_phone"] = await tab.run(
            "[...document.querySelectorAll('.scroll')].filter(it =>"
            " it.scrollWidth > it.clientWidth).map(it => it.getAttribute('aria-label'))"
        )
        await tab.type("textarea", "too long " * 200)
        await tab.submit("button")
        error = await tab.run("document.querySelector('#error').innerText")
        return {**seen, "error": error, "requested": tab.requested}
