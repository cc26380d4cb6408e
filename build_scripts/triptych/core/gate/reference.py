"""Reference outputs: the Hugging Face model in PyTorch, one row at a time, cached.

The module also measures PyTorch's rounding: the difference of fp32 from fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.cache import cached_stage, code_hash, versions_of
from triptych.base.errors import Progress
from triptych.base.tensors import TokenRow
from triptych.core.inputs import PipelineInputs
from triptych.core.requests import Expected, Sample, hash_rows, rows_of
from triptych.spec.model_info import Activation, Dense, ModelInfo, Normalize
from triptych.spec.model_source import CODE as MODEL_CODE
from triptych.spec.tasks.task import Core


def reference_outputs(
    folder: Path,
    info: ModelInfo,
    core: Core,
    samples: Sequence[Sample],
    *,
    double: bool = False,
) -> list[Expected]:
    """Return the core's expected outputs for each sample, in fp32, or in fp64 if `double`.

    Each row runs alone and unpadded, so masks, other rows and padding have no effect. Pooling,
    scores and pixel values are written here a second time, independent of the exported code that
    they check.

    Raises:
        UserError: transformers cannot load the model.
        ValueError: The core reads the mask token, and a sample has none or several.
    """
    import torch

    from triptych.core.export.to_onnx import load_model

    model = load_model(folder, core.auto_class)
    dense = _dense_layers(folder, info) if core.reads == "pooled" else {}
    dtype = torch.float64 if double else torch.float32
    for module in (model, *dense.values()) if double else ():
        module.double()
    expected = []
    with torch.inference_mode():
        for sample in samples:
            if isinstance(sample, TokenRow):
                output = model(**_token_inputs(sample))
            else:
                pixels = torch.from_numpy(pixel_values(sample, info))
                output = model(pixel_values=pixels[None].to(dtype))
            if core.returns == "spans":
                results = [output.start_logits[0], output.end_logits[0]]
            elif core.reads == "pooled":
                results = [_sentence(output.last_hidden_state[0], info, dense)]
            elif isinstance(sample, TokenRow) and core.reads == "mask":
                results = [output.logits[0, _mask_place(sample, info)]]
            else:
                results = [output.logits[0]]
            activation = _activation(info, core)
            expected.append(tuple(_activated(result, activation).numpy() for result in results))
    return expected


def pixel_values(pixels: NDArray[np.uint8], info: ModelInfo) -> NDArray[np.float32]:
    """Convert an image, UINT8 ``[H, W, C]``, to the model's input, FP32 ``[C, H, W]``."""
    if info.image is None:
        raise ValueError("the model has no image processor")
    values = pixels.astype(np.float32)
    if info.image.rescale_factor is not None:
        values = values * np.float32(info.image.rescale_factor)
    if info.image.mean is not None and info.image.std is not None:
        mean = np.array(info.image.mean, dtype=np.float32)
        values = (values - mean) / np.array(info.image.std, dtype=np.float32)
    return np.ascontiguousarray(values.transpose(2, 0, 1))


def _token_inputs(row: TokenRow) -> dict[str, Any]:
    import torch

    inputs = {"input_ids": torch.tensor([row.ids])}
    if row.first_segment < len(row.ids):
        types = [0] * row.first_segment + [1] * (len(row.ids) - row.first_segment)
        inputs["token_type_ids"] = torch.tensor([types])
    return inputs


def _mask_place(row: TokenRow, info: ModelInfo) -> int:
    places = [place for place, token in enumerate(row.ids) if token == info.mask_token_id]
    if len(places) != 1:
        raise ValueError(f"a sample has {len(places)} mask tokens instead of one")
    return places[0]


def _activation(info: ModelInfo, core: Core) -> Activation:
    if core.returns in ("vector", "logits", "spans"):
        return "none"
    # The config can replace softmax only in heads that classify a whole row or image.
    return info.activation if core.reads in ("row", "image") else "softmax"


def _activated(logits: Any, activation: Activation) -> Any:
    if activation == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if activation == "sigmoid" else logits


def _dense_layers(folder: Path, info: ModelInfo) -> dict[int, Any]:
    from triptych.core.export.heads import load_dense

    return {
        index: load_dense(module, folder)
        for index, module in enumerate(info.head)
        if isinstance(module, Dense)
    }


