"""The GPU test run: what it says where there is no GPU, and in whole over the fakes of one."""

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
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
from benchmarks.gpu.report import ALL_MET, BAD, INCOMPLETE, GpuResults
from conftest import ROOT
from triptych.container.machine import find_gpus
from triptych.core.engine.runner import EngineError
from triptych.core.gate.runs import open_core
from triptych.repository.config import CONFIG_FILE, print_config, read_config
from triptych.serving.server import Server

pytestmark = pytest.mark.long  # all of it on fakes: loads, servers, every system
FAKES = ("tensorrt", "cuda")
NO_COMPILER = "it compiles for minutes"


def run_gpu_test(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "build_scripts/benchmarks/gpu"), *words]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.skipif(bool(find_gpus()), reason="there is a GPU here")
def test_without_a_gpu_the_check_says_so_for_each_part_and_exits_with_3() -> None:
    done = run_gpu_test("--check")
    assert done.returncode == INCOMPLETE, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line)
    assert lines["GPU"] == "none"
    assert "no NVIDIA driver" in lines["engines"]
    assert "no NVIDIA driver" in lines["served"]
    assert lines["graphs"].startswith("would run")


def test_a_mistake_in_the_options_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--rounds", "0"],
        ["--minutes", "0"],
        ["--output", "x.txt"],
        ["--models", "gpt"],
    ):
        with pytest.raises(SystemExit) as ended:
            run.parse_options(words)
        assert ended.value.code == 2
        assert "error:" in capsys.readouterr().err


