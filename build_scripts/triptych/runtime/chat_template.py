"""The model's chat template: messages to the text that the model was trained to go on from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .faults import RequestError

Message = Mapping[str, str]


class _Generation(Extension):
    """``{% generation %}`` marks what a model said, for training: here only its content counts."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template, rendered as transformers does: same filters, same sandbox.

    Args:
        source: Jinja text; None for a model that has none.
        special_tokens: name to text (``bos_token`` and the like), as the template may use them.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = None if source is None else environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt of a conversation, up to where the model's answer begins.

        Raises:
            RequestError: the model has no template, or its template refuses the messages.
        """
        if self._template is None:
            raise RequestError(
                "messages",
                "must be left out: the model has no chat template",
                f"{len(messages)} messages",
                "Send text_input, or take a model that was trained to chat",
            )
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except Exception as error:  # it is the model's own, and computes with what was sent
            said = str(error) if isinstance(error, TemplateError) else ""
            raise RequestError(
                "messages",
                "must be a conversation that the model's chat template takes",
                said or f"{type(error).__name__}: {error}",
                "Mind the roles, their order, and fields besides `role` and `content`",
            ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)
