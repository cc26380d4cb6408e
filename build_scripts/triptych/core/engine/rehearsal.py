"""An engine rehearsed where there is no GPU: its graph parsed and built by TensorRT for RTX.

NVIDIA's own parser and builder read the very graph that is shipped, with the profiles of the plan:
what they refuse is known before anybody rents a GPU. What comes out is not the engine that serves,
and is thrown away.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from triptych.base.cache import cached_stage, code_hash
from triptych.base.errors import Progress, UserError
from triptych.base.files import scratch_folder
from triptych.core.engine import rtx
from triptych.core.engine.rehearsal_worker import REPLY_FILE, REQUEST_FILE
from triptych.repository.records import Rehearsal, read_record
from triptych.spec.engine_plan import EnginePlan

TIMEOUT_S = 900.0
"""MiniLM takes 3 s: what takes this long stands still."""

GET_IT = "pip install -e .[tensorrt]"
WITHOUT = "build with --no-rehearsal"
_CODE = (
    *(
        "core/engine/api.py",
        "core/engine/graph.py",
        "core/engine/make.py",
        "core/engine/messages.py",
    ),
    *(
        "core/engine/inspection.py",
        "core/engine/graph.py",
        "core/engine/rehearsal*.py",
        "core/engine/make.py",
    ),
    *("core/engine/rtx.py", "base/onnx_*.py", "spec/engine_plan.py"),
)
_RECORD_FILE = "rehearsal.json"
_WORKER = (sys.executable, "-m", "triptych.core.engine.rehearsal_worker")
_MAX_REASON = 300


def rehearse(
    onnx: Path,
    files: Mapping[str, str],
    plan: EnginePlan,
    progress: Progress,
    *,
    fp32_products: Collection[str] = (),
    gpu: str = "",
) -> Rehearsal | None:
    """Rehearse the engine of a graph, or take the result of an earlier time.

    Args:
        onnx: the ``model.onnx``.
        files: hashes of it and of the weights beside it, by name.
        plan: what the engine is to be.
        progress: told what comes of it.
        fp32_products: nodes that multiply matrices in fp32 on purpose.
        gpu: compute capability of the GPU that will serve, such as ``9.0``, where it is known.

    Returns:
        What was found; None where TensorRT for RTX is not installed, which is told.

    Raises:
        UserError: it refuses the graph, ends without an answer or takes too long, or products are
            not in the precision planned.
    """
    version = rtx.installed_version()
    if not version:
        progress("rehearse", f"not rehearsed: TensorRT for RTX is not installed ({GET_IT})")
        return None
    target = rtx.nearest(gpu or rtx.USUAL)
    asked = {
        "plan": plan.as_dict(),
        "fp32_products": sorted(fp32_products),
        "compute_capability": target,
    }
    instead = f", the nearest to {gpu}" if gpu and gpu != target else ""
    about = f"TensorRT for RTX {version} for compute capability {target}{instead}"
    seconds: list[float] = []

    def work(folder: Path) -> None:
        progress("rehearse", f"{about} ...")
        found = ask(_WORKER, {**asked, "onnx": str(onnx.absolute())})
        seconds.append(found.pop("seconds"))
        text = json.dumps({**found, "compute_capability": target})
        (folder / _RECORD_FILE).write_text(text, encoding="utf-8")

    inputs = {**asked, "files": dict(files), "rtx": version, "code": code_hash(*_CODE)}
    folder = cached_stage("rehearsal", inputs, work, progress).folder
    text = (folder / _RECORD_FILE).read_text(encoding="utf-8")
    rehearsal = read_record(Rehearsal, json.loads(text))
    took = f"in {seconds[0]:.1f} s" if seconds else "(cached)"
    progress("rehearse", f"{describe(rehearsal)}, {took}: a rehearsal, not the engine")
    return rehearsal


def describe(rehearsal: Rehearsal) -> str:
    """What was parsed and built, with what and for what, in words."""
    products = ", ".join(f"{count} {kind}" for kind, count in rehearsal.products.items())
    return (
        f"TensorRT for RTX {rehearsal.tensorrt_rtx} for compute capability "
        f"{rehearsal.compute_capability}: {rehearsal.layers:,} layers, products: "
        f"{products or 'none'}, {rehearsal.size_bytes / 1e6:.1f} MB"
    )


def ask(
    command: Sequence[str], asked: Mapping[str, Any], *, limit_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """What a worker, started by `command` and the folder of its request, found.

    Raises:
        UserError: what the worker says, or that it ended without a reply or took too long.
    """
    with scratch_folder("triptych-rehearsal-") as folder:
        (folder / REQUEST_FILE).write_text(json.dumps(asked), encoding="utf-8")
        try:
            done = subprocess.run(
                [*command, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired as expired:
            raise _no_answer(f"none after {limit_s:g} s") from expired
        try:
            reply = json.loads((folder / REPLY_FILE).read_text(encoding="utf-8"))
        except OSError as missing:
            raise _no_answer(_ending(done.returncode, done.stdout)) from missing
    if error := reply.get("error"):
        remedy = f"{error['remedy'] or 'Report it'}; or {WITHOUT}: your own TensorRT may take it"
        raise UserError(error["field"], error["rule"], given=error["given"], remedy=remedy)
    found: dict[str, Any] = reply["found"]
    return found


def _no_answer(given: str) -> UserError:
    remedy = f"Take another core.precision or core.layout, or {WITHOUT}; and report it"
    return UserError("TensorRT for RTX", "must end a rehearsal", given=given, remedy=remedy)


def _ending(code: int, output: bytes) -> str:
    how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    return f"{how}, after: {lines[-1].strip()[:_MAX_REASON]}" if lines else how
