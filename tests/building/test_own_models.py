"""Pipelines around own models, from an ONNX file to answers of a real tritonserver."""

import csv
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from gradio_client import handle_file

from tests.support.demo_pages import ask, open_demo
from tests.support.mistakes import check_refused
from tests.support.own_models import (
    SAMPLING,
    build_own,
    folders_of,
    make_sound,
    monitor_samples,
    read_own,
    write_module,
    write_rows,
    write_sounds,
    write_table,
)
from tests.support.processes import eventually
from tests.support.project import build_into, quiet, write_pipeline
from tests.support.scaffolding import run, write
from triptych.building.own_checks import check_own_pipeline
from triptych.building.pipeline_checks import check_pipeline
from triptych.client import Client, InvalidRequestError
from triptych.container.health import QUESTION_FILE, HealthCheck
from triptych.container.manifests import find_pipelines
from triptych.core.gate.cached import GateFailure
from triptych.core.gate.verify import LiveOptions, verify_pipeline
from triptych.runtime.sampling import FOLDER_VARIABLE
from triptych.serving.server import Server
from triptych.spec.model_fields import load_model_spec
from triptych.spec.spec import load_spec

pytestmark = pytest.mark.server


ADDING = """
def setup(context):
    global PREFIX
    PREFIX = (context.folder / "prefix.txt").read_text()


def after(rows, inputs):
    for row, asked in zip(rows, inputs):
        row["size"] = float((row["embedding"] ** 2).sum() ** 0.5)
        row["first"] = PREFIX + (asked["text"].split() or [""])[0]
    return rows
"""


REDACTING = """
def redact(inputs, answer):
    assert isinstance(inputs["features"], list)
    return None if inputs["bias"] == 13 else (inputs, answer)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Folder with pipelines and their repository."""
    base = tmp_path_factory.mktemp("own")
    detector = write(base / "pipelines", "object-detection", "detector")
    with (detector / "pipeline.yaml").open("a") as file:
        file.write(f"serving: {{sample: {json.dumps(SAMPLING)}}}\n")
    sample = {**SAMPLING, "redact": "hooks.redact"}
    write_table(base / "pipelines/table", serving={"sample": sample})
    (base / "pipelines/table/hooks.py").write_text(REDACTING)
    write_module(base / "pipelines/levels")
    write_sounds(base / "pipelines/sounds")
    for name in ("detector", "table", "levels", "sounds"):
        build_own(base, name)
    vectors = write_pipeline(
        base / "pipelines/vectors",
        model={"source": str(tiny_model)},
        core={"layout": "bucketed"},
        files=["prefix.txt"],
        outputs=[{"name": "size", "dtype": "FP32"}, {"name": "first", "dtype": "BYTES"}],
    )
    (vectors / "hooks.py").write_text(ADDING)
    (vectors / "prefix.txt").write_text("1. ")
    build_into(vectors, base / "repository")
    return base


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Any]:
    environment = {FOLDER_VARIABLE: str(folder / "samples")}
    with Server(folder / "repository", environment=environment) as server:
        yield server


OBJECTS = {"one": ["red square"], "two": ["blue square", "red square"], "none": []}
"""Labels that are found in the samples of the template."""


def read_pictures(folder: Path) -> list[bytes]:
    return [(folder / f"pipelines/detector/samples/{name}.png").read_bytes() for name in OBJECTS]


def test_a_detector_finds_the_squares(folder: Path, server: Any) -> None:
    images = read_pictures(folder)
    with Client("detector", server.grpc_url) as client:
        found = client.infer({"image": images})
        for labels, boxes, wanted in zip(
            found["label"], found["box"], OBJECTS.values(), strict=True
        ):
            assert sorted(label for label in labels if label) == wanted
            assert boxes[: len(wanted)].any(axis=1).all()
            assert not boxes[len(wanted) :].any()
        strict = client.infer({"image": images[:1]}, parameters={"min_score": 1.0})
        assert strict["label"].shape == (1, 0)
        usual = client.infer({"image": images[:1]})["box"]
        np.testing.assert_array_equal(usual[0], found["box"][0][: usual.shape[1]])
        first, second = client.infer_each({"image": [images[0], b"no image"]})
    assert "cannot be decoded" in str(second)
    assert isinstance(first, dict)
    assert [label for label in first["label"] if label] == OBJECTS["one"]

    spec, path = load_model_spec(folder / "pipelines/detector"), "samples/two.png"
    with open_demo(spec, spec.folder, folder / "repository", server.grpc_url) as page:
        boxes, outputs, *_ = ask(page, handle_file(spec.folder / path), *[None] * 3)
    assert sorted(each["label"] for each in boxes["annotations"]) == OBJECTS["two"]
    assert outputs.count("label: ") == 2


