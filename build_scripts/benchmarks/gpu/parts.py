"""Parts of the GPU test. Each runs as a process of its own and keeps its figures as it goes.

A part that is interrupted goes on where it was: figures in its result are not measured again.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu import peers, systems
from benchmarks.gpu.kernels import find_missing_kernels, read_kernels
from benchmarks.gpu.machine import CUDA, PROVIDERS
from benchmarks.gpu.pipelines import GpuModel, GpuPipeline, list_pipelines
from benchmarks.gpu.systems import Prepare
from benchmarks.harness import progress, run_load, say
from benchmarks.servers import MODEL
from triptych.base.files import write_files
from triptych.building.build import build
from triptych.building.compiled import CompiledStages
from triptych.building.stages import BuildOptions
from triptych.client import Client
from triptych.container.serving_machine import find_machine, parse_machine, variants_in
from triptych.core.engine.stage import EngineFailure
from triptych.core.engine.stage import build_engine as engine_stage
from triptych.repository.manifest import CompiledManifest, read_manifest
from triptych.repository.records import plain_record
from triptych.serving.bench.perf_analyzer import RequestForm
from triptych.serving.bench.results import OfferedLoad
from triptych.serving.server import Server, ServerProfile

DONE, FAILED, INTERRUPTED = "done", "failed", "interrupted"
ACCEPTED = "measured only, never served"
"""Reason to build a graph that fails its gate; the table shows the failure."""
AS_GENERATED = "as generated"
POISSON_RATIO = 0.7
"""Rate of the Poisson arrivals as a ratio of the highest rate with one text a request."""
MAX_RIGHT_DIFFERENCE = 2e-2
"""Largest difference of a number in a right answer, in every precision."""
_CHECKED_REQUESTS, _CHECK_CLIENTS, _MAX_CHECKED_ROWS = 400, 64, 8


@dataclass
class Result:
    """Result of a part so far.

    Attributes:
        file: JSON file in which it is kept.
        machine: Machine on which it was measured; empty if it holds on every machine.
        data: Figures by name.
    """

    file: Path
    part: str
    machine: str
    status: str = INTERRUPTED
    reason: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    def save(self) -> None:
        """Write the file; readers see the old result or the new one."""
        fields = {**asdict(self), "file": self.file.name}
        write_files(self.file.parent, {self.file.name: json.dumps(fields, indent=1) + "\n"})


def read_result(home: Path, part: Part, machine: str) -> Result:
    """Return the kept result of a part on this machine, or a new one."""
    file = home / "results" / f"{part.name.replace(' ', '_')}.json"
    machine = "" if part.anywhere else machine
    with suppress(OSError, ValueError):  # none, or one that is cut off
        kept = Result(**{**json.loads(file.read_text("utf-8")), "file": file})
        if kept.machine == machine:
            return kept
    return Result(file, part.name, machine)


@dataclass(frozen=True)
class Part:
    """A part of the test; its name begins with its kind.

    Attributes:
        needs: Names of what `machine` must have.
        after: Names of the parts whose results it needs.
        anywhere: Whether its result holds on every machine.
    """

    name: str
    needs: tuple[str, ...]
    measure: Callable[[Result], None]
    after: tuple[str, ...] = ()
    anywhere: bool = False

    @property
    def kind(self) -> str:
        """First word of the name."""
        return self.name.partition(" ")[0]


def list_parts(options: argparse.Namespace) -> list[Part]:
    """Return all parts for the options, the most important first."""
    parts = [part for model in options.models for part in _list_parts(model, options)]
    if options.device == CUDA:
        needs = ("device", "ONNX Runtime")
        parts.append(Part("kernels of ONNX Runtime", needs, _confirm_kernels))
    return parts


def _confirm_kernels(result: Result) -> None:
    """Compare the list of kernels with those of the installed ONNX Runtime.

    Raises:
        RuntimeError: A kernel of the list is missing.
    """
    missing = find_missing_kernels()
    result.data = {"listed": sum(map(len, read_kernels().values())), "missing": missing}
    if missing:
        raise RuntimeError(f"ONNX Runtime lacks kernels of the list: {', '.join(missing[:8])}")


def _list_parts(model: GpuModel, options: argparse.Namespace) -> Iterator[Part]:
    pipelines = list_pipelines(model, options)
    first, device = pipelines[0], options.device
    needs: tuple[str, ...]
    expected = f"reference {model.name}"
    needs = ("packages", "sentence-transformers")
    yield Part(expected, needs, partial(_reference, first), anywhere=True)
    for one in pipelines:
        run = partial(_build, one)
        yield Part(f"build {one.name}", ("packages",), run, (expected,), anywhere=True)
    for one in pipelines:
        if one.backend == "tensorrt":
            needs = ("device", "TensorRT")
            yield Part(f"engine {one.name}", needs, partial(_engine, one), (f"build {one.name}",))
    built = {
        one.name: f"{'engine' if one.backend == 'tensorrt' else 'build'} {one.name}"
        for one in pipelines
    }
    for one in pipelines:
        needs = ("device", f"{one.backend} backend", "perf_analyzer")
        yield Part(
            f"served {one.name}", needs, partial(_serve, one, options), (expected, built[one.name])
        )
    for one in pipelines:
        of = "TensorRT" if one.backend == "tensorrt" else "ONNX Runtime"
        make = partial(_open_core, one, device)
        run = partial(_time, one, make, options)
        yield Part(f"process {one.name}", ("device", of), run, (expected, built[one.name]))
    eager = partial(systems.open_torch, first, device, compiled=False)
    compiled = partial(systems.open_torch, first, device, compiled=True)
    encode = partial(systems.open_sentence_transformers, first, device)
    others: dict[str, tuple[Callable[[str], Prepare], tuple[str, ...]]] = {
        "torch_eager": (eager, ("PyTorch",)),
        "sentence_transformers": (encode, ("PyTorch", "sentence-transformers")),
        "torch_compile": (compiled, ("PyTorch", "compiler")),  # takes longest
    }
    for name, (open_system, needs) in others.items():
        for precision in [each for each in options.precisions if each in ("fp16", "fp32")]:
            run = partial(_time, first, partial(open_system, precision), options)
            part = f"process {model.name}_{name}_{precision}"
            yield Part(part, ("device", *needs), run, (expected,))
    for name in peers.PEERS:
        run = partial(_serve_peer, first, name, options)
        needs = ("device", name, "perf_analyzer")
        yield Part(f"peer {model.name}_{name}", needs, run, (expected,))


def _reference_file(pipeline: GpuPipeline) -> Path:
    return pipeline.home / "reference" / f"{pipeline.model.name}.npy"


def _read_reference(pipeline: GpuPipeline) -> NDArray[np.float32]:
    """Return the vectors of the texts; raise RuntimeError if they are of other texts."""
    vectors: NDArray[np.float32] = np.load(_reference_file(pipeline))
    if len(vectors) != len(pipeline.texts):
        raise RuntimeError("the reference is of other texts; add --again reference")
    return vectors


def _reference(pipeline: GpuPipeline, result: Result) -> None:
    """Compute the vectors of sentence-transformers in fp32 on the CPU, one text at a time."""
    file, texts = _reference_file(pipeline), pipeline.texts
    file.parent.mkdir(parents=True, exist_ok=True)
    encode = systems.open_sentence_transformers(pipeline, "cpu", "fp32")
    np.save(file, systems.embed_all(encode, len(texts), size=1))
    result.data |= {"texts": len(texts), "weights": pipeline.model.weights}


def _build(pipeline: GpuPipeline, result: Result) -> None:
    """Build the pipeline, with its gate on the CPU, and without its engine.

    Raises:
        UserError: The pipeline cannot be built.
        RuntimeError: It was built in another layout.
    """
    options = BuildOptions(repository=pipeline.repository, progress=progress, accept=ACCEPTED)
    with suppress(EngineFailure):  # the graph exists then, and the next part reports the engine
        build(CompiledStages(), pipeline.inputs, options)
    built = read_manifest(pipeline.repository, pipeline.name, CompiledManifest)
    result.data["gate"] = [*built.gate.failures]
    if built.plan.layout != pipeline.layout:
        raise RuntimeError(f"was built {built.plan.layout} instead: {built.plan.not_packed_reason}")


def _engine(pipeline: GpuPipeline, result: Result) -> None:
    """Build the engine like `triptych engine`, which compares it with its graph."""
    outcome = engine_stage(pipeline.repository, pipeline.name, progress)
    result.data["engine"] = plain_record(outcome.record)


def _open_core(pipeline: GpuPipeline, device: str) -> Prepare:
    if pipeline.backend == "tensorrt":
        return systems.open_engine(pipeline)
    return systems.open_onnxruntime(pipeline, PROVIDERS[device])


def _time(
    pipeline: GpuPipeline,
    make: Callable[[], Prepare],
    options: argparse.Namespace,
    result: Result,
) -> None:
    """Time a system in process, and compare its vectors with the reference."""
    wanted, prepare = _read_reference(pipeline), make()
    if "check" not in result.data:
        found = systems.embed_all(prepare, len(wanted))
        result.data["check"] = compare(found, wanted)
    loads = result.data.setdefault("loads", {})
    for size in options.batches:
        if str(size) not in loads:
            calls = [prepare(batch) for batch in systems.make_batches(len(wanted), size)]
            loads[str(size)] = systems.time_calls(calls, size, options.seconds)
            report_load(result, str(size), loads[str(size)])


def list_variants(pipeline: GpuPipeline) -> list[str]:
    """Return the plan of a plain server, and the plans for machines not larger than this one."""
    built = read_manifest(pipeline.repository, pipeline.name, CompiledManifest)
    found = find_machine()
    names = sorted(variants_in(built.files), key=lambda name: parse_machine(name).order)
    return [AS_GENERATED, *(name for name in names if parse_machine(name).is_within(found))]


def _serve(pipeline: GpuPipeline, options: argparse.Namespace, result: Result) -> None:
    """Serve the pipeline with Triton's own backend, check its answers, and load it."""
    wanted, texts = _read_reference(pipeline), pipeline.texts
    for variant in list_variants(pipeline):
        found = result.data.setdefault(variant, {})
        if "offered_per_s" in found:  # measured last
            continue
        server = Server(
            pipeline.repository,
            models=[pipeline.name],
            backend_directory=options.backend_directory,
            log_file=result.file.with_suffix(".log"),
            profile=ServerProfile(machine=None if variant == AS_GENERATED else variant),
        )
        with server:
            with Client(pipeline.name, server.grpc_url) as client:
                found["check"] = check_answers(client.embed, texts, wanted)
            result.save()
            load = partial(run_load, server.grpc_url, pipeline.name)
            _load(load, texts, options, result, found)
            loads = found["loads"]
            rates = [one["rate_per_s"] for name, one in loads.items() if name.endswith(" x 1")]
            rate = POISSON_RATIO * max(rates, default=0.0)
            if rates:
                loads["Poisson"] = load(texts, options.served_seconds, OfferedLoad("poisson", rate))
                report_load(result, f"Poisson {rate:.0f}/s", loads["Poisson"])
            found["offered_per_s"] = rate


