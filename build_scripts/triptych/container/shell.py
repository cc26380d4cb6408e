"""What a shell would read as more than a name: Triton starts its Python steps through one.

The Python backend (24.10 at least) hands ``bash -c`` a line with the path of each step in it.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from triptych.base.errors import UserError

PLAIN = "letters, digits and any of @%+=:,./_-"


def is_plain(text: str | Path) -> bool:
    """Whether a shell takes `text` for one word as it is."""
    return shlex.quote(str(text)) == str(text)


def check_model_names(repository: Path) -> None:
    """Raises a `UserError` for the first model's folder whose name is not plain."""
    for folder in sorted(repository.iterdir()):
        if folder.is_dir() and not is_plain(folder.name):
            raise UserError(
                "repository",
                f"must hold models whose names are of {PLAIN}",
                given=repr(folder.name),
                remedy="Rename the folder, or move it out of the repository",
            )
