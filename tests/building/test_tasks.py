"""Every task on a real tritonserver, with tokenizers of many kinds: equal to transformers."""

import asyncio
import functools
import io
import json
import random
import re
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import httpx2
import numpy as np
import pytest
from gradio_client import handle_file
from gradio_client.exceptions import AppError
from tritonclient.grpc import service_pb2_grpc

from tests.support.demo_pages import ask as ask_page
from tests.support.demo_pages import open_demo, open_events
from tests.support.project import ROOT, build_into, selected_names, traffic_texts
from tests.support.served_models import (
    MASKS,
    NO_PADDING,
    RANKER,
    SERVED,
    TAGGER,
    TOPICS,
    VECTORS,
    save,
)
from tests.support.task_models import MODELS
from tests.support.task_reference import (
    check_answers,
    check_entities,
    check_hypotheses,
    check_labels,
    image_bytes,
    same_choices,
)
from tests.support.tokenizers_of_kinds import LONGEST
from triptych.base.errors import UserError
from triptych.client import AsyncClient, Client, InvalidRequestError, PipelineFailedError
from triptych.client.wire import encode_rows, infer_request, read_outputs
from triptych.container.health import QUESTION_FILE, HealthCheck
from triptych.container.manifests import find_pipelines
from triptych.gateway.app import make_app
from triptych.gateway.http import Shared
from triptych.gateway.pipelines import Pipelines
from triptych.repository.lint.engine import unsupported
from triptych.serving.server import Server
from triptych.spec.spec import load_spec
from triptych.tasks.catalog.text_embedding import ENCODINGS

pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore:Tokenizer does not support real words:UserWarning"),
]
TEXTS = [
    *traffic_texts()[:18],
    "Anna Müller wohnt in Köln,  Straße 5.",
    "  two spaces before,\ttabs\nand lines after \n",
    "Dr. O'Neil-Smith (NYC) paid $5.99 — twice!",
    "漢字かな交じり文 and 🙂 emoji, e\u0301 and ﬁne \uff21\uff22\uff23",
    "x",
    "[SEP] </s> and <s> in [CLS] a <pad> text [PAD]",
    "word " * 700,
    " ".join(traffic_texts()[20:40]),
]
MASKED = [f"{text[:30]}{' ' * (i % 2)}[MASK] {text[30:]}" for i, text in enumerate(TEXTS)]
"""The mask is within the first tokens, with a space before it or none."""
CONTEXTS = [" ".join(traffic_texts()[i : i + n]) for i, n in enumerate((1, 3, 8, 24))]
CONTEXTS[1] = "Bücher  und (é) 🙂 — " + CONTEXTS[1]
QUESTIONS = ["Where is my order?", "What happened to the parcel that I sent back?"] * 2
QUERY = "where is my parcel"
LABELS = ["billing", "a delivery", "something else"]
ZERO_SHOT = "zero-shot-classification"
LAYOUTS = {"flags": "bucketed", "tags": "bucketed", "answers": "bucketed", "images": ""}
"""Pipelines of `task_models` that are served here, and their layouts."""
EVERYDAY = [
    *LAYOUTS,
    *("qwen_topics", "xlm_tags", "deberta_ranks", "modern_masks", "bart_labels", "t5_vectors"),
]
"""Each task once, and most kinds of tokenizers. `test_export` exports every head in both
layouts."""
TASKS = {name: MODELS[name][0] for name in LAYOUTS} | {n: s.task for n, s in SERVED.items()}


def each_of(*tasks: str) -> pytest.MarkDecorator:
    """Run a test with each pipeline of some tasks, or with all."""
    names = [
        pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.long)
        for name, task in TASKS.items()
        if task in tasks or not tasks
    ]
    return pytest.mark.parametrize("name", names)


def rows_of(name: str) -> dict[str, list[Any]]:
    """Return rows of very different lengths for a pipeline."""
    rows: dict[str, dict[str, list[Any]]] = {
        "image-classification": {"image": image_bytes()},
        "question-answering": {"text": QUESTIONS, "text_pair": CONTEXTS},
        RANKER: {"text": [QUERY] * len(TEXTS), "text_pair": TEXTS},
        MASKS: {"text": MASKED},
        ZERO_SHOT: {"text": TEXTS[:8]},
    }
    return rows.get(TASKS[name], {"text": TEXTS})


