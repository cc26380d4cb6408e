"""What a conversion is asked for and what it says it did, whatever the precision."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from typing import Literal

from triptych.errors import UserError

Precision = Literal["fp32", "fp16", "bf16", "int8", "int8_dynamic", "fp8"]
"""Of the core's weights and activations. ``int8``: activation ranges are fixed at build, by
calibration rows; ``int8_dynamic``: each token has a range of its own, found while serving."""


_REFUSED: dict[tuple[str, str], dict[str, str]] = {
    ("onnxruntime", "cpu"): {
        "bf16": "ONNX Runtime has no bf16 kernels for a CPU; int8 is the fast one there",
        "fp8": "no CPU computes in fp8, and ONNX Runtime takes it for int8; int8 is the fast one",
    },
    ("tensorrt", "gpu"): {
        "int8_dynamic": "TensorRT has ranges fixed when it builds; int8 finds them by calibration",
    },
    ("onnxruntime", "gpu"): {
        "fp8": "ONNX Runtime takes fp8 for int8 where it fuses; fp16 is the fast one there",
    },
}
"""Backend and device to the precisions that would not be served right there, and why."""


def check_runs(precision: str, backend: str, device: str) -> None:
    """The backend computes in `precision` on the device.

    Raises:
        UserError: it does not.
    """
    reason = _REFUSED.get((backend, device), {}).get(precision)
    if reason is not None:
        raise UserError(
            "core.precision",
            f"must be one that {backend} runs on a {device}",
            given=precision,
            remedy=reason[0].upper() + reason[1:],
        )


@dataclass(frozen=True)
class Recipe:
    """How to convert a graph.

    Attributes:
        precision: wanted.
        kept: layers that stay in higher precision, by the names `Conversion.layers` gives.
        backend: Triton's name of what will run the graph.
        device: where.
    """

    precision: Precision
    kept: tuple[str, ...] = ()
    backend: str = "onnxruntime"
    device: str = "cpu"


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        layers: what can be kept in higher precision, in the order of the graph.
        kept: those that are.
        reasons: kept layer to why, where the converter itself decided it.
        ranges: layer (or value) to the largest magnitude that calibration rows showed there.
        notes: what else a user should know, a sentence each.
    """

    layers: tuple[str, ...]
    kept: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """For the lock, the report and ``--json``."""
        return asdict(self)


def check_kept(recipe: Recipe, known: Collection[str]) -> None:
    """All that the recipe keeps is in the graph.

    Args:
        recipe: with the names.
        known: what can be kept, by name.

    Raises:
        UserError: something is not.
    """
    unknown = [name for name in recipe.kept if name not in known]
    if unknown:
        near = get_close_matches(unknown[0], known, n=3) or list(known)[:3]
        raise UserError(
            "core.precision",
            f"{recipe.precision} can only keep layers that the graph has",
            given=unknown[0],
            remedy=f"Name one of its layers, such as {', '.join(near)}" if near else "Keep none",
        )


def check_quantisable(recipe: Recipe, layers: Collection[str], feeds: Sequence[object]) -> None:
    """The graph can be quantised as the recipe asks.

    Args:
        recipe: of a precision that quantises linear layers.
        layers: names of those that the graph has.
        feeds: calibration rows.

    Raises:
        UserError: there is no layer, no row, or a layer to keep that does not exist.
    """
    if not layers:
        raise UserError(
            "core.precision",
            "must suit the model",
            given=f"{recipe.precision} for a graph without linear layers of a size worth it",
            remedy="Take fp16 or fp32",
        )
    if not feeds:
        raise UserError(
            "traffic.jsonl",
            f"must have rows to calibrate on for {recipe.precision}",
            given="no calibration rows beside those of the gate",
            remedy="Add real requests, or take fp16 or fp32",
        )
    check_kept(recipe, layers)
