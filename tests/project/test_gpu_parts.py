"""The parts of the GPU test without a GPU: what is run, kept and skipped, tables and targets."""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import peers, report, run, systems
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import (
    DONE,
    FAILED,
    INTERRUPTED,
    Part,
    Result,
    compare,
    list_parts,
    read_result,
)
from benchmarks.gpu.report import ALL_MET, BAD, INCOMPLETE, NOT_RUN

MACHINE = Machine({"device": "H"}, {"vLLM": "it is not installed"})


def options_of(home: Path, *words: str) -> Namespace:
    return run.parse_options(["--home", str(home), *words])


def run_parts(
    parts: list[Part], options: Namespace, monkeypatch: pytest.MonkeyPatch, on: str = "H"
) -> dict[str, tuple[str, str]]:
    """Run parts in this process; return the status and the reason of each."""

    def run_part(part: Part, machine: str, limit_s: float) -> tuple[str, str]:
        run.run_here(part, Namespace(**{**vars(options), "run_on": machine}))
        return INTERRUPTED, f"ended after {limit_s:.0f} s"

    monkeypatch.setattr(run, "run_apart", run_part)
    machine, saved = Machine({"device": on}, MACHINE.missing), list[list[str]]()
    found = run.run(
        parts, machine, options, lambda so_far: saved.append([one.part for one in so_far])
    )
    every = [one.part for one in found]
    assert all(parts == every[: len(parts)] for parts in saved)
    return {one.part: (one.status, one.reason) for one in found}


def test_parts_are_run_once_skipped_with_a_reason_and_go_on_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def part(name: str, *needs: str, after: tuple[str, ...] = (), **more: Any) -> Part:
        def measure(result: Result) -> None:
            order.append(name)
            for load in ("1", "8"):
                if load not in result.data:
                    result.data[load] = len(order)
                    result.save()
                    if name == "process killed" and len(order) < 6:
                        raise SystemExit  # as a signal ends it
            if name == "process broken":
                raise RuntimeError("out\nof memory")

        return Part(name, needs, measure, after, **more)

    parts = [
        part("build a", anywhere=True),
        part("peer b", "vLLM"),
        part("process broken"),
        part("served c", after=("process broken",)),
        part("process killed"),
    ]

    def run_all(*words: str, on: str = "H") -> dict[str, tuple[str, str]]:
        with pytest.MonkeyPatch.context() as patch:
            try:
                return run_parts(parts, options_of(tmp_path, *words), patch, on)
            except SystemExit:
                return {}

    skipped = {
        "peer b": (NOT_RUN, "vLLM: it is not installed"),
        "served c": (NOT_RUN, "needs the part `process`, which has no result"),
    }
    failed = {"process broken": (FAILED, "RuntimeError: out of memory")}
    assert run_all("--skip", "killed") == {
        "build a": (DONE, ""), **skipped, **failed, "process killed": (NOT_RUN, "of --skip")
    }  # fmt: skip
    assert order == ["build a", "process broken"]
    assert run_all() == {}  # what is done is not run again, what failed is
    assert order[2:] == ["process broken", "process killed"]
    kept = read_result(tmp_path, parts[-1], "H")
    assert (kept.status, kept.data) == (INTERRUPTED, {"1": 4})
    assert run_all("--minutes", "0.1")["process killed"] == (
        NOT_RUN, "less than 20 s left of --minutes"
    )  # fmt: skip
    assert run_all("--only", "build", "b")["process killed"] == (NOT_RUN, "not of --only")
    order.clear()
    order += [""] * 6
    assert run_all("--skip", "broken")["process killed"] == (DONE, "")
    # The figure from before stays, the other one is new.
    assert read_result(tmp_path, parts[-1], "H").data == {"1": 4, "8": 7}
    order.clear()
    parts.append(part("served d", after=("build a",)))
    assert run_all("--only", "served")["served d"] == (DONE, "")
    assert order == ["served d"]
    assert run_all("--again", "build", "--skip", "process")["served d"] == (DONE, "")
    assert order == ["served d", "build a", "served d"]
    assert run_all("--again", "build", "--skip", "p", "served")["served d"] == (
        NOT_RUN,
        "of --skip",
    )
    assert not read_result(tmp_path, parts[-1], "H").data
    del parts[-1]
    order.clear()
    order += [""] * 6
    run_all("--skip", "broken", on="another GPU")
    assert order[6:] == ["process killed"]


