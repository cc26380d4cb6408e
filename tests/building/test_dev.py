"""`triptych dev` and `serve` while a pipeline is built anew: exchanged, and nobody is refused."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.failing_models import STOP_ONCE
from tests.support.hot_reload_cases import Asker, hooks, write_tickets
from tests.support.processes import CORE_IS_A_PROCESS, eventually
from tests.support.project import build_into, quiet
from tests.support.scaffolding import keep_rows
from tests.support.served_command import TRIPTYCH
from triptych.building.dev import REASON, Watch, rebuild, write_unchecked
from triptych.repository.history import rollback
from triptych.repository.lint import run_checks
from triptych.repository.manifest import build_id
from triptych.serving.hot_reload import HotReload
from triptych.serving.server import Server

pytestmark = pytest.mark.build

STOPPED_ON_A_SERVER = (
    STOP_ONCE
    + """
if "triton_python_backend_utils" in sys.modules:
    stop_once({mark!r})
"""
)
ROWS = 50


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    """The folder of pipelines, with one whose hook names every label."""
    folder = write_tickets(tmp_path_factory.mktemp("dev"), minilm_folder)
    (folder / "test_hooks.py").write_text(
        "from hooks import after\n\ndef test_after():\n    assert after([]) == []\n"
    )
    return keep_rows(folder, ROWS).parent


def check_steps(server: Server, *pipelines: str) -> None:
    """Check that the steps of these pipelines alone run, once those before them have ended."""
    steps = [f"{name}_{step}" for name in pipelines for step in ("preprocess", "postprocess")]
    wanted = ["tickets_core", *steps] if CORE_IS_A_PROCESS else steps
    assert eventually(lambda: sorted(server.living_steps().values()) == sorted(wanted))
    assert server.find_crash(within_s=0.5) is None


def replace_text(file: Path, text: str) -> None:
    """Change a file at once, so that nobody reads it half-written."""
    written = file.with_name(f"{file.name}.tmp")  # which `dev` does not watch
    written.write_text(text)
    written.replace(file)


def put_in_place(folder: Path, repository: Path, text: str) -> None:
    """Build the pipeline with other hooks."""
    (folder / "hooks.py").write_text(text)
    build_into(folder, repository)


def test_a_watch_tells_what_changed_once_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pipeline.yaml").write_text("a")
    (tmp_path / "gone.png").write_text("a")
    watch = Watch(tmp_path)
    assert watch.changed() == []
    (tmp_path / "pipeline.yaml").write_text("ab")
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/one.png").write_text("")
    (tmp_path / "gone.png").unlink()
    for passing in (".hooks.py.swp", "hooks.py~", "4913.tmp"):
        (tmp_path / passing).write_text("x")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/hooks.py").write_text("x")
    assert watch.changed() == ["gone.png", "pipeline.yaml", "samples/one.png"]
    assert watch.changed() == []

    pauses: list[float] = []

    def write_meanwhile(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) <= 6:
            with (tmp_path / "pipeline.yaml").open("a") as file:
                file.write("line\n")

    monkeypatch.setattr("triptych.building.dev.time.sleep", write_meanwhile)
    monkeypatch.setattr("triptych.building.dev._MAX_SETTLE_S", 60.0)
    (tmp_path / "pipeline.yaml").write_text("")
    assert watch.changed() == ["pipeline.yaml"]
    assert len(pauses) == 7
    assert watch.changed() == []


@pytest.mark.server
def test_a_server_exchanges_what_was_built_anew(pipelines: Path, tmp_path: Path) -> None:
    folder, repository = pipelines / "tickets", tmp_path / "repository"
    put_in_place(folder, repository, hooks("FIRST"))
    told: list[str] = []
    problems: list[str] = []
    with Server(repository, models=["tickets"]) as server, Asker(server.grpc_url, 1, 0.05) as asker:
        exchange = HotReload(server, on_reload=told.append, on_problem=problems.append)
        old = HotReload(server, on_reload=told.append, on_problem=problems.append, production=True)
        asker.wait_for("FIRST")
        exchange.poll()
        assert (told, problems) == ([], [])

        put_in_place(folder, repository, hooks("SECOND"))
        old.poll()
        assert "keeps serving the previous build" in problems.pop()
        exchange.poll()
        steps = "tickets_postprocess, tickets_preprocess"
        assert told == [f"tickets was rebuilt and reloaded: tickets, {steps}"]
        asker.wait_for("SECOND")
        for label in ("FIRST", "SECOND"):
            rollback(repository, "tickets", None)
            exchange.poll()
            assert told.pop() == told[0]
            asker.wait_for(label)
        assert build_into(folder, repository).changed == ()
        check_steps(server, "tickets")

        # It loads here, and not on the server.
        put_in_place(folder, repository, hooks("THIRD", at_load=True))
        exchange.poll()
        assert len(told) == 1
        assert "KeyError: 'not on a server'" in problems[0]
        assert "The previous build keeps serving" in problems.pop()
        asker.wait_for("SECOND", more=3)

        damaged = repository / "tickets_postprocess/1/hooks.py"
        put_in_place(folder, repository, hooks("FOURTH"))
        damaged.write_text(hooks("FIFTH"))
        exchange.poll()
        assert (
            "tickets_postprocess/1/hooks.py is not the file that the build manifest"
            in problems.pop()
        )

        # A step that is stopped while it loads, as one without CPU, is loaded again.
        mark = tmp_path / "stopped"
        stopped = STOPPED_ON_A_SERVER.format(mark=str(mark))
        put_in_place(folder, repository, hooks("SIXTH") + stopped)
        exchange.poll()
        assert "tickets was rebuilt and reloaded" in told.pop()
        asker.wait_for("SIXTH")
        assert mark.exists()
        check_steps(server, "tickets")
        assert asker.failures == []
        assert set(asker.labels) == {"FIRST", "SECOND", "SIXTH"}
    assert problems == []


@pytest.mark.server
def test_builds_of_other_wiring_replace_each_other(pipelines: Path, tmp_path: Path) -> None:
    """A hook that gains or loses `inputs` changes the tensors from preprocess to postprocess.

    Another pipeline shares the core. Only requests while the steps are replaced may fail.
    """
    folder, repository = pipelines / "tickets", tmp_path / "repository"
    put_in_place(folder, repository, hooks("FIRST"))
    sharer = Path(shutil.copytree(folder, tmp_path / "pipelines/sharer"))
    build_into(sharer, repository, "core.shared_from=tickets")
    with (
        Server(repository, models=["tickets", "sharer"]) as server,
        Asker(server.grpc_url, 4, 0.05) as asker,
        Asker(server.grpc_url, 1, 0.05, "sharer") as other,
    ):
        other.wait_for("FIRST")
        told: list[str] = []
        exchange = HotReload(server, on_reload=told.append, on_problem=told.append)
        asker.wait_for("FIRST")
        text = hooks("SECOND").replace("after(rows)", "after(rows, inputs)")
        put_in_place(folder, repository, text)
        exchange.poll()
        asker.wait_for("SECOND", more=20)
        rollback(repository, "tickets", None)
        exchange.poll()
        asker.failures.clear()
        asker.wait_for("FIRST", more=20)
        assert len(told) == 2
        assert all("was rebuilt and reloaded" in line for line in told)
        check_steps(server, "tickets", "sharer")
    assert asker.failures == other.failures == []


def test_an_edit_of_hooks_is_marked_until_the_gate_has_run(pipelines: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pipelines / "tickets", tmp_path / "tickets"))
    repository, file = tmp_path / "repository", folder / "hooks.py"
    file.write_text(hooks("FIRST"))
    build_into(folder, repository)
    built = build_id(repository, "tickets")
    assert write_unchecked(folder, repository) == ""  # nothing was edited
    file.write_text(hooks("SECOND").replace("after(rows)", "after(rows, inputs)"))
    assert write_unchecked(folder, repository) == ""  # the tensors between the steps change
    file.write_text(hooks("SECOND"))
    assert write_unchecked(folder, repository) == built
    (finding,) = [f for f in run_checks(repository) if f.severity in ("error", "warning")]
    assert (finding.id, REASON in finding.given) == ("gate-accepted", True)
    file.write_text(hooks("THIRD"))
    lines: list[str] = []
    strict = ["accuracy.max_difference=1e-30"]
    done = rebuild(folder, repository, strict, lambda _, line: lines.append(line), ["hooks.py"])
    assert "max_difference" in str(done.failure)
    assert "the edit is served, unchecked; the gate runs behind it" in lines
    assert "the edit failed: the build before it is served again" in lines
    hook = (repository / "tickets_postprocess/1/hooks.py").read_text()
    assert hook == hooks("SECOND")
    file.write_text(hooks("SECOND"))
    assert rebuild(folder, repository, (), quiet).failure is None
    assert [f for f in run_checks(repository) if f.severity in ("error", "warning")] == []


@pytest.mark.server
@pytest.mark.long
def test_dev_serves_each_change_and_keeps_what_worked(pipelines: Path, tmp_path: Path) -> None:
    folder, repository, log = pipelines / "tickets", tmp_path / "repository", tmp_path / "log"
    put_in_place(folder, repository, hooks("FIRST"))
    options = ["--json", *(f"--{kind}-port=0" for kind in ("grpc", "http", "metrics"))]
    options += [f"--pipelines={pipelines}", f"--repository={repository}"]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [TRIPTYCH, "dev", "tickets", *options], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as dev,
    ):
        try:
            pid = change_a_served_pipeline(folder, dev, log)
            dev.send_signal(signal.SIGINT)
            code = dev.wait(120)
        finally:
            dev.kill()
    said = log.read_text()
    assert code == 0, said
    assert "stopped (SIGINT)" in said
    assert "was rebuilt and reloaded: tickets" in said
    assert "the edit is served, unchecked; the gate runs behind it" in said
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def change_a_served_pipeline(folder: Path, dev: subprocess.Popen[str], log: Path) -> int:
    """Change files of the pipeline in turn; return the process id of its server."""

    def told() -> Any:
        assert dev.stdout is not None
        line = dev.stdout.readline()
        assert line, log.read_text()
        return json.loads(line)

    file, spec = folder / "hooks.py", folder / "pipeline.yaml"
    ready = told()
    assert told()["error"] == ""
    with Asker(ready["grpc"]) as asker:
        asker.wait_for("FIRST")
        replace_text(file, hooks("SECOND"))
        asker.wait_for("SECOND")
        change = told()
        assert (change["changed"], change["error"]) == (["hooks.py"], "")
        assert change["models"] == ["tickets"]  # the edit is served already

        replace_text(file, "def after(rows): return rows[0]['label']")
        assert f"hooks.after must return {ROWS} rows" in told()["error"]
        replace_text(file, "def after(rows:")
        assert "SyntaxError" in told()["error"]
        right = spec.read_text()
        replace_text(spec, right.replace("text-classification", "text-clasification"))
        assert "text-clasification" in told()["error"]
        replace_text(file, hooks("THIRD"))
        replace_text(spec, right)
        while (change := told())["error"]:
            assert set(change["changed"]) <= {"hooks.py", "pipeline.yaml"}
        asker.wait_for("THIRD")
    assert asker.failures == []
    assert set(asker.labels) == {"FIRST", "SECOND", "THIRD"}
    return int(ready["pid"])
