"""Models with a vector for each token in older forms: those of PyLate 3 and of Stanford's ColBERT.

sentence-transformers reads both and saves them in its own form, which is the only one read here.
"""

from __future__ import annotations

from pathlib import Path

from triptych.base.cache import cached_stage, code_hash, versions_of
from triptych.base.errors import Progress, UserError
from triptych.models.info import Loader
from triptych.models.loading import one_line, quiet
from triptych.models.settings import CONFIG
from triptych.models.source import hash_model
from triptych.models.text import read_json

PYLATE, STANFORD = "ColBERT", "HF_ColBERT"
"""`model_type` of the file `settings.CONFIG`, and an architecture in ``config.json``."""


def in_current_form(folder: Path, loader: Loader, progress: Progress) -> Path:
    """Return the folder of a model; a cached folder with the current form for an older one.

    Raises:
        UserError: sentence-transformers cannot load the model.
    """
    if loader != "MultiVectorEncoder":
        return folder
    saved_by = read_json(folder / CONFIG, default={}).get("model_type")
    architectures = read_json(folder / "config.json").get("architectures") or ()
    if saved_by != PYLATE and STANFORD not in architectures:
        return folder

    def work(target: Path) -> None:
        from sentence_transformers import MultiVectorEncoder

        try:
            with quiet():
                model = MultiVectorEncoder(
                    str(folder), device="cpu", local_files_only=True, trust_remote_code=False
                )
                model.save(str(target), create_model_card=False)
        except Exception as error:
            raise UserError(
                "model.source",
                "is not a model that sentence-transformers can load",
                given=one_line(error),
                remedy="Check modules.json, config.json and the weights",
            ) from error

    key: dict[str, object] = {
        "model": hash_model(folder),
        "versions": versions_of("sentence-transformers", "transformers", "tokenizers"),
        "code": code_hash("models/older.py"),
    }
    stage = cached_stage("current_form", key, work, progress)
    progress("source", "an older form of a model with a vector for each token is converted")
    return stage.folder
