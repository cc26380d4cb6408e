"""Results of the GPU test as tables, targets, notes and an exit code."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.gpu.machine import CUDA, Machine
from benchmarks.gpu.parts import DONE, FAILED, INTERRUPTED, Result
from benchmarks.harness import tabulate, write_result
from benchmarks.results import Table

ALL_MET, BAD, INCOMPLETE = 0, 1, 3
"""Exit codes; 2 is an invalid option."""
NOT_RUN = "not run"
MAX_FP32_DIFFERENCE = 1e-5
MIN_SERVED_RATIO = 0.8
MIN_SPEEDUP = 4.0
MAX_TAIL_RATIO = 3.0
MIN_ANSWERED_RATIO = 0.93
"""Minimum ratio of answered to offered requests for a valid Poisson load."""
BATCH = "32"
"""Rows in a batch in process with which the served rate is compared."""


@dataclass(frozen=True)
class Row:
    """Figures of a system: a row of a table.

    Attributes:
        system: Name of the pipeline or of the other system.
        setting: Plan of a served pipeline, or precision of another server.
        loads: Metrics by the name of the load.
    """

    system: str
    setting: str
    check: Mapping[str, float]
    loads: Mapping[str, Mapping[str, float]]
    offered_per_s: float = 0.0

    def rate(self, load: str) -> float:
        """Return the texts per second of a load; 0 without it."""
        return self.loads.get(load, {}).get("rate_per_s", 0.0)

    @property
    def best_per_s(self) -> float:
        """Texts per second of the closed loop with the highest rate."""
        return max((self.rate(load) for load in self.loads if load != "Poisson"), default=0.0)

    @property
    def difference(self) -> str:
        """Largest difference of a number to PyTorch in fp32, and the wrong rows."""
        if not self.check:
            return "-"
        wrong = f"; WRONG: {self.check['wrong']:.0f} of {self.check['rows']:.0f} rows"
        return f"{self.check['largest_difference']:.1e}" + wrong * bool(self.check["wrong"])


@dataclass(frozen=True)
class Target:
    """A target; the figures are the reason where it was not run."""

    text: str
    status: Literal["met", "missed", "not run"]
    figures: str


def rows_of(outcomes: Sequence[Result], kind: str) -> Iterator[Row]:
    """Yield the rows of the parts of a kind that have figures."""
    for one in outcomes:
        own, _, system = one.part.partition(" ")
        every = {"": one.data} if kind == "process" else one.data
        for setting, found in every.items():
            if own == kind and "loads" in found:
                offered = found.get("offered_per_s", 0.0)
                yield Row(system, setting, found.get("check", {}), found["loads"], offered)


def judge(outcomes: Sequence[Result]) -> list[Target]:
    """Return the targets with the figures that decide them.

    Of the fp16 pipelines and their plans, the one with the highest rate counts.
    """
    process = {row.system: row for row in rows_of(outcomes, "process")}
    served = [*rows_of(outcomes, "served")]
    fp16 = [row for row in served if "_fp16_" in row.system and row.best_per_s]
    best = max(fp16, key=lambda row: row.best_per_s, default=None)
    text = f"served at least {MIN_SERVED_RATIO:g} of the same core in process"
    tail = f"p99 at 70 % load at most {MAX_TAIL_RATIO:g} times the single latency"
    targets = [*_judge_fp32(served, process)]
    if best is None or not (alone := process.get(best.system)) or not alone.rate(BATCH):
        targets.append(Target(text, "not run", "no fp16 pipeline was served and timed in process"))
    else:
        ratio = best.best_per_s / alone.rate(BATCH)
        figures = f"{ratio:.2f}: {best.best_per_s:.0f} and {alone.rate(BATCH):.0f} ({best.system})"
        targets.append(_decide(text, ratio >= MIN_SERVED_RATIO, figures))
    single = {} if best is None else best.loads.get("1 x 1", {})
    if best is None or not single or "Poisson" not in best.loads:
        targets.append(Target(tail, "not run", "no fp16 pipeline was served with these loads"))
    else:
        ratio = best.loads["Poisson"]["p99_ms"] / single["p50_ms"]
        is_valid = best.rate("Poisson") >= MIN_ANSWERED_RATIO * best.offered_per_s
        figures = f"{ratio:.1f} times at {best.offered_per_s:.0f}/s ({best.system})"
        figures += "" if is_valid else f"; only {best.rate('Poisson'):.0f}/s were answered"
        targets.append(_decide(tail, is_valid and ratio <= MAX_TAIL_RATIO, figures))
    return [*targets, _judge_engine(process)]


def _judge_fp32(served: Sequence[Row], process: Mapping[str, Row]) -> Iterator[Target]:
    text = f"fp32 differs from fp32 on the CPU by at most {MAX_FP32_DIFFERENCE:g}"
    found = [row for row in [*served, *process.values()] if "_fp32_" in row.system and row.check]
    if not found:
        yield Target(text, "not run", "no fp32 pipeline was measured")
        return
    worst = max(found, key=lambda row: row.check["largest_difference"])
    largest = worst.check["largest_difference"]
    yield _decide(text, largest <= MAX_FP32_DIFFERENCE, f"{largest:.1e} ({worst.system})")


def _judge_engine(process: Mapping[str, Row]) -> Target:
    text = f"fp16 engine at least {MIN_SPEEDUP:g} times PyTorch eager fp32, one row at a time"
    engines = [row.rate("1") for name, row in process.items() if "_tensorrt_fp16_" in name]
    eager = [row.rate("1") for name, row in process.items() if name.endswith("torch_eager_fp32")]
    if not any(engines) or not any(eager):
        return Target(text, "not run", "both were not measured")
    ratio = max(engines) / max(eager)
    figures = f"{ratio:.1f} times: {max(engines):.0f} and {max(eager):.0f} rows/s"
    return _decide(text, ratio >= MIN_SPEEDUP, figures)


def _decide(text: str, is_met: bool, figures: str) -> Target:
    return Target(text, "met" if is_met else "missed", figures)


def count_wrong(outcomes: Sequence[Result]) -> int:
    """Return the number of wrong rows in all answers."""
    kinds = ("served", "peer", "process")
    return sum(int(r.check.get("wrong", 0)) for kind in kinds for r in rows_of(outcomes, kind))


def exit_code(outcomes: Sequence[Result], *, is_trial: bool) -> int:
    """Return 0 if everything ran on a GPU, every answer is right and every target is met.

    Other servers need not be installed.
    """
    statuses = {
        one.status
        for one in outcomes
        if not (one.part.startswith("peer ") and one.status == NOT_RUN)
    }
    targets = {target.status for target in judge(outcomes)}
    if FAILED in statuses or count_wrong(outcomes) or ("missed" in targets and not is_trial):
        return BAD
    return INCOMPLETE if is_trial or statuses != {DONE} or targets != {"met"} else ALL_MET


def make_notes(outcomes: Sequence[Result], machine: Machine) -> list[str]:
    """Return the facts about the machine, and how many parts ran, failed and were skipped."""
    notes = [f"{name}: {text}" for name, text in machine.found.items() if text]
    notes += [f"failed: {one.part}: {one.reason}" for one in outcomes if one.status == FAILED]
    notes += [f"not finished: {o.part}: {o.reason}" for o in outcomes if o.status == INTERRUPTED]
    skipped = Counter(
        (one.part.partition(" ")[0], one.reason) for one in outcomes if one.status == NOT_RUN
    )
    notes += [
        f"skipped: {count} {kind} {'part' if count == 1 else 'parts'}: {reason}"
        for (kind, reason), count in skipped.items()
    ]
    counts = Counter(one.status for one in outcomes)
    names = {DONE: "done", FAILED: "failed", INTERRUPTED: "not finished", NOT_RUN: "skipped"}
    texts = [f"{counts[status]} {name}" for status, name in names.items()]
    return [*notes, f"{len(outcomes)} parts: {', '.join(texts)}."]


def make_tables(outcomes: Sequence[Result]) -> list[Table]:
    """Return the tables that have rows: targets, served, in process, builds."""
    process = {row.system: row for row in rows_of(outcomes, "process")}
    served = [*rows_of(outcomes, "served"), *rows_of(outcomes, "peer")]

    def ratio(row: Row) -> str:
        alone = process[row.system].rate(BATCH) if row.system in process else 0.0
        return f"{row.best_per_s / alone:.2f}" if alone else "-"

    builds = [one for one in outcomes if one.part.startswith("build ") and "gate" in one.data]
    targets = judge(outcomes) if process or served else []
    tables = [
        tabulate("Targets", targets, {
            "target": lambda one: one.text,
            "status": lambda one: one.status,
            "figures": lambda one: one.figures,
        }),
        tabulate("Served by tritonserver and others, texts/s (p50, p99 in ms) by clients x rows",
            served, {
            "system": lambda one: one.system,
            "setting": lambda one: one.setting,
            **_columns(served),
            "largest difference": lambda one: one.difference,
            f"best / in process ({BATCH} rows)": ratio,
        }),
        tabulate("In process, texts/s (p50, p99 in ms) by rows in a batch", process.values(), {
            "system": lambda one: one.system,
            **_columns([*process.values()]),
            "largest difference": lambda one: one.difference,
        }),
        tabulate("Builds", builds, {
            "pipeline": lambda one: one.part.partition(" ")[2],
            "gate (CPU)": lambda one: "; ".join(one.data["gate"]) or "passed",
        }),
    ]  # fmt: skip
    return [table for table in tables if table.rows]


def _columns(rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    """Return a column for each load of the rows."""

    def cell(load: str) -> Callable[[Row], str]:
        def text(row: Row) -> str:
            found = row.loads.get(load)
            if found is None:
                return "-"
            return f"{found['rate_per_s']:.0f} ({found['p50_ms']:.2f}, {found['p99_ms']:.2f})"

        return text

    return {load: cell(load) for row in rows for load in row.loads}


def write(
    options: argparse.Namespace, outcomes: Sequence[Result], machine: Machine
) -> dict[str, Any]:
    """Write the JSON result and the page beside it; return the result of `write_result`."""
    notes = make_notes(outcomes, machine)
    if options.device != CUDA:
        notes.insert(0, "A trial on a CPU: no figure here describes a GPU.")
    data = [{**asdict(one), "file": one.file.name} for one in outcomes]
    return write_result(options, make_tables(outcomes), data, notes)
