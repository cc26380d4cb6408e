"""Reference outputs: the model in PyTorch as a user loads it, one row at a time, cached.

Embeddings come from ``SentenceTransformer(folder)``, scores of reranking from
``CrossEncoder(folder)``, and all others from the model of ``pipeline(task, folder)``. `OVERRIDES`
has each setting that differs from such a call.
The module also measures PyTorch's rounding: the difference of fp32 from fp64.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.cache import cached_stage, code_hash, versions_of
from triptych.base.errors import Progress, UserError
from triptych.base.tensors import TokenRow
from triptych.core.export.own_graph import open_own_model
from triptych.core.inputs import PipelineInputs
from triptych.core.requests import Expected, Sample, core_feed, hash_rows, rows_of
from triptych.spec.model_info import Activation, ModelInfo
from triptych.spec.model_source import CODE as MODEL_CODE
from triptych.spec.model_source import read_tokenizer_outputs
from triptych.spec.spec import PipelineSpec
from triptych.spec.tasks.catalog import PROMPT
from triptych.spec.tasks.task import Core

OVERRIDES = {
    "dtype=float32": "the gate compares with fp32; files in half precision would be loaded as such",
    "device=cpu": "a GPU rounds products to TF32",
    "local_files_only=True": "a folder is complete; nothing is fetched",
    "trust_remote_code=False": "code of a model is never run",
    "config.use_cache=False": "keys and values of one row are used once; results are the same",
    "ignore_mismatched_sizes=True": "mismatched weights are then reported by name and refused",
    "set_pooling_include_prompt(False)": "as for hkunlp/instructor-*, which a user loads by name",
    "max_seq_length": "tokenizer.max_length of the pipeline shortens rows before they come here",
}
"""Differences from a user's call, each with its reason."""
MASK, TYPES = "attention_mask", "token_type_ids"
"""Fed also for a single text if the tokenizer makes them, as pipelines do: XLM masks the padding
token within a text unless it gets a mask, and some models without ``type_vocab_size`` add the
vector of token 0, or a bias, for tokens of type 0."""
FED = "input_ids", MASK, TYPES
"""Inputs of a model of texts that a core has or computes."""


def reference_outputs(
    folder: Path,
    info: ModelInfo,
    core: Core,
    samples: Sequence[Sample],
    *,
    double: bool = False,
) -> list[Expected]:
    """Return the core's expected outputs for each sample, in fp32, or in fp64 if `double`.

    Each row runs alone and unpadded, so other rows and padding have no effect. Pixel values
    are written here a second time, independent of the exported code that they check.

    Raises:
        UserError: The library cannot load the model.
        ValueError: The core reads the mask token, and a sample has none or several.
    """
    import torch

    from triptych.core.export.to_onnx import load_model

    if core.reads == "pooled" or core.activation is not None:
        return _sentence_outputs(folder, core, samples, double=double)
    model = load_model(folder, core.auto_class)
    dtype = torch.float64 if double else torch.float32
    if double:
        model.double()
    made: Collection[str] = ()
    if any(isinstance(sample, TokenRow) for sample in samples):
        # The model gets what its pipeline in transformers gives it.
        made = _read_by(model, read_tokenizer_outputs(folder))
    expected = []
    with torch.inference_mode():
        for sample in samples:
            if isinstance(sample, TokenRow):
                output = model(**_token_inputs(sample, made))
            else:
                pixels = torch.from_numpy(pixel_values(sample, info))
                output = model(pixel_values=pixels[None].to(dtype))
            if core.returns == "spans":
                results = [output.start_logits[0], output.end_logits[0]]
            elif isinstance(sample, TokenRow) and core.reads == "mask":
                results = [output.logits[0, _mask_place(sample, info)]]
            else:
                results = [output.logits[0]]
            activation = _activation(info, core)
            expected.append(tuple(_activated(result, activation).numpy() for result in results))
    return expected


def _read_by(model: Any, names: Collection[str]) -> list[str]:
    """Return which of its tokenizer's outputs a model reads.

    Raises:
        UserError: `FED` does not have one of them.
    """
    from triptych.core.export.packing import takes

    read = [name for name in names if takes(model, name)]
    for name in read:
        if name not in FED:
            raise UserError(
                "model.source",
                f"must read only {', '.join(FED)} of what its tokenizer makes",
                given=f"{type(model).__name__}, which also reads `{name}`",
                remedy="Choose another model",
            )
    return read


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


def _token_inputs(row: TokenRow, made: Collection[str]) -> dict[str, Any]:
    """Return a model's inputs for a row, with those that its tokenizer has `made`."""
    import torch

    inputs = {"input_ids": torch.tensor([row.ids])}
    if MASK in made:
        inputs[MASK] = torch.ones_like(inputs["input_ids"])
    if TYPES in made or row.first_segment < len(row.ids):
        types = [0] * row.first_segment + [1] * (len(row.ids) - row.first_segment)
        inputs[TYPES] = torch.tensor([types])
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