def write_pipeline(name: str, model: Path, folder: Path) -> Path:
    """Write the specification of a pipeline, and its rows as traffic."""
    folder.mkdir(parents=True)
    spec: dict[str, Any] = {"task": TASKS[name], "model": {"source": str(model)}}
    if layout := layout_of(name):
        spec["core"] = {"layout": layout}
    if TASKS[name] == ZERO_SHOT:
        spec["parameters"] = {"candidate_labels": LABELS}
    if name == "tags":
        spec["parameters"] = {"aggregation_strategy": "average"}
    columns = rows_of(name)
    for number, data in enumerate(columns.get("image", [])):
        (folder / f"{number}.img").write_bytes(data)
        columns["image"][number] = f"{number}.img"
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    (folder / "traffic.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def layout_of(name: str) -> str:
    return LAYOUTS[name] if name in LAYOUTS else SERVED[name].layout


@pytest.fixture(scope="module")
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path
) -> dict[str, Path]:
    """Folder of each model that a selected test needs."""
    chosen = selected_names(request)
    base = tmp_path_factory.mktemp("models")
    return {
        name: (
            MODELS[name][1](base / name, minilm_folder, traffic_texts())
            if name in LAYOUTS
            else save(SERVED[name], base / name)
        )
        for name in TASKS
        if name in EVERYDAY or name in chosen
    }


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """All of them in one repository."""
    base = tmp_path_factory.mktemp("tasks")
    for name, model in models.items():
        folder = write_pipeline(name, model, base / "pipelines" / name)
        built = build_into(folder, base / "repository")
        assert built.not_packed_reason == ""
        assert built.plan.layout == (layout_of(name) or "fixed")
    return base / "repository"


@pytest.fixture
def ask(server: Server) -> Callable[[str], Client]:
    """Opens the client of a pipeline."""
    return functools.partial(Client, url=server.grpc_url)


@pytest.fixture(scope="module")
def reference(models: dict[str, Path]) -> Callable[[str], Any]:
    """transformers' own pipeline of a model."""
    import transformers

    @functools.cache
    def get(name: str) -> Any:
        task = TASKS[name].replace("reranking", "text-classification")
        return transformers.pipeline(task, str(models[name]), device="cpu")

    return get


def close(a: Any, b: Any, tolerance: float = 1e-4) -> bool:
    return bool(np.abs(np.asarray(a) - np.asarray(b)).max() <= tolerance)


@each_of(TOPICS)
def test_text_classification(ask: Any, reference: Any, name: str) -> None:
    # transformers itself fails where an empty text has no token at all.
    texts = TEXTS if name == "qwen_topics" else ["", *TEXTS]
    with ask(name) as client:
        got = check_labels(client, reference(name), texts, top_k=4 if name == "flags" else 3)
        best = client.classify(texts)
        capped = client.classify(texts, threshold=0.2, top_k=2) if name == "flags" else []
    for mine, found in zip(got, best, strict=True):
        wanted = [choice for choice in mine if choice.score > 0.5] if name == "flags" else mine[:1]
        assert [choice.label for choice in found] == [choice.label for choice in wanted]
        assert all(close(f.score, w.score, 1e-5) for f, w in zip(found, wanted, strict=True))
    if name == "flags":  # rows of none, one and several labels
        assert len({len(found) for found in best}) > 1
    for mine, found in zip(got, capped, strict=False):
        wanted = [choice for choice in mine if choice.score > 0.2][:2]
        assert [choice.label for choice in found] == [choice.label for choice in wanted]
    several = any(sum(choice.score for choice in choices) > 1.01 for choices in got)
    assert several == (name == "flags")  # its labels do not exclude each other


@each_of(TAGGER)
def test_token_classification(ask: Any, reference: Any, name: str) -> None:
    with ask(name) as client:
        for aggregation in ("none", "simple", "first", "max"):
            check_entities(client, reference(name), TEXTS, aggregation)
            assert client.entities([""], aggregation_strategy=aggregation) == [[]]
        if name == "tags":
            check_entities(client, reference(name), TEXTS, "average")
            return
        with pytest.raises(InvalidRequestError, match="aggregation_strategy: average"):
            client.entities(TEXTS[:1], aggregation_strategy="average")


