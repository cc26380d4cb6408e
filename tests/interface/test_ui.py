"""The demo page: its components, its answers, and what it refuses, also in a real browser."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request

import pytest
from gradio_client.exceptions import AppError
from typer.testing import CliRunner

from tests.support.browser import open_tab
from tests.support.demo_pages import ask, open_client, open_demo
from tests.support.http_pages import fetch
from tests.support.project import build_into, traffic_texts, write_pipeline
from tests.support.served_command import endpoints_of
from tests.support.task_models import tagger
from triptych.base.tensors import Tensor
from triptych.client import Client
from triptych.interface import answer_views, demo_page
from triptych.interface.answer_views import mark_spans
from triptych.interface.cli import app
from triptych.spec.spec import load_spec
from triptych.tasks.catalog import TASKS

pytestmark = pytest.mark.build

HOSTILE = "<script>window.ran = 1</script><img src=http://192.0.2.1/x onerror='window.ran = 1'>"
TEXT = f"Ada Lovelace of London wrote to Charles Babbage in Turin about {HOSTILE} parcels"


def kind(component: Any) -> str:
    return type(component).__name__


def test_fields_are_those_of_the_inputs_and_of_the_rules() -> None:
    def fields(*inputs: Tensor, view: Any = "outputs") -> list[str]:
        return [kind(demo_page._field(tensor, view)) for tensor in inputs]

    kinds = {name: fields(*task.inputs, view=task.view.kind) for name, task in TASKS.items()}
    assert kinds["image-classification"] == ["Image"]
    assert kinds["reranking"] == kinds["question-answering"] == ["Textbox", "Textbox"]
    file = Tensor("sound", "BYTES", (1,), content="bytes")
    assert fields(file, Tensor("age", "INT64", (1,))) == ["File", "Number"]
    assert fields(Tensor("age", "INT64", (1,), optional=True)) == ["Textbox"]
    assert fields(file, view="boxes") == ["Image"]
    # Gradio makes the component anew after a click on an example; its file stays as it is.
    image = demo_page._field(TASKS["image-classification"].inputs[0], "choices")
    again = type(image)(**image.constructor_args)
    assert (again.type, again.image_mode) == ("filepath", None)

    rules: dict[str, dict[str, Any]] = {
        "top_k": {"type": "int", "min": 1, "max": 3},
        "share": {"type": "float"},
        "candidate_labels": {"type": "list"},
        "multi_label": {"type": "bool"},
        "kind": {"type": "str", "choices": ["a", "b"]},
    }
    made = [demo_page._parameter(name, rule, None) for name, rule in rules.items()]
    assert [kind(each) for each in made] == ["Textbox"] * 3 + ["Dropdown"] * 2
    assert (made[0].info, made[1].info) == ("from 1 to 3", None)
    default = demo_page._parameter("multi_label", rules["multi_label"], False)
    assert default.choices[0] == ("false (default of the pipeline)", "")
    number = demo_page._parameter("top_k", rules["top_k"], 2)  # it cannot be empty
    assert (kind(number), number.value, number.info) == ("Number", 2, "from 1 to 3")
    assert demo_page._parameter_example(rules["top_k"], 2, None) == 2
    # A number that is none goes as it is: the pipeline says what is wrong with it.
    sent = demo_page._read_parameters(rules, ["two", "0.5", "a, b", "false", ""])
    assert sent == {"top_k": "two", "share": 0.5, "candidate_labels": "a, b", "multi_label": False}
    assert demo_page._read_parameters(rules, ["2", "", "", "true", "b"]) == {
        "top_k": 2,
        "multi_label": True,
        "kind": "b",
    }
    assert demo_page._typed_input(Tensor("box", "INT64", (4,)), "[1, 2, 3, 4]") == [1, 2, 3, 4]
    assert demo_page._typed_input(Tensor("age", "INT64", (1,)), "9007199254740993") == 2**53 + 1
    assert demo_page._typed_input(Tensor("age", "INT64", (1,)), 0) == 0


def test_answers_are_shown_as_their_tasks_have_them() -> None:
    def shown(view: Any, row: Mapping[str, Any], **given: str) -> Any:
        return demo_page._VIEWS[view].value(given, row)

    text = "Ada 🙂 in Köln"
    entity = {"entity": "LOC", "text": "Köln", "start": 9, "end": 13, "score": 0.5}
    marked = [("Ada 🙂 in ", None), ("Köln", "LOC")]
    assert shown("entities", {"entities": [entity]}, text=text) == marked
    assert shown("entities", {"entities": []}, text=text) == [(text, None)]
    # What a hook's text moved is not marked elsewhere; of two that overlap the first is.
    assert mark_spans(text, [{**entity, "label": "LOC", "start": 0, "end": 4}]) == [(text, None)]
    spans = [{**entity, "label": "LOC"}, {**entity, "start": 8, "text": " Köln", "label": "X"}]
    assert [label for _, label in mark_spans(text, spans)] == [None, "X"]

    answer = {"answer": "Köln", "score": 0.25, "start": 9, "end": 13}
    assert shown("answer", answer, text_pair="It is in Köln.")[1] == ("Köln", "answer")
    choices = {"token": ["a", "b"], "score": [0.75, float("nan")]}
    assert shown("choices", choices) == {"a": 0.75, "b": 0.0}
    found = {"box": [[1.2, 2, 3, 3.9]], "label": ["cat"], "score": [0.5]}
    assert shown("boxes", found, image="a.png") == ("a.png", [((1, 2, 3, 4), "cat")])
    assert shown("terms", {"token_id": [7, 9], "weight": [1.5, 0.25]}) == [
        ("7", "1.50"),
        ("9", "0.25"),
    ]
    vectors = [{"embedding": [3.0, 4.0], "embedding_int8": []}, {"embedding": [4.0, 3.0]}]
    said = [*answer_views.describe_similarity(vectors)]
    assert said == ["Cosine similarity of both vectors: 0.9600"]

    # Two tokens of a query, of which the first has its best match in the second of the document.
    query, document = [[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.8, 0.6], [0.0, 0.0]]
    answers = [{"embedding": query}, {"embedding_float16": document}]
    pair = answer_views.pair_vectors(answers, ["a b", "c d e"], None)
    assert pair["tokens"] == [["1", "2"], ["1", "2", "3"]]
    drawn = shown("matches", {**pair, "tokens": [["<b>", "b"], ["c", "${d}", "e"]]})
    assert re.findall(r'class="best" title="([^"]+)"', drawn) == [
        "&lt;b&gt;, ${d}: 0.8000",
        "b, c: 1.0000",
    ]
    assert "<b>1.8000</b>, the sum of the best matches of 2 query vectors" in drawn
    for wrong in (answers[:1], [{"embedding_int8": [[1]]}] * 2):
        with pytest.raises((KeyError, ValueError)):
            answer_views.pair_vectors(wrong, ["a b", "c d e"], None)


@pytest.fixture(scope="module")
def page(minilm_server: Any, minilm_repository: Path) -> Iterator[Any]:
    """A client of MiniLM's page."""
    folder = minilm_repository.parent / "pipelines/minilm_packed"
    with open_demo(load_spec(folder), folder, minilm_repository, minilm_server.grpc_url) as page:
        yield page


