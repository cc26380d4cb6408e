"""Where a model that generates text has its files: a Hugging Face folder, or one made of a GGUF."""

from __future__ import annotations

import importlib.machinery
import subprocess
from pathlib import Path

from triptych.base.cache import cached_stage, code_hash, sha256_of
from triptych.base.errors import Progress, UserError
from triptych.serving.environment import environment_python, vllm_packages
from triptych.spec.model_source import locate
from triptych.spec.spec_fields import ModelSource

GGUF = ".gguf"
_WORKER = Path(__file__).with_name("worker_gguf.py")
_MODEL = "model"


def find_weights(model: ModelSource, folder: Path, progress: Progress) -> Path:
    """The local folder with the model's files.

    Args:
        model: as the spec has it; ``package:<module>/<file>.gguf`` is looked for among vLLM's
            packages, too.
        folder: of the pipeline.
        progress: told of a conversion.

    Raises:
        UserError: nothing there, or nothing that can be read.
    """
    if not model.source.endswith(GGUF):
        return locate(model, folder)
    file = _gguf_file(model.source, folder)
    inputs = {"gguf": sha256_of(file), "code": code_hash("building/generation/worker_gguf.py")}

    def work(target: Path) -> None:
        progress("source", f"{file.name}: dequantised to fp32 ...")
        done = subprocess.run(
            [str(environment_python()), str(_WORKER), str(file), str(target / _MODEL)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise UserError(
                "model.source",
                "must be a GGUF file that transformers reads",
                given=" ".join(done.stderr.split())[-300:],
                remedy="Name the folder of the original model",
            )

    stage = cached_stage("gguf", inputs, work, progress)
    return stage.folder / _MODEL


def _gguf_file(source: str, folder: Path) -> Path:
    if source.startswith("package:"):
        module, _, inner = source.removeprefix("package:").partition("/")
        places = [str(path) for path in vllm_packages()]
        spec = importlib.machinery.PathFinder.find_spec(module, places)
        found = list(spec.submodule_search_locations or ()) if spec is not None else []
        file = Path(found[0]) / inner if found else None
    else:
        file = (folder / source).resolve()
    if file is None or not file.is_file():
        raise UserError(
            "model.source",
            "must name a GGUF file that is there",
            given=source,
            remedy="`make setup-generation` installs the example's; a relative path is looked up "
            "from the pipeline's own folder",
        )
    return file
