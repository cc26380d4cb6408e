"""The calls that the card of a built pipeline shows, against a server."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest


def run_card(
    card: Path, server: Any, file: Path | None, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """Run each call of a card and return what each printed; `file` is the value of file inputs."""
    text = card.read_text(encoding="utf-8")
    for stated, address in (
        ("127.0.0.1:8000", server.http_url.removeprefix("http://")),
        ("127.0.0.1:8001", server.grpc_url),
        ('open("FILE", "rb")', f"open({str(file)!r}, 'rb')"),
    ):
        text = text.replace(stated, address)
    printed = []
    for language, block in re.findall(r"```(sh|python)\n(.*?)```", text, re.DOTALL):
        if language == "sh":
            command = ["bash", "-c", block.replace("curl ", "curl --silent --fail-with-body ")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stdout + done.stderr
            printed.append(done.stdout)
        else:
            capsys.readouterr()
            exec(block, {})
            printed.append(capsys.readouterr().out)
    assert all(printed)
    return printed
