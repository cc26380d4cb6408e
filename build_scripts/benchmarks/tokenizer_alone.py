"""The tokenizer in a loop on every core without a server, as the upper bound of a pipeline's rate.

Each core has its own process: ``python -m benchmarks.tokenizer_alone TEXTS_JSON TEXTS_PER_CALL
SECONDS`` prints texts/s and the milliseconds of processor time for each text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean

from benchmarks.cost import TOTAL
from benchmarks.onnxruntime_alone import open_tokenizer


def measure(texts: Sequence[str], *, texts_per_call: int, seconds: float) -> dict[str, float]:
    """Return ``rate_per_s`` of all cores and ``core-ms`` for each text."""
    with tempfile.TemporaryDirectory(prefix="triptych-benchmarks-") as folder:
        file = Path(folder) / "texts.json"
        file.write_text(json.dumps(list(texts)), encoding="ascii")
        command = [sys.executable, "-m", "benchmarks.tokenizer_alone", str(file)]
        loops = [
            subprocess.Popen(
                [*command, str(texts_per_call), str(seconds)],
                stdout=subprocess.PIPE,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
            for _ in os.sched_getaffinity(0)
        ]
        lines = [loop.communicate()[0] for loop in loops]
    rates, costs = zip(*(map(float, line.split()) for line in lines), strict=True)
    return {"rate_per_s": sum(rates), TOTAL: mean(costs)}


def _main(file: str, texts_per_call: int, seconds: float) -> None:
    texts: list[str] = json.loads(Path(file).read_text(encoding="ascii"))
    tokenizer = open_tokenizer()
    endless, done = cycle(texts), 0
    began, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        tokenizer.encode_batch_fast([next(endless) for _ in range(texts_per_call)])
        done += texts_per_call
    rate = done / (time.perf_counter() - began)
    print(rate, 1e3 * (time.process_time() - used) / done)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
