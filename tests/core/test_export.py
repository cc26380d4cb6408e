"""Exported cores of many architectures, every head and both layouts, against other libraries."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import transformers

import architectures as models
from architectures import OTHERS, SHARED
from conftest import LAYOUTS, ROOT, share_export_registry
from mistakes import refusal
from triptych.base.tensors import INPUT_IDS, ROW_LENGTH, ROW_OFFSET, TokenRow
from triptych.core.export.packing import CannotPack
from triptych.core.export.to_onnx import convert, export_onnx
from triptych.core.gate.reference import reference_outputs
from triptych.core.gate.runs import open_onnx
from triptych.core.requests import Sample
from triptych.spec.model_source import read_model_info
from triptych.spec.tasks.catalog import TEXT_EMBEDDING

pytestmark = pytest.mark.build

TOLERANCE = 2e-6
CASES = [*SHARED, *(pytest.param(*case, marks=pytest.mark.long) for case in OTHERS)]


@pytest.mark.parametrize(("name", "head", "layout"), CASES)
def test_every_row_equals_transformers_on_it_alone(name: str, head: str, layout: str) -> None:
    core, packed = models.HEADS[head], layout == "packed"
    folder, facts = models.exported(name, head, layout)
    rows = models.random_rows()
    rows += models.with_special(rows, transformers.AutoConfig.from_pretrained(folder))
    path = folder / "onnx/model.onnx"
    expected = models.expected_outputs(folder, facts, core, rows)
    run, samples = models.open_core(path, facts, core, layout), [*map(models.token_row, rows)]
    batch = run(samples)
    for found, wanted in zip(batch, expected, strict=True):
        for output, target in zip(core.outputs, wanted, strict=True):
            value = found[output.name]
            assert value.dtype == {"INT32": np.int32, "FP32": np.float32}[output.dtype]
            assert value.shape == target.shape
            assert np.abs(value - target).max() < TOLERANCE * max(1.0, np.abs(target).max())
    check_declared(path, head, packed=packed)
    if packed:  # the same bits alone and in a batch
        for row, found in zip(samples, batch, strict=True):
            (alone,) = run([row])
            assert all(np.array_equal(found[name], alone[name]) for name in found)
    # Rows of zeros, whatever they stand for, come to numbers, too.
    zeros = run([models.token_row([0, 0]), models.token_row([0, 0, 0])])
    assert all(np.isfinite(value).all() for row in zeros for value in row.values())


def check_declared(path: Path, head: str, *, packed: bool) -> None:
    """Inputs and outputs are what Triton's config will say, sizes that are fixed as numbers.

    The file has no operator of ONNX Runtime's own, and no path of this machine.
    """
    graph = onnx.load(path, load_external_data=False).graph
    assert {node.domain for node in graph.node} == {""}
    for folder in (ROOT, Path(onnx.__file__).parents[2]):
        assert str(folder).encode() not in path.read_bytes()
    axes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    tokens = ["tokens"] if packed else ["rows", "tokens"]
    expected = {"input_ids": tokens, "row_length": ["rows", 1], "first_segment": ["rows", 1]}
    if packed:
        expected |= {"row_offset": ["rows", 1], "row_stride": ["rows"]}
    for output in models.HEADS[head].outputs:
        per_token = output.dims[0] == "tokens"
        expected[output.name] = [*tokens, *output.dims[1:]] if per_token else ["rows", *output.dims]
    assert axes == expected
    assert list(axes) == list(expected)


def test_a_model_that_reads_its_padding_ends_in_one_message(tmp_path: Path) -> None:
    """The classifier of one layer of convolution reads four tokens beyond the first."""
    core = models.HEADS["classification"]
    facts = models.save_model("convbert", core.auto_class, tmp_path)
    packed = models.LAYOUT_INPUTS["packed"]
    with pytest.raises(CannotPack, match=r"rows of a batch differ by \S+ from the same rows alone"):
        export_onnx(tmp_path, facts, core, packed, packed=True, target=tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()
    error = refusal(
        export_onnx, tmp_path, facts, core, models.INPUTS, packed=False, target=tmp_path
    )
    assert error.field == "model.source"
    assert "padding" in error.message
    assert f"{facts.architecture}, whose convolution `convbert.encoder.layer.0" in error.message


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
