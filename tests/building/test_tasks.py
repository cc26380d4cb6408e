"""Every task on a real tritonserver, in one layout or both: equal to transformers' pipelines."""

import io
import json
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from conftest import LAYOUTS, ROOT, build_into, traffic_texts
from task_models import MODELS
from task_reference import (
    check_answers,
    check_entities,
    check_hypotheses,
    check_labels,
    image_bytes,
    same_choices,
)
from triptych.client import Client, InvalidRequestError
from triptych.container.health import QUESTION_FILE, HealthCheck
from triptych.container.manifests import find_pipelines
from triptych.interface.page.demo import answer, open_pipeline
from triptych.spec.spec import load_spec

pytestmark = pytest.mark.server
TEXTS = [
    *traffic_texts()[:40],
    "Anna Müller wohnt in Köln, Straße 5.",
    "Dr. O'Neil-Smith (NYC) paid $5.99 — twice!",
    "漢字かな交じり文 and 🙂 emoji",
    "x",
    "word " * 700,
]
PASSAGES = traffic_texts()[40:80]
CONTEXTS = [" ".join(traffic_texts()[i : i + n]) for i, n in enumerate((1, 3, 8, 20, 40, 60))]
QUESTIONS = ["Where is my order?", "Who?", "What happened to the parcel that I sent back?"] * 2
LABELS = ["billing", "a delivery", "something else"]
BUILT = {
    "topics": ("packed",),
    "flags": ("bucketed",),
    "tags": LAYOUTS,
    "answers": ("bucketed",),
    "ranks": ("bucketed",),
    "masks": ("packed",),
    "hypotheses": ("bucketed",),
}
"""Layouts of each pipeline. A packed export takes 7 s, a bucketed one 3 s: test_architectures has
those of every head in both layouts, test_served_architectures serves each task in the other."""
NAMES = [f"{name}_{layout}" for name, layouts in BUILT.items() for layout in layouts]


def traffic_of(task: str, folder: Path) -> list[dict[str, Any]]:
    """Traffic of a task: its inputs."""
    if task == "image-classification":
        rows = []
        for number, data in enumerate(image_bytes()):
            (folder / f"{number}.img").write_bytes(data)
            rows.append({"image": f"{number}.img"})
        return rows
    if task == "question-answering":
        return [
            {"text": q, "text_pair": c} for q, c in zip(QUESTIONS * 3, CONTEXTS * 3, strict=True)
        ]
    if task == "reranking":
        return [{"text": "refund", "text_pair": text} for text in TEXTS]
    if task == "fill-mask":
        return [{"text": f"[MASK] {text}"} for text in TEXTS]
    return [{"text": text} for text in TEXTS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> dict[str, Path]:
    """Folder of each pipeline's model."""
    base = tmp_path_factory.mktemp("models")
    return {
        name: make(base / name, minilm_folder, traffic_texts())
        for name, (_, make) in MODELS.items()
    }


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """All of them in one repository."""
    base = tmp_path_factory.mktemp("tasks")
    for pipeline in [*NAMES, "images"]:
        name, _, layout = pipeline.partition("_")
        task = MODELS[name][0]
        folder = base / "pipelines" / pipeline
        folder.mkdir(parents=True)
        spec: dict[str, Any] = {"task": task, "model": {"source": str(models[name])}}
        if layout:
            spec["core"] = {"layout": layout}
        if task == "zero-shot-classification":
            spec["parameters"] = {"candidate_labels": LABELS}
        if name == "tags" and layout == "bucketed":
            spec["parameters"] = {"aggregation_strategy": "average"}
        (folder / "pipeline.yaml").write_text(json.dumps(spec))
        rows = traffic_of(task, folder)
        (folder / "traffic.jsonl").write_text("\n".join(map(json.dumps, rows)))
        built = build_into(folder, base / "repository")
        assert built.plan.layout == (layout or "fixed")
        assert built.not_packed_reason == ""
    return base / "repository"


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Any]:
    from triptych.serving.server import Server

    with Server(repository) as server:
        yield server


@pytest.fixture(scope="module")
def reference(models: dict[str, Path]) -> Callable[..., Any]:
    """transformers' own pipeline of a model."""
    import transformers

    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            task = MODELS[name][0].replace("reranking", "text-classification")
            made[name] = transformers.pipeline(task, str(models[name]), device="cpu")
        return made[name]

    return get


@pytest.fixture
def ask(server: Any) -> Callable[[str], Client]:
    """Opens the client of a pipeline in the first layout it is built in."""
    return lambda name: Client(f"{name}_{BUILT[name][0]}", server.grpc_url)