@each_of("question-answering")
def test_question_answering(ask: Any, models: Any, name: str) -> None:
    window, stride = (384, 128) if name == "answers" else (LONGEST, LONGEST // 2)
    options: dict[str, Any] = {"window": window, "stride": stride}
    with ask(name) as client:
        for impossible in (False, True):
            options["impossible"] = impossible
            check_answers(client, models[name], QUESTIONS, CONTEXTS, **options)


@each_of(RANKER)
def test_reranking(ask: Any, reference: Any, name: str) -> None:
    with ask(name) as client:
        ranked = client.rerank(QUERY, TEXTS)
        swapped = client.infer({"text": TEXTS[:4], "text_pair": [QUERY] * 4})["score"][:, 0]
    pairs = [{"text": QUERY, "text_pair": text} for text in TEXTS]
    pairs += [{"text": text, "text_pair": QUERY} for text in TEXTS[:4]]
    want = [row["score"] for row in reference(name)(pairs, truncation=True)]
    scores = [each.score for each in ranked]
    assert close(scores, [want[each.index] for each in ranked])
    assert scores == sorted(scores, reverse=True)
    assert sorted(each.index for each in ranked) == list(range(len(TEXTS)))
    assert close(swapped, want[len(TEXTS) :])
    assert np.ptp(scores) > 0.1
    assert not close(swapped, want[:4], 1e-3)


@each_of(MASKS)
def test_fill_mask(ask: Any, reference: Any, name: str) -> None:
    with ask(name) as client:
        got = client.fill_mask(MASKED, top_k=6)
    want = reference(name)(MASKED, top_k=6, tokenizer_kwargs={"truncation": True})
    for mine, theirs in zip(got, want, strict=True):
        same_choices(mine, theirs, "token_str", cut=True)
    assert len({choices[0].token for choices in got}) > 1


@each_of(VECTORS)
def test_text_embedding(ask: Any, models: dict[str, Path], name: str) -> None:
    import torch
    from transformers import AutoModel, AutoModelForTextEncoding, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models[name])
    loader = AutoModelForTextEncoding if name == "t5_vectors" else AutoModel
    model = loader.from_pretrained(models[name]).eval()
    texts = ["", *TEXTS]
    encoded = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    mask = encoded["attention_mask"][:, :, None]
    with torch.inference_mode():
        hidden = model(**encoded).last_hidden_state
    want = ((hidden * mask).sum(1) / mask.sum(1)).numpy()
    with ask(name) as client:
        assert close(client.embed(texts), want, 1e-5)
    assert np.ptp(want, axis=0).min() > 0.1


def test_zero_shot_classification(ask: Any, reference: Any, repository: Path) -> None:
    texts = [*TEXTS[:8], *TEXTS[18:], " \t\n "]
    # Texts times six labels are more than a batch holds: the client sends fewer at a time.
    several = [*LABELS, "a return", "an invoice", "a complaint"]
    options: dict[str, Any] = {"hypothesis_template": "This is about {}."}
    with ask("bart_labels") as client:
        for labels, multi_label in ((several, False), (several, True), (LABELS[:1], True)):
            options["multi_label"] = multi_label
            check_hypotheses(client, reference("bart_labels"), texts, labels, **options)
        assert client.infer({"text": texts[:2]})["label"].shape == (2, len(LABELS))
    # A head that reads a mark in the text is one that TensorRT takes.
    assert unsupported(repository / "bart_labels_core/1/model.onnx", 10) == []