@pytest.mark.server
def test_a_page_answers_and_is_of_no_use_to_other_sites(page: Any, minilm_server: Any) -> None:
    texts = ["my delivery is late", "where is my parcel?"]
    shown, times, raw = ask(page, *texts, "", "", "")
    similar = re.search(r"Cosine similarity of both vectors: (0\.\d+)", shown)
    assert similar is not None
    with Client("minilm_packed", minilm_server.grpc_url) as client:
        one, other = client.embed(texts)
    assert float(similar[1]) == pytest.approx(float(one @ other), abs=1e-4)
    assert shown.count("(384 elements)") == 2
    for step in ("preprocess", "core", "postprocess"):
        assert re.search(rf"\| {step} (\| [\d.]+ ){{5}}\|", times)
    assert raw[0]["embedding"] == pytest.approx(one.tolist())
    assert ask(page, texts[0], "", "", "", "")[2] == raw[:1]
    with pytest.raises(AppError, match=r"must be an integer from 1 to 384\. Given: 0"):
        ask(page, "x", "", "0", "", "")

    config = fetch(page.src + "config")[1]
    assert all(text[:20] in config for text in traffic_texts()[: demo_page.MAX_EXAMPLES])
    # Another site's form, and a name that was made to point here.
    for headers in ({"Origin": "https://else.where"}, {"Host": "else.where:80"}):
        for path in ("", "config", "gradio_api/upload"):
            assert fetch(Request(page.src + path, headers=headers))[0] == 403
    assert fetch(f"{page.src}gradio_api/file=/etc/passwd")[0] == 403


