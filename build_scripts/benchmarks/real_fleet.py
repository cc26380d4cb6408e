"""Three real servers whose core sleeps, to hold the simulation of a fleet against.

The core takes as long as a GPU might and hardly any processor, so that three fit on two cores. Its
batches are Triton's own; the client stands for the balancer: the less busy of two drawn at random.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triptych.serving.server import Server

MAX_ROWS = 8
FIRST_S, ROW_S = 0.1, 0.025
"""What a batch sleeps: at first, and for each row."""
_NAME = "sleeper"
_MODEL = f"""
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep({FIRST_S} + {ROW_S} * len(requests))
        tensor = pb_utils.Tensor("y", np.zeros((1, 1), np.float32))
        return [pb_utils.InferenceResponse([tensor]) for _ in requests]
"""
_CONFIG = f"""
backend: "python"
max_batch_size: {MAX_ROWS}
input {{ name: "x" data_type: TYPE_FP32 dims: [1] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [1] }}
instance_group {{ kind: KIND_CPU count: 1 }}
dynamic_batching {{ }}
"""


@dataclass(frozen=True)
class RealRun:
    """Latency of each request in seconds, in order; seconds by batch size; rows of a mean batch.

    `idle_s` is the latency of a lone request.
    """

    latency_s: NDArray[np.float64]
    batch_s: dict[int, float]
    mean_batch: float
    idle_s: float


def run(folder: Path, servers: int, arrivals_s: NDArray[np.float64]) -> RealRun:
    """Send a request at each of these seconds to so many servers."""
    model = folder / _NAME
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(_CONFIG)
    (model / "1/model.py").write_text(_MODEL)
    started: list[Server] = []
    try:
        for _ in range(servers):
            started.append(Server(folder))
            started[-1].start()
        for server in started:
            server.wait_ready()
        urls = [server.grpc_url for server in started]
        headers = [server.operator_headers for server in started]
        return asyncio.run(_load(urls, headers, arrivals_s))
    finally:
        for server in started:
            server.stop()


async def _load(
    urls: Sequence[str], headers: Sequence[dict[str, str]], arrivals_s: NDArray[np.float64]
) -> RealRun:
    from tritonclient.grpc import InferInput
    from tritonclient.grpc.aio import InferenceServerClient

    clients = [InferenceServerClient(url) for url in urls]
    tensor = InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 1), np.float32))
    busy = [0] * len(clients)
    chance = random.Random(0)

    async def ask(place: int, due: float | None = None) -> float:
        """Seconds from when it was due, a late sender's own delay included."""
        busy[place] += 1
        began = time.perf_counter() if due is None else due
        await clients[place].infer(_NAME, [tensor])
        busy[place] -= 1
        return time.perf_counter() - began

    idle = [await ask(place) for place in range(len(clients)) for _ in range(5)]
    start = time.perf_counter()
    tasks = []
    for at in arrivals_s.tolist():
        pause = start + at - time.perf_counter()
        if pause > 0:
            await asyncio.sleep(pause)
        one, other = chance.randrange(len(clients)), chance.randrange(len(clients))
        place = one if busy[one] <= busy[other] else other
        tasks.append(asyncio.create_task(ask(place, start + at)))
    latencies = np.array(await asyncio.gather(*tasks))
    batches: dict[int, tuple[int, float]] = {}
    for client, key in zip(clients, headers, strict=True):
        found = await client.get_inference_statistics(_NAME, headers=dict(key), as_json=True)
        for batch in found["model_stats"][0]["batch_stats"]:
            parts = (batch.get(f"compute_{part}", {}) for part in ("input", "infer", "output"))
            took = sum(int(part.get("ns", 0)) for part in parts) / 1e9
            size, count = int(batch["batch_size"]), int(batch["compute_infer"]["count"])
            before = batches.get(size, (0, 0.0))
            batches[size] = (before[0] + count, before[1] + took)
        await client.close()
    runs = sum(count for count, _ in batches.values())
    rows = sum(size * count for size, (count, _) in batches.items())
    return RealRun(
        latencies,
        {size: took / count for size, (count, took) in sorted(batches.items())},
        rows / runs,
        float(np.median(idle)),
    )
