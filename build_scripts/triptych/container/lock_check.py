"""Startup check: files must be as they were built, and engines must run on this machine.

Usage: ``python3 -m triptych.container.lock_check [REPOSITORY]``. One line
for each problem, on standard error. Exit codes: 0 all can be served (there may be warnings), 1 at
least one cannot, 2 there is no repository or a setting is wrong.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from triptych.base.errors import UserError, print_line
from triptych.container.machine import Machine, VisibleGpu, read_machine, version_numbers
from triptych.container.manifests import (
    IS_BYTE_CODE,
    EngineTarget,
    ManifestError,
    ServedPipeline,
    StartupManifest,
    check_readable,
    find_pipelines,
    find_wrong_files,
    read_manifests,
    remove_byte_code,
)
from triptych.container.processor import find_instruction_sets
from triptych.container.settings import Settings, read_settings
from triptych.runtime.in_flight import FORMAT

EXIT_REFUSED = 1
EXIT_MISTAKE = 2
_AMPERE = (8, 0)
# A version-compatible plan runs on later releases of its major version, and on these two.
_NEXT_MAJOR = {8: 10, 10: 11}
_MARKS = ("in_flight.py", "flow_control.py")
_FORMAT = re.compile(r"^FORMAT = (\d+)$", re.MULTILINE)
_CHECKS = 10
"""Maximum number of checks while steps of a server that starts at the same time write byte code."""


class ManifestProblem(NamedTuple):
    """Problem of one pipeline with its remedy; an error if the pipeline cannot be served."""

    pipeline: str
    severity: Literal["error", "warning"]
    line: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.pipeline}: {self.line}"


def check_repository(
    repository: Path, machine: Machine | None, *, hashes: bool = True
) -> list[ManifestProblem]:
    """Return the problems of the pipelines, at most one for each.

    Args:
        repository: Folder of the models.
        machine: Machine to compare with; None for this one, whose server compares the engines.
        hashes: Whether files are hashed, which takes about a second per GiB of the largest.

    Raises:
        UserError: The repository does not exist.
    """
    if not repository.is_dir():
        raise UserError(
            "TRIPTYCH_REPOSITORY",
            "must be a folder with models",
            given=repository,
            remedy="Mount the model repository there",
        )
    problems: list[ManifestProblem] = []
    manifests: dict[ServedPipeline, StartupManifest] = {}
    for pipeline in find_pipelines(repository):
        try:
            manifest = pipeline.read_manifest()
        except ManifestError as error:
            line = f"its build manifest cannot be used ({error}): {_remedy(pipeline)}"
            problems.append(ManifestProblem(pipeline.name, "error", line))
            continue
        if manifest is None:
            line = "has no build manifest: nothing could be checked"
            problems.append(ManifestProblem(pipeline.name, "warning", line))
        else:
            manifests[pipeline] = manifest
    for pipeline, wrong in find_wrong_files(repository, manifests, hashes=hashes).items():
        found = _check(pipeline, manifests[pipeline], machine, wrong)
        problems += [*_unlike_pair(pipeline.name, manifests), *found][:1]
    return sorted(problems, key=lambda problem: problem.pipeline)


def has_version_compatible_plans(repository: Path) -> bool:
    """Whether an engine contains a TensorRT runtime, which Triton loads only with a flag."""
    engines = (manifest.engine for manifest in read_manifests(repository).values())
    return any(engine is not None and engine.version_compatible for engine in engines)


def enforce(settings: Settings, machine: Machine | None) -> bool:
    """Remove byte code, print the problems and return whether the server may start.

    Raises:
        UserError: The repository does not exist, or this user cannot read its files.
    """
    remove_byte_code(settings.repository)
    check_readable(settings.repository)
    if settings.lock_check == "off":
        return True
    for _ in range(_CHECKS):
        problems = check_repository(settings.repository, machine, hashes=settings.lock_hashes)
        is_found = any(IS_BYTE_CODE in problem.line for problem in problems)
        if not is_found or remove_byte_code(settings.repository):
            break
    problems += _cut_off(settings.repository)
    for problem in problems:
        print_line(str(problem))
    refused = any(problem.severity == "error" for problem in problems)
    return settings.lock_check == "warn" or not refused


def _check(
    pipeline: ServedPipeline,
    manifest: StartupManifest,
    machine: Machine | None,
    wrong: Mapping[str, str],
) -> Iterator[ManifestProblem]:
    """Yield problems, worst first; only the first one is reported."""
    if machine is not None and manifest.needs_engine:
        for line in _errors(pipeline, manifest, machine):
            yield ManifestProblem(pipeline.name, "error", line)
    faults = {path: fault for path, fault in wrong.items() if fault}
    if faults:
        path, fault = next(iter(faults.items()))
        others = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        remedy = "remove it" if fault == IS_BYTE_CODE else _remedy(pipeline)
        if path == pipeline.plan_file:
            remedy = f"{_rebuild(pipeline)}, or copy it again"
        yield ManifestProblem(pipeline.name, "error", f"{path} {fault}{others}: {remedy}")
    sets = find_instruction_sets() if machine is None else machine.instruction_sets
    warnings = [*_slower_here(manifest, sets)]
    if machine is not None and manifest.needs_engine:
        warnings += _unlike_the_engine(manifest, machine)
    for line in warnings:
        yield ManifestProblem(pipeline.name, "warning", line)


def _unlike_pair(
    name: str, manifests: Mapping[ServedPipeline, StartupManifest]
) -> Iterator[ManifestProblem]:
    """Yield a problem if a pipeline and its pair have vectors of different spaces."""
    by_name = {pipeline.name: manifest for pipeline, manifest in manifests.items()}
    own = by_name[name]
    other = by_name.get(own.pair_with)
    if other is not None and other.space != own.space:
        line = (
            f"its vectors cannot be compared with those of {own.pair_with}: they are of "
            f"{own.space}, those of {other.space or 'a pipeline without a pair'}; run "
            f"`triptych build {name} {own.pair_with}`"
        )
        yield ManifestProblem(name, "error", line)


def _cut_off(repository: Path) -> Iterator[ManifestProblem]:
    """Yield pipelines of an earlier release whose requests in flight a stop would not await."""
    for pipeline in find_pipelines(repository):
        files = [repository / step / "1" / name for step in pipeline.steps for name in _MARKS]
        texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
        if any(int(version) != FORMAT for text in texts for version in _FORMAT.findall(text)):
            line = "its steps are of an earlier release, and a stop would cut its requests off: "
            line += f"run `triptych build {pipeline.name}`"
            yield ManifestProblem(pipeline.name, "error", line)


def _remedy(pipeline: ServedPipeline) -> str:
    return f"build it again with `triptych build {pipeline.name}`, or copy it again"


def _rebuild(pipeline: ServedPipeline) -> str:
    return f"rebuild it with `triptych engine {pipeline.name}` in this image"


def _errors(pipeline: ServedPipeline, manifest: StartupManifest, machine: Machine) -> Iterator[str]:
    """Yield the reasons why the engine cannot run here."""
    rebuild = _rebuild(pipeline)
    engine = manifest.engine
    if engine is None:
        yield f"the engine has not been built: {rebuild.replace('rebuild', 'build')}"
        return
    if engine.onnx_sha256 != manifest.files.get(pipeline.graph_file):
        yield f"the engine was built from another graph than the repository holds: {rebuild}"
    if not machine.gpus:
        yield "the engine needs a GPU, here is none: start the container with `--gpus all`"
        return
    gpus = range(len(machine.gpus)) if manifest.gpus is None else manifest.gpus
    if max(gpus) >= len(machine.gpus):
        yield (
            f"its core runs on GPU {max(gpus)}, here are {len(machine.gpus)}: change "
            "`serving.gpus`, or show the container more GPUs"
        )
        return
    unfit = [gpu for gpu in (machine.gpus[i] for i in gpus) if not _fits_gpu(engine, gpu)]
    if unfit or not _fits_tensorrt(engine, machine.tensorrt):
        gpu = unfit[0] if unfit else machine.gpus[gpus[0]]
        built_on = VisibleGpu(engine.gpu, engine.compute_capability)
        yield (
            f"the engine was built for TensorRT {engine.tensorrt} on {built_on}, here are "
            f"TensorRT {machine.tensorrt or '(unknown)'} and {gpu}: {rebuild}"
        )
    if engine.plan_sha256 != manifest.files.get(pipeline.plan_file):
        yield f"{pipeline.plan_file} is not the engine that the build manifest describes: {rebuild}"


def _slower_here(manifest: StartupManifest, sets: Collection[str]) -> Iterator[str]:
    missing = [name for name in manifest.instruction_sets if name not in sets]
    if missing:
        cost = ""
        if manifest.slowdown is not None:
            cost = f", up to {manifest.slowdown:.1f} times, what it gained over fp32"
        yield (
            f"its precision was measured with {', '.join(manifest.instruction_sets)}, and this "
            f"processor lacks {', '.join(missing)}: it is slower here{cost}"
        )


def _unlike_the_engine(manifest: StartupManifest, machine: Machine) -> Iterator[str]:
    if machine.tensorrt is None:
        yield "no TensorRT was found here: its version could not be compared with the engine's"
    built = _major(manifest.engine.driver if manifest.engine else "")
    here = _major(machine.driver or "")
    if built and here and here < built:
        yield (
            f"the engine was built with NVIDIA driver {built}, here is the older {here}: "
            "update the driver if it does not load"
        )


def _fits_tensorrt(engine: EngineTarget, here: str | None) -> bool:
    if here is None:
        return True  # reported as a warning
    built, found = version_numbers(engine.tensorrt), version_numbers(here)
    shared = min(len(built), len(found))
    if built[:shared] == found[:shared]:
        return True
    if not engine.version_compatible or found < built:
        return False
    return found[0] in (built[0], _NEXT_MAJOR.get(built[0]))


def _fits_gpu(engine: EngineTarget, gpu: VisibleGpu) -> bool:
    if engine.hardware == "ampere_plus":
        return gpu.compute_capability >= _AMPERE
    if engine.hardware == "same_compute_capability":
        return gpu.compute_capability == engine.compute_capability
    return (gpu.name, gpu.compute_capability) == (engine.gpu, engine.compute_capability)


def _major(version: str) -> int:
    return next(iter(version_numbers(version)), 0)


def main(arguments: list[str]) -> int:
    """Check one repository and return the exit code."""
    try:
        settings = read_settings(repository=arguments[0] if arguments else None)
        return 0 if enforce(settings, read_machine()) else EXIT_REFUSED
    except UserError as error:
        print_line(f"error: {error.message}")
        return EXIT_MISTAKE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
