"""One rehearsal in its own process: ``python -m triptych.core.engine.rehearsal_worker FOLDER``.

Reads ``request.json`` in the folder and writes ``reply.json``: NVIDIA's code may print, crash or
take all memory, and must not end a build with it.
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
from triptych.core.engine.rtx import RtxApi, buildable
from triptych.spec.engine_plan import EnginePlan

REQUEST_FILE = "request.json"
REPLY_FILE = "reply.json"


def rehearse(asked: dict[str, Any]) -> dict[str, Any]:
    """Parse, check and build; see `repository.records.Rehearsal` for what is returned."""
    api = RtxApi(asked["compute_capability"])
    plan = buildable(EnginePlan.from_dict(asked["plan"]))
    request = make_request(Path(asked["onnx"]), plan, api)
    seen: dict[str, Any] = {}

    def look(network: Any) -> None:
        seen["layers"] = network.num_layers
        seen["products"] = check_products(network, request, asked["fp32_products"])

    started = time.monotonic()
    engine = make_engine(api, request, timing_file=None, tell=_tell_nobody, look=look)
    seconds = time.monotonic() - started
    return {"tensorrt_rtx": api.version, "size_bytes": len(engine), "seconds": seconds, **seen}


def _tell_nobody(_line: str) -> None:
    """A rehearsal takes seconds."""


def main(folder: Path) -> None:
    """Do what the folder's request asks; an error is a reply, too."""
    asked = json.loads((folder / REQUEST_FILE).read_text(encoding="utf-8"))
    try:
        reply = {"found": rehearse(asked)}
    except UserError as error:
        reply = {"error": error.as_dict()}
    (folder / REPLY_FILE).write_text(json.dumps(reply), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
