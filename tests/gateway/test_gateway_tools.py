"""Calls of tools in the text of an answer."""

import json
from typing import Any

import pytest

from triptych.gateway.errors import ApiError
from triptych.gateway.tools import CallSplitter, NamedTool, Tool, choose_tools

FIND = {"name": "find", "arguments": {"id": 7}}
CALL = f"<tool_call>\n{json.dumps(FIND)}\n</tool_call>"


def split(answer: str, step: int, finish: str = "stop") -> tuple[str, list[Any], str]:
    """Text, functions of the calls and finish reason of an answer that arrives in parts."""
    splitter, text, calls, ended = CallSplitter(None), "", [], ""
    for at in range(0, len(answer), step):
        is_last = at + step >= len(answer)
        shown, found, ended = splitter.add(answer[at : at + step], finish if is_last else "")
        text += shown
        calls += found
    for call in calls:
        assert call["type"] == "function"
        assert call["id"].startswith("call_")
    functions = [call["function"] for call in calls]
    return text, [(each["name"], json.loads(each["arguments"])) for each in functions], ended


def test_calls_are_found_in_parts_of_any_size() -> None:
    call = ("find", {"id": 7})
    cases: list[tuple[str, str, list[Any], str]] = [
        ("a < b <tool", "a < b <tool", [], "stop"),
        (CALL, "", [call], "tool_calls"),
        (f"I look.\n\n{CALL}\n{CALL}", "I look.", [call, call], "tool_calls"),
        (f"{CALL} Done. \n", " Done.", [call], "tool_calls"),
        ("Done. \n", "Done. \n", [], "stop"),
        ("<tool_call>{</tool_call>", "<tool_call>{</tool_call>", [], "stop"),
        ("<tool_call>[1]</tool_call> a", "<tool_call>[1]</tool_call> a", [], "stop"),
        ("</tool_call>", "</tool_call>", [], "stop"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "", [], "stop"),
    ]
    for answer, text, calls, finish in cases:
        for step in (1, 3, 7, len(answer)) if len(answer) < 1000 else (len(answer),):
            found = split(answer, step)
            assert found == (text or found[0], calls, finish), (answer[:80], step)
    assert split(CALL[:-3], 4, "length") == (CALL[:-3], [], "length")


def named(name: str) -> NamedTool:
    return NamedTool.model_validate({"type": "function", "function": {"name": name}})


def test_a_required_call_is_a_schema_of_the_whole_answer() -> None:
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name}})
        for name in ("find", "stop")
    ]
    choices: tuple[tuple[Any, list[str]], ...] = (
        ("required", ["find", "stop"]),
        (named("find"), ["find"]),
    )
    for choice, names in choices:
        _, calls = choose_tools(tools, choice)
        assert calls is not None
        assert calls.schema is not None
        kinds = [each["properties"]["name"]["enum"] for each in calls.schema["anyOf"]]
        assert kinds == [[name] for name in names]
        assert calls.add('{"name": "find", ', "") == ("", [], "")
        text, (call,), finish = calls.add('"arguments": {"id": 7}}', "stop")
        assert (text, finish, call["function"]["name"]) == ("", "tool_calls", "find")
    _, calls = choose_tools(tools, "required")
    assert calls is not None
    assert calls.add('{"name"', "length") == ("", [], "length")
    for answer, arguments in (
        ('{"name": "find"', ""),
        ('{"name": "find", "arguments": {"id": [7', '{"id": [7'),
        ('{"name":"find","arguments":', ""),
    ):
        _, calls = choose_tools(tools, "required")
        assert calls is not None
        assert calls.add(answer[:9], "") == ("", [], "")
        text, (call,), finish = calls.add(answer[9:], "length")
        assert (text, finish, calls.count) == ("", "length", 1)
        assert call["function"] == {"name": "find", "arguments": arguments}
    assert choose_tools(tools, "none") == ([], None)
    wrong: tuple[tuple[list[Tool], Any], ...] = (([], "required"), (tools, named("other")))
    for given, choice in wrong:
        with pytest.raises(ApiError, match="tool_choice"):
            choose_tools(given, choice)
