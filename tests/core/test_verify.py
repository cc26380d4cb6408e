"""`triptych verify` on a real tritonserver: what is right passes, what is broken fails by name."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from typer.testing import CliRunner

from tests.support.project import build_into, quiet, traffic_texts, write_pipeline
from tests.support.task_models import tagger, text_classifier
from triptych.base.errors import UserError
from triptych.core.gate.verify import (
    LiveOptions,
    describe_verification,
    verification_data,
    verify_pipeline,
)
from triptych.core.gate_rows import EDGE_TEXTS
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.interface.cli import app
from triptych.repository.records import GateResult
from triptych.serving import endpoint
from triptych.serving.readiness import ServerError
from triptych.serving.server import Server
from triptych.spec.spec import load_spec
from triptych.tasks.accuracy import thresholds
from triptych.tasks.catalog import TASKS

pytestmark = pytest.mark.server
HOOKS = """
def before(rows):
    return [{"text": row["text"].replace("!", " ").replace("ou", "o", 1)} for row in rows]


def after(rows):
    for row in rows:
        row["label"] = [label.upper() for label in row["label"]]
        row["score"] = [round(float(score), 3) for score in row["score"]]
    return rows
"""
DECODE = """
def decode(rows):
    return [
        {"urgency": float(row["scores"][0]), "best": "class %d" % row["scores"].argmax()}
        for row in rows
    ]
