"""The GPU test: ``python -m benchmarks.gpu --minutes 8``; README.md says what it needs.

Exit codes: 0 everything ran and every target was met, 1 something failed or a target was missed,
2 a mistake in what was asked, 3 something could not run here.
"""

from __future__ import annotations

import sys

NOTHING_RUNS = 3

if __name__ == "__main__":
    try:
        from benchmarks.gpu.command import main
    except ImportError as error:
        # Of this project or of what it needs: a bare machine is told what to install.
        print(
            f"not run: {error}. Install the project with `pip install -e .[build,local,demo]`, "
            "or its packages and PYTHONPATH=build_scripts",
            file=sys.stderr,
        )
        raise SystemExit(NOTHING_RUNS) from None
    raise SystemExit(main())