def test_a_table_answers_as_its_graph(folder: Path, server: Any) -> None:
    session = onnxruntime.InferenceSession(folder / "pipelines/table/table.onnx")
    features = np.random.default_rng(1).normal(size=(70, 4)).astype(np.float32)
    bias = np.linspace(-1, 1, 70, dtype=np.float32)
    (wanted,) = session.run(None, {"features": features, "bias": bias[:, None]})
    (usual,) = session.run(None, {"features": features, "bias": np.full((70, 1), 0.5, np.float32)})
    with Client("table", server.grpc_url) as client:
        got = client.infer({"features": features, "bias": bias})
        np.testing.assert_allclose(got["risk"], wanted, atol=1e-5)
        got = client.infer({"features": features.tolist()})
        np.testing.assert_allclose(got["risk"], usual, atol=1e-5)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"features": [[1, 2, 3, 4], [1, float("nan"), 3, 4]]}, "row 1: `features` must have finite"),
    ({"features": [[1, 2, 3]]}, "must have the shape [4]"),
    ({"features": ["text"]}, "must have the shape [4]"),
    ({"features": [["a", "b", "c", "d"]]}, "must have elements of type float32, not text"),
    ({"bias": [1.0]}, "`features` is required"),
    ({"features": [[1, 2, 3, 4]], "bias": [float("inf")]}, "`bias` must have finite"),
    ({"features": [[1, 2, 3, 4]], "bais": [1.0]}, "`bais` is not an input"),
]


def test_a_bad_row_is_named_with_its_input(server: Any) -> None:
    with Client("table", server.grpc_url) as client:
        for inputs, message in BAD:
            with pytest.raises(InvalidRequestError, match=re.escape(message)):
                client.infer(inputs)
        (good, bad) = client.infer_each({"features": [[0, 0, 0, 0], [0, 0, 0, float("inf")]]})
        assert isinstance(bad, InvalidRequestError)
        assert not isinstance(good, InvalidRequestError)
    with (
        Client("detector", server.grpc_url) as client,
        pytest.raises(InvalidRequestError, match="min_score` must be a number from 0"),
    ):
        client.infer({"image": [b""]}, parameters={"min_score": 2.0})


def test_health_and_the_live_gate_ask_in_the_types_of_the_inputs(folder: Path, server: Any) -> None:
    repository = folder / "repository"
    health = HealthCheck(find_pipelines(repository))
    assert health.find_fault(f"http://{server.http_url}") is None
    for name in ("detector", "levels", "sounds"):
        assert (repository / name / QUESTION_FILE).is_file()
        inputs = read_own(folder, name)
        result = verify_pipeline(
            inputs, LiveOptions(repository, nullcontext(server), quiet, clients=4, timeout_s=60.0)
        )
        assert result.passed, result.failures
        assert {verdict.metric for verdict in result.verdicts} >= {
            metric.name for metric in inputs.plan.task.metrics
        }


REFUSED = {
    "(float[1, 4] x) => (float[1, 4] y) { y = Relu(x) }": "batch axis of variable size",
    "(float[n, 4] x) => (float[n, 4] y) { m = ReduceMean(x) y = Sub(x, m) }": (
        "must compute each row of a batch by itself"
    ),
    "(float[n, 4] x) => (float[n, 4] y) { y = Nonsense(x) }": "ONNX Runtime can run",
    "(string[n, 4] x) => (string[n, 4] y) { y = Identity(x) }": "unsupported type",
}