def test_a_part_that_lasts_too_long_is_ended_with_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, started = tmp_path / "python", tmp_path / "started"
    program.write_text(f"#!/bin/sh\nsleep 500 & echo $! > {started}\n: $5 && wait\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    part = Part("build a", (), lambda result: None)
    status, reason = run.run_apart(part, "H", 2.0)
    assert (status, reason.partition(";")[0]) == (INTERRUPTED, "ended after 2 s")
    pid = int(started.read_text())
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _is_running(pid):
        time.sleep(0.05)
    assert not _is_running(pid)
    program.write_text("#!/bin/sh\nexit 9\n")
    assert run.run_apart(part, "H", 20.0) == (FAILED, "its process ended with status 9")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(") ", 1)[1][0] != "Z"


def test_all_backends_and_systems_have_parts_and_a_cpu_has_no_tensorrt(tmp_path: Path) -> None:
    kinds = [part.kind for part in list_parts(options_of(tmp_path))]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    assert counts == {
        "reference": 1, "build": 8, "engine": 4, "served": 8, "process": 14, "peer": 2,
        "kernels": 1,
    }  # fmt: skip
    trial = list_parts(options_of(tmp_path, "--device", "cpu"))
    assert not [part.name for part in trial if "tensorrt" in part.name or part.kind == "engine"]
    names = [part.name for part in list_parts(options_of(tmp_path))]
    assert len(set(names)) == len(names)


def test_batches_are_timed_in_whole_passes_and_at_least_some_calls() -> None:
    clock = count(0.0, 0.25)
    done: list[str] = []
    calls: list[Callable[[], object]] = [lambda: done.append("a"), lambda: done.append("b")]
    found = systems.time_calls(calls, 1, 2.6, lambda: next(clock))
    assert found == {"rate_per_s": 4.0, "p50_ms": 250.0, "p99_ms": 250.0}
    assert done.count("a") == done.count("b") == 8  # twice before
    assert systems.make_batches(3, 2)[:2] == [[0, 1], [2, 0]]


def test_a_wrong_row_is_one_that_differs_or_has_no_number() -> None:
    wanted = np.zeros((4, 2), np.float32)
    found = wanted.copy()
    found[1, 1], found[2, 0], found[3, 1] = 0.019, np.nan, -0.021
    assert compare(found, wanted) == {"rows": 4, "wrong": 2, "largest_difference": np.inf}
    assert compare(found[:2], wanted[:2])["wrong"] == 0


FP16, FP32, ENGINE = (
    "m_onnxruntime_fp16_packed",
    "m_onnxruntime_fp32_packed",
    "m_tensorrt_fp16_packed",
)


def metrics(rate: float, p50: float = 1.0, p99: float = 2.0) -> dict[str, float]:
    return {"rate_per_s": rate, "p50_ms": p50, "p99_ms": p99}


def outcomes(
    *,
    served: float = 800.0,
    tail: float = 3.0,
    answered: float = 1.0,
    difference: float = 1e-5,
    single: float = 400.0,
    wrong: int = 0,
) -> list[Result]:
    """Results of a run that meets all targets; each argument can miss one."""
    check = {"rows": 9, "wrong": wrong, "largest_difference": difference}
    loads = {"1 x 1": metrics(70.0), "16 x 32": metrics(served)}
    loads["Poisson"] = metrics(answered * 490.0, p99=tail)
    variants = {"as generated": {"check": check, "loads": loads, "offered_per_s": 490.0}}
    parts: dict[str, Any] = {
        f"served {FP16}": {**variants, "h200x16": {"check": check, "loads": {}}},
        f"process {FP16}": {"check": check, "loads": {"32": metrics(1000.0)}},
        f"process {FP32}": {"check": check, "loads": {"32": metrics(1.0)}},
        f"process {ENGINE}": {"check": check, "loads": {"1": metrics(single)}},
        "process m_torch_eager_fp32": {"check": check, "loads": {"1": metrics(100.0)}},
    }
    return [Result(Path("x.json"), name, "H", DONE, "", data) for name, data in parts.items()]


def test_targets_are_judged_by_their_figures() -> None:
    changes: list[tuple[dict[str, float], int]] = [
        ({"difference": 1.1e-5}, 0), ({"served": 799.0}, 1), ({"tail": 3.1}, 2),
        ({"answered": 0.9}, 2), ({"single": 399.0}, 3),
    ]  # fmt: skip
    assert [target.status for target in report.judge(outcomes())] == ["met"] * 4
    for change, place in changes:
        statuses = ["met"] * 4
        statuses[place] = "missed"
        found = report.judge(outcomes(**change))  # type: ignore[arg-type]
        assert [target.status for target in found] == statuses, change
    assert {target.status for target in report.judge([])} == {"not run"}


def test_the_exit_code_is_0_only_where_all_ran_and_was_met() -> None:
    skipped = [Result(Path("x"), "served a", "H", NOT_RUN, "no backend")] * 2
    broken = Result(Path("x"), "build a", "", FAILED, "out of memory")
    for found, is_trial, code in (
        (outcomes(), False, ALL_MET),
        (outcomes(), True, INCOMPLETE),
        ([*outcomes(), *skipped], False, INCOMPLETE),
        ([*outcomes(), replace(skipped[0], part="peer a")], False, ALL_MET),
        (outcomes()[1:], False, INCOMPLETE),
        ([*outcomes(), broken], False, BAD),
        ([*outcomes(), broken], True, BAD),
        (outcomes(wrong=1), False, BAD),
        (outcomes(served=1.0), False, BAD),
        (outcomes(served=1.0), True, INCOMPLETE),
    ):
        assert report.exit_code(found, is_trial=is_trial) == code, (found, is_trial)
    notes = report.make_notes([*outcomes(), *skipped, broken], MACHINE)
    assert "skipped: 2 served parts: no backend" in notes
    assert "failed: build a: out of memory" in notes
    assert notes[-1] == "8 parts: 5 done, 1 failed, 0 not finished, 2 skipped."
    text = "\n".join(map(str, report.make_tables(outcomes(wrong=2))))
    assert "| 800 (1.00, 2.00) |" in text
    assert "| 0.80 |" in text
    assert "1.0e-05; WRONG: 2 of 9 rows" in text


SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/embeddings" and "float16" in sys.argv, (self.path, sys.argv)
        rows = [{{"embedding": [len(text), 0.0, 2.0 * len(text)]}} for text in body["input"]]
        self.answer({{"data": rows}})

    def answer(self, value):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_another_server_is_started_asked_in_lists_and_stopped(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o755)
    name, texts = "infinity-emb", ["a" * length for length in range(1, 71)]
    assert peers.find_python(name, {name: program}) == program
    with peers.run_peer(name, program, tmp_path, "cuda", "fp16") as (url, endpoint):
        found = peers.embed(url, endpoint, texts)
    wanted = np.array([[1.0, 0.0, 2.0]] * 70) / np.sqrt(5)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    with pytest.raises(ConnectionRefusedError):
        peers.embed(url, endpoint, texts)
