"""Templates: `new`, `test`, `build`, `serve`, and the answer to the command that each one names."""

import contextlib
import json
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from tests.support import task_models
from tests.support.project import build_into, quiet, traffic_texts
from tests.support.scaffolding import OWN_MODELS, answer_of, write
from triptych.base.errors import UserError
from triptych.base.files import parse_yaml
from triptych.building.own_checks import check_own_pipeline
from triptych.client import Client, InvalidRequestError
from triptych.core.export.own_graph import read_graph, with_axis
from triptych.core.gate.cached import Gate
from triptych.core.own_inputs import read_own_inputs
from triptych.core.own_reader import OwnReader
from triptych.interface.api import build
from triptych.models.info import OwnInterface
from triptych.runtime.hooking import load_hooks
from triptych.serving.server import Server
from triptych.spec.model_fields import load_model_spec
from triptych.spec.own_task import own_task
from triptych.spec.template import BUILT_IN
from triptych.tasks.catalog import TASKS

pytestmark = pytest.mark.build
# test_scaffold.py checks the command of every template, test_tasks.py serves every task.
SERVED = {
    "custom": task_models.text_classifier,
    "image-classification": task_models.image_classifier,
    "text-pair-classification": task_models.text_classifier,
}
"""Templates whose hooks and inputs differ the most, with what makes a small model for each."""
CHANGED = {"tabular": "risk_weights", "chain.detector": "colors", "chain.classifier": "weights"}
"""A tensor of each of these example models, of which the test of the gate changes a column."""
Found = Mapping[str, NDArray[Any]]


@pytest.mark.parametrize("name", OWN_MODELS)
def test_a_template_passes_every_check_and_its_script_writes_its_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, name)
    before = sorted(folder.rglob("*"))
    checks = check_own_pipeline(load_model_spec(folder))
    assert [check for check in checks if check.severity != "ok"] == []
    assert sorted(folder.rglob("*")) == before
    monkeypatch.syspath_prepend(folder)
    (script,) = folder.glob("make_*.py")
    files = [*folder.glob("*.onnx"), *folder.glob("*.safetensors")]
    shipped = {file: file.read_bytes() for file in files}
    for file, content in shipped.items():
        assert len(content) < 10_000
        file.unlink()
    runpy.run_path(str(script))
    assert shipped == {file: file.read_bytes() for file in files}


def test_a_value_that_functions_cannot_read_is_refused_with_its_row(tmp_path: Path) -> None:
    table = {"age": [42, 42], "income": [1, 1], "months": [0, 0], "plan": ["plus", "gold"]}
    wide = (BUILT_IN / "chain/samples/wide.png").read_bytes()
    low = (BUILT_IN / "audio-classification/samples/low.wav").read_bytes()
    fast = low.replace(b"\x40\x1f", b"\x44\xac")
    for name, rows, said in (
        ("tabular", table, "plan must be one of basic"),
        ("chain", {"image": [wide, b"text"]}, "cannot be decoded"),
        ("object-detection", {"image": [wide, b"text"]}, "cannot be decoded"),
        ("audio-classification", {"audio": [low, b"text"]}, "cannot be read"),
        ("audio-classification", {"audio": [low, fast]}, "8000 Hz"),
    ):
        folder = tmp_path / name
        hooks: Any = load_hooks(folder if folder.exists() else write(tmp_path, name, name))
        if hasattr(hooks, "setup"):
            hooks.setup(SimpleNamespace(labels=[], folder=folder))
        with pytest.raises(ValueError, match=said) as caught:
            hooks.preprocess(rows, {})
        assert caught.value.args[1] == 1, name


