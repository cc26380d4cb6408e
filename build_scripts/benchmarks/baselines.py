"""A pipeline on its server against its model in PyTorch and ONNX Runtime without a server.

Usage: ``python build_scripts/benchmarks/baselines.py pipelines/minilm --rounds 3 --seconds 3``.

A baseline tokenizes its requests (or decodes and resizes its images) with the pipeline's row maker,
which is faster than the tokenizers of transformers in Python. Then it runs the model on the CPU,
with the library's default number of threads. It leaves out ``hooks.before`` and decoding, which
favors the baseline.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import (
    Metrics,
    Series,
    Turn,
    closed_loop,
    finish,
    is_wanted,
    make_parser,
    progress,
    quiet,
    run_rounds,
    say,
    tabulate,
)  # fmt: skip
from benchmarks.model import CACHE
from triptych.base.confidence import paired_ratio, separate_ratio
from triptych.base.tensors import TokenRow
from triptych.core.gate.runs import open_onnx, tokens_of
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.requests import Sample
from triptych.runtime.hooking import call_before
from triptych.runtime.row_types import RowInputs, find_class
from triptych.serving.bench.results import OfferedLoad
from triptych.serving.server import Server
from triptych.spec.spec import load_spec

ROWS_A_CALL = {"torch eager": 1, "torch batched": 32, "torch.compile": 1, "onnxruntime": 1}
"""Number of requests per call, by baseline.

``torch batched`` pads batches of requests of similar length; ``torch.compile`` compiles the model
of ``torch eager``; ``onnxruntime`` runs the pipeline's core as it was built.
"""

MAX_BATCH = 32
"""Maximum number of rows in a padded batch; a request can have several, such as text windows."""

START_LIMIT_S = 300.0
"""Maximum time to load, compile and warm up, in seconds."""
ANSWER_LIMIT_S = 120.0
"""Maximum time of the last call after the end of a measurement, in seconds."""
WARM_UP_CALLS = 12
_END_TIMEOUT_S = 5.0

_VARIABLES = {
    # A waiting thread of torch spins up to 15 ms by default, which takes a core from a thread that
    # lost its own. Spinning for 0.1 ms costs nothing on an idle machine.
    "GOMP_SPINCOUNT": "3000",
    "HF_HUB_OFFLINE": "1",
    "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "torchinductor"),
    # A pool of compiler processes would stay alive while other baselines are measured.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}

Request = Mapping[str, Any]
Call = Callable[[Sequence[Request]], object]


class Baselines:
    """Baselines of a built pipeline, each in a process that idles between measurements.

    All run on the CPU, also if the pipeline's core runs on a GPU.

    Args:
        pipeline: Folder of the pipeline, whose traffic is sent.
        repository: Folder of its models.
        names: Names from `ROWS_A_CALL`.
        start_limit_s: Maximum time until a baseline is ready, in seconds.

    Attributes:
        processes: Running processes, by name of the baseline.
        failures: Reason of the failure, by name of a baseline that does not run.
    """

    def __init__(
        self,
        pipeline: Path,
        repository: Path,
        names: Iterable[str],
        *,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        self._names = tuple(names)
        self._arguments = (pipeline, repository)
        self._start_limit_s = start_limit_s
        self._pipes: dict[str, Connection] = {}
        self.processes: dict[str, BaseProcess] = {}
        self.failures: dict[str, str] = {}

    def __enter__(self) -> Baselines:
        try:
            # Baselines start one after the other, so that they do not compete for cores.
            for name in self._names:
                self._start(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            self._end(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the running baselines."""
        return tuple(self.processes)

    def measure(self, name: str, seconds: float) -> Metrics:
        """Measure a baseline for `seconds`, continuing in the traffic where it stopped.

        Each request has the latency of its call.

        Raises:
            RuntimeError: The baseline has ended; it is then in `failures`.
        """
        with suppress(OSError):  # the process has ended, which `_receive` tells
            self._pipes[name].send(seconds)
        reply = self._receive(name, seconds + ANSWER_LIMIT_S)
        if isinstance(reply, str):
            raise RuntimeError(f"{name} ended: {reply}")
        return reply

    def _start(self, name: str) -> None:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_run_worker, args=(theirs, name, *self._arguments))
        process.daemon = True
        process.start()
        theirs.close()
        self.processes[name], self._pipes[name] = process, ours
        began = time.monotonic()
        reply = self._receive(name, self._start_limit_s)
        took = f"ready in {time.monotonic() - began:.1f} s"
        progress("baseline", f"{name} {f'failed: {reply}' if isinstance(reply, str) else took}")

    def _receive(self, name: str, limit_s: float) -> Metrics | str:
        """Return the reply of a worker, or the reason of its failure; it has then ended."""
        pipe = self._pipes[name]
        try:
            reply: Metrics | str = (
                pipe.recv() if pipe.poll(limit_s) else f"no answer within {limit_s:g} s"
            )
        except (EOFError, OSError):
            reply = "its process was killed"
        if isinstance(reply, str):
            self.failures[name] = reply
            self._end(name)
        return reply

    def _end(self, name: str) -> None:
        self._pipes.pop(name).close()  # an idle worker then ends
        process = self.processes.pop(name)
        process.join(_END_TIMEOUT_S)
        process.kill()
        process.join()
        process.close()


