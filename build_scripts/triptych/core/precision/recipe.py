"""What a conversion to any precision is asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from triptych.base.errors import UserError
from triptych.spec.precisions import Precision


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


def check_kept(recipe: Recipe, known: Collection[str]) -> None:
    """Raise a UserError unless all that the recipe keeps is among the names in `known`."""
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
    """Check that a graph with these linear layers can be quantised as the recipe asks.

    Raises:
        UserError: there is no layer, no calibration row, or no such layer to keep.
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