def test_every_task_answers_the_health_check(repository: Path, server: Any) -> None:
    pipelines = find_pipelines(repository)
    assert len(pipelines) == len(NAMES) + 1
    assert all((repository / p.name / QUESTION_FILE).is_file() for p in pipelines)
    assert HealthCheck(pipelines).find_fault(f"http://{server.http_url}") is None


def close(a: Any, b: Any, tolerance: float = 1e-4) -> bool:
    return bool(np.abs(np.asarray(a) - np.asarray(b)).max() <= tolerance)


def test_text_classification(ask: Any, reference: Any) -> None:
    with ask("topics") as client:
        got = check_labels(client, reference("topics"), TEXTS, top_k=5)
        best = client.classify(TEXTS)
    for mine, (first,) in zip(got, best, strict=True):
        assert first.label == mine[0].label
        assert abs(first.score - mine[0].score) < 1e-5


def test_several_labels_at_once(ask: Any, reference: Any) -> None:
    with ask("flags") as client:
        got = check_labels(client, reference("flags"), TEXTS, top_k=4)
    assert any(sum(choice.score for choice in choices) > 1.01 for choices in got)


@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "max", "average"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_classification(server: Any, reference: Any, layout: str, aggregation: Any) -> None:
    with Client(f"tags_{layout}", server.grpc_url) as client:
        if (aggregation, layout) == ("average", "packed"):
            with pytest.raises(InvalidRequestError, match="aggregation_strategy: average"):
                client.entities(TEXTS[:1], aggregation_strategy=aggregation)
        else:
            check_entities(client, reference("tags"), TEXTS, aggregation)


@pytest.mark.parametrize("impossible", [False, True])
def test_question_answering(ask: Any, models: Any, impossible: bool) -> None:
    windows: dict[str, Any] = {"impossible": impossible, "window": 384, "stride": 128}
    with ask("answers") as client:
        check_answers(client, models["answers"], QUESTIONS, CONTEXTS, **windows)


def test_reranking(ask: Any, reference: Any) -> None:
    with ask("ranks") as client:
        got = client.rerank("where is my parcel", PASSAGES)
    pairs = [{"text": "where is my parcel", "text_pair": passage} for passage in PASSAGES]
    want = [row["score"] for row in reference("ranks")(pairs)]
    assert close([want[ranked.index] for ranked in got], [ranked.score for ranked in got])
    assert [ranked.score for ranked in got] == sorted((r.score for r in got), reverse=True)
    assert sorted(ranked.index for ranked in got) == list(range(len(PASSAGES)))


def test_fill_mask(ask: Any, reference: Any) -> None:
    texts = [f"{text[:60]} [MASK] {text[60:400]}" for text in TEXTS[:-1]]
    with ask("masks") as client:
        got = client.fill_mask(texts, top_k=5)
    want = reference("masks")(texts, top_k=5)
    for mine, theirs in zip(got, want, strict=True):
        assert close([c.score for c in mine], [t["score"] for t in theirs])
        assert {c.label for c in mine[:3]} <= {t["token_str"] for t in theirs}


@pytest.mark.parametrize("multi_label", [False, True])
def test_zero_shot_classification(ask: Any, reference: Any, multi_label: bool) -> None:
    texts = [*TEXTS[:12], " \t\n "]
    options: dict[str, Any] = {"multi_label": multi_label}
    options["hypothesis_template"] = "This text is about {}."
    with ask("hypotheses") as client:
        for labels in (LABELS, LABELS[:1], ["a", "b", "c", "d", "e"]):
            check_hypotheses(client, reference("hypotheses"), texts, labels, **options)
        default = client.infer({"text": texts[:2]})
    assert default["label"].shape == (2, len(LABELS))


def test_image_classification(server: Any, reference: Any) -> None:
    from PIL import Image

    images = image_bytes()
    with Client("images", server.grpc_url) as client:
        got = client.classify_images(images, top_k=7)
    want = reference("images")([Image.open(io.BytesIO(data)) for data in images], top_k=7)
    for mine, theirs in zip(got, want, strict=True):
        same_choices(mine, theirs)
    assert len({choices[0].label for choices in got}) > 1


def test_an_image_is_sent_over_http_as_documented(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "pipelines/clients.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(import json\nimport struct.*?)```", text, re.DOTALL)
    (tmp_path / "red.png").write_bytes(image_bytes()[0])
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
    with Client("images", server.grpc_url) as client:
        (choices,) = client.classify_images(image_bytes()[:1], top_k=3)
    assert printed["label"] == [choice.label for choice in choices]
    assert np.allclose(printed["score"], [choice.score for choice in choices])


