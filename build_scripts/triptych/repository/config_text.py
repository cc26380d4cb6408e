"""Text of ``config.pbtxt`` in a spec (`serving.config`), merged into the generated configs.

It reaches every setting of Triton that has no field of its own, such as priority levels, host
policies or the version policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from triptych.base.errors import UserError
from triptych.repository.config import new_config, parse_config

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

FIELD = "serving.config"
GENERATED = {
    "name": "the name of the pipeline",
    "platform": "core.backend",
    "backend": "core.backend",
    "max_batch_size": "core.max_batch_size",
    "input": "task",
    "output": "task",
    "batch_input": "core.layout",
    "batch_output": "core.layout",
    "ensemble_scheduling": "task",
    "default_model_filename": "core.backend",
    "model_warmup": "the traffic",
    "response_cache": "serving.response_cache",
}
"""Fields of a config that must fit the graph and the steps, and what decides them."""
REPLACED = ("instance_group", "version_policy")
"""Fields that replace the generated ones: to join two would add instances or mix policies."""


def check_config_texts(texts: Mapping[str, str], *, shares_core: bool = False) -> None:
    """Check the texts of a spec before anything is built.

    Args:
        texts: Text in the format of ``config.pbtxt`` by step.
        shares_core: Whether the core belongs to another pipeline.

    Raises:
        UserError: A text is not part of a ModelConfig, or sets a field that is generated, or is for
            a core that belongs to another pipeline.
    """
    if shares_core and "core" in texts:
        raise _refusal("core", texts["core"], "Write it in the pipeline of core.shared_from")
    for step, text in texts.items():
        _parse(step, text)


def own_parameters(texts: Mapping[str, str], step: str) -> list[str]:
    """Return the parameters that the text of a step sets."""
    return list(_parse(step, texts[step]).parameters) if step in texts else []


def merge_config_text(config: ModelConfig, texts: Mapping[str, str], step: str) -> ModelConfig:
    """Return a config with the text for its step merged into it.

    The rules are those of protobuf: a number or text replaces the generated one, a message is
    merged field by field, and elements of a list are added. `REPLACED` are the exceptions.

    Args:
        config: Generated ModelConfig of the step, which is not changed.
        texts: Text in the format of ``config.pbtxt`` by step.
        step: ``ensemble``, ``preprocess``, ``core`` or ``postprocess``.

    Raises:
        UserError: A text is not part of a ModelConfig, or sets a field or parameter that is
            generated.
    """
    if step not in texts:
        return config
    own = _parse(step, texts[step])
    for key in own.parameters:
        if key in config.parameters:
            raise _refusal(step, f"parameters {key}", "Remove it: the step reads its own value")
    merged = new_config()
    merged.CopyFrom(config)
    for field, _ in own.ListFields():
        if field.name in REPLACED:
            merged.ClearField(field.name)
    merged.MergeFrom(own)
    return merged


def _parse(step: str, text: str) -> ModelConfig:
    config = parse_config(text, file=f"{FIELD}.{step}")
    for field, _ in config.ListFields():
        if field.name in GENERATED:
            decided = GENERATED[field.name]
            raise _refusal(step, field.name, f"Remove it: {decided} decides it")
    return config


def _refusal(step: str, given: str, remedy: str) -> UserError:
    return UserError(
        f"{FIELD}.{step}",
        "must not set what is decided elsewhere",
        given=given,
        remedy=remedy,
    )
