"""Model information for plans of GPU cores."""

from typing import Any

from triptych.models.info import ModelInfo


def facts(**more: Any) -> ModelInfo:
    fields = {"hidden_size": 384, "max_length": 256, "layers": 6, "heads": 12, **more}
    return ModelInfo(sha256="0", architecture="BertModel", pad_token_id=0, **fields)
