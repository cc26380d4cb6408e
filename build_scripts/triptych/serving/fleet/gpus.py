"""Which GPU each replica has, and how many replicas that makes."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.base.errors import UserError


def count_replicas(replicas: int | None, gpus: Sequence[str]) -> int:
    """How many replicas are asked for.

    Raises:
        UserError: less than one, a GPU twice, or another number of replicas than of GPUs.
    """
    count = len(gpus) or 1 if replicas is None else replicas
    if count < 1:
        raise UserError("--replicas", "must be at least 1", given=replicas)
    if "" in gpus or len(set(gpus)) < len(gpus):
        raise UserError(
            "--gpus",
            "must name each GPU once: numbers, or UUIDs as nvidia-smi -L tells them",
            given=",".join(gpus),
            remedy="Write for example --gpus 0,1",
        )
    if gpus and count != len(gpus):
        raise UserError(
            "--replicas",
            "must be as many as GPUs: each replica has one",
            given=f"{count} with --gpus {','.join(gpus)}",
            remedy="Leave --replicas out",
        )
    return count


def check_gpus(gpus: Sequence[str], there: int) -> None:
    """Raises a `UserError` where a number names none of the GPUs that this machine has."""
    for gpu in gpus:
        if there == 0 or (gpu.isdecimal() and int(gpu) >= there):
            raise UserError(
                "--gpus",
                "must name GPUs of this machine",
                given=f"{gpu}, and there are {there or 'none'}",
                remedy="`nvidia-smi -L` lists them" if there else "Leave --gpus out",
            )


def variables_of(gpus: Sequence[str], number: int) -> dict[str, str]:
    """What shows a server its own GPU alone; nothing where none were named."""
    return {"CUDA_VISIBLE_DEVICES": gpus[number]} if gpus else {}
