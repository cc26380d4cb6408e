"""The exported graphs, both layouts, against sentence-transformers and against themselves."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import architectures as models
from conftest import LAYOUTS, share_export_registry
from mistakes import refusal
from triptych.base.tensors import INPUT_IDS, ROW_LENGTH, ROW_OFFSET, TokenRow
from triptych.core.export.layout_check import find_text_core
from triptych.core.export.to_onnx import convert, export_onnx
from triptych.core.gate.reference import reference_outputs
from triptych.core.gate.runs import open_onnx
from triptych.core.requests import Sample
from triptych.spec.model_info import ModelInfo
from triptych.spec.model_source import read_model_info
from triptych.spec.tasks import find_task
from triptych.spec.tasks.catalog import TEXT_EMBEDDING

pytestmark = pytest.mark.build
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pooling_equals_sentence_transformers(
    tiny_model: Path, tmp_path: Path, layout: str
) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Normalize, Pooling, Transformer

    share_export_registry()
    pooled = Pooling(32, pooling_mode=POOLINGS)
    head = [Dense(32 * len(POOLINGS), 16), Normalize()]
    modules = [Transformer(str(tiny_model)), pooled, *head]
    reference = SentenceTransformer(modules=modules, device="cpu")
    folder = tmp_path / "model"
    reference.save(str(folder))
    facts = read_model_info(folder)
    core = TEXT_EMBEDDING.core(facts, {})
    packed = layout == "packed"
    inputs = (INPUT_IDS, ROW_LENGTH, *([ROW_OFFSET] if packed else []))
    export_onnx(folder, facts, core, inputs, packed=packed, target=tmp_path / "onnx")
    run = open_onnx(tmp_path / "onnx/model.onnx", core, inputs, pad_token_id=facts.pad_token_id)
    texts = ["a", "hello there", "a much longer text " * 5, "one more text of a few words", "?"]
    encoded = [reference.tokenizer(text)["input_ids"] for text in texts]
    rows: list[Sample] = [TokenRow(tuple(ids), len(ids)) for ids in encoded]
    expected = reference.encode(texts)
    vectors = np.stack([outputs["sentence_embedding"] for outputs in run(rows)])
    assert np.abs(vectors - expected).max() < 1e-5
    plain = reference_outputs(folder, facts, core, rows)
    assert np.abs(np.stack([row[0] for row in plain]) - expected).max() < 1e-5


@pytest.mark.long
def test_an_export_again_is_the_same_to_the_byte(tmp_path: Path) -> None:
    folder, facts = models.exported("bert", "embedding", "packed")
    core, inputs = models.HEADS["embedding"], models.LAYOUT_INPUTS["packed"]
    export_onnx(folder, facts, core, inputs, packed=True, target=tmp_path)
    path = folder / "onnx/model.onnx"
    assert (tmp_path / "model.onnx").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_pad_holds_changes_nothing(layout: str) -> None:
    folder, _ = models.exported("bert", "embedding", layout)
    path = folder / "onnx/model.onnx"
    model, content = onnx.load(path), path.read_bytes()
    assert {node.domain for node in model.graph.node} == {""}
    assert str(Path.cwd()).encode() not in content
    assert str(Path(onnx.__file__).parents[2]).encode() not in content
    session = onnxruntime.InferenceSession(path)
    rows = [[11, 12], [11, 72, 12], [11, *range(20, 60), 12]]
    lengths = np.array([[len(row)] for row in rows], dtype=np.int32)
    feed = {"row_length": lengths, "first_segment": lengths}
    if layout == "packed":
        feed["row_stride"] = np.full(3, 50, dtype=np.int32)
        feed["row_offset"] = np.zeros((3, 1), dtype=np.int32)
    found = []
    for pad in (0, 119):
        ids = np.full((3, 50), pad, dtype=np.int32)
        for target, row in zip(ids, rows, strict=True):
            target[: len(row)] = row
        given = ids.ravel() if layout == "packed" else ids
        found.append(session.run(None, {"input_ids": given, **feed})[0])
    assert np.abs(found[0] - found[1]).max() < 1e-6


@pytest.mark.filterwarnings("ignore")
def test_onnx_runtime_computes_operators_as_torch_does() -> None:
    """A batch of one keeps its axis, a padding before a pooling its zeros, a norm its epsilon."""
    import torch
    from torch.nn.functional import max_pool2d, pad

    class Network(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            (pixels,) = tensors
            pooled = max_pool2d(pad(pixels, (1, 1, 1, 1)), 3, 2).flatten(1)
            none = (pooled * 0 + 1e-9).rsqrt() * 0
            return pooled + pixels.amax((2, 3)).squeeze()[:, None] + none

    example = -torch.rand(3, 1, 4, 4) - 1
    proto = convert(Network(), (example,), (({0: torch.export.Dim("rows")},),), ["pixels"], ["max"])
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    for count in (3, 1):
        pixels = example[:count]
        wanted = max_pool2d(pad(pixels, (1, 1, 1, 1)), 3, 2).flatten(1) + pixels.amax((2, 3))
        (found,) = session.run(None, {"pixels": pixels.numpy()})
        assert np.abs(found - wanted.numpy()).max() < 1e-6, count


@pytest.mark.filterwarnings("ignore")
def test_a_convolution_over_padding_is_named(tmp_path: Path) -> None:
    """The classifier of one layer reads four tokens beyond the first."""
    import torch
    from transformers import ConvBertConfig, ConvBertForSequenceClassification

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    config = ConvBertConfig(**sizes, num_hidden_layers=1, vocab_size=99, initializer_range=0.1)
    model = ConvBertForSequenceClassification(config).eval()
    facts = ModelInfo("", "ConvBertForSequenceClassification", 32, 64, 0, labels=("a", "b"))
    core = find_task("text-classification").core(facts, {})
    with torch.no_grad():
        error = refusal(find_text_core, model, facts, core, tmp_path, packed=False)
    assert "whose convolution `convbert.encoder.layer.0.attention" in error.message
