"""What reaches a terminal: words of models, users and servers, never commands or a crash."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.text import Text

from triptych.base.errors import escape_for_terminal
from triptych.interface.cli.options import Terminal, print_table, say
from triptych.interface.cli.tables import print_failed_gate
from triptych.repository.records import GateResult, Verdict, WorstRow

HOSTILE = (
    "\x1b]0;owned\x07",  # the window's title
    "\x1b[2J\x1b[31m",
    "\x9b31m",  # the same sequence's other form
    "over\rwritten",
    "back\b\b\b\b",
    "\u202egpj.exe",  # read from the right
    "lone \ud800",
    "\x00\x7f",
)
COMMANDS = [chr(code) for code in (*range(10), *range(11, 32), *range(127, 160), 0x202E)]


def commands_in(text: str) -> list[str]:
    return [character for character in COMMANDS if character in text]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_text_commands_a_terminal(is_terminal: bool) -> None:
    for text in HOSTILE:
        console = Terminal(
            file=io.StringIO(), width=200, force_terminal=is_terminal, color_system=None
        )
        console.print(text, markup=False)
        console.print(f"a line\n{text}", style="red", markup=False)
        say(console, text, "bold")
        print_table(console, text, [text, "n"], [[text, "1"], [Text(text), "2"]])
        row = WorstRow(text, 1.0, 1.0, text, text)
        verdict = Verdict(text, 1.0, 0.5, passed=False)
        gate = GateResult("fp32", 1, 0, True, (verdict,), (text,), (row,))
        print_failed_gate(console, gate)
        said = console.file.getvalue()  # type: ignore[attr-defined]
        assert commands_in(said) == [], repr(text)
        said.encode()
        assert "a line\n" in said


def test_what_can_be_seen_stays_as_it_is() -> None:
    for text in ("gr\u00fcezi", "\u65e5\u672c\u8a9e", "\u0645\u06cc\u200c\u062e", "two\nlines", ""):
        assert escape_for_terminal(text) == text
    assert escape_for_terminal("\x1b[31m") == "[U+001B][31m"


def run(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("triptych"), *map(str, words)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_error_is_one_sentence_in_any_encoding(tmp_path: Path) -> None:
    name = "\u00fc\x1b]0;owned\x07"
    for variables in ({}, {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}):
        done = run("serve", tmp_path / name, **variables)
        assert done.returncode == 2, variables
        assert done.stderr.startswith("error: `REPOSITORY` must be a folder"), variables
        assert "[U+001B]]0;owned" in done.stderr, variables
        assert commands_in(done.stderr) == [], variables
        plain = run("serve", tmp_path / name, "--json", **variables)
        assert json.loads(plain.stdout)["error"]["given"].endswith(name), variables


def test_serving_beyond_this_machine_is_warned_of(tmp_path: Path) -> None:
    """Nothing is served: the port is busy."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.pbtxt").touch()
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = busy.getsockname()[1]
        for host, warns in (("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)):
            done = run("serve", tmp_path, "--host", host, "--grpc-port", port)
            assert done.returncode == 2
            warned, *others = done.stderr.splitlines()
            assert (f"warning: {host} can be reached from other machines" in warned) == warns, host
            assert len(others) == warns