def _serve_peer(
    pipeline: GpuPipeline, name: str, options: argparse.Namespace, result: Result
) -> None:
    """Serve the model with another server, check its answers, and load it."""
    wanted, texts = _read_reference(pipeline), pipeline.texts
    python = peers.find_python(name, options.peers)
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    for precision in [each for each in options.precisions if each in ("fp16", "fp32")]:
        found = result.data.setdefault(precision, {})
        folder = pipeline.model_folder
        with peers.run_peer(name, python, folder, options.device, precision) as (url, path):
            found["check"] = compare(peers.embed(url, path, texts), wanted)
            load = partial(run_load, url, MODEL, form=RequestForm(http_path=path))
            _load(load, texts, options, result, found, joins=True)


def _load(
    load: Callable[..., dict[str, float]],
    texts: Sequence[str],
    options: argparse.Namespace,
    result: Result,
    found: dict[str, Any],
    *,
    joins: bool = False,
) -> None:
    """Measure the closed loops that `found` lacks.

    Args:
        load: `run_load` with the address of the server.
        joins: Whether the rows of a request are joined here, into the body of an HTTP request.
    """
    loads = found.setdefault("loads", {})
    for clients, rows in options.loads:
        name = f"{clients} x {rows}"
        if name in loads:
            continue
        # A whole number of requests, so that each text is sent equally often.
        requests: Sequence[str] = [*texts, *texts[: -len(texts) % rows]]
        form = {"form": RequestForm(batch_size=rows)}
        if joins:
            starts = range(0, len(requests), rows)
            requests, form = [peers.make_body(requests[at : at + rows]) for at in starts], {}
        closed, warmup_requests = OfferedLoad("concurrency", clients), 2 * clients + 20
        metrics = load(
            requests, options.served_seconds, closed, warmup_requests=warmup_requests, **form
        )
        loads[name] = {**metrics, "rate_per_s": rows * metrics["rate_per_s"]}
        report_load(result, name, loads[name])


