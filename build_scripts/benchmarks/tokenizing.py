"""The limit of the path: the tokenizer alone, in a loop on every core, with nothing around it.

A process a core: ``python -m benchmarks.tokenizing TEXTS_JSON TEXTS SECONDS`` prints its texts a
second, and its milliseconds of processor time a text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import mean

from tokenizers import Tokenizer

from benchmarks.model import MAX_LENGTH, model_folder


@dataclass(frozen=True)
class Limit:
    """What the path cannot exceed: texts a second of all cores, and core-milliseconds a text."""

    texts_per_s: float
    core_ms: float


def measure(texts: Sequence[str], *, texts_a_call: int, seconds: float) -> Limit:
    """The tokenizer of the pipeline on every core for so many seconds."""
    with tempfile.TemporaryDirectory(prefix="triptych-benchmarks-") as folder:
        file = Path(folder) / "texts.json"
        file.write_text(json.dumps(list(texts)), encoding="ascii")
        command = [sys.executable, "-m", "benchmarks.tokenizing", str(file)]
        loops = [
            subprocess.Popen(
                [*command, str(texts_a_call), str(seconds)],
                stdout=subprocess.PIPE,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
            for _ in os.sched_getaffinity(0)
        ]
        said = [loop.communicate()[0] for loop in loops]
    rates, costs = zip(*(map(float, one.split()) for one in said), strict=True)
    return Limit(sum(rates), mean(costs))


def _main(file: str, texts_a_call: int, seconds: float) -> None:
    texts: list[str] = json.loads(Path(file).read_text(encoding="ascii"))
    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_LENGTH)
    tokenizer.no_padding()
    endless, done = cycle(texts), 0
    began, taken = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        tokenizer.encode_batch_fast([next(endless) for _ in range(texts_a_call)])
        done += texts_a_call
    per_s = done / (time.perf_counter() - began)
    print(per_s, 1e3 * (time.process_time() - taken) / done)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
