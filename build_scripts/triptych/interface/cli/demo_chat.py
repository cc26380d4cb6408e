"""`make demo-chat`: a served language model, a streamed answer, and how fast it came."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from triptych.client import Client
from triptych.interface.cli.options import Terminal
from triptych.serving.server import Server

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
    tokens, first_s = 0, 0.0
    with Client(pipeline, url, timeout_s=LOAD_S) as client:
        began = time.monotonic()
        for chunk in client.chat([{"role": "user", "content": QUESTION}]):
            tokens += len(chunk.token_ids)
            first_s = first_s or time.monotonic() - began
            if show:
                print(chunk.text, end="", flush=True)
    return tokens, first_s, time.monotonic() - began


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
