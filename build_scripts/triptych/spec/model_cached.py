"""What a model's files say, read once: transformers, which reads them, takes seconds to load."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from triptych.base.cache import cached_stage, code_hash, versions_of
from triptych.base.errors import Progress
from triptych.spec.model_facts import ModelFacts
from triptych.spec.model_source import hash_model, read_facts, read_tokenizer

CODE = ("spec/model_*.py", "spec/image_*.py", "spec/sentence_modules.py")


def read_model(folder: Path, progress: Progress) -> tuple[ModelFacts, Path | None]:
    """The facts of the model in `folder`, and the runtime's ``tokenizer.json`` in the cache.

    A model of images has no tokenizer.

    Raises:
        UserError: a setting that changes results and is not known here; no fast tokenizer.
    """
    sha256 = hash_model(folder)
    inputs = {
        "model": sha256,
        "versions": versions_of("transformers", "tokenizers"),
        "code": code_hash(*CODE),
    }

    def work(target: Path) -> None:
        facts = read_facts(folder, sha256)
        (target / "facts.json").write_text(json.dumps(asdict(facts)), encoding="utf-8")
        if facts.image is None:
            (target / "tokenizer.json").write_text(read_tokenizer(folder), encoding="utf-8")

    stage = cached_stage("model", inputs, work, progress)
    facts = TypeAdapter(ModelFacts).validate_json((stage.folder / "facts.json").read_bytes())
    return facts, stage.folder / "tokenizer.json" if facts.image is None else None
