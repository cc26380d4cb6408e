"""Check of what the accuracy gate saw: whether a build was checked on this device."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from triptych.base.cache import cache_root
from triptych.container.device_check import ROWS_FILE, PassedChecks, find_device
from triptych.container.machine import read_machine
from triptych.container.settings import find_state
from triptych.repository.lint.files import in_manifest
from triptych.repository.lint.snapshot import Flaw, Model, info
from triptych.spec.kind import Kind, kind_of_task


def find_passed_checks() -> PassedChecks:
    """Return the checks that passed on this machine, in ``TRIPTYCH_STATE`` or in the cache."""
    return PassedChecks(find_state(os.environ) or cache_root() / "device-checks")


def device_checked(model: Model) -> Iterator[Flaw]:
    """Check that a server answered the rows of the build within the gate's limits on this device.

    Another release of Triton is another device, too, but the one that serves is not known here.
    Pipelines that generate text have no rows, nor has a build whose model answers none of them
    within the limits.
    """
    manifest = model.manifest
    if not isinstance(manifest, dict) or in_manifest(model, "gate") is None:
        return
    rule = "should be checked by the accuracy gate on the device that serves"
    files = manifest.get("files")
    if not isinstance(files, dict) or f"{model.name}/{ROWS_FILE}" not in files:
        kind = kind_of_task(str(in_manifest(model, "spec", "task")))
        is_old = in_manifest(model, "spec", "serving", "device_check") is None
        if is_old and kind in (Kind.ENCODER, Kind.MODEL):
            yield info(
                rule,
                "never checked there: a build of an earlier release has no rows for it",
                f"Build {model.name} again, or run `triptych verify` against that server",
                model.manifest_file,
            )
        return
    on_gpu = in_manifest(model, "spec", "core", "device") == "gpu"
    here = json.loads(find_device(read_machine(), "", on_gpu=on_gpu).text)
    devices = find_passed_checks().find_devices(manifest)
    if all({**device, "release": ""} != here for device in devices):
        name = ", ".join(here.get("gpus", ())) or here["processor"] or "this processor"
        yield info(
            rule,
            f"never checked on {'a GPU' if on_gpu and not here['gpus'] else name}",
            "Start a server there: its first start checks it and keeps the result",
            model.manifest_file,
        )
