"""A model of the Hugging Face Hub: fetched into the ordinary cache, or found there."""

from __future__ import annotations

from pathlib import Path

from triptych.base.errors import UserError
from triptych.spec.model_licence import CARD
from triptych.spec.spec_fields import ModelSource

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
FILES = ("*.json", "*.txt", "*.model", "*.spm", "*.safetensors")
FOREIGN = ("onnx/*", "openvino/*", "*.onnx")


def hub_folder(model: ModelSource) -> Path:
    """The local folder of a model that is named by its Hub id.

    Raises:
        UserError: the Hub has none, or cannot be reached and none is cached.
    """
    from huggingface_hub import snapshot_download

    # A full commit never changes: what is cached of it needs no look at the Hub.
    cached_first = model.revision is not None and len(model.revision) == 40

    def fetch(*patterns: str) -> Path:
        def download(*, local: bool) -> Path:
            return Path(
                snapshot_download(
                    model.source,
                    revision=model.revision,
                    allow_patterns=[*patterns],
                    ignore_patterns=[*FOREIGN],
                    local_files_only=local,
                )
            )

        try:
            return download(local=cached_first)
        except Exception as first:
            try:
                return download(local=not cached_first)
            except Exception as second:  # what the Hub said tells more than an empty cache
                raise (second if cached_first else first) from None

    try:
        folder = fetch(*FILES, CARD)
        if not has_weights(folder):
            folder = fetch(*FILES, CARD, WEIGHTS[1])
    except Exception as error:
        raise _not_found(model, error) from error
    return folder


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights of a model."""
    return any(True for pattern in WEIGHTS for _ in folder.glob(pattern))


def _not_found(model: ModelSource, error: Exception) -> UserError:
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = f"{model.source} (revision {model.revision or 'main'})"
    reason = " ".join(str(error).split())[:200]
    remedy = "Check the name, the revision, `hf auth login` and the network"
    if isinstance(error, LocalEntryNotFoundError):
        cause = " ".join(str(error.__cause__ or "").split())[:100]
        why = (
            "HF_HUB_OFFLINE forbids to ask the Hub"
            if constants.is_offline_mode()
            else f"the Hub cannot be reached ({cause or 'no answer'})"
        )
        reason = f"{why}, and {constants.HF_HUB_CACHE} does not have it"
        remedy = (
            "Name a local folder as model.source; or fetch it where there is a network, copy the "
            "cache and let HF_HOME name it"
            + ("; or unset HF_HUB_OFFLINE" if constants.is_offline_mode() else "")
        )
    return UserError(
        "model.source",
        "must be a model the Hugging Face Hub has, or one cached before",
        given=f"{wanted}: {reason}",
        remedy=remedy,
    )
