"""The exported graphs, both layouts, against sentence-transformers and against themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from conftest import LAYOUTS
from gate_cases import requests_of
from triptych.base.tensors import INPUT_IDS, ROW_LENGTH, ROW_OFFSET, TokenRow
from triptych.core.export.to_onnx import export_onnx
from triptych.core.gate.check import check
from triptych.core.gate.reference import reference_outputs
from triptych.core.gate.runs import RunBatch, open_onnx
from triptych.core.requests import Sample
from triptych.spec.model_source import read_model_info
from triptych.spec.tasks.accuracy import CORE_METRICS, default_limits
from triptych.spec.tasks.catalog import TEXT_EMBEDDING
from triptych.spec.tasks.metrics_vectors import COSINES
from triptych.spec.tasks.task import Core

INPUTS = {
    "bucketed": (INPUT_IDS, ROW_LENGTH),
    "packed": (INPUT_IDS, ROW_LENGTH, ROW_OFFSET),
}


def token_row(ids: Sequence[int]) -> TokenRow:
    return TokenRow(tuple(ids), len(ids))


ROWS: list[Sample] = [
    token_row([101, 102]),
    token_row([101, 7592, 102]),
    token_row([101, *range(2000, 2040), 102]),
    token_row([101, 7592, 2088, 999, 102]),
    token_row([101, *range(3000, 3007), 102]),
]
REQUESTS = requests_of(ROWS)
METRICS = (*CORE_METRICS, *COSINES)
TIGHT = default_limits(METRICS, "fp32")
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
EXACT: Any = {"metrics": METRICS, "precision": "fp32", "batch_size": 3}


def modules_for(folder: Path, pooling: tuple[str, ...], *, dense: bool) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Normalize, Pooling, Transformer

    width = 32 * len(pooling)
    modules: list[Any] = [Transformer(str(folder)), Pooling(32, pooling_mode=pooling)]
    if dense:
        modules += [Dense(width, 16), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu")


def vectors_of(run: RunBatch, rows: Sequence[Sample]) -> Any:
    return np.stack([outputs["sentence_embedding"] for outputs in run(rows)])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("pooling", "dense", "layout"),
    [
        (POOLINGS, False, "packed"),
        (("max", "cls"), True, "bucketed"),
        pytest.param(POOLINGS, False, "bucketed", marks=pytest.mark.long),
        pytest.param(("max", "cls"), True, "packed", marks=pytest.mark.long),
    ],
)
def test_every_pooling_equals_sentence_transformers(
    tiny_model: Path, tmp_path: Path, layout: str, pooling: tuple[str, ...], dense: bool
) -> None:
    reference = modules_for(tiny_model, pooling, dense=dense)
    reference.save(str(tmp_path / "model"))
    folder = tmp_path / "model"
    facts = read_model_info(folder)
    core = TEXT_EMBEDDING.core(facts, {})
    packed, inputs = layout == "packed", INPUTS[layout]
    export_onnx(folder, facts, core, inputs, packed=packed, target=tmp_path / "onnx")
    run = open_onnx(tmp_path / "onnx/model.onnx", core, inputs, pad_token_id=facts.pad_token_id)
    texts = ["a", "hello there", "a much longer text " * 5, "one more text of a few words", "?"]
    rows = [token_row(reference.tokenizer(text)["input_ids"]) for text in texts]
    expected = reference.encode(texts)
    assert np.abs(vectors_of(run, rows) - expected).max() < 1e-5
    plain = reference_outputs(folder, facts, core, rows)
    assert np.abs(np.stack([row[0] for row in plain]) - expected).max() < 1e-5


class Artifact(NamedTuple):
    path: Path
    core: Core
    packed: bool

    def open(self, *, pad_token_id: int = 0) -> RunBatch:
        inputs = INPUTS["packed" if self.packed else "bucketed"]
        return open_onnx(self.path, self.core, inputs, pad_token_id=pad_token_id)


@pytest.fixture(scope="module", params=LAYOUTS)
def artifact(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    packed = request.param == "packed"
    target = tmp_path_factory.mktemp("onnx")
    facts = read_model_info(tiny_model)
    core = TEXT_EMBEDDING.core(facts, {})
    export_onnx(tiny_model, facts, core, INPUTS[request.param], packed=packed, target=target)
    return Artifact(target / "model.onnx", core, packed)


def test_the_gate_passes_a_right_artifact(artifact: Artifact, tiny_model: Path) -> None:
    expected = reference_outputs(tiny_model, read_model_info(tiny_model), artifact.core, ROWS)
    result = check(artifact.open(), REQUESTS, expected, artifact.core, TIGHT, **EXACT)
    assert result.passed
    assert result.as_dict()["verdicts"][1]["metric"] == "batch_sensitivity"
    assert result.as_dict()["verdicts"][1]["value"] < 1e-6


@pytest.mark.parametrize("fault", ["scaled weights", "NaN", "neighbors leak", "other pooling"])
def test_the_gate_stops_a_wrong_artifact(artifact: Artifact, tiny_model: Path, fault: str) -> None:
    facts = read_model_info(tiny_model)
    right = artifact.open()

    def wrong(rows: Sequence[Sample]) -> Any:
        vectors = vectors_of(right, rows)
        if fault == "scaled weights":
            vectors = vectors * 1.001
        if fault == "NaN":
            vectors[0, 0] = np.nan
        if fault == "neighbors leak":
            vectors = vectors + 1e-3 * vectors.mean(0)
        return [{"sentence_embedding": vector} for vector in vectors]

    if fault == "other pooling":
        facts = replace(facts, pooling=("cls",))
    expected = reference_outputs(tiny_model, facts, artifact.core, ROWS)
    assert not check(wrong, REQUESTS, expected, artifact.core, TIGHT, **EXACT).passed


@pytest.mark.long
def test_an_export_again_is_the_same_to_the_byte(
    artifact: Artifact, tiny_model: Path, tmp_path: Path
) -> None:
    facts = read_model_info(tiny_model)
    core, packed = artifact.core, artifact.packed
    inputs = INPUTS["packed" if packed else "bucketed"]
    export_onnx(tiny_model, facts, core, inputs, packed=packed, target=tmp_path)
    assert (tmp_path / "model.onnx").read_bytes() == artifact.path.read_bytes()


def test_what_a_pad_holds_changes_nothing(artifact: Artifact) -> None:
    rows = ROWS[:3]
    tight = vectors_of(artifact.open(), rows)
    assert np.abs(vectors_of(artifact.open(pad_token_id=7), rows) - tight).max() < 1e-6
    if not artifact.packed:
        return
    import onnxruntime

    session = onnxruntime.InferenceSession(artifact.path)
    ids = np.full((3, 50), 9999, dtype=np.int32)
    lengths = np.zeros((3, 1), dtype=np.int32)
    for index, row in enumerate(rows):
        assert isinstance(row, TokenRow)
        ids[index, : len(row.ids)], lengths[index] = row.ids, len(row.ids)
    feed = {"row_length": lengths, "row_stride": np.full(3, 50, dtype=np.int32)}
    feed["row_offset"] = np.zeros((3, 1), dtype=np.int32)
    padded = session.run(None, {"input_ids": ids.ravel(), **feed})[0]
    assert np.abs(padded - tight).max() < 1e-6


def test_the_graph_uses_standard_operators_and_tells_nothing_of_this_machine(
    artifact: Artifact,
) -> None:
    import onnx

    model, content = onnx.load(artifact.path), artifact.path.read_bytes()
    assert {node.domain for node in model.graph.node} == {""}
    assert str(Path.cwd()).encode() not in content
    assert str(Path(onnx.__file__).parents[2]).encode() not in content
