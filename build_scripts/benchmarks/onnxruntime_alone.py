"""The packed core in ONNX Runtime without a server, as the upper bound of a server's rate.

The measurement runs in its own process, so that no thread of another library disturbs it:
``python -m benchmarks.onnxruntime_alone MODEL_ONNX ROWS_JSON SECONDS`` prints JSON.
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

from benchmarks.model import MAX_LENGTH, model_folder

TOKENS_PER_BATCH = 128
_WARM_UP_RUNS = 20

Feed = dict[str, NDArray[np.int32]]


def open_tokenizer() -> Any:
    """Return MiniLM's tokenizer with truncation and without padding."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_LENGTH)
    tokenizer.no_padding()
    return tokenizer


def measure(core: Path, texts: Sequence[str], seconds: float) -> list[tuple[str, dict[str, float]]]:
    """Measure ``model.onnx`` of a packed core on rows that are tokenized beforehand.

    Returns:
        Metrics of ``128-token batches`` (the better of one session with two threads and two
        workers with one thread each; the latency is that of a batch) and of ``one row`` (one text
        after the other, the better of one and two threads).
    """
    encodings = open_tokenizer().encode_batch(list(texts))
    with tempfile.TemporaryDirectory(prefix="triptych-benchmarks-") as name:
        rows = Path(name) / "rows.json"
        rows.write_text(json.dumps([encoding.ids for encoding in encodings]), encoding="ascii")
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.onnxruntime_alone",
                str(core),
                str(rows),
                str(seconds),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=120 + 10 * seconds,
            check=True,
        )
    ways: dict[str, list[dict[str, float]]] = json.loads(done.stdout)
    return [
        (load, max(results, key=lambda one: one["rate_per_s"])) for load, results in ways.items()
    ]


def _make_feed(rows: Sequence[Sequence[int]]) -> Feed:
    lengths = np.array([len(row) for row in rows], np.int32)
    return {
        "input_ids": np.concatenate([np.array(row, np.int32) for row in rows]),
        "row_length": lengths[:, None],
        "row_offset": np.zeros_like(lengths)[:, None],
        "row_stride": lengths,
    }


def _batch_by_length(rows: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Sort rows by length and put as many into a batch as fit into `TOKENS_PER_BATCH`."""
    batches: list[list[Sequence[int]]] = []
    tokens = TOKENS_PER_BATCH
    for row in sorted(rows, key=len):
        if tokens + len(row) > TOKENS_PER_BATCH:
            batches.append([])
            tokens = 0
        batches[-1].append(row)
        tokens += len(row)
    return batches


def _open_session(core: str, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(core, options, providers=["CPUExecutionProvider"])


def _time(session: Any, feeds: Sequence[Feed], workers: int, seconds: float) -> dict[str, float]:
    """Run the feeds in turn with `workers` threads; return rate and latency."""
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
                # Only whole passes, so that long and short batches have their true shares.
                if end - began >= seconds and len(durations) % len(feeds) < workers:
                    return

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    p50, p99 = np.percentile(durations, [50, 99]) * 1e3
    rate = rows / (time.perf_counter() - began)
    return {"rate_per_s": rate, "p50_ms": float(p50), "p99_ms": float(p99)}


def _main(core: str, rows_file: str, seconds: float) -> None:
    rows: list[list[int]] = json.loads(Path(rows_file).read_text(encoding="ascii"))
    one_thread, two_threads = _open_session(core, 1), _open_session(core, 2)
    batches = [_make_feed(batch) for batch in _batch_by_length(rows)]
    single = [_make_feed([row]) for row in rows]
    report = {
        f"{TOKENS_PER_BATCH}-token batches": [
            _time(two_threads, batches, 1, seconds),
            _time(one_thread, batches, 2, seconds),
        ],
        "one row": [_time(one_thread, single, 1, seconds), _time(two_threads, single, 1, seconds)],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
