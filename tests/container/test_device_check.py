"""The accuracy gate on the device that serves: at the first start, kept for later ones."""

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import numpy_helper

from tests.support.container_cases import copy_packed
from tests.support.container_image import image_of
from tests.support.processes import serving_http
from tests.support.project import ROOT
from tests.support.served_command import endpoints_of, serving
from triptych.container.device_check import (
    ROWS_FILE,
    DeviceChecks,
    PassedChecks,
    Rules,
    compare,
    find_checks,
    find_device,
)
from triptych.container.machine import Machine, VisibleGpu, read_machine
from triptych.container.processor import find_processor
from triptych.repository.lint.checks import run_checks

RULES = Rules({"vector": 1.0, "score": 1.0}, ["entities"], 1e-2, 0.1, 0.0, strict=True)
HERE = Machine(None, (), None, ("avx2",), "a processor")
PASSED = "passed the accuracy gate on this device in"
FAILS = "fails the accuracy gate on this device"


def outputs(**values: list[Any]) -> dict[str, Any]:
    return {name: {"shape": [1, len(data)], "data": data} for name, data in values.items()}


def entities(score: float, start: int = 0) -> dict[str, Any]:
    return outputs(entities=[json.dumps([{"entity": "ORG", "start": start, "score": score}])])


def test_answers_are_compared_by_numbers_names_and_texts() -> None:
    named = outputs(label=["a", "b"], score=[0.501, 0.499])
    for wanted, got, fault in (
        (outputs(vector=[0.1, 0.2]), outputs(vector=[0.1, 0.201]), ""),
        (outputs(vector=[0.1, 0.2]), outputs(vector=[0.1, 0.22]), "differs by 0.02"),
        (outputs(vector=[0.1] * 900), outputs(vector=[0.109] * 900), ""),
        (outputs(vector=[0.01] * 900), outputs(vector=[0.015] * 900), "relative error"),
        (outputs(vector=[0.1, 0.2]), outputs(vector=[0.1, math.nan]), "NaN"),
        (outputs(vector=[0.1, 0.2]), outputs(vector=[0.1, None]), "NaN"),
        (outputs(vector=[0.1, 0.2]), outputs(vector=[0.1]), "not that of the reference"),
        (outputs(vector=[0.1, 0.2]), outputs(other=[1]), "vector is missing"),
        # The order of nearly equal scores is free, another label is not.
        (named, outputs(label=["b", "a"], score=[0.501, 0.499]), ""),
        (named, outputs(label=["b", "c"], score=[0.501, 0.499]), "label is not that"),
        (entities(0.9), entities(0.901), ""),
        (entities(0.9), entities(0.8), "differs by 0.1"),
        (entities(0.9), entities(0.9, start=1), "entities is not that"),
    ):
        found = compare(wanted, got, RULES)[0]
        assert (fault in found) if fault else (found == ""), (wanted, got, found)


def test_a_device_has_the_parts_on_which_its_results_depend() -> None:
    gpu = HERE._replace(gpus=(VisibleGpu("NVIDIA H200", (9, 0)),), driver="590.1")
    devices = [
        find_device(HERE, "24.10", on_gpu=False),
        find_device(HERE, "26.08", on_gpu=False),
        find_device(HERE._replace(processor="another"), "24.10", on_gpu=False),
        find_device(HERE._replace(instruction_sets=()), "24.10", on_gpu=False),
        find_device(gpu, "24.10", on_gpu=True),
        find_device(gpu._replace(driver="600.1"), "24.10", on_gpu=True),
        find_device(gpu._replace(gpus=(VisibleGpu("L4", (8, 9)),)), "24.10", on_gpu=True),
    ]
    assert len({device.text for device in devices}) == len(devices)
    assert all(device.is_known for device in devices)
    # The GPU does not matter to a core on the processor.
    assert find_device(gpu, "24.10", on_gpu=False) == devices[0]
    for machine, on_gpu in (
        (HERE._replace(processor=""), False),
        (HERE, True),
        (gpu._replace(driver=None), True),
        (gpu._replace(gpus=(VisibleGpu("", (9, 0)),)), True),
    ):
        assert not find_device(machine, "24.10", on_gpu=on_gpu).is_known


