"""The gate's rows: how the traffic is split, and that the made-up ones are what they say."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conftest import quiet, write_pipeline
from task_models import MODELS
from task_pipelines import write_task
from task_reference import image_bytes
from triptych.base.tensors import TokenRow
from triptych.core import gate_rows
from triptych.core.gate.reference import reference_of
from triptych.core.gate_rows import GATE_ROWS, probe_texts, split_traffic
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.requests import GateRequest, hash_requests, rows_of
from triptych.interface.cli.plan_text import describe_plan
from triptych.runtime.row_metadata import unpack_metadata
from triptych.spec.spec import load_spec
from triptych.spec.tuned import Tuned, write_tuned

pytestmark = pytest.mark.build

TEXT_TASKS = [name for name in MODELS if name not in ("images", "flags")]


@pytest.fixture(scope="module")
def inputs(
    tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path
) -> dict[str, PipelineInputs]:
    base = tmp_path_factory.mktemp("rows")
    return {
        name: read_inputs(load_spec(write_task(base, name, minilm_folder)), quiet)
        for name in TEXT_TASKS
    }


def texts(count: int) -> list[dict[str, str]]:
    return [{"text": f"text {i}"} for i in range(count)]


def test_two_thirds_decide_and_the_rest_is_for_calibration() -> None:
    gate, calibration = split_traffic(texts(300))
    assert sorted([*gate, *calibration]) == list(range(300))
    assert 170 < len(gate) < 230
    assert gate == sorted(gate)
    # Of much traffic a part decides, and of one row that one.
    gate, calibration = split_traffic(texts(3000))
    assert len(gate) == GATE_ROWS
    assert 800 < len(calibration) < 1200
    for number in range(6):
        assert split_traffic([{"text": f"only {number}"}]) == ([0], [])


def test_a_row_stays_on_its_side_and_equal_rows_are_on_one() -> None:
    rows = texts(200)
    side = {rows[place]["text"] for place in split_traffic(rows)[0]}
    more = [*texts(300), *rows]
    random.Random(1).shuffle(more)
    gate, calibration = split_traffic(more)
    chosen = [more[place]["text"] for place in gate]
    assert len(set(chosen)) == len(chosen)
    assert {text for text in chosen if int(text.split()[1]) < 200} == side
    assert not set(chosen) & {more[place]["text"] for place in calibration}


def test_other_parameters_do_not_put_a_row_on_the_other_side(
    tmp_path: Path, tiny_model: Path
) -> None:
    folder = write_pipeline(tmp_path / "tiny", model={"source": str(tiny_model)})
    rows = [{**row, "parameters": {"dimensions": 8}} for row in texts(60)]
    lines = [*map(json.dumps, [*texts(60), *rows])]
    (folder / "traffic.jsonl").write_text("\n".join(lines))
    tuned = Tuned({"core.max_batch_size": 16}, {})
    write_tuned(folder, tuned, spec_file="pipeline.yaml")
    told: list[str] = []
    made = read_inputs(load_spec(folder), lambda stage, line: told.append(line))
    assert "core.max_batch_size=16 (tuned.yaml)" in told
    assert describe_plan(made.plan)["tuned"] == tuned.overrides
    gate = {row.ids for request in made.requests for row in request.rows}  # type: ignore[union-attr]
    assert made.calibration
    assert not gate & {row.ids for row in made.calibration}  # type: ignore[union-attr]
    assert any("at least 200 are recommended for the gate" in line for line in told)
    assert hash_requests(made.requests) == hash_requests(
        read_inputs(load_spec(folder), quiet).requests
    )


def longest(request: GateRequest) -> int:
    return max(len(row.ids) for row in request.rows if isinstance(row, TokenRow))


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_made_up_rows_are_of_many_kinds_and_lengths(
    inputs: dict[str, PipelineInputs], name: str
) -> None:
    made = inputs[name]
    edges = {
        request.preview.partition(":")[0]: request for request in made.requests if request.edge
    }
    at, over = edges["at the limit"], edges["one over the limit"]
    limit = made.plan.max_length
    assert longest(at) == longest(over) == longest(edges["far over the limit"]) == limit
    # A model may compute texts of some length in another way.
    between = [longest(r) for r in made.requests if r.preview.startswith("between: ")]
    assert between == [length for length in (32, 128) if length < limit]
    last = list(at.inputs)[-1]
    assert len(over.inputs[last]) > len(at.inputs[last])
    windows = name == "answers"
    assert (len(over.rows) > len(at.rows)) == windows
    assert [request.edge for request in made.requests] == sorted(
        (request.edge for request in made.requests), reverse=True
    )
    pairs = made.plan.task.pairs  # both halves of one must say something
    refused = {"empty", "blank"} if pairs else set()
    assert set(edges) >= set(gate_rows.EDGE_TEXTS) - refused
    special = {r.preview for r in made.requests if r.preview.startswith("special token")}
    # Two mask tokens are more than fill-mask takes.
    for token in {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"} - (
        {"[MASK]"} if name == "masks" else set()
    ):
        assert any(f"one {token} of two" in shown for shown in special)
    assert all(request.preview.isprintable() for request in made.requests)
    if name == "hypotheses":
        assert {len(request.rows) for request in made.requests} == {3}


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_the_probe_is_in_the_tasks_own_form(inputs: dict[str, PipelineInputs], name: str) -> None:
    made = inputs[name]
    assert 350 <= len(made.probe) <= len(probe_texts())
    assert not any(request.edge for request in made.probe)
    (*questions, last) = made.requests[0].sent
    shown = [str(request.sent[last]) for request in made.probe]
    if name == "masks":
        assert all(text.count("[MASK]") == 1 for text in shown)
    else:
        assert set(shown) <= {row.text for row in probe_texts()}
    for question in questions:
        groups = Counter(request.sent[question] for request in made.probe)
        assert len(groups) > 30
        assert max(groups.values()) > 4  # passages to choose from


HOOKS = """
def before(rows):
    if any(not row["text"].strip() for row in rows):
        raise ValueError("say something")
    if any(row["text"] == "42" for row in rows):
        raise ValueError("say more")
    return [{"text": None if row["text"][0] == "!" else row["text"].upper()} for row in rows]
