"""Serving on this machine as the image does: the same check of the files, the same flags."""

from __future__ import annotations

import os
from pathlib import Path

from triptych.base.errors import UserError
from triptych.container.entrypoint import flags_for, warn_of
from triptych.container.lock_check import enforce
from triptych.container.machine import read_machine
from triptych.container.settings import read_settings
from triptych.serving.embedded import find_release


def check_and_make_flags(repository: Path, *, production: bool, one_gpu: bool = False) -> list[str]:
    """The flags of the image's entry point for the server that is here; files are checked before.

    The image's variables count, but for host, ports, server and repository. Without `production`
    there are no flags, and engines are left to the server. `one_gpu`: it will see but one of them.

    Raises:
        UserError: a setting is wrong, or a pipeline cannot be served here; which ones, and why,
            was printed on standard error.
    """
    settings = read_settings(os.environ, repository=str(repository))
    machine = read_machine(os.environ) if production else None
    if machine is not None and one_gpu:
        machine = machine._replace(gpus=machine.gpus[:1])
    if not enforce(settings, machine):
        raise UserError(
            "repository",
            "must hold pipelines that can be served as they were built",
            given=repository,
            remedy="Follow the lines above, or set TRIPTYCH_LOCK_CHECK=warn",
        )
    if machine is None:
        return []
    release = find_release()
    warn_of(release)
    return flags_for(repository, settings.options, machine, release)