def report_load(result: Result, name: str, metrics: dict[str, float]) -> None:
    """Save the result, and print a line about its newest figures."""
    result.save()
    text = f"{metrics['rate_per_s']:.0f}/s, p50 {metrics['p50_ms']:.2f} ms"
    say(f"  {name:12} {text}, p99 {metrics['p99_ms']:.2f} ms")


def check_answers(
    embed: Callable[[Sequence[str]], Any], texts: Sequence[str], wanted: NDArray[np.float32]
) -> dict[str, float]:
    """Compare all answers with the reference, and random ones of many clients at once."""
    picked = random.Random(0)
    requests = [
        [picked.randrange(len(texts)) for _ in range(picked.randint(1, _MAX_CHECKED_ROWS))]
        for _ in range(_CHECKED_REQUESTS)
    ]
    with ThreadPoolExecutor(_CHECK_CLIENTS) as pool:
        answers = pool.map(lambda numbers: embed([texts[number] for number in numbers]), requests)
        found = np.concatenate([np.asarray(embed(texts)), *map(np.asarray, answers)])
    numbers = [*range(len(texts)), *(number for numbers in requests for number in numbers)]
    return compare(found, wanted[numbers])


def compare(found: Any, wanted: NDArray[np.float32]) -> dict[str, float]:
    """Return the number of rows, of wrong rows, and the largest difference of a number."""
    differences = np.abs(np.asarray(found, np.float32) - wanted).max(axis=1)
    wrong = ~(differences <= MAX_RIGHT_DIFFERENCE)  # NaN is wrong, too
    return {
        "rows": len(wanted),
        "wrong": int(wrong.sum()),
        "largest_difference": float(np.nan_to_num(differences, nan=np.inf).max()),
    }
