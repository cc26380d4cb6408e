"""Several models in one ensemble, from pipeline.yaml to answers of a real tritonserver."""

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from tests.support.client_toy import wait_until
from tests.support.mistakes import check_refused
from tests.support.own_models import (
    SAMPLING,
    build_own,
    monitor_samples,
    read_own,
    save_dense,
    write_cores,
    write_rows,
)
from tests.support.project import quiet
from tests.support.scaffolding import write
from triptych.building.own_checks import check_own_pipeline
from triptych.client import Client, InferenceError, InvalidRequestError
from triptych.core.gate.cached import Gate
from triptych.core.own_inputs import read_own_inputs
from triptych.repository.manifest import CompiledManifest, read_manifest
from triptych.repository.sharing import check_sharers
from triptych.runtime.in_flight import PREFIX_VARIABLE, InFlight
from triptych.runtime.own_step import pack_arrays, unpack_arrays
from triptych.runtime.sampling import FOLDER_VARIABLE
from triptych.serving.hot_reload import HotReload
from triptych.serving.server import Server
from triptych.spec.model_fields import load_model_spec

pytestmark = pytest.mark.server


REFUSING = """    if not parameters["min_score"]:
        raise ValueError("a score is needed", 0)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with pipelines and their repository; one core of `cores` has 8 bits."""
    base = tmp_path_factory.mktemp("cores")
    write(base / "pipelines", "chain", "chain")
    with (base / "pipelines/chain/pipeline.yaml").open("a") as file:
        file.write(f"serving: {{sample: {json.dumps(SAMPLING)}}}\n")
    hooks = base / "pipelines/chain/hooks.py"
    start = "    crops, found, counts ="
    assert start in hooks.read_text()
    hooks.write_text(hooks.read_text().replace(start, REFUSING + start))
    write_cores(base / "pipelines/cores")
    build_own(base, "chain")
    outcome = build_own(base, "cores", "models.risks.core.precision=int8", "outputs.risk.limit=0.6")
    assert outcome.gate.precision == "int8"
    assert outcome.gate.passed
    spec = json.loads((base / "pipelines/cores/pipeline.yaml").read_text())
    for name in ("vectors", "classes"):
        spec["models"][name]["core"] = {"shared_from": f"cores.{name}"}
    write_cores(base / "pipelines/second", models=spec["models"])
    build_own(base, "second")
    alone = write_cores(base / "pipelines/alone")
    (alone / "hooks.py").unlink()
    fields: dict[str, Any] = {
        "task": "model",
        "model": {"onnx": "classes.onnx"},
        "core": {"shared_from": "cores.classes"},
        "inputs": {"features": {"type": "float", "shape": [4]}},
        "outputs": {"result": {"type": "float", "shape": [3]}},
    }
    (alone / "pipeline.yaml").write_text(json.dumps(fields))
    build_own(base, "alone")
    return base


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[Any]:
    environment = {FOLDER_VARIABLE: str(base / "samples")}
    names = ["chain", "cores", "second", "alone"]
    with Server(base / "repository", models=names, environment=environment) as server:
        yield server


def read_pictures(base: Path) -> list[bytes]:
    names = ("none", "one", "two")
    return [(base / f"pipelines/chain/samples/{name}.png").read_bytes() for name in names]


def test_objects_are_found_cut_out_classified_and_compared(base: Path, server: Any) -> None:
    images = read_pictures(base)
    with Client("chain", server.grpc_url) as client:
        together = client.infer({"image": images})
        alone = [client.infer({"image": [image]}) for image in images]
        assert [each["label"].shape for each in alone] == [(1, 0), (1, 1), (1, 2)]
        for row, each in enumerate(alone):
            for name, values in each.items():
                assert together[name][row][: values.shape[1]].tolist() == values[0].tolist()
        assert client.infer({"image": images[:1] * 5})["label"].shape == (5, 0)
        first, second = client.infer_each({"image": [images[1], b"no image"]})
    assert not isinstance(first, InvalidRequestError)
    assert "cannot be decoded" in str(second)

    found = monitor_samples(base, "chain", 2 * len(images))
    assert found["rows"] >= len(images)
    assert {"box.iou", "label.exact"} <= {each["metric"] for each in found["metrics"]}