def rows_of(pipeline: str) -> dict[str, list[Any]]:
    """Some rows for a pipeline, of very different lengths."""
    name = pipeline.partition("_")[0]
    texts = TEXTS[:24]
    if name == "images":
        return {"image": image_bytes()}
    if name == "answers":
        return {"text": QUESTIONS, "text_pair": CONTEXTS}
    if name == "ranks":
        return {"text": texts, "text_pair": PASSAGES[:24]}
    if name == "masks":
        return {"text": [f"[MASK] {text}" for text in texts]}
    return {"text": texts}


@pytest.mark.parametrize("pipeline", [*NAMES, "images"])
def test_a_result_does_not_depend_on_its_neighbors(server: Any, pipeline: str) -> None:
    rows = rows_of(pipeline)
    count = len(next(iter(rows.values())))
    order = list(range(count))
    random.Random(0).shuffle(order)
    with Client(pipeline, server.grpc_url) as client, ThreadPoolExecutor(16) as pool:
        together = client.infer(rows)
        shuffled = client.infer({key: [v[i] for i in order] for key, v in rows.items()})

        def alone(index: int) -> Any:
            return client.infer({key: [values[index]] for key, values in rows.items()})

        beside = list(pool.map(alone, range(count)))
    for name, values in together.items():
        for place, index in enumerate(order):
            same(values[index], shuffled[name][place])
            same(values[index], beside[index][name][0])


OPTIONS: dict[str, dict[str, Any]] = {
    "topics_packed": {"top_k": 2},
    "tags_bucketed": {"aggregation_strategy": "first"},
    "answers_bucketed": {"max_answer_len": 3, "handle_impossible_answer": True},
    "masks_packed": {"top_k": 3},
    "hypotheses_bucketed": {
        "candidate_labels": ["food", "a trip"],
        "multi_label": True,
        "hypothesis_template": "It is about {}.",
    },
    "images": {"top_k": 2},
}


def test_options_are_input_tensors_as_well(server: Any) -> None:
    with triton.InferenceServerClient(server.grpc_url) as raw:
        for pipeline, options in OPTIONS.items():
            rows = {name: values[:3] for name, values in rows_of(pipeline).items()}
            if pipeline == "hypotheses_bucketed":  # windows and labels make rows of the core
                rows = {"text": ["a short text", "another"]}
            with Client(pipeline, server.grpc_url) as client:
                sent = {k: json.dumps(v) if isinstance(v, list) else v for k, v in options.items()}
                expected, plain = client.infer(rows, parameters=sent), client.infer(rows)
            count = len(next(iter(rows.values())))
            columns = {name: [[value] for value in values] for name, values in rows.items()}
            for name, value in options.items():
                columns[name] = [value if isinstance(value, list) else [value]] * count
            inputs = [input_tensor(name, values) for name, values in columns.items()]
            answer = raw.infer(pipeline, inputs, client_timeout=60)
            for name, values in expected.items():
                assert answer.as_numpy(name).shape == values.shape, (pipeline, name)
                same(answer.as_numpy(name), values)
            if pipeline != "tags_bucketed":  # random weights: the words may be the same
                assert any(
                    values.shape != plain[name].shape or (values != plain[name]).any()
                    for name, values in expected.items()
                ), pipeline


def input_tensor(name: str, rows: list[list[Any]]) -> Any:
    """An input of Triton's own client, [rows, …]."""
    kinds = {bool: ("BOOL", np.bool_), int: ("INT32", np.int32)}
    datatype, dtype = kinds.get(type(rows[0][0]), ("BYTES", np.object_))
    data = np.array([[v.encode() if isinstance(v, str) else v for v in row] for row in rows], dtype)
    tensor = triton.InferInput(name, list(data.shape), datatype)
    tensor.set_data_from_numpy(data)
    return tensor


def same(a: Any, b: Any) -> None:
    if a.dtype != object:
        assert close(a, b, 1e-5)
        return
    for one, two in zip(a.ravel(), b.ravel(), strict=True):
        if one[:1] != b"[":
            assert one == two
            continue
        first, second = json.loads(one), json.loads(two)
        assert [(e["start"], e["end"]) for e in first] == [(e["start"], e["end"]) for e in second]
        assert not first or close([e["score"] for e in first], [e["score"] for e in second], 1e-5)