def test_an_onnx_file_fills_the_fields_of_a_new_pipeline(tmp_path: Path) -> None:
    graphs = {
        "tokens": "(int64[n, length] ids, int64[n, length] mask) => (float[n, 2] label)",
        "odd": '(float16[n, 3] "Input.1", int32[n, 1] row_counts)'
        ' => (float[n, 2] "transpose_0.tmp_0", bool[n, 1] "input.1")',
        "picture": "(uint8[n, h, w, 3] pixels, float[n, 1] scale) => (float[n, 5] logits)",
    }
    found = {}
    for name, signature in graphs.items():
        model = onnx.helper.make_model(onnx.parser.parse_graph(f"graph {signature} {{}}"))
        inputs = {each.name for each in model.graph.input}
        path = tmp_path / f"{name}.onnx"
        onnx.save(model, path)
        folder = write(tmp_path / "pipelines", None, name, model=str(path))
        assert not (folder / "model.onnx").exists()
        found[name] = spec = load_model_spec(folder)
        reader = OwnReader(spec, own_task(spec))
        requests = reader.read(folder / "traffic.jsonl")
        assert requests, name
        graph = with_axis(spec, read_graph(spec))
        made = reader.discover(OwnInterface(graph.inputs, graph.outputs), requests)
        for each in made:
            assert each.tensors.keys() >= inputs, name
            for tensor in graph.inputs:
                assert len(each.tensors[tensor.name].shape) == 1 + len(tensor.dims), name
    assert found["tokens"].model.axis[0] == "length"
    assert found["odd"].inputs.keys() == {"input_1", "value_row_counts"}
    assert found["odd"].outputs.keys() == {"transpose_0_tmp_0", "input_1_out"}
    assert found["picture"].inputs["pixels"].type == "bytes"
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    with pytest.raises(UserError, match="must be a readable ONNX file"):
        write(tmp_path / "pipelines", "onnx", "bad", model=str(tmp_path / "bad.onnx"))


