"""Core outputs to answers in process: the runtime's own decoders, and ties that are no mistake."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import quiet
from gate_cases import make
from triptych.core.gate.cached import decoding_of
from triptych.core.gate.check import describe_outputs
from triptych.core.gate.reference import reference_of
from triptych.core.gate.runs import decode, reference_row_outputs
from triptych.core.inputs import read_inputs
from triptych.core.requests import rows_of
from triptych.spec.spec import load_spec

pytestmark = pytest.mark.build


def test_vectors_are_compared_as_floats_whatever_the_request_asks_for(
    tmp_path: Path, tiny_model: Path
) -> None:
    spec = {"task": "text-embedding", "model": {"source": str(tiny_model)}}
    (tmp_path / "pipeline.yaml").write_text(json.dumps(spec))
    row = {"text": "a", "parameters": {"encoding": "binary", "dimensions": 8}}
    (tmp_path / "traffic.jsonl").write_text(json.dumps(row))
    inputs = read_inputs(load_spec(tmp_path), quiet)
    requests = inputs.requests[-1:]
    decoding = decoding_of(inputs)
    assert decoding is not None
    expected = reference_of(inputs, rows_of(requests), quiet)
    core_outputs = reference_row_outputs(inputs.plan.core, expected)
    (outputs,) = decode(decoding, requests, core_outputs)
    assert outputs["embedding"].shape == (1, 8)


SCORES = np.array([0.1, 0.3, 0.3 - 4e-6, 0.2, 0.05, 0.03, 0.02], dtype=np.float32)


def test_of_equal_classes_the_reference_takes_the_artifacts() -> None:
    core = make("choices").core
    for chosen, wanted in (
        ([1, 2, 3], [1, 2, 3]),
        ([2, 1, 3], [2, 1, 3]),  # a tie: the artifact's order is as good
        ([2, 1, 0], [2, 1, 3]),
        ([2, 3, 1], [2, 1, 3]),
        ([3, 1, 2], [1, 2, 3]),
        ([0, 4, 5], [1, 2, 3]),
    ):
        ids, zeros = np.array(chosen, np.int32), np.zeros(3, np.float32)
        like: Any = [{"class_id": ids, "class_score": zeros}]
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
