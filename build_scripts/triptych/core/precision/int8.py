"""fp32 graph -> int8 graph: what every linear layer becomes, found on calibration rows.

Weights are symmetric, with a scale for each output. A layer's input is smoothed (`smoothing`), then
quantized on one scale that calibration rows gave (``int8``), or that each vector brings itself
(``int8_dynamic``): either way a row's result does not depend on what shares its batch, which a
scale found for a batch would break.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from triptych.base.onnx_graph import initializers, read_model, value_of, write_model
from triptych.core.precision.calibrate import (
    Activations,
    Feed,
    capture,
    find_smoothing,
    model_ranges,
    quantized,
    round_together,
    scale_of,
)
from triptych.core.precision.float16 import halve_quantized
from triptych.core.precision.linear import LinearGroup, Recipe, check_quantizable, find_groups
from triptych.core.precision.quantized_graph import QuantizedGroup, QuantizedLayer, rewrite
from triptych.repository.records import Conversion


def convert(source: Path, target: Path, recipe: Recipe, feeds: Sequence[Feed]) -> Conversion:
    """Write ``target/model.onnx``, quantized but for `Recipe.kept`, inputs and outputs as before.

    `feeds` are one calibration row each, without padding.

    Raises:
        UserError: as `check_quantizable`.
    """
    graph, conversion = Quantizer(read_model(source), recipe, feeds).converted(recipe.kept)
    write_model(graph, target)
    return conversion


class Quantizer:
    """One graph with all that calibration found: written with any choice of layers to keep.

    Finding which layers to keep writes many versions; what was measured serves all of them.
    """

    def __init__(self, model: Any, recipe: Recipe, feeds: Sequence[Feed]) -> None:
        self._model = model
        self._feeds = feeds
        self._value_ranges: dict[str, float] | None = None
        self._for_tensorrt = recipe.backend == "tensorrt"
        groups = find_groups(model.graph)
        self.layers = tuple(group.name for group in groups)
        check_quantizable(recipe, self.layers, feeds)
        seen = capture(model, [group.input for group in groups], feeds)
        self._ranges = {group.name: seen[group.input].largest for group in groups}
        dynamic = "dynamic" in recipe.precision
        self._quantized = [
            _quantize(model, group, seen[group.input], dynamic=dynamic) for group in groups
        ]

    def converted(self, kept: Sequence[str]) -> tuple[Any, Conversion]:
        """The graph as an `onnx.ModelProto`, the groups in `kept` not quantized.

        They stay fp32; for TensorRT they become fp16, as all else does.
        """
        graph, fp32_products = self._graph(kept)
        notes = []
        for name, one in zip(self.layers, self._quantized, strict=True):
            found = one.smoothing
            if name not in kept:
                notes.append(
                    f"{name}: smoothed by range^{found.power}, range: {found.method}, "
                    f"error of the layer {found.error:.1e}"
                )
        return graph, Conversion(
            layers=self.layers,
            kept=tuple(name for name in self.layers if name in kept),
            ranges=self._ranges,
            notes=tuple(notes),
            fp32_products=fp32_products,
        )

    def _graph(self, kept: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
        """The graph, and what `Conversion.fp32_products` is for TensorRT."""
        chosen = [one for one in self._quantized if one.group.name not in kept]
        # ONNX Runtime's kernels on x86 want unsigned inputs, TensorRT signed ones around 0.
        written = rewrite(self._model, chosen, signed=self._for_tensorrt)
        if not self._for_tensorrt:
            return written, ()
        if self._value_ranges is None:
            self._value_ranges = model_ranges(self._model, self._feeds)
        return halve_quantized(written, self._value_ranges)


def _quantize(
    model: Any, group: LinearGroup, seen: Activations, *, dynamic: bool
) -> QuantizedGroup:
    tensors = initializers(model.graph)
    stored = [value_of(tensors[layer.weight]) for layer in group.layers]
    weights = [
        weight.T if layer.transposed else weight
        for layer, weight in zip(group.layers, stored, strict=True)
    ]
    together = np.concatenate(weights, axis=1)
    smoothing = find_smoothing(seen, together, dynamic=dynamic)
    scaled = together * smoothing.scale[:, None]
    offset = smoothing.shift / smoothing.scale
    inputs = quantized((seen.vectors - smoothing.shift) / smoothing.scale, smoothing.range)
    rounded, scale = round_together(scaled, inputs + offset), scale_of(scaled)
    # What the shift took off, with the weights as they are now: only the rounding of x is left.
    bias = offset @ (rounded * scale)
    ends = np.cumsum([weight.shape[1] for weight in weights])[:-1]
    parts = zip(
        np.split(rounded, ends, axis=1), np.split(scale, ends), np.split(bias, ends), strict=True
    )
    layers = []
    for layer, (part, steps, added) in zip(group.layers, parts, strict=True):
        own = value_of(tensors[layer.bias]) if layer.bias else np.float32(0)
        layers.append(QuantizedLayer(layer, part, steps, (added + own).astype(np.float32)))
    return QuantizedGroup(group, smoothing, tuple(layers))