"""
SHORT = {"max_length": 16, "truncation": "reject"}
PATIENT = {"queue": {"max_backlog_ms": 600_000}}
"""No request is rejected, however long a machine with other work takes for the ones before it."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    """Small pipelines of several kinds, built into one repository."""
    base = tmp_path_factory.mktemp("verify")
    topics = str(text_classifier(base / "m/topics", minilm_folder, traffic_texts()))
    tags = str(tagger(base / "m/tags", minilm_folder, []))
    classify = {"task": "text-classification", "model": {"source": topics}}
    label = {"task": "token-classification", "model": {"source": tags}}
    outputs = [{"name": "urgency", "dtype": "FP32"}, {"name": "best", "dtype": "BYTES"}]
    custom = {"auto_class": "AutoModelForSequenceClassification", "outputs": outputs}
    specs: dict[str, dict[str, Any]] = {
        **dict.fromkeys(("topics", "mixed", "hooked"), classify),
        "tags": {**label, "tokenizer": SHORT},
        "own": {**classify, "task": "custom", "core": {"layout": "bucketed"}, "custom": custom},
    }
    hooks = {"hooked": HOOKS, "own": DECODE}
    for name, spec in specs.items():
        folder = write_pipeline(base / "p" / name, **spec, serving=PATIENT)
        traffic = (folder / "traffic.jsonl").read_text().splitlines()[:60]
        (folder / "traffic.jsonl").write_text("\n".join(traffic))
        if name in hooks:
            (folder / "hooks.py").write_text(hooks[name])
        build_into(folder, base / "r")
    return base


@pytest.fixture(scope="module")
def url(base: Path) -> Iterator[str]:
    with Server(base / "r") as server:
        yield server.grpc_url


def inputs_of(folder: Path, *overrides: str) -> PipelineInputs:
    return read_inputs(load_spec(folder, overrides), quiet)


def verify(folder: Path, repository: Path, *overrides: str, url: str | None = None) -> GateResult:
    inputs = inputs_of(folder, *overrides)
    server = endpoint.open_endpoint(repository, inputs.plan.spec.name, url, quiet)
    return verify_pipeline(
        inputs, LiveOptions(repository, server, quiet, clients=16, timeout_s=120.0)
    )


def at_the_command_line(base: Path, name: str, *words: str) -> Any:
    words = (name, "--pipelines", str(base / "p"), "-r", str(base / "r"), *words)
    return CliRunner().invoke(app, ["verify", *words])


def counts(result: GateResult) -> Mapping[str, int]:
    assert result.live is not None
    return result.live.counts


def test_every_kind_of_pipeline_passes(base: Path, url: str) -> None:
    kinds = ("topics", "tags", "hooked", "own")
    results = {name: verify(base / "p" / name, base / "r", url=url) for name in kinds}
    for name, result in results.items():
        assert result.failures == (), name
        assert counts(result)["answered"] >= 60, name
        assert result.rows >= 30, name
        assert list(describe_verification(result))[-1] == ("passed", "green"), name
    assert counts(results["tags"])["refused"] >= 3 * 3  # as the spec says
    # Hooks are applied once, and what they hide is said.
    hooked, own = results["hooked"], results["own"]
    # With those up to and about the limit, and [PAD], [UNK], [CLS], [SEP] and [MASK].
    assert hooked.edge_case_rows == len(EDGE_TEXTS) + 5 + 5
    shown = {row.actual for row in hooked.worst}
    assert shown
    assert all(re.fullmatch(r"[A-Z]+ 0\.\d{4}", got) for got in shown), shown
    (alike, *_) = own.verdicts
    assert (alike.metric, alike.value) == ("answers_alike", 1.0)
    assert any("label_agreement" in note and "not measured" in note for note in own.notes)


def test_a_pipeline_passes_at_the_command_line(base: Path, url: str) -> None:
    done = at_the_command_line(base, "topics", "--url", url, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["passed"], result["failures"], result["precision"]) == (True, [], "fp32")
    assert result["counts"] == {"answered": 3 * (result["rows"] + result["edge_case_rows"])}
    figures = {verdict["metric"]: verdict["value"] for verdict in result["verdicts"]}
    assert figures["label_agreement"] == 1.0
    assert figures["batch_sensitivity"] < 1e-5


def copy_of(repository: Path, name: str, target: Path) -> Path:
    """The models of the pipeline `name` alone."""
    for model in sorted(repository.glob(f"{name}*")):
        shutil.copytree(model, target / model.name)
    return target


def scale_a_layer(repository: Path, name: str) -> None:
    """The largest matrix of the core is half as large again."""
    path = repository / f"{name}_core/1/model.onnx"
    model = onnx.load(path)
    read = {node.input[0] for node in model.graph.node if node.op_type == "Gather"}
    matrices = [
        tensor
        for tensor in model.graph.initializer
        if len(tensor.dims) == 2 and tensor.name not in read  # embeddings are looked up
    ]
    largest = max(matrices, key=lambda tensor: np.prod(tensor.dims))
    changed = numpy_helper.to_array(largest) * np.float32(1.5)
    largest.CopyFrom(numpy_helper.from_array(changed, largest.name))
    onnx.save(model, path)


def _replace(path: Path, old: str, new: str, more: str = "") -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new) + more, encoding="utf-8")


def shift_offsets(repository: Path, name: str) -> None:
    """Entities begin one character late."""
    path = repository / f"{name}_postprocess/1/decode_entities.py"
    _replace(path, '"start": start,', '"start": start + 1,')


_MIX = """

_last = []


def _mix(decode, *arguments):
    \"\"\"Give every ninth request the answer of the one before it.\"\"\"
    _last.append(decode(*arguments))
    return _last[-2] if len(_last) % 9 == 0 else _last[-1]