def test_a_processor_without_a_name_has_its_numbers(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nCPU implementer : 0x41\nCPU part : 0xd4f\n")
    assert find_processor(file) == "0x41 0xd4f"


def write_build(repository: Path, *, rows: bool = True, **others: object) -> Path:
    """A build whose reference answers `hello` with ``[0.5]``; `rows`: with its rows.

    `others` are rules of another release.
    """
    rules = {**RULES._asdict(), "floats": {"vector": 1.0}, **others}
    row = {
        "preview": "a made-up row",
        "request": base64.b64encode(b"{}\nhello").decode(),
        "answer": outputs(vector=[0.5]),
    }
    content = gzip.compress(json.dumps({"rules": rules, "rows": [row]}).encode())
    folder = repository / "p"
    folder.mkdir(parents=True)
    files = {"p/config.pbtxt": "x"}
    if rows:
        (folder / ROWS_FILE).write_bytes(content)
        files[f"p/{ROWS_FILE}"] = hashlib.sha256(content).hexdigest()
    lock = {"spec": {"core": {"device": "cpu"}}, "gate": {}, "files": files}
    (folder / "triptych.lock.json").write_text(json.dumps(lock))
    return repository


@contextmanager
def answering(value: float, status: int = 200) -> Iterator[str]:
    """A server that answers each request with this vector."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v2/models/p/infer"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert body == b"{}\nhello"
            assert self.headers["Inference-Header-Content-Length"] == "3"
            output = {"name": "vector", "shape": [1, 1], "datatype": "FP32", "data": [value]}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps({"outputs": [output]}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with serving_http(Handler) as address:
        yield address


def run(
    repository: Path, url: str, state: Path, mode: Any = "enforce", machine: Machine = HERE
) -> tuple[list[str], str]:
    """What a start tells and why it refuses."""
    told: list[str] = []
    checks = DeviceChecks(
        find_checks(repository, machine, "24.10"), PassedChecks(state), mode, told.append
    )
    checks.run(url)
    return told, checks.refusal


def test_a_device_is_checked_once_and_a_wrong_answer_is_refused_or_told(tmp_path: Path) -> None:
    repository, state = write_build(tmp_path / "models"), tmp_path / "new/state"
    other = HERE._replace(processor="another")
    with answering(0.5) as url:
        told, refusal = run(repository, url, state)
        assert not refusal
        assert told[0].startswith(f"p {PASSED}")
        assert run(repository, url, state) == ([], "")
        assert run(repository, url, state, machine=other)[0]
    # Once passed, nothing is sent; another device is.
    with answering(0.7) as url:
        assert run(repository, url, state) == ([], "")
        driver = HERE._replace(instruction_sets=("avx512f",))
        told, refusal = run(repository, url, state, machine=driver)
        assert not told
        assert "1 of 1 answers are wrong; that to 'a made-up row': differs by 0.2" in refusal
        told, refusal = run(repository, url, state, "warn", driver)
        assert not refusal
        assert told[0].startswith(f"warning: p {FAILS}: 1 of 1 answers")
        assert run(repository, url, state, "off", driver) == ([], "")
        assert run(repository, url, state, machine=driver)[1], "a failure is not kept"
    with answering(0.5, status=503) as url:
        assert "could not be checked (OSError: HTTP 503" in run(repository, url, tmp_path / "s")[1]
    assert "could not be checked (ConnectionRefused" in run(repository, url, tmp_path / "s")[1]


def test_what_cannot_be_kept_or_named_is_checked_at_each_start(tmp_path: Path) -> None:
    repository = write_build(tmp_path / "models")
    (tmp_path / "file").write_text("no folder")
    with answering(0.5) as url:
        for state, machine, words in (
            (tmp_path / "file/state", HERE, "the result cannot be kept"),
            (tmp_path / "state", HERE._replace(processor=""), "name cannot be read"),
        ):
            for _ in range(2):
                told, refusal = run(repository, url, state, machine=machine)
                assert not refusal, words
                assert PASSED in told[0], words
                assert "checked at each start" in told[1]
                assert words in told[1]


def test_changed_and_missing_rows_are_told_and_builds_without_rows_serve(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with answering(0.5) as url:
        repository = write_build(tmp_path / "a")
        (repository / "p" / ROWS_FILE).write_bytes(b"others")
        assert "differs from the build manifest" in run(repository, url, state)[1]
        (repository / "p" / ROWS_FILE).unlink()
        assert "cannot be read (No such file" in run(repository, url, state)[1]
        later = write_build(tmp_path / "c", new_limit=1.0)
        assert "could not be checked (TypeError" in run(later, url, state)[1]
        former = write_build(tmp_path / "b", rows=False)
        assert run(former, url, state) == ([], "")


def test_lint_names_what_was_never_checked_on_this_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_STATE", str(tmp_path / "state"))
    former, built = (
        write_build(tmp_path / name, rows=name == "built") for name in ("former", "built")
    )

    def given(repository: Path) -> list[str]:
        found = run_checks(repository)
        return [each.given for each in found if each.id == "device-check"]

    assert given(former) == [
        "never checked there: a build of an earlier release has no rows for it"
    ]
    (never,) = given(built)
    assert never.startswith("never checked on ")
    with answering(0.5) as url:
        run(built, url, tmp_path / "state", machine=read_machine())
    assert given(built) == []


def plant_weights(repository: Path) -> Path:
    """Make one layer of the core compute something else."""
    file = repository / "minilm_packed_core/1/model.onnx"
    model = onnx.load(file)
    largest = max(model.graph.initializer, key=lambda each: math.prod(each.dims))
    largest.CopyFrom(
        numpy_helper.from_array(numpy_helper.to_array(largest)[::-1].copy(), largest.name)
    )
    onnx.save(model, file)
    return repository


@pytest.mark.server
def test_a_container_is_ready_after_the_first_check_on_its_device(
    minilm_repository: Path, tmp_path: Path
) -> None:
    repository = copy_packed(minilm_repository, tmp_path / "models")
    state = tmp_path / "state"
    with image_of(tmp_path / "image", repository) as image:
        image.variables["TRIPTYCH_STATE"] = str(state)
        for times in (1, 0):
            with image.serving() as process:
                process.terminate()
                said, _ = process.communicate(timeout=60)
            assert said.count(PASSED) == times, said
            assert len(list(state.iterdir())) == 1
        # Another device, for which the stored result does not hold.
        (stored,) = state.iterdir()
        stored.rename(state / f"{stored.name.partition('-')[0]}-other")
        plant_weights(repository)
        image.variables["TRIPTYCH_LOCK_CHECK"] = "off"
        with image.run("entrypoint") as process:
            seen = set()
            while process.poll() is None:
                seen.add(image.health())
            said = process.stdout.read() if process.stdout else ""
        assert process.returncode == 1, said
        assert f"error: minilm_packed {FAILS}" in said
        assert {exit_code for exit_code, _ in seen} == {1}, seen
        image.variables["TRIPTYCH_DEVICE_CHECK"] = "warn"
        with image.serving() as process:
            process.terminate()
            said, _ = process.communicate(timeout=60)
        assert f"warning: minilm_packed {FAILS}" in said


@pytest.mark.server
def test_serve_checks_what_was_built_elsewhere(
    minilm_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = copy_packed(minilm_repository, tmp_path / "models")
    assert said_by_serve(repository).count(PASSED) == 0, "it was built here"
    monkeypatch.setenv("TRIPTYCH_STATE", str(tmp_path / "state"))
    assert said_by_serve(repository).count(PASSED) == 1
    assert said_by_serve(repository).count(PASSED) == 0
    plant_weights(repository)
    monkeypatch.setenv("TRIPTYCH_LOCK_CHECK", "off")
    monkeypatch.setenv("TRIPTYCH_STATE", str(tmp_path / "elsewhere"))
    with serving(repository) as server:
        _, said = server.communicate(timeout=120)
    assert server.returncode == 2
    assert FAILS in said
    assert "TRIPTYCH_DEVICE_CHECK=warn" in said
    monkeypatch.setenv("TRIPTYCH_DEVICE_CHECK", "warn")
    assert f"warning: minilm_packed {FAILS}" in " ".join(said_by_serve(repository).split())


def said_by_serve(repository: Path) -> str:
    """What `serve` prints for people until it is ready and ended."""
    with serving(repository) as server:
        endpoints_of(server)
        server.terminate()
        said: str = server.communicate(timeout=60)[1]
    return said


@pytest.mark.server
def test_rows_of_the_traffic_are_in_a_repository_by_a_setting_alone(
    minilm_repository: Path,
) -> None:
    content = gzip.decompress((minilm_repository / "minilm_packed" / ROWS_FILE).read_bytes())
    rows = json.loads(content)["rows"]
    assert 16 < len(rows) <= 32
    assert len(content) < 400_000
    sent = b"".join(base64.b64decode(row["request"]) for row in rows)
    lines = (ROOT / "pipelines/minilm/traffic.jsonl").read_text().splitlines()
    assert not [line for line in lines if json.loads(line)["text"].encode() in sent]