TELLS_HOSTS = """
import sys
from triptych.interface import main

def tell(event, given):
    name = {"socket.getaddrinfo": 0, "socket.connect": 1}.get(event)
    if name is not None and "127.0.0.1" not in given[name] and "localhost" not in given[name]:
        print(event, given[name], file=sys.stderr, flush=True)

sys.addaudithook(tell)
main()
"""
"""The command; it prints the hosts that it connects to, but for those of this machine."""


@contextmanager
def command(*words: str) -> Iterator[subprocess.Popen[str]]:
    """`triptych ui --json` with these words; ended with the context."""
    left_out = ("PYTHONPATH", "HF_HUB_OFFLINE")
    environment = {name: given for name, given in os.environ.items() if name not in left_out}
    process = subprocess.Popen(
        [sys.executable, "-c", TELLS_HOSTS, "ui", *words, "--port=0", "--json"],
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
def test_the_verb_attaches_to_a_server_and_leaves_it_running(
    page: Any, minilm_server: Any, minilm_repository: Path
) -> None:
    """Without a repository here: what the pipeline's folder says is enough."""
    grpc, pipelines = minilm_server.grpc_url, minilm_repository.parent / "pipelines"
    words = ("minilm_packed", f"--pipelines={pipelines}", f"--url={grpc}", "--repository=nowhere")
    busy = page.src.rstrip("/").rpartition(":")[2]
    refused = CliRunner().invoke(app, ["ui", *words, f"--port={busy}"])
    assert "`--port` must be a free port" in str(refused.exception)
    with command(*words) as process:
        told = endpoints_of(process)
        assert told["grpc"] == grpc
        with open_client(told["page"]) as client:
            assert ask(client, "x")[0].startswith("embedding: ")
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[1] == "stopped\n"
    assert process.returncode == 0
    assert ask(page, "x")[0].startswith("embedding: ")


@pytest.mark.server
@pytest.mark.long
def test_a_browser_shows_entities_times_and_errors_and_loads_nothing(
    demo: subprocess.Popen[str],
) -> None:
    addresses = endpoints_of(demo)
    with Client("tags", addresses["grpc"]) as client:
        (entities,) = client.entities([TEXT])
        assert entities
        seen = asyncio.run(browse(addresses["page"]))
    assert seen["marks"] == [[e.text, e.entity] for e in entities]
    assert seen["steps"][:3] == ["preprocess", "core", "postprocess"]
    assert "`text` must have at most 1000 bytes. Given: 1800 bytes." in seen["error"]
    assert seen["too_wide"] <= 0
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
        await tab.click("button.primary")
        await tab.appears(".times table")
        phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        await tab.call("Emulation.setDeviceMetricsOverride", **phone)
        seen = {
            "marks": await tab.run(
                "[...document.querySelectorAll('.token.highlighted')].map(it =>"
                " [...it.querySelectorAll('.text, .label')].map(part => part.innerText))"
            ),
            "steps": await tab.run(
                "[...document.querySelectorAll('.times tbody tr')].map(it => it.cells[0].innerText)"
            ),
            "too_wide": await tab.run(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            ),
            "ran": await tab.run("window.ran"),
        }
        await tab.type("textarea", "too long " * 200)
        await tab.click("button.primary")
        await tab.appears(".toast-body")
        error = await tab.run("document.querySelector('.toast-body').innerText")
        return {**seen, "error": error, "requested": tab.requested}
