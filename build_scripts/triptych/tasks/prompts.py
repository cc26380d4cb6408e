"""Prompts of a text model: the request parameter, and the settings of preprocess."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.models.info import ModelInfo
from triptych.tasks.task import Rule

PROMPT = "prompt"
"""Request parameter with the name of a prompt, or with its text."""


def prompt_rule(info: ModelInfo) -> Mapping[str, Rule]:
    """Return the rule of the parameter `PROMPT`; no rule for a model without prompts."""
    if not info.prompts and not info.free_prompt:
        return {}
    names = () if info.free_prompt else tuple(sorted(info.prompts))
    return {PROMPT: Rule("str", default=info.default_prompt, choices=names)}


def prompt_settings(info: ModelInfo) -> Mapping[str, object]:
    """Return the settings by which preprocess puts prompts before texts."""
    free = {"free_prompt": True} if info.free_prompt else {}
    return {"prompts": dict(info.prompts), **free}
