"""The graph for ONNX Runtime on a GPU: few operators, and attention on padded rows."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from benchmarks.gpu.kernels import count_nodes, count_operators, read_kernels
from tests.support import architectures as models
from tests.support.project import share_export_registry
from triptych.base.tensors import INPUT_IDS, ROW_LENGTH, ROW_OFFSET
from triptych.core.export.packing import CannotPack
from triptych.core.export.to_onnx import attention_for_gpu, export_onnx, plain_reason
from triptych.core.gate.runs import open_onnx
from triptych.models.source import read_model_info
from triptych.spec.fields import CoreSettings
from triptych.spec.plan import Plan
from triptych.tasks.catalog import text_embedding

pytestmark = pytest.mark.build

PACKED = models.LAYOUT_INPUTS["packed"]
CASES = [
    ("bert", "embedding", True),
    pytest.param("roberta", "mask", True, marks=pytest.mark.long),
    ("modernbert", "scores", True),
    ("distilbert", "tokens", True),
    pytest.param("mpnet", "embedding", False, marks=pytest.mark.long),
]
"""Architecture, head, and whether attention is an operator of ONNX Runtime."""


@pytest.mark.parametrize(("name", "head", "joined"), CASES)
def test_rows_of_a_gpu_graph_equal_rows_that_transformers_computes_alone(
    name: str, head: str, joined: bool, tmp_path: Path
) -> None:
    share_export_registry()
    core = models.HEADS[head]
    facts = models.save_model(name, core.auto_class, tmp_path)
    target = tmp_path / "onnx"
    found = export_onnx(tmp_path, facts, core, PACKED, packed=True, target=target, gathered=True)
    assert found == joined
    rows = models.random_rows()
    run = models.open_core(target / "model.onnx", facts, core, "packed")
    expected = models.expected_outputs(tmp_path, facts, core, rows)
    together = run([models.token_row(row) for row in rows])
    for row, outputs, wanted in zip(rows, together, expected, strict=True):
        (alone,) = run([models.token_row(row)])
        for output, other, value in zip(outputs.values(), alone.values(), wanted, strict=True):
            assert np.abs(output - value).max() <= 1e-6
            assert np.abs(output - other).max() <= 1e-6


def test_minilm_has_few_operators_on_a_gpu_and_no_copy_after_the_embedding(
    minilm_folder: Path, tmp_path: Path
) -> None:
    share_export_registry()
    facts = read_model_info(minilm_folder)
    core, inputs = text_embedding.TASK.core(facts, {}), (INPUT_IDS, ROW_LENGTH, ROW_OFFSET)
    assert export_onnx(
        minilm_folder, facts, core, inputs, packed=True, target=tmp_path, gathered=True
    )
    count = count_operators(tmp_path / "model.onnx")
    assert count.operators <= 90
    assert count.on_cpu == ()
    assert count.copies == ("places.most",)
    assert count.late_copies == ()
    assert set(count.input_copies) == {"input_ids", "row_length", "row_offset", "row_stride"}
    run = open_onnx(tmp_path / "model.onnx", core, inputs, pad_token_id=facts.pad_token_id)
    empty, full = run([models.token_row([]), models.token_row([101, 2009, 102])])
    assert not empty["sentence_embedding"].any()
    assert np.isclose(np.linalg.norm(full["sentence_embedding"]), 1.0)


def test_a_graph_that_cannot_be_rewritten_is_left_whole() -> None:
    calls = []

    def write(*, gathered: bool = False) -> bool:
        calls.append(gathered)
        if gathered:
            raise CannotPack("its rows differ")
        return False

    assert attention_for_gpu(write, "") == "as on a CPU, because its rows differ"
    assert calls == [True, False]
    assert attention_for_gpu(write, "int8") == "as on a CPU, because int8"
    assert calls == [True, False, False]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, None),
        ({"device": "gpu"}, ""),
        ({"device": "gpu", "precision": "fp16"}, ""),
        ({"device": "gpu", "precision": "int8"}, "converted to int8"),
        ({"device": "gpu", "accelerator": "tensorrt"}, "accelerator tensorrt"),
        ({"device": "gpu", "layout": "bucketed"}, None),
    ],
)
def test_a_core_that_keeps_to_standard_operators_has_a_reason(
    settings: dict[str, str], words: str | None
) -> None:
    core = CoreSettings.model_validate(settings)
    plan = SimpleNamespace(spec=SimpleNamespace(core=core), packed=core.layout != "bucketed")
    reason = plain_reason(cast(Plan, plan))
    assert (reason is None) == (words is None)
    assert words is None or (words in (reason or "") and bool(words) == bool(reason))


def test_copies_and_nodes_on_the_cpu_are_counted_as_onnx_runtime_places_them() -> None:
    """ArgMin of INT32 has no kernel. Nodes that read sizes alone run on the CPU, too."""
    make = helper.make_node
    nodes = [
        make("MatMul", ["x", "weight"], ["product"], "product"),
        make("Shape", ["x"], ["shape"], "shape"),
        make("Add", ["shape", "shape"], ["twice"], "twice"),
        make("Cast", ["product"], ["whole"], "whole", to=TensorProto.INT32),
        make("ArgMin", ["whole"], ["least"], "least", axis=1),
        make("Add", ["least", "twice"], ["sum"], "sum"),
        make("Cast", ["sum"], ["y"], "y", to=TensorProto.FLOAT),
        make("Mul", ["product", "y"], ["z"], "z"),
    ]
    tensor = helper.make_tensor_value_info
    weight = onnx.numpy_helper.from_array(np.ones((2, 2), np.float32), "weight")
    graph = helper.make_graph(
        nodes,
        "counted",
        [tensor("x", TensorProto.FLOAT, ["rows", 2])],
        [tensor("z", TensorProto.FLOAT, None)],
        [weight],
    )
    count = count_nodes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    assert count.operators == len(nodes)
    assert count.on_cpu == ("twice", "least", "sum", "y")
    assert (count.copies, count.late_copies) == ((), ("whole", "y"))
    assert count.input_copies == ("x",)


def test_the_list_has_the_kernels_that_a_gpu_graph_needs() -> None:
    kernels = read_kernels()
    for name in ("MultiHeadAttention", "SkipLayerNormalization", "BiasGelu"):
        (kernel,) = kernels[f"com.microsoft::{name}"]
        assert {"float", "float16"} <= kernel.types["T"]
    assert all("int32" not in kernel.types["T"] for kernel in kernels["ArgMin"])
