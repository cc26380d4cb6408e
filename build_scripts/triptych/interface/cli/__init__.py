"""The command line: parse, call, print, exit code. No domain logic lives here.

Exit codes: 0 done, 1 findings, a failed gate or a missed SLO, 2 a mistake of the user's; anything
else is a bug.
"""

from __future__ import annotations

import io
import json
import sys

from triptych.base.errors import UserError
from triptych.interface.cli import (  # noqa: F401  (their verbs)
    asking,
    deploying,
    history,
    pipelines,
    serving,
    tuning,
    watching,
)
from triptych.interface.cli.options import EXIT_MISTAKE, app, status

ORDER = [
    *("new", "test", "inspect", "build", "dev", "engine", "lint", "history", "rollback"),
    *("serve", "ui", "infer", "verify", "bench", "tune", "watch", "shadow", "traffic", "deploy"),
    "doctor",
]
"""Of the verbs in the help: as one comes to use them."""
app.registered_commands.sort(key=lambda verb: ORDER.index(verb.callback.__name__))  # type: ignore[union-attr]

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the ``triptych`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what its encoding lacks is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except UserError as error:
        if "--json" in sys.argv:
            print(json.dumps({"error": error.as_dict()}))
        status.print(f"error: {error.message}", style="red", markup=False)
        sys.exit(EXIT_MISTAKE)
