"""Architectures with tokenizers of their own kind, built, served and asked: as transformers."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import build_into, traffic_texts
from served_models import (
    MASKS,
    NO_PADDING,
    RANKER,
    SERVED,
    TAGGER,
    TOPICS,
    VECTORS,
    Served,
    save,
)
from task_reference import (
    check_answers,
    check_entities,
    check_hypotheses,
    check_labels,
    same_choices,
)
from tokenizers_of_kinds import LONGEST
from triptych.base.errors import UserError
from triptych.client import Client
from triptych.repository.lint.engine import unsupported

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
    "word " * 300,
    " ".join(traffic_texts()[20:40]),
]
QUERY = "where is my parcel"
CONTEXTS = [" ".join(traffic_texts()[i : i + n]) for i, n in enumerate((1, 3, 8, 16))]
CONTEXTS[1] = "Bücher  und (é) 🙂 — " + CONTEXTS[1]
QUESTIONS = ["Where is my order?", "Who?"] * 2
LABELS = ["billing", "a delivery", "something else"]


def write_pipeline(name: str, served: Served, model: Path, base: Path) -> Path:
    """The folder of the pipeline `name` with its spec and traffic."""
    folder = base / "pipelines" / name
    folder.mkdir(parents=True)
    spec: dict[str, Any] = {
        "task": served.task,
        "model": {"source": str(model)},
        "core": {"layout": served.layout},
    }
    rows: list[dict[str, str]] = [{"text": text} for text in TEXTS]
    if served.task == "zero-shot-classification":
        spec["parameters"] = {"candidate_labels": LABELS}
        rows = rows[:8]
    if served.task == "reranking":
        rows = [{"text": QUERY, "text_pair": text} for text in TEXTS]
    if served.task == "question-answering":
        pairs = zip(QUESTIONS, CONTEXTS, strict=True)
        rows = [{"text": question, "text_pair": context} for question, context in pairs]
    if served.task == "fill-mask":
        rows = [{"text": text} for text in masked()]
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    (folder / "traffic.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def masked() -> list[str]:
    """The texts with a mask within the first tokens; a space is before it, or none."""
    return [f"{text[:30]}{' ' * (i % 2)}[MASK] {text[30:]}" for i, text in enumerate(TEXTS)]


EVERYDAY = (
    "albert_tags",
    "bart_labels",
    "deberta_ranks",
    "modern_masks",
    "qwen_topics",
    "t5_vectors",
)
"""Each task but question answering once; `test_architectures` exports models as the others are."""


def pipelines_of(*tasks: str) -> list[Any]:
    return [
        pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.long)
        for name, served in SERVED.items()
        if served.task in tasks
    ]


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> list[str]:
    """The pipelines of the tests that run."""
    parameters = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function)
        if hasattr(item, "callspec")
    ]
    return sorted({str(one["name"]) for one in parameters if "name" in one})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> dict[str, Path]:
    """Folder of each pipeline's model."""
    base = tmp_path_factory.mktemp("models")
    return {name: save(SERVED[name], base / name) for name in names}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """All of them in one repository."""
    base = tmp_path_factory.mktemp("served")
    for name, model in models.items():
        folder = write_pipeline(name, SERVED[name], model, base)
        built = build_into(folder, base / "repository")
        assert built.not_packed_reason == ""
        assert built.plan.layout == SERVED[name].layout
    return base / "repository"


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Any]:
    from triptych.serving.server import Server

    with Server(repository) as server:
        yield server


@pytest.fixture
def ask(server: Any) -> Callable[[str], Client]:
    """Opens the client of a pipeline."""
    return lambda name: Client(name, server.grpc_url)


@pytest.fixture(scope="module")
def reference(models: dict[str, Path]) -> Callable[[str], Any]:
    """transformers' own pipeline of a model."""
    import transformers

    @functools.cache
    def get(name: str) -> Any:
        task = SERVED[name].task.replace("reranking", "text-classification")
        return transformers.pipeline(task, str(models[name]), device="cpu")

    return get