def test_a_request_that_fails_between_models_is_ended(
    base: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFIX_VARIABLE, server._tag)
    image = read_pictures(base)[2]
    with Client("chain", server.grpc_url) as client:
        for _ in range(20):
            with pytest.raises(InvalidRequestError, match="a score is needed"):
                client.infer({"image": [image]}, parameters={"min_score": 0.0})
        assert client.infer({"image": [image]})["label"].shape == (1, 2)
    wait_until(lambda: InFlight("chain").requests() == 0, "the end of all requests")


def test_models_of_one_step_share_their_arrays(base: Path, server: Any) -> None:
    folder = base / "pipelines/cores"
    features = np.random.default_rng(1).normal(size=(30, 4)).astype(np.float32)
    first, second = (
        onnxruntime.InferenceSession(folder / f"{name}.onnx").run(None, {"features": features})[0]
        for name in ("vectors", "classes")
    )
    session = onnxruntime.InferenceSession(folder / "risks.onnx")
    (risk,) = session.run(None, {"both": 0.5 * np.concatenate([first, second], axis=1)})
    with Client("cores", server.grpc_url) as client:
        got = client.infer({"features": features}, parameters={"factor": 0.5})
        steps = {step.model: step for step in client.step_statistics()}
    assert got["label"][:, 0].tolist() == [f"class {best}" for best in second.argmax(axis=1)]
    np.testing.assert_allclose(got["total"][:, 0], features.sum(axis=1), rtol=1e-4)
    assert np.abs(got["risk"] - risk - 0.5).max() < 0.1 * np.abs(risk).max()
    assert list(steps) == [
        "cores_preprocess",
        "cores.vectors_core",
        "cores.classes_core",
        "cores.rank_step",
        "cores.risks_core",
        "cores_postprocess",
    ]
    config = (base / "repository/cores.classes_core/config.pbtxt").read_text()
    assert "count: 2" in config
    manifest = read_manifest(base / "repository", "cores", CompiledManifest)
    precisions = {name: core.precision for name, core in manifest.cores.items()}
    assert precisions == {"vectors": "fp32", "classes": "fp32", "risks": "int8"}


def test_a_core_is_shared_by_pipelines(base: Path, server: Any) -> None:
    repository = base / "repository"
    cores = {path.name for path in repository.iterdir() if path.name.endswith("_core")}
    assert {name for name in cores if not name.startswith("chain")} == {
        *(f"cores.{name}_core" for name in ("vectors", "classes", "risks")),
        "second.risks_core",
    }
    features = np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32)
    with (
        Client("cores", server.grpc_url) as first,
        Client("second", server.grpc_url) as second,
        Client("alone", server.grpc_url) as alone,
    ):
        labels = first.infer({"features": features})["label"]
        assert second.infer({"features": features})["label"].tolist() == labels.tolist()
        best = alone.infer({"features": features})["result"].argmax(axis=1)
    assert [f"class {index}" for index in best] == labels[:, 0].tolist()
    for shared, message in {
        "cores.risks": "whose core has another model",
        "cores": "Set core.shared_from to cores.vectors, cores.classes, cores.risks",
        "second.vectors": "shares the core of cores.vectors",
        "third": "is not built into the repository",
        "alone.classes": "must name a core of another pipeline",
    }.items():
        check_refused(message, build_own, base, "alone", f"core.shared_from={shared}")
    words, known = "it would be removed", ["second", "alone"]
    check_refused(words, check_sharers, repository, "cores", {}, known)
    kept = {"cores.vectors": "", "cores.classes": ""}
    check_refused("it would change", check_sharers, repository, "cores", kept, ["alone"])


