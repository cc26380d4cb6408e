"""The command line: options, output and exit codes, without domain logic.

Exit codes: 0 success; 1 findings, a failed gate or a missed SLO; 2 invalid input; 130 an interrupt;
70 an error that Triptych does not know, with its traceback in a file.
"""

from __future__ import annotations

import io
import json
import sys

from triptych.base.files import as_user_error
from triptych.interface.cli import (  # noqa: F401  (their verbs)
    deploy,
    gateway,
    history,
    infer,
    measure,
    monitor,
    overview,
    pipelines,
    serve,
    templates,
)
from triptych.interface.cli.command import EXIT_INTERRUPTED, app
from triptych.interface.cli.options import EXIT_MISTAKE, EXIT_UNKNOWN, keep_traceback, status

__all__ = ["app", "main"]


def main() -> None:
    """Run the ``triptych`` command."""
    for stream in (sys.stdout, sys.stderr):
        # Escape characters that the terminal's encoding lacks, instead of raising an error.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except Exception as caught:
        known = as_user_error(caught)
        error = known or keep_traceback(caught)
        if "--json" in sys.argv:
            print(json.dumps({"error": error.as_dict()}))
        status.print(f"error: {error.message}", style="red", markup=False)
        sys.exit(EXIT_MISTAKE if known else EXIT_UNKNOWN)
