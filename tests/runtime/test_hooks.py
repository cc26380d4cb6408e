"""A pipeline's own functions, custom tasks and shared cores, served, and what goes wrong there."""

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.processes import eventually, mark_of
from tests.support.project import build_into, quiet, traffic_texts, write_pipeline
from tests.support.task_models import TAGS, TOPICS, tagger, text_classifier
from triptych.base.errors import UserError
from triptych.building.pipeline_checks import check_pipeline
from triptych.client import Client, InvalidRequestError, PipelineFailedError
from triptych.core.gate.answers import check_hooks, reference_answers
from triptych.core.inputs import read_inputs
from triptych.repository.lint import run_checks
from triptych.runtime.hooking import make_forwarded, read_forwarded
from triptych.runtime.in_flight import InFlight
from triptych.serving.server import Server
from triptych.spec.spec import load_spec

HOOKS = """
import os
import json
import re
import time
from pathlib import Path

SEEN = re.compile(r"<[^>]+>")


def setup(context):
    global LABELS, WORDS
    LABELS, WORDS = context.labels, context.tokenizer.get_vocab()


def before(rows):
    for row in rows:
        if row["text"] in LABELS and row["text"].lower() in WORDS:
            raise ValueError("that is a label")
        if row["text"] == "refuse me":
            raise ValueError("we do not talk about that")
        if row["text"] == "break":
            raise KeyError("missing")
    if any(row["text"] == "lose" for row in rows):
        return rows[:-1]
    if any(row["text"] == "number" for row in rows):
        return [{"text": 5} for row in rows]
    if any(row["text"] == "rename" for row in rows):
        return [{"words": row["text"]} for row in rows]
    return [{"text": SEEN.sub("", row["text"])} for row in rows]


def after(rows, inputs):
    assert len(LABELS) > 1 and "[CLS]" in WORDS
    for row, given in zip(rows, inputs):
        if given["text"] == "forget":
            return None
        if given["text"] == "be slow":
            folder = Path(os.environ["HOOK_FOLDER"])
            (folder / "begun").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)
        if given["text"] == "spell":
            row["label"] = "OTHER"
            return rows
        row["label"] = [label.upper() for label in row["label"]]
        row["score"] = [round(float(score), 2) for score in row["score"]]
        if "refund" in given["text"]:
            row["label"][0] = "REFUND"
    return rows
"""
ENTITIES = """
def after(rows, inputs):
    for row, given in zip(rows, inputs):
        assert all(given["text"][e["start"] : e["end"]] == e["text"] for e in row["entities"])
    return [{"entities": [e for e in row["entities"] if e["entity"] == "PER"]} for row in rows]
"""
SCORES = """
def setup(context):
    global WORDS
    WORDS = context.tokenizer.get_vocab()


def decode(rows):
    assert "[CLS]" in WORDS
    return [
        {
            "urgency": float(row["scores"][0]),
            "reason": "most likely class %d" % row["scores"].argmax(),
            "all": row["scores"],
        }
        for row in rows
    ]
"""
TOKENS = """
import numpy as np


def decode(rows):
    found = []
    for row in rows:
        named = (row["token_scores"].argmax(-1) != 0) & (row["offsets"][:, 1] > 0)
        characters = sum(int(e - s) for s, e in row["offsets"][np.flatnonzero(named)])
        found.append({"share": characters / max(1, len(row["text"]))})
    return found
"""
pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    """Pipelines with hooks, of custom tasks and with a shared core, in one repository."""
    base = tmp_path_factory.mktemp("hooks")
    topics = text_classifier(base / "topics", minilm_folder, traffic_texts())
    tags = {"source": str(tagger(base / "tags", minilm_folder, []))}
    plain = {"task": "text-classification", "model": {"source": str(topics)}}
    urgent = {
        "auto_class": "AutoModelForSequenceClassification",
        "outputs": [
            {"name": "urgency", "dtype": "FP32"},
            {"name": "reason", "dtype": "BYTES"},
            {"name": "all", "dtype": "FP32", "dims": [-1]},
        ],
    }
    shares = {
        "auto_class": "AutoModelForTokenClassification",
        "head_input": "tokens",
        "core_output": "token_scores",
        "outputs": [{"name": "share", "dtype": "FP32"}],
    }
    specs: dict[str, tuple[dict[str, Any], str]] = {
        "plain": (plain, ""),
        "cleaned": ({**plain, "core": {"shared_from": "plain"}}, HOOKS),
        "people": ({"task": "token-classification", "model": tags}, ENTITIES),
        "urgent": ({**plain, "task": "custom", "custom": urgent}, SCORES),
        "shares": ({"task": "custom", "model": tags, "custom": shares}, TOKENS),
    }
    for name, (fields, hooks) in specs.items():
        folder = write_pipeline(base / "p" / name, **fields)
        if hooks:
            (folder / "hooks.py").write_text(hooks)
        build_into(folder, base / "repository")
    return base