def test_a_graph_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    for number, (graph, message) in enumerate(REFUSED.items()):
        folder = tmp_path / "pipelines" / f"p{number}"
        folder.mkdir(parents=True)
        text = f'<ir_version: 9, opset_import: ["" : 18]> graph {graph}'
        onnx.save(onnx.parser.parse_model(text), folder / "model.onnx")
        spec = {
            "task": "model",
            "model": {"onnx": "model.onnx"},
            "inputs": {"x": {"type": "float", "shape": [4]}},
            "outputs": {"y": {"type": "float", "shape": [4]}},
        }
        (folder / "pipeline.yaml").write_text(json.dumps(spec))
        write_rows(folder, [{"x": [1.0, 2.0, 3.0, 4.0]}, {"x": [5.0, 1.0, 0.0, 2.0]}])
        check_refused(message, build_own, tmp_path, f"p{number}")


MISTAKES: list[tuple[str, str, str]] = [
    ("np.stack(images)", "np.stack(images)[:, :2]", "`images` must have the shape"),
    ("{INPUT: ", '{"image": ', "names images"),
    ('"score": scores}', '"scores": scores}', "must return a dict with"),
    ("boxes.append(_in_pixels(found[kept], place))", "boxes.append(kept)", "`box` must have the"),
    ("[LABELS[index] for", "[index for", "`label` must have elements of type text"),
    ('return {"box": boxes,', 'return {"box": boxes[:-1],', "`box` must have 1 rows"),
    ("def postprocess(arrays:", "def postprocess(array:", "argument `array`"),
    ("_suppress(", "suppress(", "is never called"),
    ("FILL = 114", "FILL = 0", ""),
    ("images.append(pixels)", "images.append(pixels + row)", "depends on the other rows"),
    ("    return {INPUT", "    assert not row\n    return {INPUT", "in one request, but not alone"),
]


def test_the_check_without_a_server_finds_mistakes_in_functions(tmp_path: Path) -> None:
    folder = write(tmp_path, "object-detection")
    hooks = folder / "hooks.py"
    right = hooks.read_text()
    for old, new, message in MISTAKES:
        assert old in right, old
        hooks.write_text(right.replace(old, new))
        errors = [
            check.note
            for check in check_own_pipeline(load_model_spec(folder))
            if check.severity == "error"
        ]
        assert len(errors) == bool(message), (new, errors)
        assert message in "".join(errors), (new, errors)


def test_the_command_sends_typed_rows(folder: Path, server: Any, tmp_path: Path) -> None:
    url = ["--url", server.grpc_url]
    samples = folder / "pipelines/detector/samples"
    told = run("infer", "detector", *url, "-i", f"image={samples}/two.png", "--json")
    (answer,) = json.loads(told.stdout)
    assert sorted(answer["label"]) == ["blue square", "red square"]
    assert sorted(map(sum, answer["box"])) == [128.0, 368.0]
    rows, out = tmp_path / "rows.jsonl", tmp_path / "found.jsonl"
    lines = [json.dumps({"image": str(samples / f"{name}.png")}) for name in OBJECTS]
    rows.write_text("\n".join(lines))
    run("infer", "detector", *url, "--file", rows, "--out", out)
    found = [json.loads(line)["label"] for line in out.read_text().splitlines()]
    assert list(map(len, found)) == list(map(len, OBJECTS.values()))
    table = tmp_path / "table.csv"
    table.write_text('features,bias\n"[1, 2, 3, 4]",0.25\n"[0, 0, 0, 0]",\n"[1, 2]",1\n')
    run("infer", "table", *url, "--file", table, "--out", tmp_path / "risks.csv")
    answers = list(csv.DictReader((tmp_path / "risks.csv").read_text().splitlines()))
    with Client("table", server.grpc_url) as client:
        wanted = client.infer({"features": [[1, 2, 3, 4]], "bias": [0.25]})["risk"][0]
        usual = client.infer({"features": [[0, 0, 0, 0]]})["risk"][0]
    np.testing.assert_allclose(json.loads(answers[0]["risk"]), wanted, atol=1e-6)
    np.testing.assert_allclose(json.loads(answers[1]["risk"]), usual, atol=1e-6)
    assert "must have the shape [4]" in answers[2]["error"]


