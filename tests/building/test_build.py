"""`build`: cached, atomic, reproducible, and nothing written unless every check passed."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.support.builds import build
from tests.support.killed_commits import tree
from tests.support.mistakes import check_refused, refusal
from tests.support.project import (
    build_into,
    lock_data,
    quiet,
    traffic_texts,
    write_pipeline,
)
from tests.support.scaffolding import keep_rows
from triptych.base.errors import UserError
from triptych.core.gate.cached import GateFailure
from triptych.core.gate.runs import write_warm_ups
from triptych.core.inputs import read_inputs
from triptych.repository import store
from triptych.repository.manifest import MANIFEST_FILE
from triptych.repository.store import locked
from triptych.spec.spec import load_spec
from triptych.tasks.accuracy import metrics_of
from triptych.tasks.catalog import TASKS


@pytest.fixture
def tiny(tmp_path: Path, tiny_model: Path) -> Path:
    """A pipeline on the tiny model."""
    model = {"source": str(tiny_model)}
    return keep_rows(write_pipeline(tmp_path / "pipelines/tiny", model=model), 50)


def test_a_core_that_fails_on_its_warm_ups_is_refused(tiny: Path, tmp_path: Path) -> None:
    graph = tmp_path / "model.onnx"
    for compute, given in (
        ("z = Sub(f, f) y = Div(z, z)", "not a number"),
        ("g = Gather(f, n) y = ReduceSum(g)", "out of"),
    ):
        text = f"""<ir_version: 8, opset_import: ["" : 18]>
        g (int32[T] input_ids, int32[B, 1] row_length, int32[B, 1] row_offset,
          int32[B] row_stride) => (float[B, 1] y)
        {{ n = Mul(row_length, row_length) f = Cast<to: int = 1>(row_length) {compute} }}"""
        onnx.save(onnx.parser.parse_model(text), graph)
        inputs = read_inputs(load_spec(tiny), quiet)
        with pytest.raises(UserError, match=f"fails on the warm-up of .*{given}"):
            write_warm_ups(inputs, graph, {"model.onnx": compute}, quiet)


def test_a_second_build_does_no_work_and_another_spec_only_its_own(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_WAIT_S", 0.0)
    repository = tmp_path / "repository"
    assert len(build_into(tiny, repository).changed) == 4
    lock = lock_data(repository, "tiny")
    assert set(lock["versions"]) >= {"torch", "transformers", "onnx"}
    gate = lock["gate"]
    assert len(gate["row_differences"]) == gate["rows"] + gate["edge_case_rows"]
    assert (lock["schema"], gate["failures"], "accepted" in gate) == (5, [], False)
    assert {verdict["metric"] for verdict in gate["verdicts"]} == set(
        metrics_of(TASKS["text-embedding"])
    )
    assert str(Path.cwd()) not in json.dumps(lock)
    # Byte code of a step that was served is no change.
    (repository / "tiny_preprocess/1/__pycache__").mkdir()
    (repository / "tiny_preprocess/1/__pycache__/model.cpython-311.pyc").write_bytes(b"x")
    before = {path: path.stat() for path in repository.rglob("*")}
    lines: list[str] = []
    inputs = read_inputs(load_spec(tiny), quiet)
    again = build(inputs, repository, lambda stage, line: lines.append(stage + line))
    assert again.changed == ()
    assert sum("(cached)" in line for line in lines) == 3
    after = {path: path.stat() for path in repository.rglob("*")}
    assert {p: (s.st_ino, s.st_mtime_ns) for p, s in before.items()} == {
        p: (s.st_ino, s.st_mtime_ns) for p, s in after.items()
    }
    changed = build_into(tiny, repository, "serving.instances.postprocess=2").changed
    assert changed == ("tiny", "tiny_postprocess")  # the lock in `tiny` records the spec
    files = tree(repository)
    with locked(repository), pytest.raises(UserError, match="another build"):
        build_into(tiny, repository, "serving.instances.postprocess=1")
    build_into(Path(shutil.copytree(tiny, tiny.parent / "other")), repository)
    both = tree(repository)
    assert {path: both[path] for path in files} == files
    # A number that the spec sets has no plans for other machines.
    plans = [path for path in both if path.startswith("other_postprocess/configs/")]
    assert plans
    assert len(both) == 2 * len(files) + len(plans) - 1  # no byte code


def test_a_verdict_holds_for_the_bytes_that_were_judged(tiny: Path, tmp_path: Path) -> None:
    """A core that another pipeline shares lies in the repository, where no cache watches it."""
    repository = tmp_path / "r"
    guest = Path(shutil.copytree(tiny, tiny.parent / "guest"))
    build_into(tiny, repository)
    build_into(guest, repository, "core.shared_from=tiny")
    with (repository / "tiny_core/1/model.onnx").open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(size // 8)
        file.write(bytes(size // 8))
    with pytest.raises(GateFailure, match="differs from the reference"):
        build_into(guest, repository, "core.shared_from=tiny")


@pytest.mark.long
def test_two_cold_builds_give_the_same_bytes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = []
    for run in ("one", "two"):
        monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / run / "cache"))
        build_into(tiny, tmp_path / run / "repository")
        files = tree(tmp_path / run / "repository")
        lock = json.loads(files.pop(f"tiny/{MANIFEST_FILE}"))
        lock.pop("built_at")
        trees.append((files, lock))
    assert trees[0] == trees[1]


def test_a_failed_gate_writes_nothing_and_is_run_again(tiny: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    build_into(tiny, repository)
    before = tree(repository)
    lines: list[str] = []
    spec = load_spec(tiny, ["accuracy.max_difference=1e-12", "core.layout=bucketed"])
    for _ in range(2):
        with pytest.raises(GateFailure, match="differs from the reference") as caught:
            build(read_inputs(spec, quiet), repository, lambda *line: lines.append(" ".join(line)))
        assert caught.value.gate.worst[0].difference > 1e-12
        assert tree(repository) == before
    assert sum("requests against PyTorch" in line for line in lines) == 2
    assert not any("gate" in line and "(cached)" in line for line in lines)


def test_a_failed_gate_may_be_accepted_and_labeled_rows_are_judged(
    tiny: Path, tmp_path: Path
) -> None:
    texts = traffic_texts()
    rows = [
        {"text": texts[i], "text_pair": texts[i + 1], "score": score}
        for i, score in enumerate([0.9, 0.1, 0.5, 0.3, 0.7])
    ]
    (tiny / "eval.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = load_spec(tiny, ["accuracy.max_difference=1e-12"])
    built = build(read_inputs(spec, quiet), tmp_path / "r", quiet, accept="only for a trial")
    assert [f.id for f in built.findings if f.severity == "warning"] == ["gate-accepted"]
    lock = lock_data(tmp_path / "r", "tiny")
    assert lock["gate"]["accepted"] == "only for a trial"
    assert "differs from the reference" in lock["gate"]["failures"][0]
    found = built.gate.labeled
    assert found is not None
    assert (found.metric, found.rows, found.difference) == ("similarity_correlation", 5, 0)
    assert found.candidate == found.reference
    # Without labeled rows the build passes, and is no exception, whatever would be accepted.
    (tiny / "eval.jsonl").unlink()
    build(read_inputs(load_spec(tiny), quiet), tmp_path / "r", quiet, accept="only for a trial")
    assert "accepted" not in lock_data(tmp_path / "r", "tiny")["gate"]


MISTAKES: list[tuple[dict[str, Any], str, str, str]] = [
    ({}, "def before(rows):\n    return [{'text': 5} for _ in rows]\n", "", "hooks.before"),
    ({}, "", "[" * 100000, "traffic.jsonl"),
    ({"parameters": {"top-k": 3}}, "", "", "parameters"),
    ({"tokenizer": {"max_length": 513}}, "", "", "tokenizer.max_length"),
    ({"accuracy": {"entity_f1": 0.9}}, "", "", "accuracy.entity_f1"),
]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    from tests.support.task_models import text_classifier  # imports torch, which pure tests cannot

    return text_classifier(tmp_path_factory.mktemp("model"), minilm_folder, traffic_texts())


def write_small(folder: Path, model: Path, **fields: Any) -> Path:
    """A pipeline of the classifier with three rows of traffic."""
    fields = {"task": "text-classification", **fields}
    return keep_rows(write_pipeline(folder, model={"source": str(model)}, **fields), 3)


@pytest.mark.build
def test_a_mistake_is_named_and_writes_nothing(tmp_path: Path, classifier: Path) -> None:
    for number, (fields, hooks, traffic, field) in enumerate(MISTAKES):
        folder = write_small(tmp_path / f"mistaken{number}", classifier, **fields)
        if hooks:
            (folder / "hooks.py").write_text(hooks)
        if traffic:
            (folder / "traffic.jsonl").write_text(traffic)
        check_refused(field, build_into, folder, tmp_path / "repository")
        assert not (tmp_path / "repository").exists()


@pytest.mark.build
def test_what_others_use_is_not_taken_away(tmp_path: Path, classifier: Path) -> None:
    """`test_hooks` refuses changes of a shared core."""
    repository = tmp_path / "repository"
    for name, core in (("owner", {}), ("user", {"shared_from": "owner"}), ("third", {})):
        build_into(write_small(tmp_path / name, classifier, core=core), repository)
    before = tree(repository)
    for number, (name, core) in enumerate(
        (
            ("owner", {"shared_from": "owner"}),
            ("owner", {"shared_from": "third"}),
            ("owner_preprocess", {}),  # named like a step of another pipeline
        )
    ):
        folder = write_small(tmp_path / f"{number}" / name, classifier, core=core)
        refusal(build_into, folder, repository)
        assert tree(repository) == before, (name, core)
