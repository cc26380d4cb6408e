"""The accuracy gate on this machine, where its server is none that the gate ran with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from triptych.base.cache import versions_of
from triptych.base.errors import UserError
from triptych.container.device_check import MODE_VARIABLE, DeviceChecks, find_checks
from triptych.container.machine import read_machine
from triptych.container.settings import read_settings
from triptych.repository.lint.device import find_passed_checks
from triptych.serving.embedded import find_release
from triptych.serving.server import Server


def find_emulated_release() -> str:
    """Return the libraries in which emulated backends run a core, as the gate does."""
    libraries = [name for name in ("onnxruntime", "openvino") if find_spec(name) is not None]
    return f"emulated, {versions_of(*libraries)}"


def check_device(
    repository: Path, models: Sequence[str], server: Server, tell: Callable[[str], object]
) -> None:
    """Check the pipelines of a server that has loaded them, if they never passed on this device.

    Args:
        repository: Folder of the models.
        models: Names of the pipelines; empty for all.
        server: The server.
        tell: Called with each result.

    Raises:
        UserError: A pipeline fails, and `MODE_VARIABLE` is ``enforce``.
    """
    settings = read_settings(os.environ, repository=str(repository))
    if settings.device_check == "off":
        return
    own = server.own_backends
    is_real = own is not None or shutil.which("tritonserver") is not None
    release = str(find_release(own_backends=own)) if is_real else find_emulated_release()
    found = find_checks(repository, read_machine(), release, models)
    checks = DeviceChecks(found, find_passed_checks(), settings.device_check, tell)
    checks.run(f"http://{server.http_url}")
    if checks.refusal:
        raise UserError(
            str(repository),
            "contains a pipeline that fails the accuracy gate on this device",
            given=checks.refusal,
            remedy=f"Build it on this device, or set {MODE_VARIABLE}=warn",
        )
