"""One dry-run build in its own process: ``python -m triptych.core.engine.dry_run_worker FOLDER``.

It reads ``request.json`` in the folder and writes ``reply.json``. NVIDIA's code may print, crash or
use all memory; in a separate process it cannot end the build.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError
from triptych.core.engine.inspection import check_products
from triptych.core.engine.make import make_engine, make_request
from triptych.core.engine.rtx import RtxApi, remove_unsupported
from triptych.spec.engine_plan import EnginePlan

REQUEST_FILE = "request.json"
REPLY_FILE = "reply.json"


def dry_build(asked: dict[str, Any]) -> dict[str, Any]:
    """Parse, check and build; return the fields of `DryRun`, and the seconds taken."""
    api = RtxApi(asked["compute_capability"])
    plan = remove_unsupported(EnginePlan.from_dict(asked["plan"]))
    request = make_request(Path(asked["onnx"]), plan, api)
    seen: dict[str, Any] = {}

    def look(network: Any) -> None:
        seen["layers"] = network.num_layers
        seen["products"] = check_products(network, request, asked["fp32_products"])

    started = time.monotonic()
    engine = make_engine(api, request, timing_file=None, tell=_ignore, look=look)
    seconds = time.monotonic() - started
    return {"tensorrt_rtx": api.version, "size_bytes": len(engine), "seconds": seconds, **seen}


def _ignore(_line: str) -> None:
    """Ignore a progress line, because a dry run takes only seconds."""


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
