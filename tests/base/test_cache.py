"""Cached stages and scratch folders: keys, damage, and what a killed build leaves behind."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mistakes import check_refused
from tests.support.project import ROOT, quiet
from tests.support.rights import without_rights
from triptych.base import cache
from triptych.base.cache import CACHE_VARIABLE, cache_root, cached_stage, code_hash, sha256_of
from triptych.base.files import expand_home, locked_folder, scratch_folder
from triptych.core.engine.stage import CODE as ENGINE_CODE
from triptych.core.export.to_onnx import CODE as EXPORT_CODE
from triptych.core.gate.cached import CODE as GATE_CODE

PACKAGE = ROOT / "build_scripts/triptych"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package that `code_hash` reads."""
    copy = tmp_path / "triptych"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "templates"))
    monkeypatch.setattr(cache, "PACKAGE", copy)
    return copy


def edit(package: Path, file: str) -> None:
    path = package / file
    path.write_text(path.read_text(encoding="utf-8") + "# edited\n", encoding="utf-8")


def move(package: Path, file: str) -> None:
    path = package / file
    path.rename(path.with_name("moved.py"))


@pytest.mark.parametrize("change", [edit, move])
def test_the_key_of_a_stage_changes_with_its_code_alone(
    package: Path, change: Callable[[Path, str], None]
) -> None:
    stages = {"export": EXPORT_CODE, "gate": GATE_CODE, "engine": ENGINE_CODE}

    def hashes() -> dict[str, str]:
        return {name: code_hash(*patterns) for name, patterns in stages.items()}

    before = hashes()
    change(package, "repository/manifest.py")
    for engine in ("runtime/engine_vllm.py", "runtime/generation_core.py"):
        edit(package, engine)
    assert hashes() == before
    for edited, changed, file in (
        (change, {"export"}, "core/export/packing.py"),
        (edit, {"gate"}, "core/gate/live.py"),
        (edit, {"gate", "engine"}, "core/gate/check.py"),
    ):
        edited(package, file)
        after = hashes()
        assert {name for name in stages if after[name] != before[name]} == changed, file
        before = after
    with pytest.raises(ValueError, match=r"no source file of this package matches 'gone/\*\.py'"):
        code_hash("core/export/*.py", "gone/*.py")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_stage_is_done_once_and_appears_whole(root: Path) -> None:
    def fail(target: Path) -> None:
        (target / "half").write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        cached_stage("stage", {"key": 1}, fail, quiet)
    assert not list((root / "stage").iterdir())
    made = cached_stage("stage", {"key": 1}, write_weights, quiet)
    assert not made.cached
    again = cached_stage("stage", {"key": 1}, fail, quiet)
    assert again == made._replace(cached=True)
    assert set(again.files) == {"model.onnx", "inner/notes.txt"}
    assert again.files["model.onnx"] == sha256_of(again.folder / "model.onnx")


WEIGHTS = bytes(range(256)) * 4096


def write_weights(target: Path) -> None:
    (target / "model.onnx").write_bytes(WEIGHTS)
    (target / "inner").mkdir()
    (target / "inner/notes.txt").write_text("notes")


