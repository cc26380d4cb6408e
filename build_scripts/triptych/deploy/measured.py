"""What one replica was measured to hold and to use: of `bench`, or given by hand."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from triptych.base.errors import UserError
from triptych.base.explained import Because
from triptych.deploy.options import Options
from triptych.repository.lock import Lock
from triptych.serving.bench.points import BenchResult, Measurement, Resources, read_result

MEMORY_MARGIN = 1.25
"""Over the most that was seen: a longer run and other requests need more than a bench does."""


@dataclass(frozen=True)
class Measured:
    """Figures of one replica.

    Attributes:
        capacity_per_s: requests a second that keep the promise.
        cpu_cores: that it keeps busy at that rate.
        memory_mib: most that it held.
        load_s: from start to ready; None where nobody knows.
        gpu_memory_mib: most in use on its GPU; None where there is none.
    """

    capacity_per_s: Because
    cpu_cores: Because
    memory_mib: Because
    load_s: float | None
    gpu_memory_mib: float | None


def measured_of(lock: Lock, options: Options, reports: Path) -> Measured:
    """The figures of the lock's pipeline.

    Args:
        lock: of the build that is deployed.
        options: those given by hand win.
        reports: the pipeline's folder of reports.

    Raises:
        UserError: something is neither measured nor given, is of another build or promise, or says
            that the promise cannot be kept.
    """
    bench = _read_bench(lock, options, reports / "bench/bench.json")
    if bench is not None:
        _check_promise(bench, options.capacity_per_s)
    return _with_use(lock, options, bench, _capacity(lock, options, bench, reports))


def memory_seen_mib(lock: Lock, reports: Path) -> float | None:
    """Most MiB that `bench` saw a server of this very build hold; None where it saw none.

    Raises:
        UserError: its result cannot be read.
    """
    file = reports / "bench/bench.json"
    bench = read_result(BenchResult, file, "bench") if file.is_file() else None
    if bench is None or _fault(lock, bench) is not None:
        return None
    return _most_memory_mib(bench) or None


def _capacity(lock: Lock, options: Options, bench: BenchResult | None, reports: Path) -> Because:
    if options.capacity_per_s is not None:
        return Because(options.capacity_per_s, "given by hand (--capacity)")
    if bench is None or bench.rate is None:
        raise UserError(
            "--capacity",
            "must be given where the rate that one replica holds is not measured",
            given="no search for it in the last bench"
            if bench
            else f"no {reports}/bench/bench.json",
            remedy=f"Run `triptych bench {lock.spec.name} --find-rate`, or give --capacity",
        )
    rate = bench.rate
    broken = rate.lowest_broken_per_s
    more = "" if broken is None else f", {broken:.4g}/s broke it"
    held = f"measured: {rate.highest_per_s:.4g}/s held {bench.slo}{more} ({_where(bench)})"
    return Because(rate.highest_per_s, held)


def _with_use(
    lock: Lock, options: Options, bench: BenchResult | None, capacity: Because
) -> Measured:
    used = None if bench is None else _use_at(bench, capacity.value)
    missing = [
        option
        for option, given in (("--cpu", options.cpu_cores), ("--memory", options.memory_mib))
        if given is None and (used is None or not used.processes)
    ]
    if missing:
        raise UserError(
            " and ".join(missing),
            "must be given where nothing of it was measured",
            given="a bench of a server elsewhere" if bench else "no bench of this build",
            remedy=f"Run `triptych bench {lock.spec.name} --find-rate` without --url",
        )
    cores = sum(one.cpu_cores for one in used.processes) if used else 0.0
    memory = _most_memory_mib(bench)
    if options.memory_mib is not None and options.memory_mib < memory:
        raise UserError(
            "--memory",
            "must not be below what the server was measured to use",
            given=f"{options.memory_mib}Mi, and it used {memory:.0f} MiB",
            remedy="Give more, or build a smaller core (core.precision)",
        )
    where = "" if bench is None else f" ({_where(bench)})"
    seen = used.cores if used else 0
    gpus = [gpu.memory_mib for gpu in used.gpus] if used else []
    return Measured(
        capacity_per_s=capacity,
        cpu_cores=Because(options.cpu_cores, "given by hand (--cpu)")
        if options.cpu_cores is not None
        else Because(
            cores,
            f"measured: {cores:.2f} of {seen} cores busy, at the rate nearest to capacity{where}",
        ),
        memory_mib=Because(options.memory_mib, "given by hand (--memory)")
        if options.memory_mib is not None
        else Because(
            memory * MEMORY_MARGIN,
            f"measured: {memory:.0f} MiB at most{where}, times {MEMORY_MARGIN:g} for what a bench "
            "does not meet",
        ),
        load_s=None if bench is None else bench.load_s,
        gpu_memory_mib=max(gpus, default=None),
    )


def _read_bench(lock: Lock, options: Options, file: Path) -> BenchResult | None:
    """The last bench of this very build, under this very promise; None where there is no file."""
    by_hand = (options.capacity_per_s, options.cpu_cores, options.memory_mib)
    if not file.is_file():
        return None
    bench = read_result(BenchResult, file, "bench")
    again = f"Run `triptych bench {lock.spec.name} --find-rate` again"
    given = _fault(lock, bench)
    if given is None:
        return bench
    if None not in by_hand:
        return None
    raise UserError(str(file), "must be of this build and its promise", given=given, remedy=again)


def _fault(lock: Lock, bench: BenchResult) -> str | None:
    """Why a result says nothing of the build; None where it does."""
    subject = bench.subject
    own = (lock.spec.name, lock.gate.precision, lock.plan.layout)
    measured = (subject.pipeline, subject.precision, subject.layout)
    if measured != own:
        return f"a measurement of {', '.join(measured)}; built is {', '.join(own)}"
    if _time(subject.measured_at) < _time(lock.built_at):
        return f"measured at {subject.measured_at}, built at {lock.built_at}"
    if bench.slo.limits_us != lock.spec.serving.slo.limits_us:
        return f"measured for {bench.slo}; promised is {lock.spec.serving.slo}"
    return None


def _check_promise(bench: BenchResult, capacity: float | None) -> None:
    """Raises a `UserError` where what was measured says that the promise cannot be kept."""
    name = bench.subject.pipeline
    rate = bench.rate
    alone = [p for p in bench.points if p.load.kind == "concurrency" and p.load.value == 1]
    if any(point.rounds and bench.slo.strain(point.latencies_us) > 1 for point in alone):
        raise UserError(
            "serving.slo",
            "must be a promise that one request alone keeps",
            given=f"{bench.slo}; one client alone was measured at {alone[0].typical}",
            remedy=f"Promise less, or make it faster: `triptych tune {name}`",
        )
    if rate is None:
        return
    if rate.highest_per_s <= 0:
        raise UserError(
            "serving.slo",
            "must be a promise that holds at some rate",
            given=f"{bench.slo}; the lowest rate that broke it: {rate.lowest_broken_per_s:.4g}/s",
            remedy=f"Promise less, or make it faster: `triptych tune {name}`",
        )
    broken = rate.lowest_broken_per_s
    if capacity is not None and broken is not None and capacity >= broken:
        raise UserError(
            "--capacity",
            "must be below the rate that was measured to break the promise",
            given=f"{capacity:g}/s; {broken:.4g}/s broke {bench.slo}",
            remedy=f"Leave it out: {rate.highest_per_s:.4g}/s held",
        )


def _use_at(bench: BenchResult, rate_per_s: float) -> Resources | None:
    """What was taken in the round whose throughput is nearest to a rate, of those watched."""
    watched = [one for one in _rounds(bench) if one.resources is not None]
    nearest = min(watched, key=lambda one: abs(one.throughput_per_s - rate_per_s), default=None)
    return None if nearest is None else nearest.resources


def _most_memory_mib(bench: BenchResult | None) -> float:
    rounds = [] if bench is None else _rounds(bench)
    uses = [one.resources for one in rounds if one.resources is not None]
    return max((sum(p.memory_mib for p in use.processes) for use in uses), default=0.0)


def _rounds(bench: BenchResult) -> list[Measurement]:
    points = (*bench.points, *(bench.rate.points if bench.rate else ()))
    return [one for point in points for one in point.rounds]


def _where(bench: BenchResult) -> str:
    machine = bench.subject.machine
    kind = f"{machine.get('cores', '?')} cores of {machine.get('processor', 'a machine')}"
    return f"bench of {bench.subject.measured_at} on {kind}, server {bench.subject.server}"


def _time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)