def test_sampled_rows_are_compared_and_become_traffic(folder: Path, server: Any) -> None:
    features = np.random.default_rng(3).normal(size=(20, 4)).astype(np.float32)
    with Client("detector", server.grpc_url) as client:
        client.infer({"image": read_pictures(folder)})
    with Client("table", server.grpc_url) as client:
        client.infer({"features": features})
        client.infer({"features": features[:1], "bias": [13]})  # which `redact` drops
    found = monitor_samples(folder, "table", 20)
    assert found["rows"] >= 4
    assert "risk.max_difference" in [each["metric"] for each in found["metrics"]]
    where = folders_of(folder, "pipelines", "repository", "samples")
    traffic = folder / "pipelines/table/traffic.jsonl"
    kept = traffic.read_bytes()

    def add() -> int:
        return int(json.loads(run("traffic", "table", *where, "--json").stdout)["added"])

    try:
        assert add() > 0
        assert eventually(lambda: add() == 0)  # what other tests sent may still be written
        inputs = read_own(folder, "table")
    finally:
        traffic.write_bytes(kept)
    assert len(inputs.traffic) >= 60
    assert not any(row.get("bias") == 13 for row in inputs.traffic)
    refused = run("traffic", "detector", *where).exception
    assert "a file in the traffic is a path" in str(refused)
    other = folder / "other"
    run("build", "table", *where[:2], "--repository", other, "--set", "core.threads=1")
    words = [*where, *folders_of(folder, "reports"), "--json", "--max-rounds", "0"]
    for source in ([], ["--traffic"]):
        done = run("shadow", "table", other, *words, *source)
        assert done.stdout, (done.output, done.exception)
        verdict = json.loads(done.stdout)
        assert verdict["answers"]["rows"] >= 19
        assert verdict["verdict"] != "reject"


def test_a_module_answers_as_in_torch(folder: Path, server: Any) -> None:
    import torch

    from triptych.core.export.own_module import load_module

    module = load_module(load_model_spec(folder / "pipelines/levels"))
    features = np.random.default_rng(2).normal(size=(9, 4)).astype(np.float32)
    ages = np.arange(9) * 11
    with torch.inference_mode():
        wanted = module(torch.from_numpy(features), torch.from_numpy(ages[:, None]).float())
    best = wanted["logits"].argmax(1).numpy()
    with Client("levels", server.grpc_url) as client:
        got = client.infer({"features": features, "age": ages, "customer": list("abcdefghi")})
        assert got["best"].ravel().tolist() == best.tolist()
        assert "".join(got["customer_id"].ravel()) == "abcdefghi"
        assert set(got["level"].ravel()) <= {"low", "middle", "high"}
        usual = client.infer({"features": features[:1], "age": [0]})
        assert usual["customer_id"].tolist() == [["unknown"]]


def test_a_module_with_a_mistake_is_refused(folder: Path, tmp_path: Path) -> None:
    right = folder / "pipelines/levels"
    mistakes = [
        ("net.py", "Linear(4, 8)", "Linear(4, 9)", "weights of the module"),
        ("net.py", "features, ages)", "features, years)", "`forward` takes years"),
        ("net.py", "class Net(", "class Other(", "must name a function or class"),
        ("net.py", "self.first(features)", "self.first(features.T)", "must run on the arrays"),
        ("pipeline.yaml", '"net.py:Net"', '"net.py"', "must have the form FILE.py:NAME"),
        ("net.py", "+ ages / 100", "+ ages.mean()", "must compute each row of a batch"),
    ]
    for number, (file, old, new, message) in enumerate(mistakes):
        copy = Path(shutil.copytree(right, tmp_path / f"pipelines/m{number}"))
        text = (copy / file).read_text()
        assert old in text
        (copy / file).write_text(text.replace(old, new))
        check_refused(message, build_own, tmp_path, copy.name)


def test_sounds_of_any_length_share_planned_sizes(folder: Path, server: Any) -> None:
    plan = read_own(folder, "sounds").plan
    assert plan.layout == "bucketed"
    assert plan.bucket_edges[-1] == 400
    assert 1 < len(plan.bucket_edges) <= 6
    sounds = [make_sound(length, length) for length in (3, 16, 250, 399, 400, 401, 1203)]
    with Client("sounds", server.grpc_url) as client:
        for size in (400, 100):
            got = client.infer(
                {"sound": [sound.tobytes() for sound in sounds]}, parameters={"window": size}
            )
            for row, sound in enumerate(sounds):
                starts = range(0, len(sound), size)
                parts = [(sound[start : start + size] / 32768.0) ** 2 for start in starts]
                powers = [float(part.mean()) for part in parts]
                np.testing.assert_allclose(got["power"][row], np.mean(powers), rtol=1e-4)
                assert got["loudest"][row] == np.argmax(powers)
                np.testing.assert_allclose(got["seconds"][row], len(sound) / 16000)
        with pytest.raises(InvalidRequestError, match="at most 400 along the free axis"):
            client.infer({"sound": [make_sound(500, 0).tobytes()]}, parameters={"window": 500})
        with pytest.raises(InvalidRequestError, match="at most 32 rows of the core"):
            client.infer({"sound": [make_sound(640, 0).tobytes()]}, parameters={"window": 16})


