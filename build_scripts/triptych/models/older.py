"""Models in other forms: those of PyLate 3 and of Stanford's ColBERT, with a Router, and CLIP.

sentence-transformers reads them and saves them in its own form, which is the only one read here.
From a CLIP model that it saved, the files of transformers are taken.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from triptych.base.cache import cached_stage, code_hash, versions_of
from triptych.base.errors import Progress, UserError
from triptych.models.info import Loader
from triptych.models.loading import one_line, quiet
from triptych.models.routed import check_routes, write_parts
from triptych.models.settings import CONFIG
from triptych.models.source import CARD, hash_model, read_license, refuse_own_code
from triptych.models.text import OF_LIBRARY, find_clip, is_routed, read_json

PYLATE, STANFORD = "ColBERT", "HF_ColBERT"
"""`model_type` of the file `settings.CONFIG`, and an architecture in ``config.json``."""


def in_current_form(folder: Path, loader: Loader, progress: Progress) -> Path:
    """Return the folder of a model; a cached folder with the current form for another one.

    Raises:
        UserError: sentence-transformers cannot load the model, or its Router is not served.
    """
    clip = find_clip(folder) if loader in ("", "SentenceTransformer") else None
    form = "an older form of a model with token vectors"
    if routed := is_routed(folder):
        form = "a model with a Router"
        check_routes(folder, loader)
        for part in folder.glob("*/"):
            refuse_own_code(part)
    elif clip is not None:
        form = "a CLIP model"
    elif not _is_older(folder, loader):
        return folder

    def work(target: Path) -> None:
        if clip is not None:
            _copy_clip(clip, folder, target)
            return
        import sentence_transformers

        load = getattr(sentence_transformers, loader)
        try:
            with quiet():
                model = load(
                    str(folder), device="cpu", local_files_only=True, trust_remote_code=False
                )
                if routed:
                    write_parts(model, target)
                else:
                    model.save(str(target), create_model_card=False)
            if (folder / CARD).is_file():  # it names the license
                shutil.copy(folder / CARD, target)
        except Exception as error:
            raise UserError(
                "model.source",
                "is not a model that sentence-transformers can load",
                given=one_line(error),
                remedy="Check modules.json, config.json and the weights",
            ) from error

    key: dict[str, object] = {
        "model": hash_model(folder),
        "license": read_license(folder),
        "versions": versions_of("sentence-transformers", "transformers", "tokenizers"),
        "code": code_hash("models/older.py", "models/routed.py"),
    }
    stage = cached_stage("current_form", key, work, progress)
    progress("source", f"{form} is converted")
    return stage.folder


def _copy_clip(clip: Path, folder: Path, target: Path) -> None:
    """Copy the files of transformers, and the model card of the folder around them."""
    for file in (*clip.glob("*.*"), *folder.glob(CARD)):
        if file.name not in OF_LIBRARY:
            shutil.copy(file, target)


def _is_older(folder: Path, loader: Loader) -> bool:
    """Whether a model with a vector for each token is not in the form of the library."""
    if loader != "MultiVectorEncoder":
        return False
    saved_by = read_json(folder / CONFIG, default={}).get("model_type")
    architectures = read_json(folder / "config.json").get("architectures") or ()
    return saved_by == PYLATE or STANFORD in architectures