def zero_an_eighth(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 8)
        stream.write(bytes(file.stat().st_size // 8))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "an eighth zeroed": lambda folder: zero_an_eighth(folder / "model.onnx"),
    "truncated": lambda folder: os.truncate(folder / "model.onnx", 1000),
    "empty": lambda folder: (folder / "inner/notes.txt").write_bytes(b""),
    "a file is gone": lambda folder: (folder / "inner/notes.txt").unlink(),
    "a file too many": lambda folder: (folder / "model.onnx.data").write_bytes(b"x"),
    "hashes truncated": lambda folder: os.truncate(folder / "sha256.json", 20),
    "hashes of another kind": lambda folder: (folder / "sha256.json").write_text("[]"),
}


def test_a_damaged_entry_is_thrown_away_and_made_again(root: Path) -> None:
    lines: list[str] = []

    def tell(_stage: str, line: str) -> None:
        lines.append(line)

    for damage, do in DAMAGES.items():
        made = cached_stage("stage", {"key": 1}, write_weights, quiet)
        do(made.folder)
        lines.clear()
        again = cached_stage("stage", {"key": 1}, write_weights, tell)
        assert again == made._replace(cached=False), damage
        assert (again.folder / "model.onnx").read_bytes() == WEIGHTS, damage
        assert len(lines) == 1, damage
        assert "damaged" in lines[0], damage
        assert cached_stage("stage", {"key": 1}, write_weights, quiet).cached, damage


def test_what_a_killed_build_left_goes_and_what_another_writes_stays(root: Path) -> None:
    left = root / "stage/.partial-killed"  # nothing holds its lock
    left.mkdir(parents=True)

    def write_beside_another(target: Path) -> None:
        write_weights(target)
        cached_stage("another", {}, write_weights, quiet)
        assert not left.exists()

    made = cached_stage("stage", {}, write_beside_another, quiet)
    assert (made.folder / "model.onnx").read_bytes() == WEIGHTS
    (made.folder / "sha256.json").unlink()  # an entry without hashes is not there
    assert not cached_stage("stage", {}, write_weights, quiet).cached


def test_the_cache_is_that_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TRIPTYCH_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / "home/.cache/triptych"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg/triptych"
    monkeypatch.setenv("TRIPTYCH_CACHE", "own")
    assert cache_root() == tmp_path / "own"


HOLD = """
import sys
from triptych.base.files import scratch_folder
with scratch_folder("triptych-lint-") as folder:
    (folder / "model").mkdir()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_user_without_a_home_or_a_cache_to_write_is_told_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CACHE_HOME", CACHE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patch:  # as in a container with a user of its own
        patch.setattr("pwd.getpwuid", {}.__getitem__)
        check_refused("`TRIPTYCH_CACHE` is required for a user without a home", cache_root)
        assert expand_home("~/model") == Path("~/model")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert cache_root() == tmp_path / "xdg/triptych"
    home, given = tmp_path / "home", tmp_path / "given"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))

    def make(weights: Path | None = None) -> None:
        def work(folder: Path) -> None:
            if weights is not None:
                weights.read_bytes()
            write_weights(folder)

        without_rights(cached_stage, "s", {"weights": str(weights)}, work, quiet)

    make()
    another = "or name another folder with TRIPTYCH_CACHE."
    (entry,) = (home / ".cache/triptych/s").iterdir()
    # What another user made and this one cannot read is not damaged.
    entry.chmod(0)
    check_refused([f"{home}/.cache/triptych` is not a writable folder", another], make)
    entry.chmod(0o700)
    make()
    monkeypatch.setenv("HOME", str(tmp_path / "closed"))
    (tmp_path / "closed").mkdir(mode=0o500)
    check_refused([f"{tmp_path}/closed/.cache/triptych` is not a writable", another], make)
    # A file elsewhere that cannot be read is no fault of the cache.
    monkeypatch.setenv(CACHE_VARIABLE, str(given))
    weights = tmp_path / "model/weights"
    weights.parent.mkdir()
    weights.touch(mode=0)
    with pytest.raises(PermissionError, match="model/weights"):
        make(weights)
    assert list((given / "s").iterdir()) == []


def test_a_killed_build_leaves_nothing_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "with space \u00fc"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    (temporary / "triptych-lint-mine").mkdir()  # of nobody's that can be told
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        killed, living = (
            Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout
        )
        holders[0].kill()
        holders[0].wait()
        assert killed.is_dir()
        # A process of another container has a number that says nothing here.
        elsewhere = temporary / f"triptych-lint-{holders[0].pid}-x"
        elsewhere.mkdir()
        with locked_folder(elsewhere), scratch_folder("triptych-lint-") as own:
            assert sorted(temporary.glob("triptych-lint-*")) == sorted(
                [living, own, elsewhere, temporary / "triptych-lint-mine"]
            )
        assert not own.exists()
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