"""


def test_rows_are_made_of_what_the_hook_makes_and_sent_as_they_were(
    inputs: dict[str, PipelineInputs],
    tmp_path: Path,
    minilm_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("triptych.core.inputs.LABELED_ROWS", 3)
    plain = inputs["topics"].requests
    folder = write_task(tmp_path, "topics", minilm_folder)
    (folder / "hooks.py").write_text(HOOKS)
    rows = [{"text": f"text {i}", "label": "billing"} for i in range(5)]
    (folder / "eval.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = read_inputs(load_spec(folder), quiet)
    sent = {request.sent["text"] for request in made.requests if not request.edge}
    lines = (folder / "traffic.jsonl").read_text().splitlines()
    assert sent <= {json.loads(line)["text"] for line in lines}
    for request in made.requests:
        assert request.inputs == {"text": str(request.sent["text"]).upper()}
    kinds = {r.preview.partition(":")[0]: r for r in made.requests if r.edge}
    every = {r.preview.partition(":")[0] for r in plain if r.edge}
    assert set(kinds) == every - {"empty", "blank", "punctuation"}  # refused, and made no text
    assert longest(kinds["at the limit"]) == made.plan.max_length
    assert kinds["repeated tokens"].sent["text"] == gate_rows.EDGE_TEXTS["repeated tokens"]
    # What the hook refuses is left out of the probe, too; the rest goes through it.
    taken = {str(request.sent["text"]) for request in made.probe}
    assert taken == {str(r.sent["text"]) for r in inputs["topics"].probe if r.sent["text"] != "42"}
    assert all(r.inputs == {"text": str(r.sent["text"]).upper()} for r in made.probe)
    assert [row.truth for row in made.labeled.rows] == ["billing"] * 3
    assert [r.inputs["text"] for r in made.labeled.requests] == ["TEXT 0", "TEXT 1", "TEXT 2"]
    assert made.labeled.notes == ("of 5 labeled rows, the first 3 count",)


def test_carries_go_with_their_core_rows(inputs: dict[str, PipelineInputs]) -> None:
    for request in inputs["answers"].requests:
        metadata = [unpack_metadata(row_metadata) for row_metadata in request.metadata]
        assert [len(row_metadata.kinds) for row_metadata in metadata] == [
            len(row.ids) for row in request.rows if isinstance(row, TokenRow)
        ]
        assert metadata[0].text == request.inputs["text_pair"]
    assert all(not request.metadata for request in inputs["topics"].requests)


def test_images_are_split_as_texts_are(
    tmp_path: Path, minilm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.core.gate_rows.GATE_IMAGES", 4)
    folder = write_task(tmp_path, "images", minilm_folder)
    encoded = [data for data in image_bytes() if data[:2] != b"BM"]
    for number, data in enumerate(encoded):
        (folder / f"{number}.img").write_bytes(data)
    lines = [json.dumps({"image": f"{number}.img"}) for number in range(len(encoded))]
    (folder / "traffic.jsonl").write_text("\n".join(lines))
    made = read_inputs(load_spec(folder), quiet)
    shown = [request.preview for request in made.requests]
    assert shown[:2] == ["one pixel", "very wide"]
    assert [request.edge for request in made.requests[:2]] == [True, True]
    gate, rest = split_traffic([{"image": data} for data in encoded], max_rows=4)
    assert shown[2:] == [f"{place}.img" for place in gate]
    assert len(made.calibration) == len(rest) > 0
    sizes = {np.asarray(row).shape for row in (*rows_of(made.requests), *made.calibration)}
    assert sizes == {(32, 32, 3)}
    assert made.probe == ()
    # A hook may refuse what is made up.
    (folder / "hooks.py").write_text(
        "def before(rows):\n"
        "    if any(row['image'][:2] == b'BM' for row in rows):\n"
        "        raise ValueError('no bitmaps')\n"
        "    return rows\n"
    )
    assert not any(request.edge for request in read_inputs(load_spec(folder), quiet).requests)


@pytest.mark.parametrize("name", ["topics", "tags", "answers", "masks"])
def test_the_reference_is_kept_and_comes_back_as_it_was(
    inputs: dict[str, PipelineInputs], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path))
    made = replace(inputs[name], requests=inputs[name].requests[:9])
    rows = rows_of(made.requests)
    first = reference_of(made, rows, quiet)
    monkeypatch.setattr("triptych.core.gate.reference.reference_outputs", None)  # a call fails
    again = reference_of(made, rows, quiet)
    assert len(again) == len(rows)
    for one, other in zip(first, again, strict=True):
        assert [part.dtype for part in other] == [np.float32] * len(one)
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    with pytest.raises(TypeError):
        reference_of(made, rows[1:], quiet)
    assert reference_of(made, [], quiet) == []