def load_as_user(folder: Path, *, pairs: bool) -> Any:
    """Return ``CrossEncoder(folder)`` for pairs, else ``SentenceTransformer(folder)``, in fp32.

    Raises:
        UserError: sentence-transformers cannot load the model.
    """
    import torch
    from sentence_transformers import CrossEncoder, SentenceTransformer

    from triptych.core.export.to_onnx import quiet

    try:
        with quiet():
            return (CrossEncoder if pairs else SentenceTransformer)(
                str(folder),
                device="cpu",
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"dtype": torch.float32},
            ).eval()
    except Exception as error:
        raise UserError(
            "model.source",
            "is not a model that sentence-transformers can load, with which the gate compares",
            given=" ".join(str(error).split())[:300],
            remedy="Check modules.json, the files of its modules, and the weights",
        ) from error


def _sentence_outputs(
    folder: Path, core: Core, samples: Sequence[Sample], *, double: bool
) -> list[Expected]:
    """Return vectors or scores of sentence-transformers, for rows of tokens."""
    import torch

    model = load_as_user(folder, pairs=core.activation is not None)
    if any(isinstance(row, TokenRow) and row.prompt for row in samples):
        model.set_pooling_include_prompt(False)
    if model.transformers_model is not None:
        _read_by(model.transformers_model, model.tokenizer.model_input_names)
    if double:
        model.double()
    expected: list[Expected] = []
    with torch.inference_mode():
        for row in samples:
            if not isinstance(row, TokenRow):
                raise ValueError("sentence-transformers is the reference of texts alone")
            features = _token_inputs(row, {MASK, *model.tokenizer.model_input_names})
            if row.prompt:
                features["prompt_length"] = row.prompt
            output = model(features)
            if core.activation is not None:
                result = model.activation_fn(output["scores"][0])
            else:
                result = output["sentence_embedding"][0, : model.truncate_dim]
            expected.append((result.numpy(),))
    return expected


def check_tokens(inputs: PipelineInputs) -> None:
    """Check that sentence-transformers makes the same tokens of the gate's texts.

    Nothing is checked for tasks with another reference.

    Raises:
        UserError: The tokens of a text differ.
    """
    plan = inputs.plan
    if not plan.task.of_sentences:
        return
    pairs = plan.core.activation is not None
    model = load_as_user(inputs.model_folder, pairs=pairs)
    model.max_seq_length = plan.max_length
    for request in inputs.requests:
        chosen = request.parameters.get(PROMPT, "")
        prompt = plan.info.prompts.get(chosen, chosen if plan.info.free_prompt else "")
        text, *second = map(str, request.inputs.values())
        features = model.preprocess([(text, *second) if second else text], prompt=prompt)
        wanted = tuple(features["input_ids"][0].tolist())
        (row,) = request.rows
        left_out = 0 if plan.info.include_prompt else features.get("prompt_length", 0)
        if isinstance(row, TokenRow) and row.prompt != left_out:
            raise UserError(
                "model.source",
                "must have a tokenizer that counts the tokens of a prompt as sentence-transformers",
                given=f"{prompt!r:.80}: {row.prompt} tokens, there {left_out}",
                remedy="Save the model again with sentence-transformers, or choose another model",
            )
        if isinstance(row, TokenRow) and row.ids != wanted:
            raise UserError(
                "model.source",
                "must have a tokenizer that makes the same tokens as in sentence-transformers",
                given=f"{request.preview!r}: {len(row.ids)} tokens {row.ids[:12]}, there "
                f"{len(wanted)} tokens {wanted[:12]}",
                remedy="Save the model again with sentence-transformers, or choose another model",
            )


def _graph_outputs(
    inputs: PipelineInputs, samples: Sequence[Sample], *, double: bool
) -> list[Expected]:
    """Return the outputs of the user's own graph for each row alone.

    Args:
        inputs: Inputs of the pipeline.
        samples: Rows of the core.
        double: Whether to run with another rounding; see `open_own_model`.
    """
    spec = inputs.plan.spec
    if isinstance(spec, PipelineSpec):
        raise ValueError(f"{spec.name} has a model of transformers")
    run = open_own_model(spec, other_rounding=double)
    names = [tensor.name for tensor in inputs.plan.core.outputs]
    expected = []
    for sample in samples:
        outputs = run(core_feed([sample], inputs.plan.core_inputs, pad_token_id=0))
        expected.append(tuple(outputs[name][0] for name in names))
    return expected


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
        if plan.info.own is not None:
            return _graph_outputs(inputs, samples, double=double)
        return reference_outputs(inputs.model_folder, plan.info, plan.core, samples, double=double)

    if not keep:
        return run()
    key: dict[str, object] = {
        "facts": plan.info.of_core,
        "core": asdict(plan.core),
        "rows": hash_rows(samples),
        "double": double,
        "versions": versions_of("torch", "transformers", "sentence-transformers"),
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