def test_an_axis_that_is_not_declared_is_refused_with_its_name(folder: Path) -> None:
    words = ["axis time differs", "model.axes: {time: {max: SIZE}}"]
    check_refused(words, build_own, folder, "sounds", "model.axes={}")
    words = ["must be an axis of an input"]
    check_refused(words, build_own, folder, "sounds", "model.axes={length: {max: 400}}")


def test_an_engine_has_a_profile_for_each_planned_size(folder: Path) -> None:
    setting = "core.backend=tensorrt"
    sounds, detector = (read_own(folder, name, setting).plan for name in ("sounds", "detector"))
    assert sounds.engine is not None
    profiles = [profile["samples"] for profile in sounds.engine.profiles]
    assert [shapes.maximum for shapes in profiles] == [(32, edge) for edge in sounds.bucket_edges]
    assert [shapes.minimum for shapes in profiles] == [(1, edge) for edge in sounds.bucket_edges]
    assert detector.engine is not None
    (profile,) = detector.engine.profiles
    assert profile["images"].maximum == (32, 3, 64, 64)


REFERENCE = """
import numpy as np


def answer(rows, parameters):
    found = [np.frombuffer(data, np.int16) / 32768.0 for data in rows["sound"]]
    return {
        "power": [float((sound**2).mean()) FACTOR for sound in found],
        "loudest": [0 for _ in found],
        "seconds": [len(sound) / 16000 for sound in found],
    }
"""


def test_after_adds_declared_outputs_to_a_built_in_task(folder: Path, server: Any) -> None:
    vectors = folder / "pipelines/vectors"
    with Client("vectors", server.grpc_url) as client:
        found = client.infer({"text": ["two words"]})
        size = np.linalg.norm(found["embedding"][0])
        np.testing.assert_allclose(found["size"], [[size]], rtol=1e-5)
        assert found["first"].tolist() == [["1. two"]]
    assert not [each for each in check_pipeline(load_spec(vectors)) if each.severity == "error"]
    (vectors / "hooks.py").write_text(ADDING.replace('"size"', '"length"'))
    (wrong,) = [each for each in check_pipeline(load_spec(vectors)) if each.severity == "error"]
    assert "size" in wrong.note
    # Names of an output, of a parameter, and of tensors before and behind the core.
    for name in ("embedding", "dimensions", "input_ids", "sentence_embedding"):
        words, own = (
            "no other tensor of the pipeline has",
            f"outputs=[{{name: {name}, dtype: FP32}}]",
        )
        check_refused(words, build_into, vectors, folder / "repository", own)
    (vectors / "hooks.py").write_text("def before(rows):\n    return rows\n")
    check_refused("has no function `after`", build_into, vectors, folder / "repository")


def test_the_gate_compares_with_a_reference_of_the_user(folder: Path) -> None:
    reference = folder / "pipelines/sounds/reference.py"
    # The reference does not cut sounds into windows.
    whole = ["model.axes.time.max=2000", "parameters.window.default=1000"]
    try:
        reference.write_text(REFERENCE.replace("FACTOR", ""))
        outcome = build_own(folder, "sounds", *whole)
        assert outcome.gate.passed
        reference.write_text(REFERENCE.replace("FACTOR", "* 1.5"))
        with pytest.raises(GateFailure, match=r"power\.max_difference"):
            build_own(folder, "sounds", *whole)
        reference.write_text("def reply(rows):\n    return {}\n")
        check_refused("must have a function `answer", build_own, folder, "sounds")
    finally:
        reference.unlink()
        build_own(folder, "sounds")
