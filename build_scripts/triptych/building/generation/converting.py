"""An encoder-decoder model of transformers -> the files that CTranslate2 runs, by its converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triptych.base.errors import UserError
from triptych.building.generation.marian import without_advice
from triptych.runtime.engine_ctranslate2 import COMPUTE_TYPES, VOCABULARY_FILE


def convert(folder: Path, target: Path, precision: str) -> None:
    """Write the converted model of `folder` to `target`, which must not be there.

    Raises:
        UserError: CTranslate2 is not installed, or does not convert the model.
    """
    try:
        from ctranslate2.converters import TransformersConverter
    except ImportError as error:
        raise UserError(
            "core.backend",
            "needs CTranslate2",
            given="not installed",
            remedy="Run `make setup`, or `pip install -e .[text2text]`",
        ) from error

    class Converter(TransformersConverter):  # type: ignore[misc]  # it has no types
        def load_model(self, model_class: Any, *places: Any, **named: Any) -> Any:
            model = super().load_model(model_class, *places, **named)
            # transformers normalises behind each block of BART whatever the file says, and newer
            # configurations leave out what the converter asks for.
            if model_class.__name__ == "BartForConditionalGeneration":
                model.config.normalize_before = False
                model.config.normalize_embedding = True
            # T5 1.1, Flan-T5 and mT5 do not scale what goes into the last layer. The converter asks
            # whether embeddings are tied, which newer configurations say of all of them.
            elif model_class.__name__ in (
                "T5ForConditionalGeneration",
                "MT5ForConditionalGeneration",
            ):
                scaled = getattr(model.config, "scale_decoder_outputs", False)
                model.config.tie_word_embeddings = scaled
            return model

    try:
        with without_advice():
            Converter(str(folder)).convert(str(target), quantization=COMPUTE_TYPES[precision])
    except (ValueError, KeyError, NotImplementedError, AttributeError, RuntimeError) as error:
        raise UserError(
            "model.source",
            "must be a model that CTranslate2 converts",
            given=" ".join(str(error).split())[:300],
            remedy="Choose another model",
        ) from error
    if not (target / VOCABULARY_FILE).is_file():
        raise UserError(
            "model.source",
            "must read and write with one vocabulary",
            given="two vocabularies",
            remedy="Choose another model",
        )
