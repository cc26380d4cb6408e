"""The writer of a repository: killed at any moment, and where the disk has no room or no leave."""

import errno
import json
import os
import resource
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from tests.support import scaffolding
from tests.support.echo_server import write_model
from tests.support.killed_commits import tree
from tests.support.mistakes import check_refused
from tests.support.project import ROOT
from tests.support.rights import without_rights
from triptych.base.cache import cached_stage
from triptych.base.errors import UserError
from triptych.base.files import check_writable, write_files
from triptych.deploy.folder import write_manifests
from triptych.repository import store
from triptych.repository.bundle import Link
from triptych.repository.store import (
    Work,
    check_target,
    locked,
    recover,
    sibling_work_dir,
    write_models,
)
from triptych.serving.bench.perf_analyzer import export_rows
from triptych.serving.server import Server

OLD = {"a/x": b"old", "b/x": b"old", "c/x": b"old"}


def test_a_commit_may_be_killed_at_every_moment() -> None:
    """Before each of its operations on files, and at random."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # hundreds of commits: in memory
        words = [sys.executable, "-m", "tests.support.killed_commits", f"{folder}/w"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["exchange"]) == {"old", "new"}
    assert sum(found["exchange"].values()) > 80
    # Some network file systems: a model is missing for a moment, but never half there.
    assert set(found["renames"]) == {"old", "new", "a model missing, then new"}


@pytest.mark.parametrize("mark", ["", "{"])
def test_a_mark_that_was_not_finished_leaves_the_old_models(tmp_path: Path, mark: str) -> None:
    write_models(tmp_path / "r", OLD)
    staging = tmp_path / ".r.staging"
    (staging / "new/b").mkdir(parents=True)
    (staging / "new/b/x").write_bytes(b"new")
    (staging / "commit").write_text(mark)
    assert write_models(tmp_path / "r", {"a/x": b"new"}) == ["a"]
    assert tree(tmp_path / "r") == {**OLD, "a/x": b"new"}
    assert not staging.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from triptych.repository.store import write_models
seen = []
def hook(event, _arguments):
    if event == "ctypes.dlopen":  # just before a model trades places
        seen.append(event)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
repository = Path(sys.argv[1])
files = {str(path.relative_to(repository)): path.read_bytes() + b"\\n"
         for path in repository.rglob("*") if path.is_file()}
write_models(repository, files)
"""


@pytest.mark.server
def test_a_second_writer_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two builds that end at the same moment both write; one that never ends is named."""
    repository, waits, sleep = tmp_path / "r", threading.Event(), time.sleep

    def note(seconds: float) -> None:
        waits.set()
        sleep(seconds)

    write_models(repository, OLD)
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        patch.setattr(time, "sleep", note)
        with locked(repository):
            second = pool.submit(write_models, repository, {"a/x": b"new"})
            assert waits.wait(60)
            assert tree(repository) == OLD
        assert second.result(60) == ["a"]
    monkeypatch.setattr(store, "MAX_WAIT_S", 0.0)
    with locked(repository), pytest.raises(UserError, match="is being written by another build"):
        write_models(repository, OLD)
    assert tree(repository) == {**OLD, "a/x": b"new"}


def test_a_server_reads_whole_models_after_a_kill_between_two(tmp_path: Path) -> None:
    repository = tmp_path / "r"
    for name in ("a", "b"):
        write_model(repository, name)
    before = tree(repository)
    done = subprocess.run([sys.executable, "-c", KILLED, str(repository)], timeout=300)
    assert done.returncode < 0
    now = tree(repository)
    assert {path.partition("/")[0] for path in now if now[path] != before[path]} == {"a"}
    with Server(repository):
        pass  # both are ready
    recover(repository)
    now = tree(repository)  # with byte code that the server has left
    assert all(now[path] == content + b"\n" for path, content in before.items())


def test_what_killed_work_left_goes_with_the_next_command(tmp_path: Path) -> None:
    """With folders as `sibling_work_dir` names them; test_cache.py kills real work."""
    repository = tmp_path / "r"
    write_models(repository, OLD)
    with subprocess.Popen(["true"]) as ended:
        pass
    for work, other, command in (
        ("auto", "tune", partial(recover, repository)),
        ("tune", "auto", partial(write_models, repository, OLD)),
    ):
        left = tmp_path / f".{work}-{ended.pid}-x"
        left.mkdir()
        with sibling_work_dir(repository, cast("Work", other)) as living:
            assert living.name.startswith(f".{other}-{os.getpid()}-")
            command()
            assert living.is_dir()
        assert not left.exists(), work


def write_and_cache(folder: Path) -> None:
    """Check that there is a reason why neither models nor a cached stage can be written."""
    content = bytes(500_000)
    files = {"a/x": b"new", "b/x": content, "d/x": content}

    def write_stage(target: Path) -> None:
        (target / "x").write_bytes(content)

    for write in (
        lambda: write_models(folder / "r", files),
        lambda: cached_stage("s", {}, write_stage, print),
    ):
        try:
            write()
        except UserError as error:
            print(error)
    assert tree(folder / "r") == OLD
    assert not (folder / ".r.staging").exists()
    assert list((folder / "cache/s").iterdir()) == []


def test_a_limit_on_files_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))
    write_models(tmp_path / "r", OLD)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        write_and_cache(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capsys.readouterr().out.count("does not allow files of this size") == 2


DISKS = """
import os, subprocess, sys
from pathlib import Path
from tests.repository.test_store import OLD, tree, write_and_cache
from triptych.base.errors import UserError
from triptych.repository.store import (
    Work, check_target, recover, sibling_work_dir, write_models
)
from triptych.serving.embedded import find_temporary_fault