def _sentence(tokens: Any, info: ModelInfo, dense: dict[int, Any]) -> Any:
    """Pool token vectors ``[tokens, hidden]`` to one vector and apply the head."""
    import torch

    vector = torch.cat([_pool(mode, tokens) for mode in info.pooling])[None]
    for index, module in enumerate(info.head):
        if isinstance(module, Normalize):
            vector = vector / vector.norm(dim=1, keepdim=True).clamp(min=1e-12)
        else:
            vector = dense[index](vector)
    return vector[0]


def _pool(mode: str, tokens: Any) -> Any:
    import torch

    if mode == "mean":
        return tokens.mean(0)
    if mode == "max":
        return tokens.max(0).values
    if mode == "cls":
        return tokens[0]
    if mode == "lasttoken":
        return tokens[-1]
    if mode == "mean_sqrt_len_tokens":
        return tokens.sum(0) / len(tokens) ** 0.5
    weight = torch.arange(1, len(tokens) + 1, dtype=tokens.dtype)
    return (weight[:, None] * tokens).sum(0) / weight.sum()


FILE = "expected.npz"
CODE = ("core/gate/reference.py", "core/export/to_onnx.py", "core/export/heads.py")


def reference_of(
    inputs: PipelineInputs,
    samples: Sequence[Sample],
    progress: Progress,
    *,
    double: bool = False,
    keep: bool = True,
) -> list[Expected]:
    """Return the core's expected outputs for each sample, by PyTorch in fp32, or fp64 if `double`.

    Without `keep`, the cache is neither read nor written.

    Raises:
        UserError: transformers cannot load the model.
    """
    if not samples:
        return []
    plan = inputs.plan

    def run() -> list[Expected]:

        return reference_outputs(inputs.model_folder, plan.info, plan.core, samples, double=double)

    if not keep:
        return run()
    key: dict[str, object] = {
        "facts": plan.info.of_core,
        "core": asdict(plan.core),
        "rows": hash_rows(samples),
        "double": double,
        "versions": versions_of("torch", "transformers"),
        "code": code_hash(*CODE, *MODEL_CODE),
    }

    def work(target: Path) -> None:
        save(target / FILE, run())

    return load(cached_stage("reference", key, work, progress).folder / FILE)


def save(path: Path, expected: Sequence[Expected]) -> None:
    """Write results of any shapes for `load`: each part has its rows concatenated."""
    arrays: dict[str, Any] = {}
    for part, values in enumerate(zip(*expected, strict=True)):
        arrays[f"shapes_{part}"] = np.array([value.shape for value in values], dtype=np.int64)
        arrays[f"values_{part}"] = np.concatenate([value.ravel() for value in values])
    np.savez(path, **arrays)


def load(path: Path) -> list[Expected]:
    """Read the results that `save` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        parts = []
        for part in range(len(arrays.files) // 2):
            shapes, values = arrays[f"shapes_{part}"], arrays[f"values_{part}"]
            ends = np.cumsum(shapes.prod(axis=1))[:-1]
            pieces = zip(np.split(values, ends), shapes.tolist(), strict=True)
            parts.append([piece.reshape(shape) for piece, shape in pieces])
    return list(zip(*parts, strict=True))


ROUNDING_ROWS = 32
"""Maximum number of gate rows, evenly spaced, that also run in fp64, which takes twice the time."""


def measure_rounding(
    inputs: PipelineInputs, expected: Sequence[Expected], progress: Progress
) -> float | None:
    """Return the largest difference of fp32 from fp64, on the scale of `max_difference`.

    Returns None if the model does not run in fp64, or a result is not finite.

    Args:
        inputs: Inputs of the pipeline.
        expected: Outputs of the reference in fp32, for all rows of the gate.
        progress: Receives a line for each damaged entry of the cache.
    """
    rows = rows_of(inputs.requests)
    step = -(-len(rows) // ROUNDING_ROWS)
    try:
        exact = reference_of(inputs, rows[::step], progress, double=True)
    except (RuntimeError, TypeError, ValueError, MemoryError):  # The model supports fp32 only.
        return None
    return _largest_difference(expected[::step], exact, expected)


def _largest_difference(
    rounded: Sequence[Expected], exact: Sequence[Expected], every: Sequence[Expected]
) -> float | None:
    largest = 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for part in range(len(exact[0])):
            scale = np.max([1.0, *(np.abs(row[part]).max(initial=0) for row in every)])
            for own, right in zip(rounded, exact, strict=True):
                off = np.abs(np.subtract(own[part], right[part], dtype=np.float64))
                largest = float(np.maximum(largest, off.max(initial=0) / scale))
    return largest if np.isfinite(largest) else None
