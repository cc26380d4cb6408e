"""Instruction sets of this machine's processor, on which speed and rounding of a CPU core depend.

The kernel lists them in ``/proc/cpuinfo``. node-feature-discovery names them alike in the labels
of Kubernetes nodes, in upper case and without underscores for those of AMX and AVX-512.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

LABELS: Mapping[str, str] = {
    "avx2": "AVX2",
    "avx_vnni": "AVXVNNI",
    "avx512f": "AVX512F",
    "avx512_vnni": "AVX512VNNI",
    "avx512_bf16": "AVX512BF16",
    "amx_int8": "AMXINT8",
    "amx_bf16": "AMXBF16",
}
"""Instruction sets that matrix kernels choose between, slowest first: the flag of the kernel, and
the name in the label of a node."""


_OF_PRECISION: Mapping[str, tuple[str, ...]] = {
    "bf16": ("avx512_bf16", "amx_bf16"),
    "int8": ("avx_vnni", "avx512_vnni", "amx_int8"),
    "int8_dynamic": ("avx_vnni", "avx512_vnni", "amx_int8"),
}

FP32_LIMIT = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}
"""Variable of a server in which OpenVINO computes fp32 graphs in fp32, because its kernels then use
no instructions for bf16. Triton's OpenVINO backend has no parameter for fp32, and the default of
OpenVINO on a processor with bf16 is bf16."""


def sets_for(precision: str, sets: Iterable[str]) -> tuple[str, ...]:
    """Return those of `sets` that make a precision faster than fp32."""
    return tuple(name for name in sets if name in _OF_PRECISION.get(precision, ()))


def node_label(instruction_set: str) -> str:
    """Return the label of Kubernetes nodes with an instruction set."""
    return f"feature.node.kubernetes.io/cpu-cpuid.{LABELS[instruction_set]}"


def find_instruction_sets(cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """Return the known instruction sets of this processor, in the order of `LABELS`."""
    flags = set(_field(cpuinfo, "flags").split())
    return tuple(name for name in LABELS if name in flags)


def find_processor(cpuinfo: Path = CPUINFO) -> str:
    """Return the processor's name, on ARM its numbers of maker and part; empty if unknown."""
    part = [_field(cpuinfo, name) for name in ("CPU implementer", "CPU part")]
    return _field(cpuinfo, "model name") or " ".join(filter(None, part))


def _field(cpuinfo: Path, name: str) -> str:
    """Return a field of the first processor; empty if there is none."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")
