"""The models of a repository as tritonserver sees them: every folder is one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from triptych.base.errors import UserError
from triptych.container.shell import check_model_names


def model_folders(repository: Path) -> list[str]:
    """The names of the repository's models, in order."""
    return sorted(
        path.name
        for path in repository.iterdir()
        if path.is_dir() and not path.name.startswith(".")
    )


def check_models(repository: Path, wanted: Sequence[str]) -> None:
    """Raises a `UserError` where the repository cannot be served, or lacks one of `wanted`."""
    if not repository.is_dir():
        raise UserError("repository", "must be a folder", given=repository)
    there = model_folders(repository)
    if not there:
        raise UserError(
            "repository",
            "must hold at least one model",
            given=repository,
            remedy="Run `triptych build NAME` first",
        )
    check_model_names(repository)
    for name in wanted:
        if name not in there:
            raise UserError(
                "models",
                "must name models of the repository",
                given=name,
                remedy=f"There are: {', '.join(there)}",
            )