@pytest.fixture(scope="module")
def url(base: Path) -> Iterator[str]:
    with Server(base / "repository") as server:
        yield server.grpc_url


def test_hooks_clean_texts_and_map_labels(url: str) -> None:
    text = traffic_texts()[0]
    texts = ["<i>a refund, please", "nothing of the kind", "refund"]
    with Client("plain", url) as plain, Client("cleaned", url) as cleaned:
        want = plain.classify([text], top_k=5)[0]
        got = cleaned.classify([f"<b>{text}</b><br/>"], top_k=5)[0]
        labels = [choices[0].label for choices in cleaned.classify(texts)]
    assert [c.label for c in got] == [c.label.upper() for c in want]
    assert [c.score for c in got] == pytest.approx([round(c.score, 2) for c in want], abs=1e-6)
    assert [label == "REFUND" for label in labels] == [True, False, True]  # `after` sees the texts


def test_after_sees_entities_as_data(url: str) -> None:
    with Client("people", url) as client:
        found = client.entities(traffic_texts()[:40])
    assert {entity.entity for entities in found for entity in entities} == {"PER"}
    assert {tag.partition("-")[2] for tag in TAGS} == {"", "PER", "LOC"}


def test_a_hook_that_fails_fails_one_request_and_names_its_row(url: str) -> None:
    others = ["all is well", "a much longer text, so that the client sorts it first", "all is well"]
    for text, kind, words in (
        ("refuse me", InvalidRequestError, "we do not talk about that"),
        ("break", PipelineFailedError, "hooks.before raised KeyError: 'missing'"),
        ("lose", PipelineFailedError, "hooks.before must return 1 rows, returned 0"),
        ("number", PipelineFailedError, "hooks.before must return str as `text`, not int"),
        ("delivery", InvalidRequestError, "that is a label"),
        ("rename", PipelineFailedError, "hooks.before must return rows with ['text']"),
        ("forget", PipelineFailedError, "hooks.after must return 1 rows, returned NoneType"),
        ("spell", PipelineFailedError, "a row must be a list of str, not str 'OTHER'"),
    ):
        with Client("cleaned", url) as client, ThreadPoolExecutor(9) as pool:
            sound = [pool.submit(client.classify, ["all is well"]) for _ in range(8)]
            with pytest.raises(kind) as caught:
                client.classify([text])
            assert words in str(caught.value)
            assert len({str(answer.result()) for answer in sound}) == 1, text
            if text in ("refuse me", "break"):
                with pytest.raises(kind) as caught:
                    client.classify([*others[:2], text, others[2]])
                assert caught.value.row == 2


def test_a_build_runs_after_and_decode_on_what_the_model_answers(
    tmp_path: Path, base: Path
) -> None:
    """Every rule for hooks is in `tests/data/hooks.yaml`."""
    # Its `setup` knows the model without a build.
    checks = check_pipeline(load_spec(base / "p/cleaned"))
    assert not [check for check in checks if check.severity == "error"], checks
    for name, hooks, words in (
        ("plain", "def after(rows): return rows if len(rows) < 2 else rows[1:]", "at once"),
        (
            "plain",
            "def after(rows): return [{**row, 'score': rows[0]['score']} for row in rows]",
            "depending on the other rows. Given: a different `score`",
        ),
        ("urgent", SCORES.replace("float(row", "str(row"), "elements of type float32"),
    ):
        folder = shutil.copytree(base / "p" / name, tmp_path / name, dirs_exist_ok=True)
        (folder / "hooks.py").write_text(hooks)
        with pytest.raises(UserError, match=re.escape(words)) as caught:
            build_into(folder, tmp_path / "repository")
        assert caught.value.field == str(folder / "hooks.py")
        assert not (tmp_path / "repository").exists()