def mount(name, *words):
    folder = Path(sys.argv[1]) / name
    folder.mkdir(exist_ok=True)
    if subprocess.run(["mount", *words, folder]).returncode:
        sys.exit(9)
    return folder

def write_one(folder):
    for call in (write_models, check_target):
        try:
            call(folder / "r", *([{"a/x": b"new"}] if call is write_models else []))
        except UserError as error:
            print(error)
    recover(folder / "r")  # for a server: there is nothing to do, and no leave is needed
    assert sorted(path.name for path in folder.iterdir()) == [".r.lock", "r"]

small = mount("small", "-t", "tmpfs", "-o", "size=300k", "tmpfs")
os.environ["TRIPTYCH_CACHE"] = str(small / "cache")
write_models(small / "r", OLD)
write_and_cache(small)
kept = Path(sys.argv[1]) / "kept"
write_models(kept / "r", OLD)
mount("kept", "--bind", kept)
mount("kept", "-o", "remount,ro,bind")
write_one(kept)
assert tree(kept / "r") == OLD
(Path(sys.argv[1]) / "other/r").mkdir(parents=True)
mount("other/r", "-t", "tmpfs", "-o", "size=1m", "tmpfs")
write_one(kept.with_name("other"))
assert not list((kept.with_name("other") / "r").iterdir())
for options in ("size=1m", "size=30m,noexec"):
    print(find_temporary_fault(mount(options, "-t", "tmpfs", "-o", options, "tmpfs")))
"""


def test_a_full_a_read_only_and_another_disk_are_told(tmp_path: Path) -> None:
    """In a name space of its own, so that no mount stays.

    Models are staged beside the repository, and cannot be renamed across disks.
    """
    unshare = ["unshare", "--map-root-user", "--mount"]
    words = [*unshare, sys.executable, "-c", DISKS, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode == 9 or "unshare failed" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    reasons = (
        *("has too little free space",) * 2,
        *("is not a writable folder",) * 2,
        *("is not on the same file system as its parent folder",) * 2,
        "size=1m, with 1 MiB free",
        "size=30m,noexec, whose mount has `noexec`",
    )
    for line, reason in zip(said, reasons, strict=True):
        assert reason in line


def test_a_folder_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    write_models(tmp_path / "r", OLD)
    before = sorted(path.name for path in tmp_path.iterdir())
    for repository in (tmp_path / "r", tmp_path / "a/new/r"):
        check_target(repository)
    closed = tmp_path / "closed"
    write_models(closed / "r", OLD)
    for folder in (closed, closed / "r"):
        folder.chmod(0o555)
        said = [f"`{folder}` is not a writable folder", "name another folder with --repository."]
        check_refused(said, without_rights, check_target, closed / "r")
        folder.chmod(0o755)
    check_target(closed / "r")
    said = ["is not a writable folder", "name another folder with --reports."]
    check_refused(said, check_writable, tmp_path / "r/a/x/reports", "--reports")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        check_refused("does not allow files of this size", check_writable, tmp_path / "reports")
        rows = ["a" * 2000]
        check_refused("files of this size", export_rows, tmp_path / "perf.json", rows, {})
        check_refused("files of this size", scaffolding.write, tmp_path, "text-embedding")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "closed"])


@pytest.mark.parametrize(
    ("umask", "folder", "file"), [(0o077, 0o755, 0o644), (0o002, 0o775, 0o664)]
)
def test_files_of_a_build_and_manifests_can_be_read_by_every_user(
    tmp_path: Path, umask: int, folder: int, file: int
) -> None:
    before = os.umask(umask)
    try:
        write_models(tmp_path / "r", OLD)
        write_models(tmp_path / "r", {**OLD, "b/1/y": b"new", "c/1/y": Link("b/1/y")})
        write_manifests(tmp_path / "m", {"base/envoy.yaml": {}})
        write_files(tmp_path / "secret", {"key": "s"}, is_private=True)
    finally:
        os.umask(before)
    for path in (tmp_path / "r", tmp_path / "m", *(tmp_path / "r").rglob("*"), tmp_path / "m/base"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (folder if path.is_dir() else file), path
    assert stat.S_IMODE((tmp_path / "m/base/envoy.yaml").stat().st_mode) == file
    assert stat.S_IMODE((tmp_path / "secret/key").stat().st_mode) == 0o600


def test_a_file_system_without_links_has_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").write_bytes(bytes(100_000))
    write_models(tmp_path / "r", {"a/1/weights": tmp_path / "weights"})

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert write_models(tmp_path / "r", {"b/1/weights": tmp_path / "weights"}) == ["b"]
    assert (tmp_path / "r/b/1/weights").read_bytes() == bytes(100_000)


def test_a_file_is_written_after_a_killed_process_of_the_same_number(tmp_path: Path) -> None:
    (tmp_path / f".x.{os.getpid()}").touch()
    write_files(tmp_path, {"x": "new"})
    assert (tmp_path / "x").read_text() == "new"


def test_a_repository_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "r").touch()
    check_refused("is not a writable folder", write_models, tmp_path / "r", OLD)
