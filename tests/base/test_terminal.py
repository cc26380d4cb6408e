"""What reaches a terminal: words of models, users and servers, never commands or a crash."""

import io
import json
import socket
import sys
from pathlib import Path

import pytest
from rich.text import Text
from typer.testing import CliRunner

from triptych.base.errors import UserError, escape_for_terminal
from triptych.interface.cli import app, main
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


def run_main(encoding: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Run the command, which ends with 2, and return its output and its errors."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2)]
    monkeypatch.setattr(sys, "argv", ["triptych", *words])
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = []
    for stream in streams:
        stream.flush()
        said.append(stream.detach().getvalue().decode(encoding))
    return said[0], said[1]


def test_an_error_is_one_sentence_in_any_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "\u00fc\x1b]0;owned\x07"
    for encoding in ("utf-8", "ascii", "latin-1"):
        with monkeypatch.context() as patch:
            _, errors = run_main(encoding, ["serve", str(tmp_path / name)], patch)
            assert errors.startswith("error: `REPOSITORY` must be a folder"), encoding
            assert "[U+001B]]0;owned" in errors, encoding
            assert commands_in(errors) == [], encoding
            output, _ = run_main(encoding, ["serve", str(tmp_path / name), "--json"], patch)
            assert json.loads(output)["error"]["given"].endswith(name), encoding


def test_serving_other_machines_needs_keys_or_certificates(tmp_path: Path) -> None:
    """Nothing is served: the port is busy."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.pbtxt").touch()
    (tmp_path / "keys.yaml").write_text("keys: {}\n")
    keys = ("--keys", str(tmp_path / "keys.yaml"))
    cases: list[tuple[tuple[str, ...], str]] = [
        (("--host", "0.0.0.0"), "must be this machine, because Triton"),
        (("--host", "0.0.0.0", "--http-api", "0"), "must be this machine without keys"),
        (("--host", "0.0.0.0", "--insecure"), "`grpc_port` must be a free port"),
        (("--host", "0.0.0.0", "--http-api", "0", *keys), "`grpc_port` must be a free port"),
        (("--host", "127.0.0.1"), "`grpc_port` must be a free port"),
        (("--host", "localhost"), "`grpc_port` must be a free port"),
        (keys, "only supported with --http-api"),
        (("--alias", "a=b"), "`--alias` is only supported with --http-api. Given: --alias a=b"),
        (("--http-api", "0", "--client-ca", "ca.pem"), "only supported with --tls-certificate"),
        (("--http-api", "0", "--tls-key", "key.pem"), "must be given together"),
        (("--backend-directory", str(tmp_path)), "must be a folder that holds a folder for each"),
    ]
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        for words, message in cases:
            done = CliRunner().invoke(app, ["serve", str(tmp_path), "--grpc-port", port, *words])
            assert isinstance(done.exception, UserError), (words, done.output)
            assert message in str(done.exception), (words, str(done.exception))
