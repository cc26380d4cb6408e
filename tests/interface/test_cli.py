"""Each verb at the command line: results, ``--json``, exit codes, and messages without traces."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.processes import eventually, regions
from tests.support.project import ROOT, write_pipeline
from tests.support.rights import without_rights
from tests.support.served_command import TRIPTYCH, endpoints_of, serving
from triptych.base.files import as_user_error
from triptych.core import inputs as core_inputs
from triptych.interface.cli import main


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


class Commands:
    """The `triptych` command in this process, in a folder."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.folder = folder
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def run(self, *words: str | Path) -> tuple[int, str, str]:
        """Run a command; return its exit code, output and error output."""
        self._monkeypatch.chdir(self.folder)
        self._monkeypatch.setattr(sys, "argv", ["triptych", *map(str, words)])
        self._monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert isinstance(code, int) or code is None
        return (code or 0, *self._capsys.readouterr())

    def read_json(self, *words: str | Path) -> Any:
        """Return what a command prints with ``--json``."""
        code, output, errors = self.run(*words, "--json")
        assert code == 0, errors
        return json.loads(output)


@pytest.fixture
def commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Commands:
    return Commands(tmp_path, monkeypatch, capsys)


@pytest.fixture
def project(commands: Commands, tiny_model: Path) -> Commands:
    """A folder as a user has it, with one pipeline on the tiny model."""
    write_pipeline(commands.folder / "pipelines/tiny", model={"source": str(tiny_model)})
    return commands