def test_without_its_packages_it_says_what_to_install_and_exits_with_3() -> None:
    command = [sys.executable, "-S", str(ROOT / "build_scripts/benchmarks/gpu"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == INCOMPLETE
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def make_options(**changes: Any) -> Namespace:
    return change(run.parse_options([]), **changes)


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
    return replace(machine, lacks={**machine.lacks, **dict.fromkeys(parts, "not this time")})


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
    """A run in whole, and what it wrote."""

    trt: Any
    options: Namespace
    machine: Machine
    found: GpuResults
    ledger: Ledger
    code: int
    page: str
    report: dict[str, Any]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Done]:
    """All of it for a tiny model: PyTorch and ONNX Runtime on the CPU, the engines on the fakes."""
    base = tmp_path_factory.mktemp("gpu")
    options = make_options(
        models=[tiny_subject(tiny_model)],
        precisions=("fp16",),
        rounds=2,
        seconds=0.02,
        served_seconds=1.5,
        home=base / "home",
        batches=(1, 8),
        clients=(1, 4),
    )
    substitutes = Substitutes(device="cpu", provider="CPUExecutionProvider", fakes=FAKES)
    with pytest.MonkeyPatch.context() as patch:
        trt = engine_cases.machine(patch, base, "10")
        patch.setattr(served, "Server", serve_fakes(base))
        machine = read_machine(substitutes)
        machine = replace(machine, lacks={**machine.lacks, "torch.compile": NO_COMPILER})
        lines: list[str] = []
        ledger = Ledger(lines.append)
        output = base / "gpu.json"
        found = run.run(options, machine, substitutes, ledger, partial(write_to, output, ledger))
        yield Done(
            trt,
            options,
            machine,
            found,
            ledger,
            report.exit_code(found, ledger),
            output.with_suffix(".md").read_text(encoding="utf-8"),
            json.loads(output.read_text(encoding="utf-8")),
        )


def write_to(output: Path, ledger: Ledger, so_far: GpuResults) -> None:
    report.write(so_far, ledger, Namespace(output=output, title="Engines on a GPU"))


@pytest.mark.server
def test_engines_of_both_layouts_are_built_and_held_to_pytorch(done: Done) -> None:
    assert [one.plan.layout for one in done.found.built] == list(LAYOUTS)
    for built in done.found.built:
        assert built.engine is not None
        assert built.engine["precision"] == "fp16"
        assert built.parity is not None
        assert built.parity["rows"] > 20
        assert built.parity["failures"] == []


@pytest.mark.server
def test_every_system_is_timed_under_every_load_in_every_round(done: Done) -> None:
    names = list(dict.fromkeys(one.system for one in done.found.speeds))
    assert names == [
        "engine fp16 packed",
        "engine fp16 bucketed, CUDA graphs",
        "engine fp16 bucketed, no graphs",
        "torch eager fp32",
        "torch eager fp16",
        "onnxruntime-gpu fp16",
    ]
    for name in names:
        own = [one for one in done.found.speeds if one.system == name]
        assert {(one.batch_size, one.lengths) for one in own} == {
            (size, lengths) for size in (1, 8) for lengths in ("mixed", "equal")
        }
        assert {one.rounds for one in own} == {2}
        assert all(0 < one.p50_ms <= one.p99_ms for one in own)


@pytest.mark.server
def test_the_ensemble_is_served_and_loaded_in_both_layouts(done: Done) -> None:
    assert [one.layout for one in done.found.served] == list(LAYOUTS)
    for one in done.found.served:
        assert [loop.clients for loop in one.closed] == [1, 4]
        assert one.poisson.offered_per_s == pytest.approx(0.7 * one.top.rate_per_s)
        assert one.poisson.p99_ms > 0


@pytest.mark.server
def test_nothing_on_the_fakes_passes_and_every_page_says_that_they_are(done: Done) -> None:
    assert {target.status for target in done.found.targets} <= {"met", "missed"}
    assert done.code in (BAD, INCOMPLETE)
    assert done.report["measurements"]["fakes"] == list(FAKES)
    assert f"FAKE: {', '.join(FAKES)}" in done.page
    rows = [line for line in done.page.splitlines() if line.startswith("| ") and "---" not in line]
    assert sum("FAKE " in row for row in rows) > 20


@pytest.mark.server
def test_what_was_not_run_is_named_and_counted_and_nothing_failed(done: Done) -> None:
    assert done.ledger.failed == []
    assert [(one.what, one.reason) for one in done.ledger.not_run] == [
        (f"torch.compile ({PARTS['torch.compile']})", NO_COMPILER),
        ("tiny, onnxruntime-gpu fp32", "no bucketed fp32 graph was built"),
    ]
    assert "- 0 failed, 2 not run." in done.page


@pytest.mark.server
def test_a_pipeline_that_falls_back_to_the_other_layout_is_not_measured_twice(
    done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bucketed,) = [one for one in done.found.built if not one.plan.packed]
    monkeypatch.setattr(engines, "build_graph", lambda subject, *_, **__: bucketed)
    found, ledger = measure(change(done.options, build_only=True), done.machine)
    assert [one.what for one in ledger.failed] == ["tiny_fp16_packed"]
    assert found.built == [bucketed]


@pytest.mark.server
def test_building_alone_needs_no_gpu_and_judges_nothing(done: Done) -> None:
    machine = without(Machine({}, {}), *(part for part in PARTS if part != "graphs"))
    found, ledger = measure(change(done.options, reuse=True, build_only=True), machine)
    assert [one.engine for one in found.built] == [None, None]
    assert (found.speeds, found.targets) == ([], [])
    assert report.exit_code(found, ledger, judged=False) == ALL_MET
    assert report.exit_code(found, ledger) == INCOMPLETE


@pytest.mark.server
@pytest.mark.parametrize("kind", ["torch fp32", "torch fp16", "onnxruntime"])
def test_systems_compute_what_the_engine_does(kind: str, done: Done) -> None:
    built = next(one for one in done.found.built if not one.plan.packed)
    rows, (output,) = built.rows[:9], built.plan.core.outputs
    wanted = np.stack([row[output.name] for row in open_core(built.graph, built.plan)(rows)])
    if kind == "onnxruntime":
        provider = "CPUExecutionProvider"
        system = systems.open_onnxruntime(kind, built.graph, built.plan, provider=provider)
        (got,) = cast("list[Any]", system.prepare(rows)())
    else:
        precision: systems.TorchType = "fp32" if kind.endswith("fp32") else "fp16"
        system = systems.open_torch(
            kind, built.inputs, device="cpu", precision=precision, compiled=False
        )
        got = system.prepare(rows)()
    np.testing.assert_allclose(got, wanted, atol=2e-3)


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
def test_an_engine_that_computes_something_else_is_told_and_its_graph_still_measured(
    done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def negated(outputs: dict[str, Any]) -> dict[str, Any]:
        return {name: -values for name, values in outputs.items()}

    monkeypatch.setattr(done.trt._play, "miscompute", negated)
    found, ledger = measure(
        change(done.options, home=tmp_path, layouts=("bucketed",), rounds=1),
        without(done.machine, "served", "torch eager"),
        Substitutes(device="cpu", provider="CPUExecutionProvider", fakes=FAKES),
    )
    assert [one.what for one in ledger.failed] == ["engine of tiny_fp16_bucketed"]
    assert "differ from its graph" in ledger.failed[0].reason
    assert {one.system for one in found.speeds} == {"onnxruntime-gpu fp16"}
    assert report.exit_code(found, ledger) == BAD


@pytest.mark.server
@pytest.mark.parametrize(
    ("is_random", "graph_failures", "failed"),
    [(False, (), True), (True, (), True), (False, ("far off",), True), (True, ("far off",), False)],
)
def test_only_random_weights_whose_graph_is_off_too_may_fail_the_gate(
    is_random: bool,
    graph_failures: tuple[str, ...],
    failed: bool,
    done: Done,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check_parity(built: engines.BuiltPipeline) -> None:
        built.graph_failures = graph_failures
        built.parity = {"failures": ["mean_cosine is 0.1"], "verdicts": []}

    monkeypatch.setattr(engines, "check_parity", check_parity)
    monkeypatch.setattr(engines, "build_engine", lambda built, progress: None)
    monkeypatch.setattr(engine_speed, "measure", lambda *_, **__: [])
    models = [replace(done.options.models[0], is_random=is_random)]
    options = change(done.options, reuse=True, layouts=("packed",), models=models)
    others = [part for part in PARTS if part not in ("graphs", "engines")]
    _, ledger = measure(options, replace(done.machine, lacks=dict.fromkeys(others, "not now")))
    assert [one.what for one in ledger.failed] == ["parity of tiny_fp16_packed"] * failed
    skipped = [one.what for one in ledger.not_run]
    assert ("parity of tiny_fp16_packed" in skipped) is not failed


def test_a_machine_without_anything_names_every_part_and_all_targets_as_not_run(
    tmp_path: Path, tiny_model: Path
) -> None:
    options = make_options(models=[tiny_subject(tiny_model)], home=tmp_path)
    found, ledger = measure(options, without(Machine({"GPU": "none"}, {}), *PARTS))
    assert [one.what.split(" (")[0] for one in ledger.not_run] == [*PARTS, "tiny"]
    assert [target.status for target in found.targets] == ["not run"] * 3
    assert report.exit_code(found, ledger) == INCOMPLETE


def test_graphs_of_another_machine_are_used_only_if_they_are_there(
    tmp_path: Path, tiny_model: Path
) -> None:
    machine = without(Machine({}, {}), *(part for part in PARTS if part != "graphs"))
    models = [tiny_subject(tiny_model)]
    options = make_options(models=models, precisions=("fp16",), home=tmp_path, reuse=True)
    found, ledger = measure(options, machine)
    assert found.built == []
    missing = f"{tmp_path / 'repository'} has no tiny_fp16_packed"
    assert missing in [one.reason for one in ledger.not_run]
