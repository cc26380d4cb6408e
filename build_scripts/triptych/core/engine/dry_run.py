"""Dry-run engine build: parse and build a graph without a GPU, with TensorRT for RTX.

NVIDIA's own parser and builder read the same graph that is deployed, with the profiles of the plan.
Their errors are then known before a GPU is needed. The result is discarded, because it is not the
engine that serves.

The build runs in its own process, ``python -m triptych.core.engine.dry_run FOLDER``, which reads
``request.json`` in the folder and writes ``reply.json``. NVIDIA's code may print, crash or use all
memory; in a separate process it cannot end the build.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.base.cache import cached_stage, code_hash
from triptych.base.errors import Progress, UserError
from triptych.base.extras import install_command
from triptych.base.files import scratch_folder
from triptych.core.engine.api import (
    USUAL_CAPABILITY,
    RtxApi,
    installed_rtx_version,
    nearest_capability,
    remove_unsupported,
)
from triptych.core.engine.inspection import check_products
from triptych.core.engine.make import make_engine, make_request
from triptych.repository.records import DryRun, read_record
from triptych.spec.engine_plan import EnginePlan

if TYPE_CHECKING:
    import tensorrt as trt

TIMEOUT_S = 900.0
"""Time limit of a dry run in seconds. MiniLM takes 3 s."""

EXTRA = "tensorrt"
WITHOUT = "build with --no-dry-run"
_CODE = (
    "core/engine/api.py",
    "core/engine/dry_run.py",
    "core/engine/graph.py",
    "core/engine/inspection.py",
    "core/engine/make.py",
    "core/engine/messages.py",
    "base/onnx_*.py",
    "spec/engine_plan.py",
)
_RECORD_FILE = "dry_run.json"
_WORKER = (sys.executable, "-m", "triptych.core.engine.dry_run")
_MAX_REASON = 300


def run_dry_build(
    onnx: Path,
    files: Mapping[str, str],
    plan: EnginePlan,
    progress: Progress,
    *,
    fp32_products: Collection[str] = (),
    gpu: str = "",
) -> DryRun | None:
    """Build the engine of a graph in a dry run, or return the cached result.

    Args:
        onnx: Path of the ``model.onnx``.
        files: SHA-256 hashes of the graph and of its weight files, by name.
        fp32_products: Nodes that multiply matrices in fp32 on purpose.
        gpu: Compute capability of the serving GPU, such as ``9.0``; empty if unknown.

    Returns:
        The result; None if TensorRT for RTX is not installed, which is reported.

    Raises:
        UserError: TensorRT for RTX rejects the graph, crashes or takes too long, or products are
            not in the planned precision.
    """
    version = installed_rtx_version()
    if not version:
        progress(
            "dry run", f"skipped: TensorRT for RTX is not installed ({install_command(EXTRA)})"
        )
        return None
    target = nearest_capability(gpu or USUAL_CAPABILITY)
    asked = {
        "plan": plan.as_dict(),
        "fp32_products": sorted(fp32_products),
        "compute_capability": target,
    }
    instead = f", the nearest to {gpu}" if gpu and gpu != target else ""
    about = f"TensorRT for RTX {version} for compute capability {target}{instead}"
    seconds: list[float] = []

    def work(folder: Path) -> None:
        progress("dry run", f"{about} ...")
        found = call_worker(_WORKER, {**asked, "onnx": str(onnx.absolute())})
        seconds.append(found.pop("seconds"))
        text = json.dumps({**found, "compute_capability": target})
        (folder / _RECORD_FILE).write_text(text, encoding="utf-8")

    inputs = {**asked, "files": dict(files), "rtx": version, "code": code_hash(*_CODE)}
    folder = cached_stage("dry-run", inputs, work, progress).folder
    text = (folder / _RECORD_FILE).read_text(encoding="utf-8")
    result = read_record(DryRun, json.loads(text))
    took = f"in {seconds[0]:.1f} s" if seconds else "(cached)"
    progress("dry run", f"{describe(result)}, {took}: a dry run, not the engine")
    return result


def describe(result: DryRun) -> str:
    """Return one line about the result: versions, layers, products, size."""
    products = ", ".join(f"{count} {kind}" for kind, count in result.products.items())
    return (
        f"TensorRT for RTX {result.tensorrt_rtx} for compute capability "
        f"{result.compute_capability}: {result.layers:,} layers, products: "
        f"{products or 'none'}, {result.size_bytes / 1e6:.1f} MB"
    )


def call_worker(
    command: Sequence[str], asked: Mapping[str, object], *, limit_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Return the result of a worker, started by `command` and the folder of its request.

    Raises:
        UserError: The error that the worker reports, or the worker ended without a reply or took
            too long.
    """
    with scratch_folder("triptych-dry-run-") as folder:
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
            raise _no_answer(f"no result after {limit_s:g} s") from expired
        try:
            reply = json.loads((folder / REPLY_FILE).read_text(encoding="utf-8"))
        except OSError as missing:
            raise _no_answer(_ending(done.returncode, done.stdout)) from missing
    if error := reply.get("error"):
        remedy = f"{error['remedy'] or 'Report it'}; or {WITHOUT}: your own TensorRT may accept it"
        raise UserError(error["field"], error["rule"], given=error["given"], remedy=remedy)
    found: dict[str, object] = reply["found"]
    return found


def _no_answer(given: str) -> UserError:
    remedy = f"Set another core.precision or core.layout, or {WITHOUT}; and report it"
    return UserError("TensorRT for RTX", "did not finish the dry run", given=given, remedy=remedy)


def _ending(code: int, output: bytes) -> str:
    how = f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    return f"{how}, after: {lines[-1].strip()[:_MAX_REASON]}" if lines else how


REQUEST_FILE = "request.json"
REPLY_FILE = "reply.json"


def dry_build(asked: dict[str, Any]) -> dict[str, Any]:
    """Parse, check and build; return the fields of `DryRun`, and the seconds taken."""
    api = RtxApi(asked["compute_capability"])
    plan = remove_unsupported(EnginePlan.from_dict(asked["plan"]))
    request = make_request(Path(asked["onnx"]), plan, api)
    seen: dict[str, object] = {}

    def look(network: trt.INetworkDefinition) -> None:
        seen["layers"] = network.num_layers
        seen["products"] = check_products(network, request, asked["fp32_products"])

    started = time.monotonic()
    # A dry run takes only seconds, so that its progress is not reported.
    engine = make_engine(api, request, timing_file=None, tell=lambda _: None, look=look)
    seconds = time.monotonic() - started
    return {"tensorrt_rtx": api.version, "size_bytes": len(engine), "seconds": seconds, **seen}


def main(folder: Path) -> None:
    """Execute the request in `folder` and write the reply, which may be an error."""
    asked = json.loads((folder / REQUEST_FILE).read_text(encoding="utf-8"))
    try:
        reply = {"found": dry_build(asked)}
    except UserError as error:
        reply = {"error": error.as_dict()}
    (folder / REPLY_FILE).write_text(json.dumps(reply), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
