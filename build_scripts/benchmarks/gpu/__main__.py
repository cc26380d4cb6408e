"""The GPU test: ``python -m benchmarks.gpu --minutes 8``; see README.md.

Exit codes: 0 everything ran and every target was met, 1 something failed or a target was missed,
2 an option is invalid, 3 something could not run on this machine.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NOTHING_RUNS = 3


def install_wheels(words: list[str]) -> None:
    """Install the wheels of the folder behind ``--wheels``, before anything is imported."""
    if "--wheels" in words[:-1]:
        wheels = sorted(map(str, Path(words[words.index("--wheels") + 1]).glob("*.whl")))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        subprocess.run([*pip, *wheels], check=True)


if __name__ == "__main__":
    install_wheels(sys.argv)
    try:
        from benchmarks.gpu.run import main
    except ImportError as error:
        # A package of this project or one that it needs is not installed.
        print(
            f"not run: {error}. Install the project with `pip install -e build_scripts/client "
            "-e .[demo]`, or install its packages and set PYTHONPATH=build_scripts.",
            file=sys.stderr,
        )
        raise SystemExit(NOTHING_RUNS) from None
    raise SystemExit(main())
