"""Run `make demo` in a terminal and draw what is then on it as ``demo.svg``, for README.md.

It begins from nothing: without a cache and without models in the repository.

Usage: ``make recording``.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from triptych.base.files import write_files

ROOT = Path(__file__).resolve().parents[2]
PICTURE = Path(__file__).with_name("demo.svg")
WIDTH = 108
"""Width of the terminal in columns."""
_CONTROL = re.compile(r"(\x1b\[\d*[A-HJKST]|\x1b\[\?\d+[hl]|\r|\n)")
"""Line ends, and sequences that move the cursor, erase or hide; colors stay in the text."""
_WEB_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Fonts that rich's picture would load from the network."""


def draw(output: str, title: str) -> str:
    """Return an SVG picture of a terminal with this output, which may have ANSI colors."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(output.strip()), highlight=False)
    picture = console.export_svg(title=title, theme=DIMMED_MONOKAI, unique_id="demo")
    return _WEB_FONTS.sub("", picture)


def fold(output: str) -> str:
    """Return the lines that a terminal has after this output, without what was erased."""
    lines, row = [""], 0
    for part in _CONTROL.split(output):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif up := re.fullmatch(r"\x1b\[(\d*)A", part):
            row = max(0, row - int(up[1] or 1))
        elif not _CONTROL.fullmatch(part):
            lines[row] += part
    return "\n".join(lines)


def _run(command: list[str], environment: dict[str, str]) -> str:
    """Return the output of a command in a terminal of its own."""
    ours, its = pty.openpty()
    variables = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(WIDTH), **environment}
    process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=its, stderr=its)
    os.close(its)
    parts = []
    with suppress(OSError):  # raised after the last output
        while part := os.read(ours, 65536):
            parts.append(part)
    os.close(ours)
    if process.wait():
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
    return b"".join(parts).decode()


def main() -> None:
    """Run the demo on this machine and write the picture."""
    for built in (ROOT / "model_repository").glob("minilm*"):
        shutil.rmtree(built)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        output = _run(["make", "--no-print-directory", "demo"], {"TRIPTYCH_CACHE": cache})
    seconds = time.monotonic() - began
    day = time.strftime("%Y-%m-%d", time.gmtime())
    write_files(
        PICTURE.parent,
        {PICTURE.name: draw(f"$ make demo\n{fold(output)}", f"{day}, {seconds:.0f} s")},
    )


if __name__ == "__main__":
    main()