def test_the_gate_finds_a_fault_in_a_core_and_behind_it(base: Path, tmp_path: Path) -> None:
    model = "vectors"
    inputs = read_own(base, "cores")
    core = next(each for each in (inputs, *inputs.others) if each.model == model)
    gate = Gate(core, "fp32", quiet)
    shutil.copy(base / f"pipelines/cores/{model}.onnx", tmp_path / "right.onnx")
    assert gate.run(tmp_path / "right.onnx", {"model.onnx": f"right {model}"}).passed
    graph = onnx.load(tmp_path / "right.onnx")
    (weight,) = graph.graph.initializer
    values = numpy_helper.to_array(weight).copy()
    values[:, 0] *= 1.01
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(graph, tmp_path / "model.onnx")
    result = gate.run(tmp_path / "model.onnx", {"model.onnx": f"changed {model}"})
    # The class of a row does not depend on so small a change, but the risk behind it does.
    assert {verdict.metric for verdict in result.verdicts if not verdict.passed} >= {
        "max_difference",
        "risk.max_difference",
    }


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": {"onnx": "risks.onnx"}}, "models` replaces model"),
    ({"model": "risks.onnx"}, "models` replaces model"),
    ({"models": {"risks": {"onnx": "risks.onnx", "step": "rank"}}}, "must be preprocess"),
    ({"models": {"preprocess": {"onnx": "vectors.onnx"}}}, "must not have the name of a function"),
    ({"models": {"a": {"onnx": "vectors.onnx", "step": "setup"}}}, "must be preprocess"),
    (
        {"models": {"a": {"onnx": "vectors.onnx"}, "b": {"onnx": "risks.onnx", "step": "setup"}}},
        "must not have the name of a function",
    ),
    ({"core": {"precision": "auto"}}, "must name a precision"),
    (
        {"models": {"a": {"onnx": "vectors.onnx", "core": {"backend": "tensorrt"}}}},
        "is not supported for several models",
    ),
    ({"models": {"a": {"onnx": "vectors.onnx", "cores": {}}}}, "is not a field of the spec"),
    (
        {
            "models": {
                "a": {"onnx": "vectors.onnx", "axes": {"tokens": {"max": 8}}},
                "b": {"onnx": "classes.onnx"},
            }
        },
        "must be equal for the models of one step",
    ),
]


def test_a_wrong_graph_of_models_is_refused(tmp_path: Path) -> None:
    for number, (fields, message) in enumerate(WRONG):
        folder = write_cores(tmp_path / f"wrong{number}", **fields)
        check_refused(message, load_model_spec, folder)


def test_the_check_without_a_server_calls_the_functions_between_models(tmp_path: Path) -> None:
    folder = write_cores(tmp_path / "cores")
    hooks = (folder / "hooks.py").read_text()
    names = {check.name: check for check in check_own_pipeline(load_model_spec(folder))}
    assert names["rank"].note.startswith("40 synthetic rows")
    changes = {
        ('"both": both', '"all": both'): "must return arrays with the names both",
        ("def rank(arrays,", "def rank(array,"): "it gets arrays, rows, parameters, counts",
        ("def rank(", "def _rank("): "has no function `rank`",
        ("axis=1)\\n    best", "axis=0)\\n    best"): "all the input array dimensions",
        ('arrays["best"]', 'arrays["first"]'): "KeyError: 'first'",
    }
    for (old, new), message in changes.items():
        (folder / "hooks.py").write_text(
            hooks.replace(old.replace("\\n", "\n"), new.replace("\\n", "\n"))
        )
        notes = [
            check.note
            for check in check_own_pipeline(load_model_spec(folder))
            if check.severity != "ok"
        ]
        assert any(message in note for note in notes), (message, notes)


def test_arrays_of_any_shape_go_past_a_model() -> None:
    texts = np.array([[b"", b"a b"], [b"\xff", b"c"]], object)
    arrays: dict[str, NDArray[Any]] = {
        "numbers": np.arange(6, dtype=np.int16).reshape(3, 2, 1),
        "none": np.zeros((0, 4), np.float32),
        "one": np.array(7),
        "words": np.array(["ä", "longer"]),
        "texts": texts,
    }
    for rows in (1, 3, 1000):
        packed = pack_arrays(arrays, rows)
        assert (len(packed), packed.dtype.name) == (rows, "uint8")
        found = unpack_arrays(packed)
        assert list(found) == list(arrays)
        for name, array in arrays.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            assert found[name].tolist() == array.tolist()
    with pytest.raises(RuntimeError, match="`mixed` must be an array of numbers or texts"):
        pack_arrays({"mixed": np.array([1, None], object)}, 1)


