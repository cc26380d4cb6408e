"""The writer of a repository: killed at any moment, and where the disk has no room or no leave."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from echo_server import write_model
from killed_commits import tree
from triptych.base.errors import UserError
from triptych.repository.store import recover, sibling_work_dir, write_models
from triptych.serving.server import Server

SUPPORT = Path(__file__).parents[1] / "support"
OLD = {"a/x": b"old", "b/x": b"old", "c/x": b"old"}


def kill_commits(timed: int, way: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # hundreds of commits: in memory
        words = [sys.executable, str(SUPPORT / "killed_commits.py"), f"{folder}/w", str(timed), way]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["exit"] == 0, done.stderr
    return result


def test_a_commit_may_be_killed_at_every_moment() -> None:
    """Before each of its operations on files, and 15 times at random."""
    result = kill_commits(15, "exchange")
    assert set(result["found"]) == {"old", "new"}
    assert result["events"] > 80


def test_a_commit_may_be_killed_where_models_cannot_trade_places() -> None:
    """Some network file systems: a model is missing for a moment, but never half there."""
    found = kill_commits(0, "renames")["found"]
    assert set(found) == {"old", "new", "a model missing, then new"}


@pytest.mark.parametrize("mark", ["", "{"])
def test_a_mark_with_nothing_beside_it_is_no_obstacle(tmp_path: Path, mark: str) -> None:
    write_models(tmp_path / "r", OLD)
    staging = tmp_path / ".r.staging"
    staging.mkdir()
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
def test_a_server_reads_whole_models_after_a_kill_between_two(tmp_path: Path) -> None:
    repository = tmp_path / "r"
    for name in ("a", "b"):
        write_model(repository, name)
    before = tree(repository)
    done = subprocess.run([sys.executable, "-c", KILLED, str(repository)], timeout=60)
    assert done.returncode < 0
    now = tree(repository)
    assert {path.partition("/")[0] for path in now if now[path] != before[path]} == {"a"}
    with Server(repository):
        pass  # both are ready
    recover(repository)
    now = tree(repository)  # with byte code that the server has left
    assert all(now[path] == content + b"\n" for path, content in before.items())


HOLD = """
import sys
from pathlib import Path
from triptych.repository.store import sibling_work_dir
with sibling_work_dir(Path(sys.argv[1]), sys.argv[2]) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_what_killed_work_left_goes_with_the_next_command(tmp_path: Path) -> None:
    repository = tmp_path / "r"
    write_models(repository, OLD)
    for work, command in (
        ("auto", lambda: recover(repository)),
        ("tune", lambda: write_models(repository, OLD)),
    ):
        words = [sys.executable, "-c", HOLD, str(repository), work]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as killed:
            assert killed.stdout is not None
            left = Path(killed.stdout.readline().decode().strip())
            killed.kill()
        assert left.parent == tmp_path
        assert left.is_dir()
        with sibling_work_dir(repository, "auto") as living:
            command()
            assert living.is_dir()
        assert not left.exists()


WRITES = """
import sys
from pathlib import Path
from triptych.base.cache import cached_stage
from triptych.base.errors import UserError
from triptych.repository.store import write_models
folder = Path(sys.argv[1])
content = bytes(500_000)
for write in (
    lambda: write_models(folder / "r", {"a/x": b"new", "b/x": content, "d/x": content}),
    lambda: cached_stage("s", {}, lambda target: (target / "x").write_bytes(content), print),
):
    try:
        write()
    except UserError as error:
        print(error)
"""


def check_refused(said: str, folder: Path, *, why: str) -> None:
    lines = said.splitlines()
    assert len(lines) == 2, said
    assert all(why in line for line in lines), lines
    assert tree(folder / "r") == OLD
    assert not (folder / ".r.staging").exists()
    assert list((folder / "cache/s").iterdir()) == []


def test_a_limit_on_files_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))
    write_models(tmp_path / "r", OLD)
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 300; "$0" -c "$1" "$2"', sys.executable, WRITES, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    check_refused(done.stdout, tmp_path, why="does not allow files of this size")


def with_mounts(script: str, *words: object) -> str:
    """What a script says that may mount; in a name space of its own, so that nothing stays."""
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "bash", "-c", script, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode == 9 or "unshare failed" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return done.stdout


SMALL_DISK = """
mount -t tmpfs -o size=300k tmpfs "$0" && mkdir "$0/r" && cp -r "$1/." "$0/r" || exit 9
"$2" -c "$3" "$0"
cp -r "$0/." "$4"
"""


def test_a_full_disk_is_told_and_is_not_kept_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    copy.mkdir()
    monkeypatch.setenv("TRIPTYCH_CACHE", str(disk / "cache"))
    write_models(tmp_path / "r", OLD)
    said = with_mounts(SMALL_DISK, disk, tmp_path / "r", sys.executable, WRITES, copy)
    check_refused(said, copy, why="has too little free space")


READ_ONLY = """
mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" || exit 9
"$1" -c "$2" "$0"
"""
ONE_MODEL = """
import sys
from pathlib import Path
from triptych.base.errors import UserError
from triptych.repository.store import recover, write_models
folder = Path(sys.argv[1])
try:
    write_models(folder / "r", {"a/x": b"new"})
except UserError as error:
    print(error)
recover(folder / "r")  # for a server: there is nothing to do, and no leave is needed
print(sorted(path.name for path in folder.iterdir()))
"""


def test_a_parent_that_is_read_only_is_told(tmp_path: Path) -> None:
    write_models(tmp_path / "r", OLD)
    told, left = with_mounts(READ_ONLY, tmp_path, sys.executable, ONE_MODEL).splitlines()
    assert "is not a writable folder" in told
    assert left == "['.r.lock', 'r']"
    assert tree(tmp_path / "r") == OLD


OTHER_DISK = """
mount -t tmpfs -o size=1m tmpfs "$0/r" || exit 9
"$1" -c "$2" "$0"
"""


def test_a_repository_on_a_disk_of_its_own_is_told_and_stays_usable(tmp_path: Path) -> None:
    """Its models are staged beside it, and cannot be renamed across disks."""
    (tmp_path / "r").mkdir()
    told, left = with_mounts(OTHER_DISK, tmp_path, sys.executable, ONE_MODEL).splitlines()
    assert "is not on the same file system as its parent folder" in told
    assert left == "['.r.lock', 'r']"


def test_a_repository_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "r").touch()
    with pytest.raises(UserError, match="is not a writable folder"):
        write_models(tmp_path / "r", OLD)