def test_boxes_of_a_yolo_file_need_no_code(tmp_path: Path) -> None:
    signature = "(float[n, 3, h, w] pixels) => (float[n, 6, 3] found)"
    model = onnx.helper.make_model(onnx.parser.parse_graph(f"graph {signature} {{}}"))
    onnx.helper.set_model_props(model, {"names": "{0: 'cat', 1: 'dog'}", "imgsz": "[96, 96]"})
    onnx.save(model, tmp_path / "yolo.onnx")
    folder = write(tmp_path, "object-detection", model=str(tmp_path / "yolo.onnx"))
    checks = check_own_pipeline(load_model_spec(folder))
    assert [check for check in checks if check.severity == "error"] == []
    hooks: Any = load_hooks(folder)
    image = (folder / "samples/wide.png").read_bytes()
    made = hooks.preprocess(rows={"image": [image]}, parameters={})
    assert made["pixels"].shape == (1, 3, 96, 96)
    scale, left, top = made["place"][0, :3]
    boxes = np.array([[48, 48, 20, 10, 0.1, 0.9], [48, 48, 21, 10, 0, 0.8], [9, 9, 2, 2, 0, 0]]).T
    options = {"min_score": 0.5, "max_overlap": 0.3, "max_detections": 20}
    arrays = {"found": boxes[None], "place": made["place"]}
    answer = hooks.postprocess(arrays=arrays, parameters=options)
    assert answer["label"] == [["dog"]]
    wanted = (np.array([38, 43, 58, 53]) - [left, top, left, top]) / scale
    np.testing.assert_allclose(answer["box"][0], [wanted], rtol=1e-5)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every template, made and built, in one repository."""
    base = tmp_path_factory.mktemp("own_templates")
    for name in OWN_MODELS:
        write(base / "pipelines", name, name)
        build(name, pipelines=base / "pipelines", repository=base / "repository")
    return base


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[Any]:
    with Server(base / "repository") as server:
        yield server


@pytest.mark.long
def test_the_gate_finds_a_changed_weight(base: Path, tmp_path: Path) -> None:
    for name, changed in CHANGED.items():
        pipeline, _, model_name = name.partition(".")
        inputs = read_own_inputs(load_model_spec(base / "pipelines" / pipeline), quiet)
        cores = {each.model: each for each in (inputs, *inputs.others)}
        gate = Gate(cores[model_name], "fp32", quiet)
        core = base / f"repository/{name}_core/1/model.onnx"
        assert gate.run(core, {"model.onnx": f"right {name}"}).passed
        model = onnx.load(core)
        (tensor,) = [each for each in model.graph.initializer if each.name == changed]
        values = numpy_helper.to_array(tensor).copy()
        values[..., :1] *= 1.05
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        onnx.save(model, tmp_path / f"{name}.onnx")
        assert gate.run(tmp_path / f"{name}.onnx", {"model.onnx": f"changed {name}"}).failures


def _send(name: str, base: Path, server: Any) -> tuple[list[Found], Path]:
    """Return the answers to each line of the template's traffic, and its folder."""
    folder = base / "pipelines" / name
    fields = parse_yaml((folder / "pipeline.yaml").read_text())["inputs"]
    found: list[Found] = []
    with Client(name, server.grpc_url) as client:
        for line in (folder / "traffic.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            parameters = row.pop("parameters", None)
            inputs = {
                key: [(folder / value).read_bytes() if fields[key]["type"] == "bytes" else value]
                for key, value in row.items()
            }
            answer = client.infer(inputs, parameters=parameters)
            found.append({key: value[0] for key, value in answer.items()})
    return found, folder


@pytest.mark.long
@pytest.mark.server
def test_a_table_is_decided_by_the_threshold_of_the_request(base: Path, server: Any) -> None:
    found, folder = _send("tabular", base, server)
    lines = (folder / "traffic.jsonl").read_text().splitlines()
    for line, answer in zip(lines, found, strict=True):
        threshold = json.loads(line).get("parameters", {}).get("threshold", 0.5)
        wanted = "review" if answer["risk"][0] >= threshold else "accept"
        assert answer["decision"][0] == wanted, line
    assert {answer["decision"][0] for answer in found} == {"review", "accept"}
    with Client("tabular", server.grpc_url) as client:
        each = client.infer_each({"age": [30, 40], "income": [1e4, 2e4], "plan": ["plus", "gold"]})
    assert isinstance(each[0], dict)
    assert each[0].keys() == {"risk", "decision"}
    assert isinstance(each[1], InvalidRequestError)
    assert "plan must be one of basic, plus" in str(each[1])


@pytest.mark.long
@pytest.mark.server
def test_a_chain_classifies_what_it_detects(base: Path, server: Any) -> None:
    found, folder = _send("chain", base, server)
    objects = [dict(zip(each["label"], each["box"].tolist(), strict=True)) for each in found]
    assert objects == [
        {"dotted": [16, 20, 32, 36]},
        {"dotted": [64, 56, 128, 120], "plain": [16, 16, 48, 48]},
        {"plain": [16, 32, 80, 96], "dotted": [160, 32, 224, 96]},
        {},
    ]
    with Client("chain", server.grpc_url) as client:
        images = [(folder / f"samples/{name}.png").read_bytes() for name in ("none", "two")]
        together = client.infer({"image": images}, parameters={"max_objects": 1})
    assert together["label"].tolist() == [[""], ["dotted"]]


@pytest.mark.long
@pytest.mark.server
def test_the_command_in_the_spec_answers(base: Path, server: Any) -> None:
    for name in OWN_MODELS:
        folder = base / "pipelines" / name
        outputs = parse_yaml((folder / "pipeline.yaml").read_text())["outputs"]
        assert answer_of(folder, server.grpc_url).keys() == outputs.keys()


@pytest.mark.server
def test_a_template_answers_the_command_that_it_names(tmp_path: Path, minilm_folder: Path) -> None:
    for task, make in SERVED.items():
        model = make(tmp_path / "models" / task, minilm_folder, traffic_texts())
        folder = write(tmp_path / "pipelines", task, task, model=str(model), with_hooks=True)
        build_into(folder, tmp_path / "repository")
    with Server(tmp_path / "repository") as server, contextlib.chdir(tmp_path):
        for task in SERVED:
            row = answer_of(tmp_path / "pipelines" / task, server.grpc_url)
            if task == "custom":
                assert len(row) > 1
            else:
                outputs = TASKS.get(task, TASKS["text-classification"]).outputs
                assert set(row) == {tensor.name for tensor in outputs if not tensor.optional}
