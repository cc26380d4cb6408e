"""Core outputs to answers in process: the runtime's own decoders, and ties that are no mistake."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import quiet
from gate_benches import write_task
from gate_cases import make
from task_models import MODELS
from triptych.core.gate.cached import decoding_of
from triptych.core.gate.check import describe_outputs
from triptych.core.gate.reference import reference_of
from triptych.core.gate.runs import Decoded, decode, reference_row_outputs
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.requests import rows_of
from triptych.spec.spec import load_spec

pytestmark = pytest.mark.build

NAMES = [name for name in MODELS if name != "images"]


@pytest.fixture(scope="module")
def inputs(
    tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path
) -> dict[str, PipelineInputs]:
    base = tmp_path_factory.mktemp("decoded")
    made = {}
    for name in NAMES:
        one = read_inputs(load_spec(write_task(base, name, minilm_folder, rows=20)), quiet)
        made[name] = replace(one, requests=one.requests[-6:])
    return made


def answers(inputs: PipelineInputs) -> list[Decoded]:
    decoding = decoding_of(inputs)
    assert decoding is not None
    expected = reference_of(inputs, rows_of(inputs.requests), quiet)
    outputs = reference_row_outputs(inputs.plan.core, expected)
    return decode(decoding, inputs.requests, outputs)


@pytest.mark.parametrize("name", NAMES)
def test_each_request_has_the_outputs_of_the_ensemble(
    inputs: dict[str, PipelineInputs], name: str
) -> None:
    made = inputs[name]
    found = answers(made)
    assert len(found) == len(made.requests)
    for outputs in found:
        assert set(outputs) == {tensor.name for tensor in made.plan.task.outputs}
        assert all(len(array) == 1 for array in outputs.values())
        assert describe_outputs(outputs)


def test_labels_are_those_of_transformers(inputs: dict[str, PipelineInputs]) -> None:
    import transformers

    made = inputs["topics"]
    classify = transformers.pipeline("text-classification", str(made.model_folder), device="cpu")
    wanted = classify([request.inputs["text"] for request in made.requests])
    for outputs, best in zip(answers(made), wanted, strict=True):
        assert outputs["label"][0, 0].decode() == best["label"]
        assert outputs["score"][0, 0] == pytest.approx(best["score"], abs=1e-5)


def test_entities_are_found_where_the_text_has_them(inputs: dict[str, PipelineInputs]) -> None:
    made = inputs["tags"]
    found = [json.loads(outputs["entities"][0, 0]) for outputs in answers(made)]
    assert any(found)
    for request, entities in zip(made.requests, found, strict=True):
        text = request.inputs["text"]
        assert all(text[e["start"] : e["end"]] == e["text"] for e in entities)


def test_windows_of_one_request_make_one_answer(inputs: dict[str, PipelineInputs]) -> None:
    made = inputs["answers"]
    folder = made.plan.spec.folder
    every = read_inputs(load_spec(folder), quiet)
    long = [request for request in every.requests if len(request.rows) > 1]
    assert long
    assert len(answers(replace(made, requests=tuple(long)))) == len(long)


def test_vectors_are_compared_as_floats_whatever_the_request_asks_for(
    tmp_path: Path, tiny_model: Path
) -> None:
    folder = tmp_path / "vectors"
    folder.mkdir()
    spec = {"task": "text-embedding", "model": {"source": str(tiny_model)}}
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    row = {"text": "a", "parameters": {"encoding": "binary", "dimensions": 8}}
    (folder / "traffic.jsonl").write_text(json.dumps(row))
    made = read_inputs(load_spec(folder), quiet)
    (outputs,) = answers(replace(made, requests=made.requests[-1:]))
    assert outputs["embedding"].shape == (1, 8)


def test_one_output_a_core_row_is_needed(inputs: dict[str, PipelineInputs]) -> None:
    decoding = decoding_of(inputs["topics"])
    assert decoding is not None
    with pytest.raises(ValueError, match="one for each core row"):
        decode(decoding, inputs["topics"].requests, [])


SCORES = np.array([0.1, 0.3, 0.3 - 4e-6, 0.2, 0.05, 0.03, 0.02], dtype=np.float32)


@pytest.mark.parametrize(
    ("chosen", "wanted"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([2, 1, 3], [2, 1, 3]),  # a tie: the artifact's order is as good
        ([2, 1, 0], [2, 1, 3]),
        ([2, 3, 1], [2, 1, 3]),
        ([3, 1, 2], [1, 2, 3]),
        ([0, 4, 5], [1, 2, 3]),
    ],
)
def test_of_equal_classes_the_reference_takes_the_artifacts(
    chosen: list[int], wanted: list[int]
) -> None:
    core = make("choices").core
    like: Any = [{"class_id": np.array(chosen, np.int32), "class_score": np.zeros(3, np.float32)}]
    (row,) = reference_row_outputs(core, [(SCORES,)], like)
    assert row["class_id"].tolist() == wanted
    assert row["class_id"].dtype == np.int32
    assert row["class_score"].tolist() == SCORES[wanted].tolist()


def test_an_answer_in_a_line() -> None:
    def describe(**outputs: Any) -> str:
        return describe_outputs({k: np.array([v], dtype=object) for k, v in outputs.items()})

    scores = np.array([[0.75, 0.25]], dtype=np.float32)
    labels = np.array([[b"late", b"lost\x1b"]], dtype=object)
    assert describe_outputs({"label": labels, "score": scores}) == "late 0.7500, lost\\x1b 0.2500"
    assert describe(entities=[b"[]"]) == "(nothing)"
    entity = {"entity": "PER", "text": "Ada", "start": 0, "end": 3, "score": 1.0}
    assert describe(entities=[json.dumps([entity]).encode()]) == "PER 'Ada' 0-3"
    vector = np.arange(9, dtype=np.float32)[None]
    assert describe_outputs({"embedding": vector}) == "0 1 2 3 … (9 numbers)"
