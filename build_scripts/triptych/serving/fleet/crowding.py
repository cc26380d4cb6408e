"""Whether replicas have room beside each other, by what they were measured to use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress

import psutil

_MIB = 2**20


def find_crowding(servers: Iterable[int]) -> list[str]:
    """What to warn of, in sentences, now that the servers with these process ids are ready."""
    used = [_memory_mib(pid) for pid in servers]
    free_mib = psutil.virtual_memory().available / _MIB
    return list(crowding(used, free_mib, len(os.sched_getaffinity(0))))


def crowding(used_mib: list[float], free_mib: float, cores: int) -> Iterator[str]:
    """The same from numbers: MiB that each replica uses and that are left, cores to run on."""
    if max(used_mib) > free_mib:
        yield (
            f"a replica uses {max(used_mib):.0f} MiB and {free_mib:.0f} MiB are left: under load "
            "they may need more; fewer replicas leave room"
        )
    if len(used_mib) > cores:
        yield f"{len(used_mib)} replicas share {cores} cores, and take them from each other"


def _memory_mib(server: int) -> float:
    """Of a server and its steps; what they share counts once for all of them."""
    found = 0
    with suppress(psutil.Error):
        process = psutil.Process(server)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                found += member.memory_full_info().pss
    return found / _MIB
