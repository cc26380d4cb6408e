"""The GPU test run: what it says where there is no GPU, and in whole over the fakes of one."""

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

import engine_cases
import served_engines
from benchmarks.gpu import engine_speed, engines, report, run, served, systems
from benchmarks.gpu.ledger import Ledger
from benchmarks.gpu.machine import PARTS, Machine, Substitutes, read_machine
from benchmarks.gpu.pipelines import LAYOUTS, GpuModel
from benchmarks.gpu.report import BAD, INCOMPLETE, GpuResults
from conftest import ROOT
from triptych.container.machine import find_gpus
from triptych.core.engine.runner import EngineError
from triptych.core.gate.runs import open_core
from triptych.repository.config import CONFIG_FILE, print_config, read_config
from triptych.serving.server import Server

pytestmark = pytest.mark.long  # all of it on fakes: loads, servers, every system
FAKES = ("tensorrt", "cuda")
NOT_NOW = "not this time"


@pytest.mark.skipif(bool(find_gpus()), reason="there is a GPU here")
def test_without_a_gpu_or_its_packages_it_says_so_and_exits_with_3() -> None:
    def run_check(*options: str) -> subprocess.CompletedProcess[str]:
        script = str(ROOT / "build_scripts/benchmarks/gpu")
        command = [sys.executable, *options, script, "--check"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    done = run_check()
    assert done.returncode == INCOMPLETE, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line)
    assert lines["GPU"] == "none"
    for part in ("engines", "served"):
        assert "no NVIDIA driver" in lines[part]
    assert lines["graphs"].startswith("would run")
    done = run_check("-S")
    assert done.returncode == INCOMPLETE
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def change(options: Namespace, **changes: Any) -> Namespace:
    return Namespace(**{**vars(options), **changes})


def measure(
    options: Namespace, machine: Machine, substitutes: Substitutes | None = None
) -> tuple[GpuResults, Ledger]:
    """Return the results of a run and its ledger."""
    ledger = Ledger(lambda line: None)
    replaced = substitutes or Substitutes()
    return run.run(options, machine, replaced, ledger, lambda so_far: None), ledger


def without(machine: Machine, *parts: str) -> Machine:
    """Return a machine that lacks parts of the test, too."""
    return replace(machine, lacks={**machine.lacks, **dict.fromkeys(parts, NOT_NOW)})


def tiny_subject(model: Path) -> GpuModel:
    return GpuModel("tiny", "tiny, RANDOM weights", True, lambda folder: str(model), 60)


def serve_fakes(base: Path) -> Any:
    """Return a substitute for `Server` that serves a copy whose engines run on the fakes."""
    backends = served_engines.write_fakes(base / "backends")

    def serve(repository: Path, *, models: list[str]) -> AbstractContextManager[Server]:
        copy = base / "served" / models[0]
        shutil.copytree(repository, copy)
        core = copy / f"{models[0]}_core" / CONFIG_FILE
        config = read_config(core)
        for group in config.instance_group:  # Triton gives KIND_GPU only where it sees a GPU
            group.kind = group.KIND_MODEL
            del group.gpus[:]
        core.write_text(print_config(config), encoding="utf-8")
        return Server(copy, models=models, backend_directory=backends)

    return serve


class Done(NamedTuple):
    """A run in whole."""

    options: Namespace
    machine: Machine
    found: GpuResults
    ledger: Ledger
    output: Path


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Done]:
    """All of it for a tiny model: PyTorch and ONNX Runtime on the CPU, the engines on the fakes."""
    base = tmp_path_factory.mktemp("gpu")
    short: dict[str, Any] = {"rounds": 2, "seconds": 0.02, "served_seconds": 1.0}
    few: dict[str, Any] = {"precisions": ("fp16",), "batches": (1, 8), "clients": (1, 4)}
    models = [tiny_subject(tiny_model)]
    options = change(run.parse_options([]), models=models, home=base / "home", **short, **few)
    substitutes = Substitutes(device="cpu", provider="CPUExecutionProvider", fakes=FAKES)
    with pytest.MonkeyPatch.context() as patch:
        engine_cases.machine(patch, base, "10")
        patch.setattr(served, "Server", serve_fakes(base))
        machine = without(read_machine(substitutes), "torch.compile")
        ledger = Ledger(lambda line: None)
        output = base / "gpu.json"

        def write(so_far: GpuResults) -> None:
            report.write(so_far, ledger, Namespace(output=output, title="Engines on a GPU"))

        found = run.run(options, machine, substitutes, ledger, write)
        yield Done(options, machine, found, ledger, output)