def test_a_model_may_take_the_settings_of_the_pipeline(tmp_path: Path) -> None:
    folder = write_cores(tmp_path / "cores", core={"threads": 2, "max_batch_size": 16})
    spec = load_model_spec(folder, ["serving.instances.core=3"])
    plans = read_own_inputs(spec, quiet).plan.cores
    found = {
        plan.model: (plan.spec.core.threads, plan.max_batch_size, plan.spec.serving.instances.core)
        for plan in plans
    }
    assert found == {"vectors": (2, 16, 3), "classes": (1, 16, 2), "risks": (2, 64, 3)}
    assert plans[0].request_rows == 16
    assert json.loads((folder / "pipeline.yaml").read_text())["core"]["threads"] == 2


def test_functions_that_pass_other_arrays_replace_those_before(base: Path, server: Any) -> None:
    told: list[str] = []
    exchange = HotReload(server, on_reload=told.append, on_problem=told.append)
    hooks = base / "pipelines/second/hooks.py"
    text = hooks.read_text()
    # Another array goes past the last model.
    changed = text.replace('"best": best}', '"best": best, "eight": best * 0 + 8}')
    hooks.write_text(changed.replace('rows["features"].sum(axis=1)', 'arrays["eight"]'))
    totals: list[float] = []
    ended = threading.Event()

    def ask() -> None:
        with Client("second", server.grpc_url, timeout_s=60.0) as client:
            while totals[-1:] != [8.0] and not ended.is_set():
                with suppress(InferenceError):  # while the steps are replaced
                    found = client.infer({"features": [[1.0, 2.0, 3.0, 4.0]]})
                    totals.append(float(found["total"][0, 0]))

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            wait_until(lambda: bool(totals), "an answer")
            build_own(base, "second")
            assert exchange.poll(), told
            asking.result(timeout=120)
        finally:
            ended.set()
    (line,) = told
    assert "second was rebuilt and reloaded" in line


TENSOR_NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(12, 3)

    def forward(self, month):
        return self.table((month - 1)[:, 0])
"""

BETWEEN = """
def preprocess(rows):
    return {"features": rows["features"]}


def between(arrays):
    return {"month": arrays["vector"].argmax(axis=1)[:, None] + 1}
"""


def test_a_module_that_returns_a_tensor_is_a_later_model(tmp_path: Path) -> None:
    folder = tmp_path / "pipelines/months"
    folder.mkdir(parents=True)
    save_dense(folder / "vectors.onnx", "features", 4, {"vector": 12}, 1)
    (folder / "net.py").write_text(TENSOR_NET)
    (folder / "hooks.py").write_text(BETWEEN)
    features = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
    write_rows(folder, [{"features": row} for row in features.tolist()])
    spec: dict[str, Any] = {
        "task": "model",
        "models": {
            "vectors": {"onnx": "vectors.onnx"},
            "months": {"module": "net.py:Net", "step": "between"},
        },
        "inputs": {"features": {"type": "float", "shape": [4]}},
        "outputs": {"season": {"type": "float", "shape": [3]}},
    }
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    inputs = read_own(tmp_path, "months")
    assert inputs.plan.stages[1].own.ranges == {"month": [[1], [12]]}
    assert inputs.chain is not None
    direct = [inputs.chain.answer(request)["season"][0] for request in inputs.requests]
    build_own(tmp_path, "months")
    sent = np.array([request.sent["features"] for request in inputs.requests])
    with (
        Server(tmp_path / "repository") as server,
        Client("months", server.grpc_url) as client,
    ):
        found = client.infer({"features": sent})["season"]
    np.testing.assert_allclose(found, direct, atol=1e-5)
    both = {"season": {"type": "float", "shape": [3]}, "other": {"type": "float"}}
    (folder / "pipeline.yaml").write_text(json.dumps({**spec, "outputs": both}))
    check_refused("model.outputs", build_own, tmp_path, "months")
