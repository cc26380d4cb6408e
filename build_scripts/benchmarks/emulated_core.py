"""Repositories with an emulated core, to measure what everything around the core costs.

The emulated core is a Triton backend in C (``emulated/core.c``), compiled by the machine's `cc`. It
waits as long as a core on a GPU computes; a core in Python would use as much processor time as a
step.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

_FILES = Path(__file__).parent / "emulated"
_BACKEND = "emulated"
_TOKENS, _PIXELS = "input_ids", "pixels"
ECHO = "echo"
VIT_TOKENS = 197
"""Tokens of an image in a ViT with patches of 16 pixels; its base size has BERT-base's layers."""


@dataclass(frozen=True)
class CoreTime:
    """Duration of a batch in the core: a constant, plus parts for each row and each token.

    Attributes:
        token_us: Microseconds for each token, padding included.
    """

    batch_us: float
    row_us: float
    token_us: float


# BERT-base: NVIDIA's table of TensorRT on an A100, FP16, 128 tokens (demo/BERT/README.md of
# TensorRT) has 0.67 ms for one row and 16.14 ms for 128, which leaves no time for a row beside its
# tokens. MiniLM-L6 has half the layers, so half the time of a batch; the time of a token follows
# from the rates that sbert.net lists for all-MiniLM-L6-v2 and all-mpnet-base-v2 on a V100, 14,200
# and 2,800 texts/s.
CORES = {
    "zero": CoreTime(0.0, 0.0, 0.0),
    "MiniLM": CoreTime(275.0, 0.0, 0.188),
    "BERT-base": CoreTime(550.0, 0.0, 0.952),
}


def write_pipeline(
    built: Path, pipeline: str, target: Path, time: CoreTime, *, preprocess: int = 1
) -> Path:
    """Copy a built pipeline to `target`, with an emulated core; return `target`.

    Args:
        built: Repository that `triptych build` wrote.
        target: Repository to write; an existing one is replaced.
        preprocess: Number of instances of the preprocess step.
    """
    _clear(target)
    core = f"{pipeline}_core"
    for name in (pipeline, f"{pipeline}_preprocess", f"{pipeline}_postprocess"):
        shutil.copytree(built / name, target / name)
    file = target / f"{pipeline}_preprocess" / "config.pbtxt"
    config = read_config(file)
    config.instance_group[0].count = preprocess
    file.write_text(text_format.MessageToString(config), encoding="utf-8")
    write_core(built / core / "config.pbtxt", target / core, time)
    return target


def write_hops(built: Path, pipeline: str, target: Path, time: CoreTime) -> Path:
    """Write a pipeline of vectors whose Python steps do nothing: what Triton's hops cost alone."""
    write_pipeline(built, pipeline, target, time)
    for step in ("preprocess", "postprocess"):
        version = target / f"{pipeline}_{step}" / "1"
        shutil.rmtree(version)
        version.mkdir()
        shutil.copyfile(_FILES / "hop.py", version / "model.py")
    return target


def write_echo(target: Path) -> Path:
    """Write a repository with one Python model that returns its text; return `target`."""
    _clear(target)
    folder = target / ECHO
    (folder / "1").mkdir(parents=True)
    shutil.copyfile(_FILES / "echo.pbtxt", folder / "config.pbtxt")
    shutil.copyfile(_FILES / "echo.py", folder / "1" / "model.py")
    return target


def write_core(config_file: Path, folder: Path, time: CoreTime) -> None:
    """Write the model folder of an emulated core with the tensors of the core in `config_file`."""
    config = read_config(config_file)
    config.backend = _BACKEND
    for field in ("batch_input", "batch_output", "model_warmup", "optimization", "parameters"):
        config.ClearField(field)
    config.ClearField("instance_group")
    config.instance_group.add(kind="KIND_CPU", count=1)
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config), encoding="utf-8")
    _compile(folder / f"libtriton_{_BACKEND}.so", config, time)


def read_config(file: Path) -> Any:
    """Return the ``ModelConfig`` of a ``config.pbtxt``."""
    return text_format.Parse(file.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())


def _compile(library: Path, config: Any, time: CoreTime) -> None:
    types = {
        output.name: model_config_pb2.DataType.Name(output.data_type).removeprefix("TYPE_")
        for output in config.output
    }
    tensors = ",".join(
        f'{{"{output.name}",{types[output.name]},{{{",".join(map(str, output.dims))}}}}}'
        for output in config.output
    )
    has_pixels = any(tensor.name == _PIXELS for tensor in config.input)
    values: dict[str, object] = {
        "INPUT": f'"{_PIXELS if has_pixels else _TOKENS}"',
        "ROW_TOKENS": VIT_TOKENS if has_pixels else 0,
        "BATCH_NS": round(1e3 * time.batch_us),
        "ROW_NS": 1e3 * time.row_us,
        "TOKEN_NS": 1e3 * time.token_us,
        "OUTPUTS": f"{{{tensors}}}",
    }
    defined = [f"-D{name}={value}" for name, value in values.items()]
    command = ["cc", "-std=gnu11", "-O2", "-Wall", "-shared", "-fPIC", *defined]
    subprocess.run([*command, str(_FILES / "core.c"), "-o", str(library)], check=True)


def _clear(target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