def _run_worker(pipe: Connection, name: str, pipeline: Path, repository: Path) -> None:
    """Load a baseline, warm it up, then measure on each order of the parent.

    It ends with its parent, at the latest after the measurement.
    """
    os.environ.update({**_VARIABLES, **os.environ})
    try:
        inputs = read_inputs(load_spec(pipeline), quiet).with_built_layout(repository)
        core = repository / inputs.plan.step("core") / "1" / "model.onnx"
        call, planned = open_call(name, inputs, core), plan_calls(name, requests_of(inputs))
        # Calls of all lengths make a compiler recompile for dynamic lengths before the measurement.
        ranked = sorted(planned, key=lambda requests: len(str(requests)))
        for requests in ranked[:: -(-len(ranked) // WARM_UP_CALLS)] + ranked[-1:]:
            call(requests)
        pipe.send({})
        turns = cycle(planned)
        while True:
            pipe.send(_measure(call, turns, pipe.recv()))
    except (EOFError, BrokenPipeError):  # the parent has ended
        return
    except Exception as error:  # the parent reports every kind of error
        pipe.send(" ".join(f"{type(error).__name__}: {error}".split())[:300])


def _measure(call: Call, turns: Iterator[Sequence[Request]], seconds: float) -> Metrics:
    """Return the metrics of consecutive calls during `seconds`, at least one call."""
    latencies_ms: list[float] = []
    start = end = time.perf_counter()
    while not latencies_ms or end - start < seconds:
        requests, began = next(turns), end
        call(requests)
        end = time.perf_counter()
        latencies_ms += [(end - began) * 1e3] * len(requests)
    p50, p99 = np.percentile(latencies_ms, (50, 99)).tolist()
    return {"rate_per_s": len(latencies_ms) / (end - start), "p50_ms": p50, "p99_ms": p99}


def requests_of(inputs: PipelineInputs) -> list[Request]:
    """Return the traffic after the pipeline's own ``hooks.before``."""
    names = [tensor.name for tensor in inputs.plan.task.inputs]
    images = [tensor.name for tensor in inputs.plan.task.inputs if tensor.content == "image"]
    requests = [dict(request) for request in inputs.traffic]
    before = inputs.find_hook("before")
    if before is not None:
        requests = call_before(before, requests, names, encoded=images)
    return [{name: request[name] for name in names if name in request} for request in requests]


def plan_calls(name: str, requests: Sequence[Request]) -> list[list[Request]]:
    """Return the requests of each call, in the order of the calls; each request occurs once.

    Requests of a batch have similar lengths, as in sentence-transformers. The order of the batches
    is random with a fixed seed, so that a measurement that ends early sees all lengths.
    """
    size = ROWS_A_CALL[name]
    if size == 1:
        return [[request] for request in requests]
    ranked = sorted(requests, key=lambda request: sum(map(len, request.values())))
    batches = [list(ranked[start : start + size]) for start in range(0, len(ranked), size)]
    random.Random(0).shuffle(batches)
    return batches


def open_call(name: str, inputs: PipelineInputs, core: Path) -> Call:
    """Return the function that the baseline `name` times.

    Args:
        core: The ``model.onnx`` of the pipeline, in the plan's layout.

    Raises:
        UserError: The model cannot be loaded.
    """
    plan, make = inputs.plan, open_rows(inputs)
    run: Callable[[Sequence[Sample]], object]
    if name == "onnxruntime":
        pad = plan.info.pad_token_id
        run = open_onnx(core.resolve(), plan.core, plan.core_inputs, pad_token_id=pad)
    else:
        from benchmarks.torch_model import TorchModel

        compiled = name == "torch.compile"
        run = TorchModel(inputs.model_folder, plan.info, plan.core, compiled=compiled)

    def call(requests: Sequence[Request]) -> object:
        samples = sorted(make(requests), key=tokens_of)
        starts = range(0, len(samples), MAX_BATCH)
        return [run(samples[start : start + MAX_BATCH]) for start in starts]

    return call


def open_rows(inputs: PipelineInputs) -> Callable[[Sequence[Request]], list[Sample]]:
    """Return a function that converts requests to rows of the model, in the same order."""
    plan = inputs.plan
    # sentence-transformers and the pipelines of transformers also truncate long texts.
    settings = {**plan.row_settings, "bucket_edges": [], "overflow": "truncate"}
    maker: Any = find_class(plan.task.rows)(settings, inputs.tokenizer_folder)
    is_image = plan.info.image is not None

    def make(requests: Sequence[Request]) -> list[Sample]:
        columns = [{name: [value] for name, value in request.items()} for request in requests]
        rows = [RowInputs(each, plan.parameters) for each in columns]
        results = maker.make(rows) if is_image else maker.token_rows(rows)
        for result in results:
            if isinstance(result, Exception):
                raise result
        if is_image:
            return [pixels for result in results for pixels in result.tensors["pixels"]]
        return [
            TokenRow(tuple(row.ids), row.first_segment, row.prompt)
            for result in results
            for row in result
        ]

    return make


def main() -> int:
    """Measure a built pipeline and its baselines in rounds."""
    title = "A pipeline and its model without a server"
    parser = make_parser(__doc__, "baselines", title, rounds=3, seconds=3.0, only=True)
    parser.add_argument("pipeline", type=Path, help="folder of the pipeline")
    parser.add_argument("--repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32])
    options = parser.parse_args()
    inputs = read_inputs(load_spec(options.pipeline), quiet)
    name, requests = inputs.plan.spec.name, inputs.traffic
    wanted = [each for each in ROWS_A_CALL if is_wanted(each, options)]
    with ExitStack() as stack:
        baselines = stack.enter_context(Baselines(options.pipeline, options.repository, wanted))
        server = stack.enter_context(Server(options.repository, models=[name]))

        def serve(clients: int) -> list[tuple[str, Metrics]]:
            load = {"clients": clients, "seconds": options.seconds}
            metrics = closed_loop(server.grpc_url, name, requests, **load)
            return [(str(OfferedLoad("concurrency", clients)), metrics)]

        turns = [Turn(name, partial(serve, clients)) for clients in options.clients]
        turns += turns_of(baselines, options.seconds)
        found = run_rounds(
            [turns],
            options.rounds,
            max_minutes=options.max_minutes,
            on_error=lambda system, error: say(f"{system}: {error}"),
        )
    best = max((one for one in found if one.system == name), key=lambda one: one.median(_RATE))
    table = tabulate(
        f"Requests of {name}",
        found,
        {
            "system": lambda one: one.system,
            "load": lambda one: one.load,
            "requests/s": lambda one: one.text(_RATE),
            "p50 ms": lambda one: one.text("p50_ms", 1),
            "p99 ms": lambda one: one.text("p99_ms", 1),
            f"{name}, {best.load}, times as fast": lambda one: times_as_fast(best, one),
        },
    )
    failures = [f"{each} does not run: {reason}" for each, reason in baselines.failures.items()]
    finish(options, [table], found, failures)
    return 0


_RATE = "rate_per_s"


def turns_of(baselines: Baselines, seconds: float) -> list[Turn]:
    """Return the turns of the running baselines."""

    def measure(name: str) -> list[tuple[str, Metrics]]:
        return [(f"in process, {ROWS_A_CALL[name]} a call", baselines.measure(name, seconds))]

    return [Turn(name, partial(measure, name)) for name in baselines.names]


def times_as_fast(fast: Series, slow: Series) -> str:
    """Return the ratio of the rates with its 95 % interval, such as ``2.31 (2.20 to 2.43)``."""
    rates = slow.values(_RATE), fast.values(_RATE)
    in_turns = len(slow.rounds) == len(fast.rounds)
    return (paired_ratio(*rates) if in_turns else separate_ratio(*rates)).brief


if __name__ == "__main__":
    raise SystemExit(main())