BAD: list[tuple[str, dict[str, list[Any]], dict[str, Any], list[str]]] = [
    ("ranks", {"text": ["a"], "text_pair": [" "]}, {}, ["text_pair", "not be empty"]),
    ("ranks", {"text": [""], "text_pair": ["b"]}, {}, ["`text`", "not be empty"]),
    ("answers", {"text": ["q"], "text_pair": [""]}, {}, ["text_pair", "not be empty"]),
    ("answers", {"text": [""], "text_pair": ["c"]}, {}, ["`text`", "not be empty"]),
    ("answers", {"text": ["q " * 400], "text_pair": ["c"]}, {}, ["question", "tokens"]),
    ("answers", {"text": ["q"], "text_pair": ["c " * 20000]}, {}, ["32 rows of the model"]),
    ("answers", {"text": ["q"], "text_pair": ["c"]}, {"max_answer_len": 0}, ["from 1 to 512"]),
    ("masks", {"text": ["no mask"]}, {}, ["exactly one [MASK]", "0 of them"]),
    ("masks", {"text": ["[MASK] [MASK]"]}, {}, ["exactly one [MASK]", "2 of them"]),
    ("masks", {"text": ["[MASK]"]}, {"top_k": 65}, ["top_k", "from 1 to 64"]),
    ("topics", {"text": ["a"]}, {"top_k": 6}, ["top_k", "from 1 to 5"]),
    ("topics", {"text": ["a"]}, {"topk": 1}, ["topk", "not known", "top_k"]),
    ("topics", {"text": [b"\xff"]}, {}, ["valid UTF-8"]),
    (
        "tags",
        {"text": ["a"]},
        {"aggregation_strategy": "best"},
        ["aggregation_strategy", "one of none, simple"],
    ),
    ("hypotheses", {"text": ["a"]}, {"labels": "[1]"}, ["candidate_labels", "JSON list"]),
    ("hypotheses", {"text": ["a"]}, {"candidate_labels": "[bad"}, ["candidate_labels", "JSON"]),
    (
        "hypotheses",
        {"text": ["a"]},
        {"candidate_labels": ","},
        ["candidate_labels", "must not be empty"],
    ),
    (
        "hypotheses",
        {"text": ["a"]},
        {"candidate_labels": ",".join("abcdefg" * 5)},
        ["1 texts x 35 labels"],
    ),
    ("hypotheses", {"text": ["a"]}, {"hypothesis_template": "no place"}, ["{}"]),
    ("hypotheses", {"text": ["a"]}, {"hypothesis_template": "{{}} {}"}, ["no {{ or }}"]),
    ("hypotheses", {"text": [""]}, {}, ["`text`", "not be empty"]),
    ("hypotheses", {"text": ["a"]}, {"multi_label": 1}, ["multi_label", "true or false"]),
    ("images", {"image": [b"no image"]}, {}, ["image"]),
    ("images", {"image": [b""]}, {}, ["image"]),
    ("images", {"image": [image_bytes()[0][:-200]]}, {}, ["image"]),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_a_bad_request_fails_alone(server: Any, case: int) -> None:
    name, bad, parameters, words = BAD[case]
    pipeline = name if name == "images" else f"{name}_{BUILT[name][case % len(BUILT[name])]}"
    good = {key: values[:1] for key, values in rows_of(pipeline).items()}
    with Client(pipeline, server.grpc_url) as client, ThreadPoolExecutor(9) as pool:
        before = client.infer(good)
        sound = [pool.submit(client.infer, good) for _ in range(8)]
        with pytest.raises(InvalidRequestError) as caught:
            client.infer(bad, parameters=parameters)
        for answer in sound:
            for key, values in answer.result().items():
                same(values[0], before[key][0])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("pipeline", [*NAMES, "images"])
def test_the_demo_page_shows_the_answer_of_an_example(
    server: Any, repository: Path, pipeline: str
) -> None:
    folder = repository.parent / "pipelines" / pipeline
    page = open_pipeline(load_spec(folder), folder, repository, server.grpc_url, 120.0)
    first = page.form.first_values(page.examples[0])
    sent = {name: b"" if name == "image" else text.encode() for name, text in first.items()}
    status, html = answer(page, {**sent, "example": b"0"})
    page.client.close()
    assert status == 200, html
    kind = page.form.view.kind
    wanted = {
        "choices": "<meter",
        "entities": "<mark ",
        "answer": "<mark ",
        "outputs": "<dt>score</dt>",
    }
    assert wanted[kind] in html, html
    assert f"{pipeline}_core</th>" in html
    assert ('src="data:' in html) == (pipeline == "images")