@pytest.mark.parametrize("name", pipelines_of(TOPICS))
def test_text_classification(ask: Any, reference: Any, name: str) -> None:
    # transformers itself fails where an empty text has no token at all.
    texts = TEXTS if name == "qwen_topics" else ["", *TEXTS]
    with ask(name) as client:
        check_labels(client, reference(name), texts, top_k=3)


@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "max"])
@pytest.mark.parametrize("name", pipelines_of(TAGGER))
def test_token_classification(ask: Any, reference: Any, name: str, aggregation: str) -> None:
    with ask(name) as client:
        check_entities(client, reference(name), TEXTS, aggregation)
        assert client.entities([""], aggregation_strategy=aggregation) == [[]]


@pytest.mark.parametrize("name", pipelines_of(RANKER))
def test_reranking(ask: Any, reference: Any, name: str) -> None:
    with ask(name) as client:
        got = client.rerank(QUERY, TEXTS)
        swapped = client.infer({"text": TEXTS[:4], "text_pair": [QUERY] * 4})["score"]
    pairs = [{"text": QUERY, "text_pair": text} for text in TEXTS]
    pairs += [{"text": text, "text_pair": QUERY} for text in TEXTS[:4]]
    want = np.array([row["score"] for row in reference(name)(pairs, truncation=True)])
    scores = np.array([r.score for r in sorted(got, key=lambda ranked: ranked.index)])
    assert np.abs(scores - want[: len(TEXTS)]).max() <= 1e-4
    assert np.abs(swapped[:, 0] - want[len(TEXTS) :]).max() <= 1e-4
    assert np.ptp(scores) > 0.1
    assert np.abs(swapped[:, 0] - scores[:4]).max() > 1e-3


@pytest.mark.parametrize("name", pipelines_of(MASKS))
def test_fill_mask(ask: Any, reference: Any, name: str) -> None:
    texts = masked()
    with ask(name) as client:
        got = client.fill_mask(texts, top_k=6)
    want = reference(name)(texts, top_k=6, tokenizer_kwargs={"truncation": True})
    for mine, theirs in zip(got, want, strict=True):
        same_choices(mine, theirs, "token_str", cut=True)
    assert len({choices[0].label for choices in got}) > 1


@pytest.mark.parametrize("name", pipelines_of(VECTORS))
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
        got = client.embed(texts)
    assert np.abs(got - want).max() <= 1e-5
    assert np.ptp(want, axis=0).min() > 0.1


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("name", pipelines_of("zero-shot-classification"))
def test_zero_shot_classification(ask: Any, reference: Any, name: str, multi_label: bool) -> None:
    # Texts times labels are more than a batch holds: the client sends fewer at a time.
    labels = [*LABELS, "a return", "an invoice", "a complaint"]
    options: dict[str, Any] = {
        "multi_label": multi_label,
        "hypothesis_template": "This is about {}.",
    }
    with ask(name) as client:
        check_hypotheses(client, reference(name), TEXTS, labels, **options)


@pytest.mark.parametrize("name", ["bart_labels"])
def test_a_head_that_reads_a_mark_is_one_that_tensorrt_takes(repository: Path, name: str) -> None:
    assert unsupported(repository / f"{name}_core/1/model.onnx", 10) == []


@pytest.mark.parametrize("impossible", [False, True])
@pytest.mark.parametrize("name", pipelines_of("question-answering"))
def test_question_answering(ask: Any, models: Any, name: str, impossible: bool) -> None:
    windows: dict[str, Any] = {"impossible": impossible, "window": LONGEST, "stride": LONGEST // 2}
    with ask(name) as client:
        check_answers(client, models[name], QUESTIONS, CONTEXTS, **windows)


def test_a_model_that_reads_its_padding_ends_in_one_message(tmp_path: Path) -> None:
    model = save(NO_PADDING, tmp_path / "model")
    folder = write_pipeline("no_padding", NO_PADDING, model, tmp_path)
    with pytest.raises(UserError, match="depends on the padding") as caught:
        build_into(folder, tmp_path / "repository")
    assert caught.value.field == "model.source"
    assert not (tmp_path / "repository").exists()
