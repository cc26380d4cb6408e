"""Run `make demo` and draw what it prints as ``demo.svg``, the picture of README.md.

Usage: ``make recording``.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from triptych.base.files import write_files

ROOT = Path(__file__).resolve().parents[2]
PICTURE = Path(__file__).with_name("demo.svg")
WIDTH = 108
"""Width of the terminal in columns."""
_WEB_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Fonts that rich's picture would load from the network."""


def draw(output: str, title: str) -> str:
    """Return an SVG picture of a terminal with this output, which may have ANSI colors."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(output.strip()), highlight=False)
    picture = console.export_svg(title=title, theme=DIMMED_MONOKAI, unique_id="demo")
    return _WEB_FONTS.sub("", picture)


def main() -> None:
    """Run the demo on this machine and write the picture."""
    began = time.monotonic()
    done = subprocess.run(
        ["make", "--no-print-directory", "demo"],
        cwd=ROOT,
        env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
        text=True,
    )
    seconds = time.monotonic() - began
    day = time.strftime("%Y-%m-%d", time.gmtime())
    write_files(
        PICTURE.parent,
        {PICTURE.name: draw(f"$ make demo\n{done.stdout}", f"{day}, {seconds:.0f} s")},
    )


if __name__ == "__main__":
    main()
