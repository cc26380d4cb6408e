"""The in-process bound: the packed core in ONNX Runtime with nothing around it.

A program of its own, so that no other library's threads are in the process:
``python -m benchmarks.bounds MODEL_ONNX ROWS_JSON SECONDS`` prints JSON. Rows are tokenized before.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measurement import Measurement
from benchmarks.model import MAX_LENGTH, model_folder

TOKENS_PER_BATCH = 128
_WARM_UP_RUNS = 20

Feed = dict[str, NDArray[np.int32]]


def measure(core: Path, texts: Sequence[str], *, seconds: float) -> list[Measurement]:
    """Measure ``model.onnx`` of a packed core in a process of its own.

    Returns:
        ``onnxruntime, 128-token batches``: the better of one session with two threads and two
        workers with one thread each; its latency is that of a batch. ``onnxruntime, one row``: one
        text after the other, the better of one and two threads.
    """
    with tempfile.TemporaryDirectory(prefix="triptych-benchmarks-") as name:
        rows = Path(name) / "rows.json"
        rows.write_text(json.dumps(_tokenize(texts)), encoding="ascii")
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.bounds", str(core), str(rows), str(seconds)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=120 + 10 * seconds,
            check=True,
        )
    ways: dict[str, dict[str, dict[str, float]]] = json.loads(done.stdout)
    best = []
    for contender, results in ways.items():
        way, result = max(results.items(), key=lambda item: item[1]["throughput_per_s"])
        notes: dict[str, object] = {"way": way, "all": results}
        best.append(Measurement(contender, clients=0, notes=notes, **result))
    return best


def _tokenize(texts: Sequence[str]) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_LENGTH)
    tokenizer.no_padding()
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


def _feed(rows: Sequence[Sequence[int]]) -> Feed:
    lengths = np.array([len(row) for row in rows], np.int32)
    return {
        "input_ids": np.concatenate([np.array(row, np.int32) for row in rows]),
        "row_length": lengths[:, None],
        "row_offset": np.zeros_like(lengths)[:, None],
        "row_stride": lengths,
    }


def _ideal_batches(rows: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Rows sorted by length, as many in a batch as fit in the budget."""
    batches: list[list[Sequence[int]]] = []
    tokens = TOKENS_PER_BATCH
    for row in sorted(rows, key=len):
        if tokens + len(row) > TOKENS_PER_BATCH:
            batches.append([])
            tokens = 0
        batches[-1].append(row)
        tokens += len(row)
    return batches


def _session(core: str, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(core, options, providers=["CPUExecutionProvider"])


def _time(session: Any, feeds: Sequence[Feed], *, workers: int, seconds: float) -> dict[str, float]:
    """Run the feeds round and round, `workers` at a time, and count the rows that came out."""
    for feed in feeds[:_WARM_UP_RUNS]:
        session.run(None, feed)
    waiting: Iterator[Feed] = cycle(feeds)
    lock = threading.Lock()
    durations: list[float] = []
    rows = 0
    began = time.perf_counter()

    def work() -> None:
        nonlocal rows
        while True:
            with lock:
                feed = next(waiting)
            start = time.perf_counter()
            session.run(None, feed)
            end = time.perf_counter()
            with lock:
                durations.append(end - start)
                rows += len(feed["row_stride"])
                # Whole rounds only, so that long and short batches have their true shares.
                if end - began >= seconds and len(durations) % len(feeds) < workers:
                    return

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "throughput_per_s": rows / (time.perf_counter() - began),
        "p50_ms": float(np.percentile(durations, 50)) * 1e3,
        "p99_ms": float(np.percentile(durations, 99)) * 1e3,
    }


def _main(core: str, rows_file: str, seconds: float) -> None:
    rows: list[list[int]] = json.loads(Path(rows_file).read_text(encoding="ascii"))
    one, two = _session(core, 1), _session(core, 2)
    batches = [_feed(batch) for batch in _ideal_batches(rows)]
    single = [_feed([row]) for row in rows]
    report = {
        f"onnxruntime, {TOKENS_PER_BATCH}-token batches": {
            "1 session, 2 threads": _time(two, batches, workers=1, seconds=seconds),
            "2 workers, 1 thread": _time(one, batches, workers=2, seconds=seconds),
        },
        "onnxruntime, one row": {
            "1 thread": _time(one, single, workers=1, seconds=seconds),
            "2 threads": _time(two, single, workers=1, seconds=seconds),
        },
    }
    print(json.dumps(report))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
