"""What the ensemble itself costs: its real steps around an empty core, against a bare echo."""

from __future__ import annotations

import shutil
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

_FILES = Path(__file__).parent / "hop"
ECHO = "echo"


def write_repository(built: Path, pipeline: str, target: Path) -> None:
    """Copy a built pipeline to `target` with a core that does nothing, and put the echo beside it.

    Args:
        built: the repository that `triptych build` wrote.
        pipeline: the pipeline's name in it.
        target: the repository to write; what is there is replaced.
    """
    if target.exists():
        shutil.rmtree(target)
    core = f"{pipeline}_core"
    for name in (pipeline, f"{pipeline}_preprocess", f"{pipeline}_postprocess"):
        shutil.copytree(built / name, target / name)
    config = model_config_pb2.ModelConfig()
    text_format.Parse((built / core / "config.pbtxt").read_text(encoding="utf-8"), config)
    config.backend = "python"
    for field in ("batch_input", "batch_output", "model_warmup", "optimization", "parameters"):
        config.ClearField(field)
    _write_model(target / core, text_format.MessageToString(config), "empty_core.py")
    _write_model(target / ECHO, (_FILES / "echo.pbtxt").read_text(encoding="utf-8"), "echo.py")


def _write_model(folder: Path, config: str, code: str) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    shutil.copyfile(_FILES / code, folder / "1" / "model.py")
