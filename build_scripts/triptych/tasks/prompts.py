"""Prompts of a text model: the request parameters, and the settings of preprocess."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.models.info import ModelInfo
from triptych.models.roles import DOCUMENT, QUERY, ROLES
from triptych.tasks.task import Rule

PROMPT = "prompt"
"""Request parameter with the name of a prompt, or with its text."""

ROLE = "role"
"""Request parameter that chooses the prompt of queries or of documents, as `encode_query` and
`encode_document` of sentence-transformers do."""


def prompt_rule(info: ModelInfo) -> Mapping[str, Rule]:
    """Return the rule of the parameter `PROMPT`; no rule for a model without prompts."""
    if not info.prompts and not info.free_prompt:
        return {}
    names = () if info.free_prompt else tuple(sorted(info.prompts))
    return {PROMPT: Rule("str", default=info.default_prompt, choices=names)}


def prompt_rules(info: ModelInfo) -> Mapping[str, Rule]:
    """Return the rules of `PROMPT` and, for a model with a prompt of a role, of `ROLE`.

    Documents are no role if only a prompt of another name is for them, which sentence-transformers
    would leave out.
    """
    others = {"passage", "corpus"} & {name for name, text in info.prompts.items() if text}
    roles = ROLES if info.prompts.get(DOCUMENT) or not others else (QUERY,)
    has_roles = info.has_query_weights or any(info.prompts.get(role) for role in ROLES)
    return {**prompt_rule(info), **({ROLE: Rule("str", choices=roles)} if has_roles else {})}


def prompt_settings(info: ModelInfo) -> Mapping[str, object]:
    """Return the settings by which preprocess puts prompts before texts."""
    free = {"free_prompt": True} if info.free_prompt else {}
    return {"prompts": dict(info.prompts), **free}
