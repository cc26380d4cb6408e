"""The command line: parse, call, print, exit code. No domain logic lives here.

Exit codes: 0 done, 1 findings, a failed gate or a missed SLO, 2 a mistake of the user's; anything
else is a bug.
"""

from __future__ import annotations

import json
import sys

from triptych.cli import engines, pipelines, serving, tuning  # noqa: F401  (their verbs, in this order)
from triptych.cli.options import EXIT_MISTAKE, app, status
from triptych.errors import UserError

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the ``triptych`` command."""
    try:
        app()
    except UserError as error:
        if "--json" in sys.argv:
            print(json.dumps({"error": error.as_dict()}, ensure_ascii=False))
        status.print(f"error: {error.message}", style="red", markup=False)
        sys.exit(EXIT_MISTAKE)
