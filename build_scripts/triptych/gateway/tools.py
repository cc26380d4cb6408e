"""Tools of OpenAI's chat API: their types, and their calls in the text of an answer."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, TypedDict

from triptych.gateway.errors import invalid
from triptych.gateway.http import Body

_BEGIN, _END = "<tool_call>", "</tool_call>"
_CUT = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]*)"(?:\s*,\s*"arguments"\s*:\s*(.*))?', re.DOTALL)
"""Beginning of a call that the limit of tokens has cut after its name."""


class Function(Body):
    """Function that a model may call; `strict` has an effect only if a call is required."""

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(Body):
    """Tool that a model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """Name of a function."""

    name: str


class NamedTool(Body):
    """Tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


class FunctionCall(Body):
    """Call of a function; `arguments` is JSON."""

    name: str
    arguments: str


class ToolCall(Body):
    """Call of a tool in an earlier answer."""

    id: str
    type: Literal["function"]
    function: FunctionCall

    def plain(self) -> dict[str, object]:
        """Return the call with its arguments as an object, if they are JSON."""
        made = self.model_dump()
        with suppress(ValueError, RecursionError):
            made["function"]["arguments"] = json.loads(self.function.arguments)
        return made


class FoundCall(TypedDict):
    """Call of a tool in an answer; the values of `function` are its name and arguments."""

    id: str
    type: str
    function: dict[str, str]


class CallSplitter:
    """Splitter of an answer into text and calls: ``<tool_call>{"name": …, "arguments": …}…``.

    Args:
        schema: JSON schema of an answer that is one call, without the tags; None for any answer.
        only_first: Whether further calls are left out.

    Attributes:
        count: Number of calls up to now.
    """

    def __init__(self, schema: dict[str, Any] | None, *, only_first: bool = False) -> None:
        self.schema, self._only_first = schema, only_first
        self._held = ""
        self.count = 0

    def add(self, text: str, finish: str) -> tuple[str, list[FoundCall], str]:
        """Return text, calls and finish reason; text that may begin a call is held back.

        Args:
            text: Next part of the answer.
            finish: Reason of its end; empty before.
        """
        self._held += text
        if self.schema is not None:
            if not finish:
                return "", [], ""
            call = self._read(self._held)
            if call is not None:
                return "", [call], "tool_calls"
            cut = _CUT.match(self._held)  # the arguments, as far as the answer has them
            return "", [] if cut is None else [self._call(cut[1], cut[2] or "")], finish
        shown, calls = "", []
        while (end := self._held.find(_END)) >= 0:
            before, _, content = self._held[:end].partition(_BEGIN)
            end += len(_END)
            call = self._read(content)
            if call is None:
                shown += self._held[:end]
            else:
                shown += before.rstrip()
                if self._only_first and self.count > 1:
                    self.count = 1
                else:
                    calls.append(call)
            self._held = self._held[end:]
        size = len(self._held) if finish else _safe_size(self._held)
        left, self._held = self._held[:size], self._held[size:]
        # Without the space at the end, as before a call, however the answer is divided into parts.
        shown += left.rstrip() if finish and self.count else left
        return shown, calls, "tool_calls" if finish == "stop" and self.count else finish

    def _read(self, content: str) -> FoundCall | None:
        """Return the call that JSON contains; None if it is none."""
        try:
            call = json.loads(content)
            return self._call(str(call["name"]), json.dumps(call["arguments"]))
        except (ValueError, RecursionError, KeyError, TypeError):
            return None

    def _call(self, name: str, arguments: str) -> FoundCall:
        self.count += 1
        function = {"name": name, "arguments": arguments}
        return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _safe_size(text: str) -> int:
    """Return the length of the beginning of a text that cannot be a part of a call."""
    at = text.find(_BEGIN)
    sizes = range(len(_BEGIN) - 1, 0, -1)
    if at < 0:
        at = len(text) - next((size for size in sizes if text.endswith(_BEGIN[:size])), 0)
    return len(text[:at].rstrip())


def choose_tools(
    tools: Sequence[Tool], choice: str | NamedTool | None, *, only_first: bool = False
) -> tuple[list[dict[str, object]], CallSplitter | None]:
    """Return the tools for the chat template, and the splitter of the answer.

    Raises:
        ApiError: `choice` names no tool.
    """
    if not tools or choice == "none":
        if choice not in (None, "none"):
            raise invalid("tool_choice", "needs tools", "none", "Send tools")
        return [], None
    functions = [tool.function for tool in tools]
    schema: dict[str, Any] | None = None
    if choice not in (None, "auto"):
        if isinstance(choice, NamedTool):
            functions = [each for each in functions if each.name == choice.function.name]
            if not functions:
                name = choice.function.name
                raise invalid("tool_choice", "must name one of `tools`", name, "Correct the name")
        schema = {"anyOf": [_call_schema(each) for each in functions]}
    splitter = CallSplitter(schema, only_first=only_first)
    return [tool.model_dump(exclude_none=True) for tool in tools], splitter


_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def _call_schema(function: Function) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "enum": [function.name]},
            "arguments": function.parameters or _NO_PARAMETERS,
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
