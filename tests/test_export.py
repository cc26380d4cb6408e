"""The exported graphs, both layouts, against sentence-transformers and against themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import LAYOUTS
from triptych.build.export import export_onnx
from triptych.build.source import read_facts
from triptych.quality.artifact import open_onnx
from triptych.quality.gate import check_embeddings
from triptych.quality.reference import embed_reference
from triptych.tasks.task import Thresholds

ROWS: list[list[int]] = [
    [101, 102],
    [101, 7592, 102],
    [101, *range(2000, 2040), 102],
    [101, 7592, 2088, 999, 102],
    [101, *range(3000, 3007), 102],
]
TIGHT = Thresholds(min_cosine=0.99999, max_difference=1e-5)


def modules_for(folder: Path, pooling: tuple[str, ...], *, dense: bool) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Normalize, Pooling, Transformer

    width = 32 * len(pooling)
    modules: list[Any] = [Transformer(str(folder)), Pooling(32, pooling_mode=pooling)]
    if dense:
        modules += [Dense(width, 16), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("pooling", "dense"),
    [
        (("mean",), False),
        (("cls",), False),
        (("max",), False),
        (("lasttoken",), False),
        (("mean_sqrt_len_tokens",), False),
        (("weightedmean",), False),
        (("max", "cls"), True),
    ],
)
def test_every_pooling_equals_sentence_transformers(
    tiny_model: Path, tmp_path: Path, layout: str, pooling: tuple[str, ...], dense: bool
) -> None:
    reference = modules_for(tiny_model, pooling, dense=dense)
    reference.save(str(tmp_path / "model"))
    folder = tmp_path / "model"
    facts = read_facts(folder)
    packed = layout == "packed"
    export_onnx(folder, facts, packed=packed, output="vector", target=tmp_path / "onnx")
    run = open_onnx(tmp_path / "onnx/model.onnx", packed=packed, pad_token_id=facts.pad_token_id)
    texts = ["a", "hello there", "a much longer text " * 5, "one more text of a few words", "?"]
    rows = [reference.tokenizer(text)["input_ids"] for text in texts]
    expected = reference.encode(texts)
    assert np.abs(run(rows) - expected).max() < 1e-5
    plain = embed_reference(folder, facts, rows)
    assert np.abs(plain - expected).max() < 1e-5


@pytest.fixture(scope="module", params=LAYOUTS)
def artifact(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, bool]:
    packed = request.param == "packed"
    target = tmp_path_factory.mktemp("onnx")
    facts = read_facts(tiny_model)
    export_onnx(tiny_model, facts, packed=packed, output="vector", target=target)
    return target / "model.onnx", packed


def test_the_gate_passes_a_right_artifact(artifact: tuple[Path, bool], tiny_model: Path) -> None:
    path, packed = artifact
    facts = read_facts(tiny_model)
    result = check_embeddings(
        open_onnx(path, packed=packed, pad_token_id=0),
        ROWS,
        embed_reference(tiny_model, facts, ROWS),
        TIGHT,
        batch_size=3,
    )
    assert result.passed
    assert result.max_neighbour_effect < 1e-6


@pytest.mark.parametrize("fault", ["scaled weights", "NaN", "neighbours leak", "other pooling"])
def test_the_gate_stops_a_wrong_artifact(
    artifact: tuple[Path, bool], tiny_model: Path, fault: str
) -> None:
    path, packed = artifact
    facts = read_facts(tiny_model)
    right = open_onnx(path, packed=packed, pad_token_id=0)

    def wrong(rows: Any) -> Any:
        vectors = right(rows)
        if fault == "scaled weights":
            return vectors * 1.001
        if fault == "NaN":
            vectors[0, 0] = np.nan
        if fault == "neighbours leak":
            vectors = vectors + 1e-3 * vectors.mean(0)
        return vectors

    if fault == "other pooling":
        facts = replace(facts, pooling=("cls",))
    reference = embed_reference(tiny_model, facts, ROWS)
    result = check_embeddings(wrong, ROWS, reference, TIGHT, batch_size=3)
    assert not result.passed


def test_pads_inside_a_packed_request_change_nothing(artifact: tuple[Path, bool]) -> None:
    path, packed = artifact
    if not packed:
        assert open_onnx(path, packed=False, pad_token_id=7)(ROWS[:3]) == pytest.approx(
            open_onnx(path, packed=False, pad_token_id=0)(ROWS[:3]), abs=1e-6
        )
        return
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    ids = np.zeros((3, 50), dtype=np.int32)
    for target, row in zip(ids, ROWS[:3], strict=True):
        target[: len(row)] = row
    lengths = np.array([[len(row)] for row in ROWS[:3]], dtype=np.int32)
    feed = {"row_length": lengths, "row_stride": np.full(3, 50, dtype=np.int32)}
    padded = session.run(None, {"input_ids": ids.ravel(), **feed})[0]
    tight = open_onnx(path, packed=True, pad_token_id=0)(ROWS[:3])
    assert np.abs(padded - tight).max() < 1e-6
    ids[ids == 0] = 9999  # what a pad holds never matters
    other = session.run(None, {"input_ids": ids.ravel(), **feed})[0]
    assert np.abs(padded - other).max() < 1e-6


def test_the_graph_uses_standard_operators_and_tells_nothing_of_this_machine(
    artifact: tuple[Path, bool],
) -> None:
    import onnx

    model = onnx.load(artifact[0])
    assert {node.domain for node in model.graph.node} == {""}
    assert str(Path.cwd()).encode() not in artifact[0].read_bytes()
    assert str(Path(onnx.__file__).parents[2]).encode() not in artifact[0].read_bytes()
    axes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in model.graph.input
    }
    if artifact[1]:
        assert axes == {"input_ids": ["tokens"], "row_length": ["rows", 1], "row_stride": ["rows"]}
    else:
        assert axes == {"input_ids": ["rows", "tokens"], "row_length": ["rows", 1]}