def test_image_classification(
    server: Server,
    repository: Path,
    reference: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from PIL import Image

    images = image_bytes()
    with Client("images", server.grpc_url) as client:
        got = client.classify_images(images, top_k=7)
        with pytest.raises(InvalidRequestError, match="threshold"):  # the labels exclude each other
            client.classify_images(images, threshold=0.5)
    want = reference("images")([Image.open(io.BytesIO(data)) for data in images], top_k=7)
    for mine, theirs in zip(got, want, strict=True):
        same_choices(mine, theirs)
    assert len({choices[0].label for choices in got}) > 1

    text = (ROOT / "build_scripts/documentation/guides/clients.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(import json\nimport struct.*?)```", text, re.DOTALL)
    (tmp_path / "red.png").write_bytes(images[0])
    stated = {
        "127.0.0.1:8000": server.http_url.removeprefix("http://"),
        "models/photos": "models/images",
        "pipelines/photos/samples/red.png": str(tmp_path / "red.png"),
    }
    for old, new in stated.items():
        assert old in snippet
        snippet = snippet.replace(old, new)
    exec(snippet, {})
    printed = eval(capsys.readouterr().out)
    assert printed["label"] == [choice.label for choice in got[0][:3]]
    assert np.allclose(printed["score"], [choice.score for choice in got[0][:3]])

    folder = repository.parent / "pipelines/images"
    with open_demo(load_spec(folder), folder, repository, server.grpc_url) as page:
        shown = ask_page(page, handle_file(folder / "0.img"), 7)
        with pytest.raises(AppError, match="must be an undamaged image"):
            ask_page(page, handle_file(folder / "traffic.jsonl"), 7)
        # A file that was not sent, but that this machine has.
        file = {"path": str(folder / "1.img")}
        for marks in ({}, {"meta": {"_type": "gradio.FileData"}}):
            with open_events(page, file | marks, 7) as events:
                ended = next(line for line in events if b"process_completed" in line)
            assert re.search(rb"not uploaded by|must be a file that was sent", ended)
    assert shown[0]["label"] == got[0][0].label
    (raw,) = shown[3]
    assert [*zip(raw["label"], raw["score"], strict=True)] == [(c.label, c.score) for c in got[0]]


def test_every_task_answers_the_health_check(repository: Path, server: Server) -> None:
    pipelines = find_pipelines(repository)
    assert len(pipelines) >= len(EVERYDAY)
    assert all((repository / p.name / QUESTION_FILE).is_file() for p in pipelines)
    assert HealthCheck(pipelines).find_fault(f"http://{server.http_url}") is None


@each_of()
def test_a_result_does_not_depend_on_its_neighbors(server: Server, name: str) -> None:
    rows = rows_of(name)
    count = len(next(iter(rows.values())))
    order = list(range(count))
    random.Random(0).shuffle(order)
    with Client(name, server.grpc_url) as client, ThreadPoolExecutor(16) as pool:
        together = client.infer(rows)
        shuffled = client.infer({key: [v[i] for i in order] for key, v in rows.items()})

        def alone(index: int) -> Any:
            return client.infer({key: [values[index]] for key, values in rows.items()})

        beside = list(pool.map(alone, range(count)))
    for output, values in together.items():
        for place, index in enumerate(order):
            same(values[index], shuffled[output][place])
            own = beside[index][output][0]
            if name == "flags":  # rows of a request have the width of the longest
                assert not any(values[index][len(own) :])
            same(values[index][: len(own)] if name == "flags" else values[index], own)


@pytest.mark.parametrize("name", ["qwen_topics", "images"])
@pytest.mark.parametrize("way", ["client", "gateway"])
def test_bad_rows_of_two_clients_fail_no_request_of_twelve_others(
    server: Server, name: str, way: str
) -> None:
    (key, good), *_ = rows_of(name).items()
    bad: Any = b"\xff no text or image"
    if way == "gateway":
        good = [value if isinstance(value, str) else b64encode(value).decode() for value in good]
        bad = "" if name == "images" else "x" * 200_000

    async def ask(send: Any, *, is_good: bool) -> list[bool]:
        values = [good[index % len(good)] if is_good else bad for index in range(10)]
        return [await send(value) for value in values]

    async def attack() -> list[list[bool]]:
        pipelines = Pipelines([name], {}, None, {"url": server.grpc_url})
        transport = httpx2.ASGITransport(make_app(pipelines, Shared()))
        async with (
            AsyncClient(name, server.grpc_url) as client,
            httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http,
        ):

            async def send(value: Any) -> bool:
                if way == "gateway":
                    body = {"rows": [{key: value}]}
                    status = (await http.post(f"/v1/pipelines/{name}", json=body)).status_code
                    assert status in (200, 400)
                    return bool(status == 200)
                (answer,) = await client.infer_each({key: [value]})
                assert isinstance(answer, dict | InvalidRequestError)
                return isinstance(answer, dict)

            asked = [ask(send, is_good=index >= 2) for index in range(14)]
            answered = await asyncio.gather(*asked)
        await pipelines.close()
        return answered

    assert asyncio.run(attack()) == [[False] * 10] * 2 + [[True] * 10] * 12


OPTIONS: dict[str, list[dict[str, Any]]] = {
    VECTORS: [{"dimensions": 8}, *({"encoding": name} for name in ENCODINGS)],
    TOPICS: [{"top_k": 2}],
    "image-classification": [{"top_k": 2}],
    MASKS: [{"top_k": 2}],
    TAGGER: [{"aggregation_strategy": "none"}],
    "question-answering": [{"handle_impossible_answer": True}],
    ZERO_SHOT: [{"multi_label": True}],
}


@each_of()
def test_a_response_has_the_requested_outputs_that_its_options_give(
    server: Server, name: str
) -> None:
    """Outputs of another encoding are left out, because no step sees which a request names."""
    columns = {key: [rows[0]] for key, rows in rows_of(name).items()}
    encoded = encode_rows(columns)
    with grpc.insecure_channel(server.grpc_url) as channel, Client(name, server.grpc_url) as client:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        outputs = list(client.interface().outputs)
        subsets = [each for n in range(len(outputs) + 1) for each in combinations(outputs, n)]
        for options in [{}, *OPTIONS.get(TASKS[name], [])]:
            whole = client.infer(columns, parameters=options)
            assert whole
            for subset in subsets:
                request = infer_request(name, encoded.columns, [0], options, {})
                for output in subset:
                    request.outputs.add(name=output)
                found = read_outputs(stub.ModelInfer(request, timeout=60))
                expected = {key: whole[key] for key in subset or outputs if key in whole}
                assert found.keys() == expected.keys(), (options, subset)
                for key, values in expected.items():
                    same(found[key], values)


def test_a_response_without_outputs_is_an_error_for_the_client(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name_another(*arguments: Any) -> Any:
        request = infer_request(*arguments)
        request.outputs.add(name="embedding_int8")
        return request

    monkeypatch.setattr("triptych.client.work.infer_request", name_another)
    told = "response must have an output"
    with Client("t5_vectors", server.grpc_url) as client:
        with pytest.raises(PipelineFailedError, match=told):
            client.infer({"text": ["a"]})
        with pytest.raises(PipelineFailedError, match=told):
            client.embed(["a"])
        assert client.embed(["a"], encoding="int8").dtype == np.int8


def same(a: Any, b: Any) -> None:
    if a.dtype != object:
        assert close(a, b, 1e-5)
        return
    for one, two in zip(a.ravel(), b.ravel(), strict=True):
        if one[:1] != "[":
            assert one == two
            continue
        first, second = json.loads(one), json.loads(two)
        assert [(e["start"], e["end"]) for e in first] == [(e["start"], e["end"]) for e in second]
        assert not first or close([e["score"] for e in first], [e["score"] for e in second], 1e-5)


BAD: list[tuple[str, dict[str, list[Any]], dict[str, Any], list[str]]] = [
    ("deberta_ranks", {"text": ["a"], "text_pair": [" "]}, {}, ["text_pair", "not be empty"]),
    ("answers", {"text": [""], "text_pair": ["c"]}, {}, ["`text`", "not be empty"]),
    ("answers", {"text": ["q " * 400], "text_pair": ["c"]}, {}, ["question", "tokens"]),
    ("answers", {"text": ["q"], "text_pair": ["c " * 20000]}, {}, ["32 rows of the model"]),
    ("answers", {"text": ["q"], "text_pair": ["c"]}, {"max_answer_len": 0}, ["from 1 to 512"]),
    ("modern_masks", {"text": ["no mask"]}, {}, ["exactly one [MASK]", "0 of them"]),
    ("modern_masks", {"text": ["[MASK] [MASK]"]}, {}, ["exactly one [MASK]", "2 of them"]),
    ("flags", {"text": ["a"]}, {"top_k": 5}, ["top_k", "from 1 to 4"]),
    ("tags", {"text": ["a"]}, {"aggregation_strategy": "best"}, ["one of none, simple"]),
    ("bart_labels", {"text": ["a"]}, {"candidate_labels": "[bad"}, ["candidate_labels", "JSON"]),
    ("bart_labels", {"text": ["a"]}, {"candidate_labels": ","}, ["must not be empty"]),
    (
        "bart_labels",
        {"text": ["a"]},
        {"candidate_labels": ",".join("abcdefg" * 5)},
        ["1 texts x 35 labels"],
    ),
    ("bart_labels", {"text": ["a"]}, {"hypothesis_template": "{{}} {}"}, ["no {{ or }}"]),
    ("bart_labels", {"text": [""]}, {}, ["`text`", "not be empty"]),
    ("images", {"image": [b""]}, {}, ["image"]),
    ("images", {"image": [image_bytes()[0][:-200]]}, {}, ["image"]),
]


def test_a_bad_request_fails_alone(server: Server) -> None:
    with ThreadPoolExecutor(9) as pool:
        for name, bad, parameters, words in BAD:
            good = {key: values[:1] for key, values in rows_of(name).items()}
            with Client(name, server.grpc_url) as client:
                before = client.infer(good)
                sound = [pool.submit(client.infer, good) for _ in range(4)]
                with pytest.raises(InvalidRequestError) as caught:
                    client.infer(bad, parameters=parameters)
                for one in sound:
                    for output, values in one.result().items():
                        same(values[0], before[output][0])
            for word in words:
                assert word in str(caught.value), (name, parameters)


def test_a_model_that_reads_its_padding_ends_in_one_message(tmp_path: Path) -> None:
    model = save(NO_PADDING, tmp_path / "model")
    folder = write_pipeline("qwen_topics", model, tmp_path / "no_padding")
    with pytest.raises(UserError, match="depends on the padding") as caught:
        build_into(folder, tmp_path / "repository")
    assert caught.value.field == "model.source"
    assert not (tmp_path / "repository").exists()