def test_a_server_that_stops_waits_for_a_slow_hook(base: Path, tmp_path: Path) -> None:
    """The server has no metrics, which steps must do without."""
    environment, options = {"HOOK_FOLDER": str(tmp_path)}, ["--allow-metrics=false"]
    with (
        Server(
            base / "repository", models=["cleaned"], environment=environment, extra_args=options
        ) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        (counts,) = InFlight.of_server(server.pid, mark_of(server.pid))
        with Client("cleaned", server.grpc_url, retry=None) as client:
            answer = pool.submit(client.classify, ["be slow"])
            assert eventually((tmp_path / "begun").exists)
            stopped = pool.submit(server.stop)
            assert eventually(lambda: counts.closed_at > 0)
            (tmp_path / "go").touch()
            (labels,) = answer.result(timeout=300)
            stopped.result(timeout=300)
    assert all(label.label.isupper() for label in labels)


def test_hooks_may_refuse_made_up_rows_in_a_build(tmp_path: Path, base: Path) -> None:
    folder = shutil.copytree(base / "p/plain", tmp_path / "plain")
    (folder / "hooks.py").write_text(
        "def after(rows, inputs):\n    if any(not row['text'].strip() for row in inputs):\n"
        "        raise ValueError('nothing was asked')\n    return rows\n"
    )
    inputs = read_inputs(load_spec(folder), quiet)
    check_hooks(inputs, quiet)
    refused = [answer.refusal for answer in reference_answers(inputs, quiet) if answer.refusal]
    assert len(refused) >= 2
    assert all("nothing was asked" in refusal for refusal in refused)


def test_inputs_go_past_a_core_of_more_rows_than_the_request() -> None:
    columns: dict[str, list[Any]] = {"text": ["Käse", ""], "image": [b"\xff\0", b""]}
    tensors = make_forwarded(columns, 5)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "forwarded_text": (5, 1),
        "forwarded_image": (5, 1),
    }
    read = {name: tensors[f"forwarded_{name}"].ravel().tolist() for name in columns}
    assert read_forwarded(read, {"text": "text", "image": "image"}, 2) == [
        {"text": "Käse", "image": b"\xff\0"},
        {"text": "", "image": b""},
    ]


def test_a_custom_task_makes_its_own_outputs_of_scores_or_tokens(url: str) -> None:
    texts = traffic_texts()[:20]
    with Client("urgent", url) as custom, Client("plain", url) as plain:
        outputs = custom.infer({"text": texts})
        choices = plain.classify(texts, top_k=5)
    assert outputs["all"].shape == (20, 5)
    for row, best in enumerate(choices):
        by_label = {choice.label: choice.score for choice in best}
        scores = [by_label[topic] for topic in TOPICS]
        assert np.abs(outputs["all"][row] - scores).max() < 1e-5
        assert abs(outputs["urgency"][row, 0] - scores[0]) < 1e-5
        assert outputs["reason"][row, 0] == f"most likely class {np.argmax(scores)}"
    with Client("shares", url) as client:
        shares = client.infer({"text": traffic_texts()[:30]})["share"]
    assert shares.shape == (30, 1)
    assert 0 <= shares.min() < shares.max() <= 1


def test_a_core_of_another_kind_is_not_shared(base: Path) -> None:
    folder = shutil.copytree(base / "p/people", base / "p/wrong")
    before = {path: path.stat().st_mtime_ns for path in (base / "repository").rglob("*")}
    for pipeline, setting, said in (
        ("wrong", "core.shared_from=plain", "another model, task head"),
        ("wrong", "core.shared_from=nothing", "is not built into"),
        ("wrong", "core.shared_from=cleaned", "without its own core"),
        ("plain", "core.shared_from=plain", r"core\.share"),
        ("cleaned", "core.max_batch_size=64", "greater than that of the shared core, 32"),
        ("plain", "core.layout=bucketed", "cleaned uses it, and it would change"),
    ):
        with pytest.raises(UserError, match=said):
            build_into(folder.with_name(pipeline), base / "repository", setting)
    assert before == {path: path.stat().st_mtime_ns for path in (base / "repository").rglob("*")}


def test_a_core_given_up_for_a_shared_one_goes_and_lint_sees_another_one(
    tmp_path: Path, base: Path
) -> None:
    one, other = (
        base / f"repository/{name}_preprocess/1/tokenizer.json" for name in ("plain", "urgent")
    )
    assert one.stat().st_ino == other.stat().st_ino
    repository = shutil.copytree(base / "repository", tmp_path / "repository")
    assert [f for f in run_checks(repository) if f.severity != "info"] == []
    build_into(base / "p/cleaned", repository, "core.shared_from=null")
    assert (repository / "cleaned_core/1/model.onnx").is_file()
    changed = build_into(base / "p/cleaned", repository).changed
    assert "cleaned_core" in changed
    assert not (repository / "cleaned_core").exists()
    assert [f for f in run_checks(repository) if f.id == "shared-core"] == []
    build_into(base / "p/plain", repository, "core.layout=bucketed", built_after=["cleaned"])
    found = [f for f in run_checks(repository) if f.id == "shared-core"]
    assert [(f.severity, f.file) for f in found] == [("error", "cleaned/triptych.lock.json")]


def test_fields_that_do_not_fit_the_task_are_refused(base: Path) -> None:
    output = {"auto_class": "AutoModel", "outputs": [{"name": "a", "dtype": "FP32"}]}
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"task": "custom"}, "is required for task: custom"),
        ({"custom": output}, "custom"),
        ({"parameters": {"top_k": 9}}, "from 1 to 5"),
        ({"parameters": {"topk": 1}}, "not known"),
    )
    for number, (fields, words) in enumerate(cases):
        plain = json.loads((base / "p/plain/pipeline.yaml").read_text())
        folder = write_pipeline(base / f"p/misfit{number}", **{**plain, **fields})
        with pytest.raises(UserError, match=words):
            read_inputs(load_spec(folder), quiet)