@pytest.mark.server
def test_every_system_is_built_compared_timed_and_served_and_every_page_names_the_fakes(
    done: Done,
) -> None:
    found, ledger = done.found, done.ledger
    assert [one.plan.layout for one in found.built] == list(LAYOUTS)
    for built in found.built:
        assert built.engine is not None
        assert built.parity is not None
        assert (built.engine["precision"], built.parity["failures"]) == ("fp16", [])
        assert built.parity["rows"] > 20
    bucketed = ("engine fp16 bucketed, CUDA graphs", "engine fp16 bucketed, no graphs")
    others = ("torch eager fp32", "torch eager fp16", "onnxruntime-gpu fp16")
    measured = dict.fromkeys(one.system for one in found.speeds)
    assert [*measured] == ["engine fp16 packed", *bucketed, *others]
    loads = {(one.system, one.batch_size, one.lengths) for one in found.speeds}
    assert len(loads) == len(found.speeds) == 6 * 2 * 2
    assert {one.rounds for one in found.speeds} == {2}
    assert all(0 < one.p50_ms <= one.p99_ms for one in found.speeds)
    assert [one.layout for one in found.served] == list(LAYOUTS)
    for one in found.served:
        assert [loop.clients for loop in one.closed] == [1, 4]
        assert one.poisson.offered_per_s == pytest.approx(0.7 * one.top.rate_per_s)
        assert one.poisson.p99_ms > 0
    assert ledger.failed == []
    assert [(one.what, one.reason) for one in ledger.not_run] == [
        (f"torch.compile ({PARTS['torch.compile']})", NOT_NOW),
        ("tiny, onnxruntime-gpu fp32", "no bucketed fp32 graph was built"),
    ]
    assert {target.status for target in found.targets} <= {"met", "missed"}
    assert report.exit_code(found, ledger) in (BAD, INCOMPLETE)
    written = json.loads(done.output.read_text(encoding="utf-8"))["measurements"]
    assert written["fakes"] == list(FAKES)
    page = done.output.with_suffix(".md").read_text(encoding="utf-8")
    assert f"FAKE: {', '.join(FAKES)}" in page
    assert "- 0 failed, 2 not run." in page
    rows = [line for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    assert sum("FAKE " in row for row in rows) > 20


@pytest.mark.server
def test_systems_compute_what_the_engine_does(done: Done) -> None:
    built = next(one for one in done.found.built if not one.plan.packed)
    rows, (output,) = built.rows[:9], built.plan.core.outputs
    wanted = np.stack([row[output.name] for row in open_core(built.graph, built.plan)(rows)])
    provider = "CPUExecutionProvider"
    onnxruntime = systems.open_onnxruntime("o", built.graph, built.plan, provider=provider)
    (got,) = cast("list[Any]", onnxruntime.prepare(rows)())
    np.testing.assert_allclose(got, wanted, atol=2e-3)
    precisions: tuple[systems.TorchType, ...] = "fp32", "fp16"
    for precision in precisions:
        torch = systems.open_torch(
            "t", built.inputs, device="cpu", precision=precision, compiled=False
        )
        np.testing.assert_allclose(cast("Any", torch.prepare(rows)()), wanted, atol=2e-3)


@pytest.mark.server
@pytest.mark.parametrize("step", ["check_parity", "open_runner"])
def test_an_engine_that_fails_is_told_and_the_others_are_still_timed(
    step: str, done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise EngineError("no memory\nleft")

    monkeypatch.setattr(engines, step, refuse)
    found, ledger = measure(
        change(done.options, reuse=True, layouts=("packed",), rounds=1),
        without(done.machine, "served", "onnxruntime-gpu"),
        Substitutes(device="cpu", fakes=FAKES),
    )
    assert [one.reason for one in ledger.failed]
    assert all("no memory left" in one.reason for one in ledger.failed)
    assert "torch eager fp32" in [one.system for one in found.speeds]
    assert report.exit_code(found, ledger) == BAD


@pytest.mark.server
def test_only_random_weights_whose_graph_is_off_too_may_fail_the_gate(
    done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "build_engine", lambda built, progress: None)
    monkeypatch.setattr(engine_speed, "measure", lambda *_, **__: [])
    others = [part for part in PARTS if part not in ("graphs", "engines")]
    parity = "parity of tiny_fp16_packed"
    for is_random, graph_failures in product((False, True), ((), ("far off",))):

        def check_parity(
            built: engines.BuiltPipeline, failures: tuple[str, ...] = graph_failures
        ) -> None:
            built.graph_failures = failures
            built.parity = {"failures": ["mean_cosine is 0.1"], "verdicts": []}

        monkeypatch.setattr(engines, "check_parity", check_parity)
        models = [replace(done.options.models[0], is_random=is_random)]
        options = change(done.options, reuse=True, layouts=("packed",), models=models)
        _, ledger = measure(options, replace(done.machine, lacks=dict.fromkeys(others, "not now")))
        may_fail = is_random and bool(graph_failures)
        failed, skipped = ([one.what for one in every] for every in (ledger.failed, ledger.not_run))
        assert failed == [parity] * (not may_fail), (is_random, graph_failures)
        assert (parity in skipped) is may_fail, (is_random, graph_failures)


def test_a_machine_without_anything_names_every_part_and_all_targets_as_not_run(
    tmp_path: Path, tiny_model: Path
) -> None:
    options = change(run.parse_options([]), models=[tiny_subject(tiny_model)], home=tmp_path)
    found, ledger = measure(options, without(Machine({"GPU": "none"}, {}), *PARTS))
    assert [one.what.split(" (")[0] for one in ledger.not_run] == [*PARTS, "tiny"]
    assert [target.status for target in found.targets] == ["not run"] * 3
    assert report.exit_code(found, ledger) == INCOMPLETE
