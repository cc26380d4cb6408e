"""Exported cores of many architectures, every head and both layouts, against transformers."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import transformers

import architectures as models
from architectures import OTHERS, SHARED
from triptych.base.errors import UserError
from triptych.core.export.packing import CannotPack
from triptych.core.export.to_onnx import export_onnx

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
    """Inputs and outputs are what Triton's config will say, sizes that are fixed as numbers."""
    graph = onnx.load(path, load_external_data=False).graph
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
    core = models.HEADS["classification"]
    facts = models.save_model("fnet", core.auto_class, tmp_path)
    packed = models.LAYOUT_INPUTS["packed"]
    with pytest.raises(CannotPack, match=r"rows of a batch differ by \S+ from the same rows alone"):
        export_onnx(tmp_path, facts, core, packed, packed=True, target=tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()
    with pytest.raises(UserError) as caught:
        export_onnx(tmp_path, facts, core, models.INPUTS, packed=False, target=tmp_path)
    assert caught.value.field == "model.source"
    assert "padding" in caught.value.message
    assert facts.architecture in caught.value.message
