"""Command line, Python functions, demo page and reports."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the ``triptych`` command, or say how to install it where only the client is installed."""
    try:
        from triptych.interface import cli
    except ModuleNotFoundError as error:
        from triptych.base.extras import COMMAND_LINE, install_command

        if (error.name or "").partition(".")[0] == "triptych":
            raise
        print(
            f"error: `triptych` needs the packages of the command line. Given: no {error.name}. "
            f"Run `{install_command(COMMAND_LINE)}`.",
            file=sys.stderr,
        )
        sys.exit(2)
    cli.main()
