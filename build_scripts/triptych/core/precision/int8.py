"""Convert an fp32 graph to int8, with parameters found on calibration rows.

Weights are symmetric, with one scale per output. A layer's input is smoothed (see `calibrate`) and
then quantized: with one scale from calibration (``int8``), or with one scale that the graph
computes for each vector (``int8_dynamic``). In both cases a row's result does not depend on other
rows in the batch, as it would with a scale computed for each batch.
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
    """Write ``target/model.onnx`` in int8, except `Recipe.kept`.

    It has the inputs and outputs of `source`. `feeds` contain one calibration row each, without
    padding.

    Raises:
        UserError: See `check_quantizable`.
    """
    graph, conversion = Quantizer(read_model(source), recipe, feeds).converted(recipe.kept)
    write_model(graph, target)
    return conversion


class Quantizer:
    """Calibrated graph that can be written with any selection of excluded layers.

    The search for layers to exclude writes many versions; the calibration is shared by all of them.
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
        """Return the quantized graph as an `onnx.ModelProto`, and the record of the conversion.

        The groups in `kept` stay fp32; for TensorRT they become fp16, like all else.
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
            excluded_layers=tuple(name for name in self.layers if name in kept),
            ranges=self._ranges,
            notes=tuple(notes),
            fp32_products=fp32_products,
        )

    def _graph(self, kept: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
        """Return the graph, and `Conversion.fp32_products` for TensorRT."""
        chosen = [one for one in self._quantized if one.group.name not in kept]
        # ONNX Runtime's x86 kernels need unsigned inputs; TensorRT needs signed inputs around 0.
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
    # The bias adds back what the shift removed, computed with the rounded weights.
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
