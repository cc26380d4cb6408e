"""Commits of small models by processes that are killed; `main` prints the results as JSON.

Usage: ``python -m tests.support.killed_commits FOLDER``. It kills a commit before each operation
on files, then some at random times; then again where two models cannot trade places. It forks, and
therefore runs in a process of its own.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path

from triptych.repository import store

Files = dict[str, bytes]
LARGE = bytes(range(256)) * 400  # linked to where another model has it
OLD: Files = {
    "changed/config.pbtxt": b"old",
    "changed/1/model.onnx": b"old" * 9,
    "same/config.pbtxt": b"same",
    "same/1/weights.bin": LARGE,
    "too/config.pbtxt": b"old",
    "retired/config.pbtxt": b"old",
}
NEW: Files = {
    "changed/config.pbtxt": b"new",
    "changed/1/model.onnx": b"new" * 9,
    "changed/1/weights.bin": LARGE,
    "same/config.pbtxt": b"same",
    "same/1/weights.bin": LARGE,
    "too/config.pbtxt": b"new",
    "added/config.pbtxt": b"new",
}
ALWAYS = ("changed", "same", "too")
# What the kernel knows no such flag for is refused, as by file systems that cannot exchange.
NO_SUCH_FLAG = 1 << 20
RANDOM = 10
"""Number of commits that are killed at random times."""


def tree(folder: Path) -> Files:
    """Every file below `folder` with its content."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def model(files: Files, name: str) -> Files:
    return {path: content for path, content in files.items() if path.startswith(f"{name}/")}


def commit(repository: Path, kill_before: int | None = None) -> int:
    """The id of a process that writes `NEW`, killed before its operation number `kill_before`."""
    if pid := os.fork():
        return pid
    seen = 0

    def hook(event: str, _arguments: object) -> None:
        nonlocal seen
        if event.startswith(("os.", "shutil.", "open", "ctypes.", "fcntl.")):
            seen += 1
            if seen - 1 == kill_before:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    try:
        store.write_models(repository, NEW, retired=["retired"])
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)


def verdict(repository: Path) -> str:
    """What a killed commit left: as a server would read it, and after the next command."""
    found = tree(repository)
    for name in {path.partition("/")[0] for path in found}:
        if model(found, name) not in (model(OLD, name), model(NEW, name)):
            return f"half-written: {name}"
    missing = [name for name in ALWAYS if not model(found, name)]
    try:
        store.recover(repository)
    except BaseException as error:
        return f"bricked: {error!r}"
    after = tree(repository)
    if after not in (OLD, NEW):
        return "neither old nor new"
    if sorted(path.name for path in repository.parent.iterdir()) != [".r.lock", "r"]:
        return "something left"
    if store.write_models(repository, {"next/config.pbtxt": b"next"}) != ["next"]:
        return "not to be written to"
    return ("a model missing, then " if missing else "") + ("old" if after == OLD else "new")


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    store.write_models(folder / "r", OLD)
    return folder / "r"


def kill_each(folder: Path) -> Counter[str]:
    """Kill commits before each operation; return how many left what."""
    found: Counter[str] = Counter()
    for number in count():
        repository = fresh(folder)
        _, status = os.waitpid(commit(repository, number), 0)
        if os.WIFEXITED(status):
            assert status == 0
            return found
        found[verdict(repository)] += 1
    raise AssertionError


def main(folder: Path) -> None:
    exchange = kill_each(folder)
    for _ in range(RANDOM):
        repository = fresh(folder)
        pid = commit(repository)
        time.sleep(random.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        exchange[verdict(repository)] += 1
    store._RENAME_EXCHANGE = NO_SUCH_FLAG
    print(json.dumps({"exchange": exchange, "renames": kill_each(folder)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
