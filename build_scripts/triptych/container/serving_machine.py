"""The machine that serves: its GPU and cores, and the variant of the configs planned for it.

A build writes ``configs/NAME.pbtxt`` beside the ``config.pbtxt`` of a model whose config differs on
the machine NAME, such as ``l4x8`` (an L4 and 8 cores) or ``cpu16``. A server that is started with
``--model-config-name=NAME`` uses these files, and the ``config.pbtxt`` of all other models.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from triptych.base.errors import UserError
from triptych.container.machine import CUDA, find_gpus, load_cuda
from triptych.container.manifests import StartupManifest, find_pipelines, read_manifests

MAX_CORES = 9999


class GpuModel(NamedTuple):
    """Memory of a GPU in GiB, and its half-precision rate in encoders, in 10^12 operations/s."""

    memory_gib: float
    teraflops: float


GPUS = {
    "t4": GpuModel(14, 15),
    "l4": GpuModel(21, 30),
    "a10": GpuModel(21, 35),
    "l40s": GpuModel(44, 95),
    "a100": GpuModel(39, 100),
    "h100": GpuModel(78, 140),
    "h200": GpuModel(138, 141),
    "b200": GpuModel(176, 250),
}
"""GPUs by name, slowest first. The rate of the H200 was measured with MiniLM, that of the A100 is
the one of the cost model in `spec.engine_plan`. The others are assumed from their peaks."""
_GPU_NAME = re.compile(rf"\b({'|'.join(GPUS)}|a10g)\b", re.IGNORECASE)


class ServingMachine(NamedTuple):
    """GPU (its name in `GPUS`, or empty), processor cores, and memory of the GPU in GiB."""

    gpu: str
    cores: int
    memory_gib: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.gpu}x{self.cores}" if self.gpu else f"cpu{self.cores}"

    @property
    def order(self) -> tuple[float, int]:
        """Position in the order of machines: by GPU, then by cores."""
        return (GPUS[self.gpu].teraflops if self.gpu else 0.0, self.cores)

    def is_within(self, other: ServingMachine) -> bool:
        """Whether the other machine has at least the GPU, memory and cores of this one."""
        fits = self.order[0] <= other.order[0] and self.memory_gib <= other.memory_gib
        return fits and self.cores <= other.cores

    def shared_by(self, pipelines: int) -> ServingMachine:
        """Return the part of this machine that each of several pipelines has."""
        return self._replace(cores=max(1, self.cores // max(1, pipelines)))


def parse_machine(name: str, field: str = "serving.machine") -> ServingMachine:
    """Return the machine of a name.

    Args:
        name: Such as ``h200x16``, ``l4x8`` or ``cpu2``.
        field: Field or option with the name, for the error.

    Raises:
        UserError: There is no such machine.
    """
    found = re.fullmatch(r"(cpu|[a-z0-9]+x)([1-9]\d{0,3})", name)
    gpu = "" if found is None or found[1] == "cpu" else found[1][:-1]
    if found is None or (gpu and gpu not in GPUS):
        raise UserError(
            field,
            "must be the name of a machine: cpuCORES, or GPUxCORES",
            given=name,
            remedy=f"Write cpu8 or h200x16, for example. GPUs: {', '.join(GPUS)}",
        )
    return ServingMachine(gpu, int(found[2]), GPUS[gpu].memory_gib if gpu else 0.0)


def find_machine(most: int | None = None) -> ServingMachine:
    """Return this machine, with the cores that its control groups allow, and `most` at most."""
    gpus, cores = find_gpus(), find_cores()
    cores = min(cores, most or cores)
    return with_gpu(cores, gpus[0].name, find_gpu_memory_gib()) if gpus else with_gpu(cores)


def with_gpu(cores: int, name: str = "", memory_gib: float = 0.0) -> ServingMachine:
    """Return a machine with a GPU, by its name in the driver and its memory.

    A part of a GPU (MIG), and one that is not in `GPUS`, is as the fastest one that has no more
    memory, and no faster than an A100 if it is unknown.
    """
    known = _GPU_NAME.search(name)
    gpu = known[1].lower().removesuffix("g") if known else "a100"
    order = list(GPUS)
    fitting = [one for one in order[: order.index(gpu) + 1] if GPUS[one].memory_gib <= memory_gib]
    return ServingMachine(fitting[-1], cores, memory_gib) if fitting else ServingMachine("", cores)


def find_gpu_memory_gib() -> float:
    """Return the memory of the first GPU in GiB; 0 without one."""
    cuda, total = load_cuda(CUDA), ctypes.c_size_t()
    if cuda is None or cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0):
        return 0.0
    return total.value / 2**30


def find_cores(root: Path = Path("/"), affinity: int | None = None) -> int:
    """Return the whole cores that this process may use, by affinity and control groups.

    Args:
        root: Folder with ``proc`` and ``sys``.
        affinity: Number of cores that the scheduler gives this process; None to ask it.
    """
    most = float(affinity or len(os.sched_getaffinity(0)))
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        place = base / group.lstrip("/")
        # A container sees its own group as the root, or as the path that the host has.
        for folder in (place, *(up for up in place.parents if base in (up, *up.parents))):
            if controllers:
                numbers = [_text(folder / f"cpu.cfs_{which}_us") for which in ("quota", "period")]
            else:
                numbers = _text(folder / "cpu.max").split()
            if len(numbers) == 2 and all(text.strip().isdecimal() for text in numbers):
                most = min(most, int(numbers[0]) / max(1, int(numbers[1])))
    return max(1, int(most))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def choose(names: Iterable[str], machine: ServingMachine) -> str | None:
    """Return the name of the largest machine that is not larger than `machine`; None without."""
    fitting = [each for each in map(parse_machine, names) if each.is_within(machine)]
    return max(fitting, key=lambda each: each.order).name if fitting else None


class ChosenVariant(NamedTuple):
    """Name of the variant that a server uses, empty for ``config.pbtxt``; lines for its log."""

    name: str
    lines: tuple[str, ...] = ()


def choose_variant(
    repository: Path, found: ServingMachine, named: str = "", release: str = ""
) -> ChosenVariant:
    """Return the variant of the configs for the pipelines of a repository on a machine.

    Only files that a build manifest lists are used. Each pipeline has an equal part of the cores.

    Args:
        repository: Folder of the models.
        found: Machine that starts the server.
        named: Machine that the operator names; empty for `found`.
        release: Release whose configs the server reads by their name, or empty.

    Raises:
        UserError: `named` is no machine.
    """
    lines, machine = [], found
    if named:
        machine = parse_machine(named, "TRIPTYCH_MACHINE")
        if not machine.is_within(found):
            lines.append(f"warning: this machine, {found.name}, has less than {named}: it is used")
            machine = found
    pipelines = len(find_pipelines(repository))
    part = machine.shared_by(pipelines)
    manifests = read_manifests(repository).items()
    planned = [_plans_of(served.name, manifest, part) for served, manifest in manifests]
    for one in planned:
        if one.best and not parse_machine(one.best).is_within(part):
            line = f"its smallest plan, for {one.best}, is larger than {part.name}"
            lines.append(f"warning: {one.name}: {line}: the steps take turns on the cores")
    wanted = Counter(one.best for one in planned if one.best not in ("", one.base))
    if not wanted:
        return ChosenVariant("", tuple(lines))
    name = max(wanted, key=lambda each: (wanted[each], parse_machine(each).order))
    shared = f", shared by {pipelines} pipelines" if pipelines > 1 else ""
    nearest = "" if name == part.name else " (the nearest one)"
    lines.append(f"note: the plan for {name} is used on {machine.name}{shared}{nearest}")
    others = [one.name for one in planned if name not in {*one.names, one.base}]
    if others:
        lines.append(f"note: {', '.join(others)} has no plan for {name}, and uses config.pbtxt")
    # The server would use the ``config.pbtxt``, with fields that it lacks, of any other model.
    files = {path for one in planned for path in one.files}
    own = [path for path in files if release and path.endswith(f"/configs/{release}.pbtxt")]
    used = f"{name}-{release}" if own else name
    lacking = [path for path in own if path.replace(f"{release}.", f"{used}.") not in files]
    if lacking:
        line = f"note: {min(lacking)} has no counterpart {used}.pbtxt: config.pbtxt is used"
        return ChosenVariant("", (*lines[:-1], line))
    return ChosenVariant(used, tuple(lines))


class _Plans(NamedTuple):
    """Plans of a pipeline: machines with a variant, that of ``config.pbtxt``, and the best one."""

    name: str
    names: set[str]
    base: str
    best: str
    files: Iterable[str]


def _plans_of(name: str, manifest: StartupManifest, part: ServingMachine) -> _Plans:
    """Return the plans of a pipeline for a part of a machine."""
    names = variants_in(manifest.files)
    base = next(iter(variants_in([f"model/configs/{manifest.machine}.pbtxt"])), "")
    best = choose({*names, base} - {""}, part) or ""
    if base and not best:  # `config.pbtxt` is not for two cores
        best = min({*names, base}, key=lambda each: parse_machine(each).order)
    return _Plans(name, names, base, best, manifest.files)


def variants_in(files: Iterable[str]) -> set[str]:
    """Return the machines whose variants are among the files of a build."""
    pattern = rf"[^/]+/configs/((?:cpu|(?:{'|'.join(GPUS)})x)[1-9]\d{{0,3}})\.pbtxt"
    found = (re.fullmatch(pattern, path) for path in files)
    return {match[1] for match in found if match}
