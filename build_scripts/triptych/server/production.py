"""Serving on this machine as the image does: the same check of the locks, the same flags."""

from __future__ import annotations

import os
from pathlib import Path

from triptych.container.entrypoint import flags_for
from triptych.container.lock_check import enforce
from triptych.container.machine import read_machine
from triptych.container.settings import read_settings
from triptych.errors import UserError
from triptych.server.embedded import find_release


def check_and_make_flags(repository: Path) -> list[str]:
    """The flags of the image's entry point for the server that is here.

    The image's variables count, but for host, ports, server and repository.

    Raises:
        UserError: a setting is wrong, or an engine cannot run here; which ones, and why, was
            printed on standard error.
    """
    settings = read_settings(os.environ, repository=str(repository))
    machine = read_machine(os.environ)
    if not enforce(settings, machine):
        raise UserError(
            "repository",
            "must hold engines that this machine can run",
            given=repository,
            remedy="Follow the lines above, or set TRIPTYCH_LOCK_CHECK=warn",
        )
    return flags_for(repository, settings.options, machine, find_release())
