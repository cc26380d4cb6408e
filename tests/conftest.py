"""Options and the order of tests; fixtures are in the plugins."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.support.project import ROOT

pytest_plugins = ["tests.support.fixtures"]
# A suite that a shell runs in the background ignores Ctrl-C, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("TRIPTYCH_CACHE", str(ROOT / ".cache" / "triptych"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The models are tiny and several tests run at a time: more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

BUILT = {"minilm_repository", "minilm_server", "reference", "server", "tiny_model", "model", "toy"}
"""Fixtures that need torch or a server: a test that uses one is not pure."""
NOT_PURE = ("server", "build", "long")
"""Marks of tests that are not pure."""
FILE_IS_NOT_PURE = re.compile(rf"(?m)^pytestmark = \[?\s*pytest\.mark\.({'|'.join(NOT_PURE)})\b")


class NoTorch:
    """An import hook that makes torch absent for pure tests, because its import takes seconds."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "torch":
            raise ImportError("a pure test cannot import torch: mark the test or its file `build`")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pure", action="store_true", help="tests without a server, build or torch")
    parser.addoption("--rewrite", action="store_true", help="write the files on record again")
    parser.addoption("--long", default="1", help="K/N: long tests of part K of N; 1: all of them")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--pure"):
        sys.meta_path.insert(0, NoTorch())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without pure tests before they are imported."""
    if not config.getoption("--pure") or collection_path.suffix != ".py":
        return None
    return True if FILE_IS_NOT_PURE.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The longest tests come first, so that no worker is left alone with one at the end.
    items.sort(key=lambda item: (is_pure(item), item.get_closest_marker("server") is None))
    if config.getoption("--pure"):
        items[:] = [item for item in items if is_pure(item)]
    if shutil.which("tritonserver"):
        deselect(config, items, [i for i in items if i.get_closest_marker("replacement")])
    part, _, parts = config.getoption("--long").partition("/")
    long_files = sorted({item.path for item in items if item.get_closest_marker("long")})
    chosen = set(long_files[int(part) - 1 :: int(parts or 1)])
    others = [item for item in items if item.get_closest_marker("long") and item.path not in chosen]
    deselect(config, items, others)


def deselect(config: pytest.Config, items: list[pytest.Item], others: list[pytest.Item]) -> None:
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def is_pure(item: pytest.Item) -> bool:
    """Whether a test needs no server, build or torch, by its marks and fixtures."""
    marked = any(item.get_closest_marker(name) for name in NOT_PURE)
    return not marked and BUILT.isdisjoint(getattr(item, "fixturenames", ()))
