"""`make demo-chat`: a served language model, a streamed answer, and how fast it came."""

from __future__ import annotations

import json
import queue
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from triptych.cli.tables import Terminal
from triptych.server.server import Server

QUESTION = "Explain in two sentences why bread rises."
LOAD_S = 900.0


def main(repository: Path, pipeline: str) -> None:
    """Serve `repository`, ask `pipeline` a question, print the answer while it comes."""
    console = Terminal(highlight=False, soft_wrap=True)
    began = time.monotonic()
    server = Server(repository, models=[pipeline])
    try:
        server.start()
        server.wait_ready(timeout_s=LOAD_S)
        console.print(f"tritonserver is ready after {time.monotonic() - began:.1f} s\n")
        console.print(QUESTION, style="bold", markup=False)
        _ask(server.grpc_url, pipeline)  # the first request warms the engine up
        tokens, first_s, whole_s = _ask(server.grpc_url, pipeline, show=True)
        rate = (tokens - 1) / (whole_s - first_s)
        console.print(
            f"\n{tokens} tokens: the first after {first_s * 1e3:.0f} ms, then {rate:.1f} tokens/s"
        )
    finally:
        server.stop()
    console.print("server stopped")


def _ask(url: str, pipeline: str, *, show: bool = False) -> tuple[int, float, float]:
    """Tokens of the answer, seconds to the first, seconds to the last."""
    from tritonclient.grpc import InferenceServerClient, InferInput

    responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
    messages = json.dumps([{"role": "user", "content": QUESTION}])
    tensor = InferInput("messages", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([messages.encode()], np.object_))
    tokens, first_s = 0, 0.0
    with InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        began = time.monotonic()
        client.async_stream_infer(pipeline, [tensor])
        while True:
            result, error = responses.get(timeout=LOAD_S)
            if error is not None:
                raise error
            tokens += len(result.as_numpy("token_ids"))
            first_s = first_s or time.monotonic() - began
            if show:
                print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
            if result.as_numpy("finish_reason")[0]:
                return tokens, first_s, time.monotonic() - began


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