def test_a_project_is_inspected_built_linted_and_not_served_when_it_is_broken(
    project: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, output, errors = project.run("inspect", "tiny", "--set", "core.layout=bucketed")
    assert code == 0, errors
    assert "fewest padded tokens" in output
    assert sorted(path.name for path in project.folder.iterdir()) == ["pipelines"]
    shutil.move(project.folder / "pipelines", project.folder / "elsewhere")
    plan = project.read_json("inspect", "tiny", "--pipelines", "elsewhere")
    assert plan["models"]["tiny_core"]["backend"] == "onnxruntime"
    shutil.move(project.folder / "elsewhere", project.folder / "pipelines")

    (result,) = project.read_json("build", "tiny")
    assert result["changed"] == ["tiny", "tiny_core", "tiny_postprocess", "tiny_preprocess"]
    assert result["gate"]["failures"] == []
    assert (project.folder / result["report"]).is_file()
    assert "curl" in (project.folder / result["card"]).read_text(encoding="utf-8")
    findings = project.read_json("lint")
    assert [f for f in findings if f["severity"] == "error"] == []
    assert project.run("lint")[0] == 0

    models = project.folder / "model_repository"
    step = models / "tiny_preprocess/1/model.py"
    step.write_text(step.read_text() + "\nimport no_such_module\n")
    monkeypatch.setenv("TRIPTYCH_LOCK_CHECK", "warn")
    ports = ("--grpc-port=0", "--http-port=0", "--metrics-port=0")
    code, _, errors = project.run("serve", "tiny", *ports)
    assert code == 2
    assert "error: tiny: tiny_preprocess/1/model.py is not the file that" in errors
    assert "No module named 'no_such_module'" in errors
    assert len(errors) < 3000
    (models / "tiny_core/1/model.onnx").unlink()
    code, output, _ = project.run("lint")
    assert code == 1
    assert "model.onnx" in output


def test_a_failed_gate_exits_with_1_and_is_accepted_with_a_reason(project: Commands) -> None:
    words = ("build", "tiny", "--set", "accuracy.max_difference=1e-12")
    code, _, errors = project.run(*words)
    assert code == 1
    for said in ("accuracy gate", "Failed metrics", "max_difference", "Rows with the largest"):
        assert said in errors
    assert not (project.folder / "model_repository").exists()
    assert (project.folder / "reports/tiny/report.html").is_file()
    assert json.loads((project.folder / "reports/tiny/gate.json").read_text())["failures"]
    code, _, errors = project.run(*words, "--accept-failed-gate", " ")
    assert (code, "needs a reason" in errors) == (2, True)
    again = (*words, "--reports", "elsewhere", "--accept-failed-gate", "a [trial]")
    (result,) = project.read_json(*again)
    assert result["gate"]["accepted"] == "a [trial]"
    assert result["gate"]["failures"]
    gate = json.loads((project.folder / "elsewhere/tiny/gate.json").read_text())
    assert gate["accepted"] == "a [trial]"
    linted = project.read_json("lint")
    assert [f["id"] for f in linted if f["severity"] == "warning"] == ["gate-accepted"]


def test_a_build_of_several_builds_all_that_it_can(
    project: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipelines = project.folder / "pipelines"
    for name in ("strict", "crash", "typo"):
        shutil.copytree(pipelines / "tiny", pipelines / name)
    shutil.rmtree(pipelines / "typo")

    def read(spec: Any, *words: Any, **named: Any) -> Any:
        if spec.name == "crash":
            raise KeyError("lost")
        return core_inputs.read_inputs(spec, *words, **named)

    monkeypatch.setattr("triptych.building.compiled.read_inputs", read)
    names = ("typo", "strict", "crash", "tiny")
    code, output, errors = project.run("build", *names, "--json")
    results = {each["pipeline"]: each for each in json.loads(output)}
    assert (code, set(results)) == (2, set(names)), errors
    assert {name for name, each in results.items() if "error" in each} == {"typo", "crash"}
    assert "KeyError: 'lost'" in results["crash"]["error"]["given"]
    table = errors.partition("Not built")[2]
    assert re.findall(r"^│ (\w+)", table, re.MULTILINE) == ["typo", "crash"]
    built = {path.name for path in (project.folder / "model_repository").iterdir()}
    assert {"tiny", "strict"} <= built
    code, _, errors = project.run("build", "typo")
    assert (code, "Not built" in errors) == (2, False)


def test_a_mistake_exits_with_2_and_no_trace(project: Commands) -> None:
    for words, expected in (
        ("inspect nope", "Pipelines here: tiny"),
        ("build tiny --set core.layoot=x", "not a field"),
        ("build tiny --set model.source=./nowhere", "./nowhere"),
        ("build tiny --set task=translation", "Choose one of"),
        ("lint nowhere", "must be an existing folder"),
        ("serve nowhere", "triptych build"),
        ("infer tiny", "--text"),
        ("infer tiny --text a --url 127.0.0.1:9", "127.0.0.1:9"),
        ("verify nope", "triptych build nope"),
        ("new other translation", "text-embedding"),
    ):
        code, output, errors = project.run(*words.split())
        assert code == 2, (words, output, errors)
        assert expected in errors, (words, errors)
        assert "Traceback" not in errors, words
        assert not (project.folder / "model_repository").exists(), words
    # The same as a process.
    done = triptych("inspect", "nope", "--json", cwd=project.folder)
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert set(error) == {"field", "rule", "given", "remedy"}
    assert "Traceback" not in done.stderr


def test_an_error_that_is_no_mistake_ends_in_one_line_with_its_traceback_in_a_file(
    project: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(project.folder))

    def read(*_: object, **__: object) -> None:
        raise KeyError("lost\nand gone")

    monkeypatch.setattr("triptych.building.compiled.read_inputs", read)
    code, output, errors = project.run("inspect", "tiny", "--json")
    told = re.fullmatch(
        r"error: `triptych inspect` ended with an error that it does not know\. Given: KeyError: "
        r"'lost\\nand gone'\. The traceback is in (\S+)\. If nothing .* report .*\n",
        errors,
    )
    assert told is not None, errors
    assert code == 70
    assert json.loads(output)["error"]["field"] == "triptych inspect"
    text = Path(told[1]).read_text()
    assert "'inspect', 'tiny'" in text
    assert "raise KeyError" in text
    monkeypatch.setattr(tempfile, "tempdir", "/proc/no")  # as on a full disk
    code, _, errors = project.run("inspect", "tiny")
    assert (code, "raise KeyError" in errors, "The traceback is above" in errors) == (
        70,
        True,
        True,
    )

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("triptych.interface.cli.app", interrupt)
    code, _, errors = project.run("list")
    assert (code, errors) == (130, "interrupted\n")


def test_a_folder_that_takes_no_files_is_named(project: Commands) -> None:
    for words, option in (
        ("build tiny --repository /proc/x", "--repository"),
        ("build tiny --repository /proc/x/y", "--repository"),
        ("build tiny --reports /proc/x", "--reports"),
        ("engine tiny --repository /proc/x", "--repository"),
        ("tune tiny --repository /proc/x", "--repository"),
        ("key new a --keys /proc/x", "--keys"),
    ):
        code, _, errors = project.run(*words.split())
        assert code == 2, (words, errors)
        assert "cannot be created or written. Given: /proc: No such file" in errors, words
        assert f"Name another folder with {option}" in errors, words


def test_what_this_user_may_not_read_or_write_is_told_before_the_work(
    project: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0o077)
    try:
        project.read_json("build", "tiny")
    finally:
        os.umask(before)
    models = project.folder / "model_repository"
    assert all(path.stat().st_mode & 0o004 for path in (models, *models.rglob("*")))
    manifest = models / "tiny/triptych.lock.json"
    content = manifest.read_bytes()
    again = ("build", "tiny", "--set", "core.max_batch_size=3")

    def told(closed: Path, *words: str, code: int = 2) -> str:
        mode = closed.stat().st_mode
        closed.chmod(0o500 if closed.is_dir() else 0)
        exit_code, output, errors = without_rights(project.run, *words)
        closed.chmod(mode)
        assert exit_code == code, (words, output, errors)
        assert "Traceback" not in errors
        assert "  gate  " not in errors
        assert manifest.read_bytes() == content
        return " ".join((output + errors).split())

    reports = project.folder / "reports"
    verbs: list[tuple[str, ...]] = [
        again,
        ("bench", "tiny"),
        ("tune", "tiny"),
        ("shadow", "tiny", "0000"),
    ]
    for words in verbs:
        said = told(reports / "tiny", *words)
        assert "reports/tiny` is not a writable folder. Given: [Errno 13]" in said, words
        assert "name another folder with --reports." in said, words
    for folder in (models, project.folder):
        assert "name another folder with --repository." in told(folder, *again), folder
    pipeline = project.folder / "pipelines/tiny"
    assert "`pipelines/tiny` is not a writable folder." in told(pipeline, "tune", "tiny")
    user = f"by user {os.geteuid()}. "
    remedy = "Run `chmod -R a+rX model_repository` as its owner, or run this as that user"
    graph = models / "tiny_core/1/model.onnx"
    for words in [("list",), ("serve", "model_repository"), ("gateway", "--insecure")]:
        said = told(graph, *words)
        assert f"`model_repository/tiny_core/1/model.onnx` cannot be read {user}{remedy}" in said
    assert f"cannot be read {user}Given: model_repository/tiny_core" in told(graph, "lint", code=1)
    for words in (("history", "tiny"), ("deploy", "tiny"), ("engine", "tiny")):
        said = told(manifest, *words)
        assert f"tiny/triptych.lock.json` cannot be used {user}Given: Permission denied" in said
    said = told(pipeline / "pipeline.yaml", "inspect", "tiny")
    assert f"`pipelines/tiny/pipeline.yaml` cannot be used {user}" in said
    assert "Let this user read or write it (`chmod`), or run this as its owner." in said

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "reports/tiny/gate.json")

    # A report that cannot be written after all leaves the build that is active.
    monkeypatch.setattr("triptych.interface.report.gate.write_gate_report", fail)
    code, _, errors = project.run(*again)
    assert (code, "`reports/tiny` has too little free space. Given: [Errno 28]" in errors) == (
        2,
        True,
    )
    assert manifest.read_bytes() == content
    # A disk that is full elsewhere is no trace either.
    monkeypatch.setattr("triptych.building.compiled.read_inputs", fail)
    errors = project.run("inspect", "tiny")[2]
    assert "`reports/tiny/gate.json` has too little free space. Given: No space left on" in errors
    full = OSError(errno.ENOSPC, "No space left on device")  # of a write, which names no file
    assert "TMPDIR (" in str(as_user_error(full))


def test_serve_answers_starts_a_killed_server_again_and_ends_cleanly(
    minilm_repository: Path, commands: Commands
) -> None:
    listed = commands.folder / "texts.txt"
    listed.write_text("second\nthird\n")
    with serving(minilm_repository) as server:
        first = endpoints_of(server)
        os.kill(first["pid"], signal.SIGKILL)
        endpoints = endpoints_of(server)
        pid = endpoints.pop("pid")
        assert pid != first.pop("pid")
        assert endpoints == first
        url = endpoints["grpc"]
        assert url.startswith("127.0.0.1:")
        infer = ("infer", "minilm_packed", "--text", "first", "--url", url)
        rows = commands.read_json(*infer, "--file", listed, "--parameter", "dimensions=8")
        assert [len(row["embedding"]) for row in rows] == [8, 8, 8]
        assert "(384 elements)" in commands.run(*infer)[1]
        code, _, errors = commands.run(*infer, "-p", "dimensions=0")
        assert (code, "integer from 1 to 384" in errors) == (2, True)
        own = f"triptych_{server.pid}_"
        assert regions(own)
        server.send_signal(signal.SIGINT)
        errors = ended(server)
    for said in ("SIGKILL", "The server restarts now.", "SIGINT"):
        assert said in errors
    assert not psutil.pid_exists(pid)
    assert eventually(lambda: regions(own) == [])


def ended(server: subprocess.Popen[str]) -> str:
    """Return what `triptych serve` said when it has ended without an error."""
    _, errors = server.communicate(timeout=120)
    assert server.returncode == 0, errors
    assert "Traceback" not in errors
    return errors


def test_a_signal_during_start_up_ends_it(minilm_repository: Path) -> None:
    with serving(minilm_repository) as server:
        assert eventually(lambda: bool(psutil.Process(server.pid).children()))
        server.send_signal(signal.SIGTERM)
        ended(server)


@pytest.mark.long
def test_no_path_or_encoding_is_in_the_way(project: Commands) -> None:
    """Build, a server and perf_analyzer: in folders that a shell would read, an ASCII terminal."""
    odd = project.folder / "a b \u00fc $(touch PWNED)"
    shutil.copytree(project.folder / "pipelines", odd / "pipelines")
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
    assert not list(project.folder.rglob("PWNED"))
    assert not list(temporary.glob("triptych-*"))
