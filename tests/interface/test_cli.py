"""Each verb at the command line: results, ``--json``, exit codes, and messages without traces."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from conftest import ROOT, write_pipeline
from processes import eventually
from served_command import TRIPTYCH, endpoints_of, serving


def triptych(
    *words: str | Path, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TRIPTYCH, *map(str, words)],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Path:
    """A folder as a user has it, with one pipeline on the tiny model."""
    write_pipeline(tmp_path / "pipelines/tiny", model={"source": str(tiny_model)})
    return tmp_path


def test_inspect_prints_the_plan_and_writes_nothing(project: Path) -> None:
    done = triptych("inspect", "tiny", "--set", "core.layout=bucketed", cwd=project)
    assert done.returncode == 0, done.stderr
    assert "fewest padded tokens" in done.stdout
    assert sorted(path.name for path in project.iterdir()) == ["pipelines"]
    plan = json.loads(triptych("inspect", "tiny", "--json", cwd=project).stdout)
    assert plan["models"]["tiny_core"]["backend"] == "onnxruntime"


def test_build_then_lint_as_json(project: Path) -> None:
    done = triptych("build", "tiny", "--json", cwd=project)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert result["changed"] == ["tiny", "tiny_core", "tiny_postprocess", "tiny_preprocess"]
    assert result["gate"]["failures"] == []
    assert Path(project, result["report"]).is_file()
    findings = json.loads(triptych("lint", "--json", cwd=project).stdout)
    assert [f for f in findings if f["severity"] == "error"] == []
    assert triptych("lint", cwd=project).returncode == 0


def test_a_failed_gate_exits_with_1(project: Path) -> None:
    done = triptych("build", "tiny", "--set", "accuracy.max_difference=1e-12", cwd=project)
    assert done.returncode == 1
    for words in (
        "accuracy gate",
        "Failed metrics",
        "max_difference",
        "Rows with the largest errors",
    ):
        assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / "model_repository").exists()
    assert (project / "reports/tiny/report.html").is_file()
    gate = json.loads((project / "reports/tiny/gate.json").read_text())
    assert gate["failures"]


def test_a_failed_gate_is_accepted_with_a_reason(project: Path) -> None:
    words = ("build", "tiny", "--set", "accuracy.max_difference=1e-12", "--reports", "elsewhere")
    done = triptych(*words, "--accept-failed-gate", " ", cwd=project)
    assert done.returncode == 2
    assert "needs a reason" in done.stderr
    done = triptych(*words, "--accept-failed-gate", "a [trial]", "--json", cwd=project)
    assert done.returncode == 0, done.stderr
    assert "a [trial]" in done.stderr
    (result,) = json.loads(done.stdout)
    assert result["gate"]["accepted"] == "a [trial]"
    assert result["gate"]["failures"]
    assert json.loads((project / "elsewhere/tiny/gate.json").read_text())["accepted"] == "a [trial]"
    linted = triptych("lint", "--json", cwd=project)
    assert [f["id"] for f in json.loads(linted.stdout) if f["severity"] == "warning"] == [
        "gate-accepted"
    ]


def test_lint_of_a_broken_repository_exits_with_1(project: Path) -> None:
    assert triptych("build", "tiny", cwd=project).returncode == 0
    (project / "model_repository/tiny_core/1/model.onnx").unlink()
    done = triptych("lint", cwd=project)
    assert done.returncode == 1
    assert "model.onnx" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["inspect", "nope"], "Pipelines here: tiny"),
        (["build", "tiny", "nope"], "Pipelines here: tiny"),
        (["build", "tiny", "--set", "core.layoot=x"], "not a field"),
        (["build", "tiny", "--set", "model.source=./nowhere"], "./nowhere"),
        (["build", "tiny", "--set", "task=translation"], "Choose one of"),
        (["lint", "nowhere"], "must be an existing folder"),
        (["serve", "nowhere"], "triptych build"),
        (["infer", "tiny"], "--text"),
        (["infer", "tiny", "--file", "nowhere.txt"], "nowhere.txt"),
        (["infer", "tiny", "--text", "a", "--parameter", "x"], "KEY=VALUE"),
        (["infer", "tiny", "--text", "a", "--url", "127.0.0.1:9"], "127.0.0.1:9"),
        (["lint", "pipelines", "--triton", "soon"], "soon"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_exits_with_2_and_no_trace(
    project: Path, words: list[str], expected: str
) -> None:
    done = triptych(*words, cwd=project)
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / "model_repository").exists()


def test_a_mistake_as_json_keeps_its_parts(project: Path) -> None:
    done = triptych("inspect", "nope", "--json", cwd=project)
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert set(error) == {"field", "rule", "given", "remedy"}


def test_doctor_reports_this_machine(project: Path) -> None:
    done = triptych("doctor", "--json", cwd=project)
    findings = json.loads(done.stdout)
    assert {"id", "severity", "rule", "given", "remedy"} <= set(findings[0])
    errors = [finding for finding in findings if finding["severity"] == "error"]
    assert done.returncode == (1 if errors else 0)


def running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_answers_and_ends_cleanly(
    minilm_repository: Path, tmp_path: Path, number: signal.Signals
) -> None:
    listed = tmp_path / "texts.txt"
    listed.write_text("second\nthird\n")
    with serving(minilm_repository) as server:
        endpoints = endpoints_of(server)
        url = endpoints["grpc"]
        assert url.startswith("127.0.0.1:")
        done = triptych(
            *("infer", "minilm_packed", "--text", "first", "--file", listed),
            *("--url", url, "--parameter", "dimensions=8", "--json"),
        )
        assert done.returncode == 0, done.stderr
        assert [len(row["embedding"]) for row in json.loads(done.stdout)] == [8, 8, 8]
        shown = triptych("infer", "minilm_packed", "-t", "first", "--url", url)
        assert "(384 elements)" in shown.stdout
        refused = triptych("infer", "minilm_packed", "-t", "a", "--url", url, "-p", "dimensions=0")
        assert refused.returncode == 2
        assert "integer from 1 to 384" in refused.stderr
        marks = {path.name for path in Path("/dev/shm").glob("triptych_*")}
        assert marks
        server.send_signal(number)
        _, errors = server.communicate(timeout=60)
    assert server.returncode == 0, errors
    assert number.name in errors
    assert not running(endpoints["pid"])
    own = f"triptych_{server.pid}_"
    assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith(own)]


def test_serve_starts_a_killed_server_anew(minilm_repository: Path) -> None:
    with serving(minilm_repository) as server:
        first = endpoints_of(server)
        os.kill(first["pid"], signal.SIGKILL)
        again = endpoints_of(server)
        assert again.pop("pid") != first.pop("pid")
        assert again == first
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=60)
    assert server.returncode == 0
    assert "SIGKILL" in errors
    assert "The server restarts now." in errors
    assert "Traceback" not in errors


def test_serve_names_the_step_that_died(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert triptych("build", "tiny", cwd=project).returncode == 0
    repository = project / "model_repository"
    model = repository / "tiny_preprocess/1/model.py"
    model.write_text(model.read_text() + "\nimport no_such_module\n")
    monkeypatch.setenv("TRIPTYCH_LOCK_CHECK", "warn")
    ports = ("--grpc-port=0", "--http-port=0", "--metrics-port=0")
    done = triptych("serve", "tiny", *ports, cwd=project)
    assert done.returncode == 2
    assert "error: tiny: tiny_preprocess/1/model.py is not the file that" in done.stderr
    assert "No module named 'no_such_module'" in done.stderr
    assert len(done.stderr) < 3000


def test_a_signal_during_start_up_ends_it(minilm_repository: Path) -> None:
    with serving(minilm_repository) as server:
        assert eventually(lambda: bool(psutil.Process(server.pid).children()))
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=60)
    assert server.returncode == 0, errors
    assert "Traceback" not in errors


def test_another_folder_of_pipelines(project: Path) -> None:
    moved = project / "elsewhere"
    shutil.move(project / "pipelines", moved)
    assert triptych("inspect", "tiny", "--pipelines", moved, cwd=project).returncode == 0


@pytest.mark.long
def test_no_path_or_encoding_is_in_the_way(project: Path) -> None:
    """Build, a server and perf_analyzer: in folders that a shell would read, an ASCII terminal."""
    odd = project / "a b \u00fc $(touch PWNED)"
    shutil.copytree(project / "pipelines", odd / "pipelines")
    temporary = odd / "temporary folder"
    temporary.mkdir()
    variables = {"TMPDIR": str(temporary), "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    for words in (
        ("build", "tiny"),
        ("lint",),
        ("verify", "tiny"),
        ("bench", "tiny", "-c", "2", "--rounds", "1", "--window-seconds", "0.5"),
    ):
        done = triptych(*words, cwd=odd, **variables)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    assert (odd / "reports/tiny/report.html").is_file()
    assert (odd / "reports/tiny/bench/report.html").is_file()
    assert not list(project.rglob("PWNED"))
    assert not list(temporary.glob("triptych-*"))
