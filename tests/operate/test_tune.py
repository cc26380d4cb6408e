"""`triptych tune` for real: a tiny model, two real servers, and what a stopped run leaves."""

import json
import os
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.http_pages import comes_true
from tests.support.project import build_into, link_cache, quiet, write_pipeline
from triptych.operate.tune.kinds import CompiledTuning, Setting
from triptych.operate.tune.trial_servers import trial_servers
from triptych.operate.tune.tune import Tuning, tune_pipeline
from triptych.serving.bench.results import to_json
from triptych.spec.slo import Slo
from triptych.spec.spec import load_spec
from triptych.spec.tuned import TUNED_FILE, read_tuned

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A built pipeline that rejects no request, however long its server is paused."""
    home = tmp_path_factory.mktemp("tune")
    model, queue = {"source": str(tiny_model)}, {"max_backlog_ms": 3_600_000}
    folder = write_pipeline(home / "pipelines" / "tiny", model=model, serving={"queue": queue})
    build_into(folder, home / "repository")
    return home


def snapshot(home: Path) -> dict[str, int]:
    files = [path for path in home.rglob("*") if path.is_file() and path.name != TUNED_FILE]
    return {str(path.relative_to(home)): path.stat().st_mtime_ns for path in files}


def test_a_short_run_measures_decides_and_leaves_the_repository_alone(home: Path) -> None:
    folder = home / "pipelines" / "tiny"
    before = snapshot(home)
    tuning = Tuning(Slo(p99_ms=500.0), budget_s=40.0, clients=4, seconds=0.6)
    result = tune_pipeline(folder, home / "repository", tuning, quiet)
    assert snapshot(home) == before
    assert result.trials or result.stopped == "time budget reached"
    for trial in result.trials:
        assert trial.verdict in ("better", "worse", "no difference", "cannot tell"), trial
        assert trial.score is not None
        assert trial.points
        assert set(trial.change) == set(trial.before)
    assert result.winner.rate is not None
    assert result.met == (result.winner.rate.highest_per_s > 0)
    json.dumps(to_json(result))
    tuned = read_tuned(folder)
    if result.winner.overrides:
        assert tuned is not None
        assert tuned.overrides == result.winner.overrides
        assert load_spec(folder).tuned == result.winner.overrides
        assert tuned.provenance["after"]["points"]
        (folder / TUNED_FILE).unlink()
    else:
        assert tuned is None


def test_only_the_models_that_changed_are_loaded_again(home: Path) -> None:
    told: list[str] = []
    folder = home / "pipelines" / "tiny"
    kind, repository = CompiledTuning(folder, Slo(), 2), home / "repository"
    with trial_servers(kind, repository, 0.6, lambda _stage, line: told.append(line)) as found:
        slot = found.best
        found.put(slot, Setting())
        pid = slot.target.pid
        found.put(slot, Setting({"serving.queue.max_delay_us": 700, "core.threads": 1}))
        found.put(slot, Setting({"core.max_batch_size": 16, "serving.instances.preprocess": 2}))
        assert slot.target.pid == pid
        assert found.score(slot).score > 0
        steps = {use.step: use for use in slot.measure(2, 0.6).steps}
        assert (steps["preprocess"].instances, steps["core"].max_delay_us) == (2, 0)
        folders = list(home.glob(".tune-*"))
        assert len(folders) == 1
    assert not list(home.glob(".tune-*"))
    again = [line for line in told if line.startswith("again")]
    assert again[0] == "again: tiny, tiny_core"  # the ensemble has the build record
    assert "tiny_preprocess" in again[1]


@pytest.mark.long
def test_an_interrupted_run_leaves_nothing_but_what_it_has_measured(
    home: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    link_cache(cache, "tune")
    before = snapshot(home)
    command = [sys.executable, "-m", "triptych.interface.cli", "tune", "tiny", "--clients", "2"]
    command += ["--pipelines", str(home / "pipelines"), "--repository", str(home / "repository")]
    pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "TRIPTYCH_CACHE": str(cache)}
    process = subprocess.Popen(command, env=environment, **pipes)
    assert process.stderr is not None
    lines = list(takewhile(lambda line: "trial 1" not in line, process.stderr))
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)  # Ctrl-C goes the same way
    assert any("tuning tiny, about 15 min after the first build" in line for line in lines)
    rest = process.communicate(timeout=300)[1]
    assert process.returncode not in (0, 1), lines
    assert "Traceback" not in rest
    assert comes_true(lambda: not any(child.is_running() for child in children))
    assert snapshot(home) == before
    assert not list(home.glob(".tune-*"))
    assert not (home / "pipelines" / "tiny" / TUNED_FILE).exists()
    kept = list((cache / "tune").glob("*/*.json"))
    assert len(kept) >= 1
