"""Checks against what was built and measured of the pipeline that the manifests serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from triptych.building.generation.lock import built_spec
from triptych.deploy.checks.composed import KIND
from triptych.deploy.checks.objects import Server, mapping, sequence
from triptych.deploy.checks.pods import bytes_of
from triptych.deploy.devices import PRODUCT
from triptych.deploy.generation import generation_shm_mib, gpus_of
from triptych.deploy.measured import memory_seen_mib
from triptych.deploy.sizing import shm_mib
from triptych.repository.lint.flaw import Flaw, error
from triptych.repository.lock import read_lock
from triptych.repository.records import EngineRecord

_MIB = 2**20


@dataclass(frozen=True)
class Known:
    """Of a pipeline.

    Attributes:
        engine: of TensorRT; None where it has none.
        gpus: that a copy of its model is on; 0 where any number will do.
        memory_mib: most that `bench` saw; None where it saw none of this build.
        shm_mib: shared memory that its steps may need.
    """

    name: str
    engine: EngineRecord | None
    gpus: int
    memory_mib: float | None
    shm_mib: int


def known_of(repository: Path, pipeline: str, reports: Path) -> Known:
    """What there is to compare with.

    Raises:
        UserError: the pipeline was not built, or its bench cannot be read.
    """
    spec = built_spec(repository, pipeline)
    if spec is not None:
        shared_mib = generation_shm_mib(repository, spec)
        return Known(pipeline, None, gpus_of(spec), None, shared_mib)
    lock = read_lock(repository, pipeline)
    memory_mib = memory_seen_mib(lock, reports)
    return Known(pipeline, lock.engine, 0, memory_mib, shm_mib(lock, repository))


def memory_measured(server: Server, known: Known | None) -> Iterator[Flaw]:
    if known is None or known.memory_mib is None:
        return
    limits = mapping(mapping(server.container.get("resources")).get("limits"))
    given_mib = bytes_of(limits.get("memory")) / _MIB
    if 0 < given_mib < known.memory_mib:
        yield error(
            "The limit of memory must not be below what the server was measured to use",
            f"{limits['memory']}; it used {known.memory_mib:.0f} MiB, and shared memory counts",
            f"Give {known.memory_mib + known.shm_mib:.0f}Mi or more",
        )


def shared_memory_measured(server: Server, known: Known | None) -> Iterator[Flaw]:
    if known is None:
        return
    mounts = {
        mapping(mount).get("name")
        for mount in sequence(server.container.get("volumeMounts"))
        if mapping(mount).get("mountPath") == "/dev/shm"
    }
    for volume in sequence(server.pod.get("volumes")):
        size = mapping(mapping(volume).get("emptyDir")).get("sizeLimit")
        given_mib = bytes_of(size) / _MIB
        if mapping(volume).get("name") in mounts and 0 < given_mib < known.shm_mib:
            yield error(
                "Shared memory must hold what the steps of the pipeline need",
                f"sizeLimit: {size}; its instances and largest request take {known.shm_mib} MiB",
                f"Give {known.shm_mib}Mi, and as much more memory",
            )


def engine_gpu(server: Server, known: Known | None) -> Iterator[Flaw]:
    if known is None or server.owner.kind == KIND:
        return
    if known.gpus:
        yield from _parts(server, known)
    engine = known.engine
    if engine is None:
        return
    own = engine.gpu.replace(" ", "-")
    node = mapping(server.pod.get("nodeSelector")).get(PRODUCT)
    if engine.hardware == "none" and node != own:
        yield error(
            "Nodes must have the GPU that the engine was built for: no other loads it",
            f"{PRODUCT}: {node or 'not selected'}; the engine is of {own}",
            f"Select {own}, or run `triptych engine {known.name}` on the other one",
        )


def _parts(server: Server, known: Known) -> Iterator[Flaw]:
    limits = mapping(mapping(server.container.get("resources")).get("limits"))
    given = {name: count for name, count in limits.items() if name.startswith("nvidia.com/")}
    if [str(count) for count in given.values()] != [str(known.gpus)]:
        shown = ", ".join(f"{name}: {count}" for name, count in given.items())
        yield error(
            "A pod must have a GPU for each part of the model",
            f"{shown or 'no nvidia.com/gpu'}; it has {known.gpus} (tensor_parallel x "
            "pipeline_parallel)",
            f"Limit nvidia.com/gpu to {known.gpus}, or build {known.name} with as many parts",
        )