"""


def mix_answers_up(repository: Path, name: str) -> None:
    """Some requests get the answer of another: what a faulty batcher would do."""
    path = repository / f"{name}_postprocess/1/postprocess.py"
    _replace(path, "self.decoder.decode(", "_mix(self.decoder.decode, ", _MIX)


BROKEN: dict[str, tuple[Callable[[Path, str], None], str, str]] = {
    "topics": (scale_a_layer, "max_probability_difference", "max_probability_difference"),
    "tags": (shift_offsets, "entity_f1", "entity_f1"),
    "mixed": (mix_answers_up, "batch_sensitivity", "batch_sensitivity"),
}
"""Pipeline to what is wrong with it, the metric that fails and the words of a failure."""


def test_a_broken_repository_fails_by_the_metrics_name(
    base: Path, url: str, tmp_path: Path
) -> None:
    for name, (break_it, _, _) in BROKEN.items():
        break_it(copy_of(base / "r", name, tmp_path), name)
    with Server(tmp_path) as server:
        for name, (_, metric, words) in BROKEN.items():
            result = verify(base / "p" / name, tmp_path, url=server.grpc_url)
            missed = {verdict.metric for verdict in result.verdicts if not verdict.passed}
            assert metric in missed, name
            assert any(words in failure for failure in result.failures), name
            json.dumps(verification_data(result), allow_nan=False)
        done = at_the_command_line(base, "topics", "--url", server.grpc_url)
    assert done.exit_code == 1
    assert "failed: label_agreement is 0." in done.stdout
    assert "rows with the largest error:" in done.stdout
    # What a spec refuses and the pipeline answers.
    other = verify(base / "p/topics", base / "r", "tokenizer.truncation=reject", url=url)
    assert any("answered, though the spec refuses them" in f for f in other.failures)


def test_mistakes_are_said(base: Path, url: str, tmp_path: Path) -> None:
    done = at_the_command_line(base, "topics", "--url", "127.0.0.1:9")
    assert isinstance(done.exception, UserError)
    assert "127.0.0.1:9: nothing listens there" in str(done.exception)
    with pytest.raises(UserError, match="does not contain the pipeline"):
        verify(base / "p/topics", tmp_path)
    model = {"source": str(base / "m/topics")}
    write_pipeline(tmp_path / "nobody", model=model)
    with pytest.raises(UserError, match="nobody"):
        verify(tmp_path / "nobody", tmp_path, url=url)
    folder = write_pipeline(tmp_path / "tags", model=model)
    with pytest.raises(UserError, match=r"outputs of text-embedding.*Given: entities object \[1\]"):
        verify(folder, tmp_path, url=url)
    server = endpoint.open_endpoint(base / "r", "topics", url, quiet)
    inputs = inputs_of(base / "p/topics")
    with pytest.raises(UserError, match="does not answer requests within 1e-05 s"):
        verify_pipeline(inputs, LiveOptions(base / "r", server, quiet, clients=2, timeout_s=1e-5))


def test_a_server_that_dies_meanwhile_is_named(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers: list[Server] = []

    class Watched(Server):
        def start(self) -> None:
            super().start()
            servers.append(self)

    def kill(stage: str, line: str) -> None:
        if "16 at a time" in line and "last" not in line:
            os.kill(servers[0].pid, signal.SIGKILL)

    monkeypatch.setattr(endpoint, "Server", Watched)
    # A killed server that gets no CPU ends late, and may end after its steps.
    monkeypatch.setattr(endpoint, "_CRASH_WAIT_S", 120.0)
    monkeypatch.setattr("triptych.serving.server._DYING_S", 120.0)
    server = endpoint.open_endpoint(base / "r", "topics", None, quiet)
    inputs = inputs_of(base / "p/topics")
    with pytest.raises(ServerError, match="SIGKILL"):
        verify_pipeline(inputs, LiveOptions(base / "r", server, kill, clients=16, timeout_s=120.0))


def test_the_lock_tells_the_precision_and_what_was_accepted(
    base: Path, url: str, tmp_path: Path
) -> None:
    repository = copy_of(base / "r", "tags", tmp_path / "r")
    path = repository / "tags/triptych.lock.json"
    lock = json.loads(path.read_text())
    lock["gate"] |= {"precision": "int8", "accepted": "known and harmless"}
    path.write_text(json.dumps(lock))
    result = verify(base / "p/tags", repository, url=url)
    limits = {verdict.metric: verdict.limit for verdict in result.verdicts}
    assert limits["entity_f1"] == thresholds(TASKS["token-classification"], "int8", {})["entity_f1"]
    assert limits["entity_f1"] < 1.0
    assert limits["max_difference"] is None
    assert any("known and harmless" in line for line, _ in describe_verification(result))
