"""Reference outputs: the model in PyTorch as a user loads it, one row at a time, cached.

Embeddings come from ``SentenceTransformer(folder)``, scores of reranking from
``CrossEncoder(folder)``, and all others from the model of ``pipeline(task, folder)``. `OVERRIDES`
has each setting that differs from such a call.
The module also measures PyTorch's rounding: the difference of fp32 from fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.cache import cached_stage, code_hash, versions_of
from triptych.base.errors import Progress, UserError, counted
from triptych.base.tensors import TokenRow
from triptych.core.export.own_graph import open_own_model
from triptych.core.inputs import PipelineInputs
from triptych.core.requests import GateRequest, Sample, core_feed, hash_rows, rows_of
from triptych.models.image_vectors import PADDED_TOWERS, pooled
from triptych.models.info import Activation, Loader, ModelInfo
from triptych.models.roles import QUERY, ROLES
from triptych.models.source import CODE as MODEL_CODE
from triptych.models.token_layers import VECTORS_LAYER, WEIGHTS_LAYER
from triptych.models.tokenizer import load_tokenizer
from triptych.runtime.row_metadata import OUTSIDE, unpack_metadata
from triptych.runtime.row_types import find_class
from triptych.runtime.rows_spans import MAX_STRIDE
from triptych.spec.model_fields import is_own
from triptych.spec.plan import Plan
from triptych.tasks.prompts import PROMPT, ROLE
from triptych.tasks.results import Expected
from triptych.tasks.task import Core

OVERRIDES = {
    "dtype=float32": "the gate compares with fp32; files in half precision would be loaded as such",
    "device=cpu": "a GPU rounds products to TF32",
    "local_files_only=True": "a folder is complete; nothing is fetched",
    "trust_remote_code=False": "code of a model is never run",
    "return_dict=True": "outputs are read by name, whatever config.json says; numbers are the same",
    "rope_type=default": "dynamic frequencies differ only beyond the length of the model",
    "projection_dim": "one side of CLIP has the size of the whole, not of its own config",
    "config.use_cache=False": "keys and values of one row are used once; results are the same",
    "ignore_mismatched_sizes=True": "mismatched weights are then reported by name and refused",
    "set_pooling_include_prompt(False)": "as for hkunlp/instructor-*, which a user loads by name",
    "processor": "with tokenizer.source: file, the tokenizer is that of tokenizer.json",
    "normalizer": "that tokenizer writes texts in lower case where sentence-transformers does",
    "max_seq_length": "tokenizer.max_length of the pipeline shortens rows before they come here",
    "truncation": "for the same reason; a pipeline of transformers fails for a longer text",
    "backend=pil": "a server resizes by Pillow; with torchvision, transformers takes its kernels",
    "pixel_values": "computed again from the pixels of a row, with the settings of its processor",
}
"""Differences from a user's call, each with its reason."""
MASK, TYPES = "attention_mask", "token_type_ids"
"""Fed also for a single text if the tokenizer makes them, as pipelines do: XLM masks the padding
token within a text unless it gets a mask, and some models without ``type_vocab_size`` add the
vector of token 0, or a bias, for tokens of type 0."""
IDS, LENGTH = "input_ids", "prompt_length"
ATTENDED, KEPT = "attended_length", "kept"
FED = IDS, MASK, TYPES
"""Inputs of a model of texts that a core has or computes."""


def reference_outputs(
    folder: Path,
    info: ModelInfo,
    core: Core,
    samples: Sequence[Sample],
    *,
    loader: Loader = "",
    double: bool = False,
    loaded: object = None,
) -> list[Expected]:
    """Return the core's expected outputs for each sample, in fp32, or in fp64 if `double`.

    Each row runs alone and unpadded, so other rows and padding have no effect. Pixel values
    are written here a second time, independent of the exported code that they check. `loader` is
    that of the task; `loaded` is its model in fp32 if it is loaded already.

    Raises:
        UserError: The library cannot load the model, or run it.
    """
    if loader:
        if double or loaded is None:
            loaded = load_as_user(folder, loader)
        run: Callable[..., list[Expected]] = partial(_sentence_outputs, loaded, folder)
    else:
        from triptych.models.loading import load_model

        run = partial(_model_outputs, load_model(folder, core.auto_class), folder, info)
    if double:
        return run(core, samples, double=True)
    try:
        return run(core, samples, double=False)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            "model.source",
            "fails in PyTorch on a row of the gate",
            given=f"{info.architecture}: {type(error).__name__}: {reason}",
            remedy="Correct the setting in the model's files that causes the error; for texts that "
            "are too long, lower tokenizer.max_length",
        ) from error


def _model_outputs(
    model: Any,
    folder: Path,
    info: ModelInfo,
    core: Core,
    samples: Sequence[Sample],
    *,
    double: bool,
) -> list[Expected]:
    """Return the results of a model of transformers for each row."""
    import torch

    dtype = torch.float64 if double else torch.float32
    if double:
        model.double()
    made: Collection[str] = ()
    if any(isinstance(sample, TokenRow) for sample in samples):
        # The model gets what its pipeline in transformers gives it.
        made = _read_by(model, load_tokenizer(folder).model_input_names)
    expected, activation = [], _activation(info, core)
    with torch.inference_mode():
        for sample in counted(samples, "rows", len(samples)):
            if isinstance(sample, TokenRow):
                output = model(**_token_inputs(sample, made))
            else:
                pixels = torch.from_numpy(pixel_values(sample, info))
                output = model(pixel_values=pixels[None].to(dtype))
            if core.returns == "spans":
                results = [output.start_logits[0], output.end_logits[0]]
            elif isinstance(sample, TokenRow) and core.reads == "mask":
                results = [output.logits[0, _mask_place(sample, info)]]
            elif core.returns == "vector":
                pooling = "pooler" if isinstance(sample, TokenRow) else info.pooling[0]
                results = [pooled(output, pooling)[0]]
            else:
                results = [output.logits[0]]
            expected.append(tuple(_activated(result, activation).numpy() for result in results))
    return expected


def _read_by(model: object, names: Collection[str]) -> list[str]:
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

    inputs = {IDS: torch.tensor([row.ids])}
    if MASK in made:
        inputs[MASK] = torch.ones_like(inputs[IDS])
        inputs[MASK][:, row.attended or len(row.ids) :] = 0
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


def load_as_user(folder: Path, loader: Loader) -> Any:
    """Return the model of a class of sentence-transformers: ``loader(folder)``, in fp32.

    Raises:
        UserError: sentence-transformers cannot load the model.
    """
    import sentence_transformers
    import torch

    from triptych.models.loading import quiet

    try:
        with quiet():
            return getattr(sentence_transformers, loader)(
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
    model: Any, folder: Path, core: Core, samples: Sequence[Sample], *, double: bool
) -> list[Expected]:
    """Return vectors or scores of sentence-transformers, for rows of tokens."""
    import torch

    if any(isinstance(row, TokenRow) and row.prompt for row in samples):
        model.set_pooling_include_prompt(False)
    if model.transformers_model is not None:
        _read_by(model.transformers_model, model.tokenizer.model_input_names)
    if double:
        model.double()
    finish = _finish_several(folder, core, double=double) if core.returns == "several" else None
    expected: list[Expected] = []
    with torch.inference_mode():
        for row in counted(samples, "rows", len(samples)):
            if not isinstance(row, TokenRow):
                raise ValueError("sentence-transformers is the reference of texts alone")
            features = _token_inputs(row, {MASK, *model.tokenizer.model_input_names})
            if row.prompt:
                features[LENGTH] = row.prompt
            output = model(features)
            if "scores" in output:  # of a CrossEncoder
                result = model.activation_fn(output["scores"][0])
            elif finish is not None:
                expected.append(finish(output))
                continue
            elif core.reads == "vectors":
                result = output["token_embeddings"][0]
            else:
                size = getattr(model, "truncate_dim", None)  # a SparseEncoder has none
                result = output["sentence_embedding"][0, :size]
            expected.append((result.numpy(),))
    return expected


def _finish_several(
    folder: Path, core: Core, *, double: bool
) -> Callable[[Mapping[str, Any]], Expected]:
    """Return the function from features to the results of all heads, as of `BGEM3FlagModel`."""
    from torch.nn.functional import normalize

    from triptych.models.token_layers import load_layer

    width = int(core.outputs[0].dims[0])
    weigh = load_layer(folder, WEIGHTS_LAYER, width, 1)
    project = load_layer(folder, VECTORS_LAYER, width, width)
    if double:
        weigh.double()
        project.double()

    def finish(features: Mapping[str, Any]) -> Expected:
        hidden = features["token_embeddings"][0]
        vectors = normalize(project(hidden), dim=-1)
        results = features["sentence_embedding"][0], weigh(hidden).relu(), vectors
        return tuple(result.numpy() for result in results)

    return finish


def check_tokens(inputs: PipelineInputs) -> object:
    """Check that the library of the reference makes the same rows of the gate's texts.

    Returns:
        The model of sentence-transformers, for `reference_of`; None for other references.

    Raises:
        UserError: The tokens of a text differ, or their types in a model that reads types.
    """
    from tokenizers import normalizers

    from triptych.core.export.packing import takes
    from triptych.models.loading import model_class

    plan, model = inputs.plan, None
    if plan.info.image is not None or plan.info.own is not None:
        return None
    if plan.task.loader:
        library = "sentence-transformers"
        model = load_as_user(inputs.model_folder, plan.task.loader)
        _check_template(model, plan)
        if plan.encoder_spec.tokenizer.source == "file":
            made = load_tokenizer(inputs.model_folder, "file")
            model[0].processor = made
            if plan.info.lowercase:  # as sentence-transformers does
                own = made.backend_tokenizer.normalizer or normalizers.Sequence([])
                steps = normalizers.Sequence([normalizers.Lowercase(), own])
                made.backend_tokenizer.normalizer = steps
        model.max_seq_length = plan.max_length
        for name, role in plan.info.roles.items():
            setattr(model[0], f"{name}_length", min(role.max_length, plan.max_length))
        reader = model.transformers_model
        make: Callable[[GateRequest], list[_Features]] = partial(_of_sentences, model, plan.info)
    else:
        library = "a pipeline of transformers"
        reader = model_class(inputs.model_folder, plan.core.auto_class)
        tokenizer = load_tokenizer(inputs.model_folder, plan.encoder_spec.tokenizer.source)
        make = partial(_of_pipeline, tokenizer, plan)
    typed = reader is not None and takes(reader, TYPES)
    for request in inputs.requests:
        found = make(request)
        wanted = [_row_of(features, typed=typed) for features in found]
        kept = [features[KEPT] for features in found if KEPT in features]
        own = [
            (each.ids if plan.info.has_query_weights else each.kinds != OUTSIDE).tolist()
            for each in map(unpack_metadata, request.metadata)
        ]
        if wanted != list(request.rows) or (kept and kept != own):
            raise _other_rows(request, wanted, library)
    return model


def _check_template(model: Any, plan: Plan) -> None:
    """Check that the reference writes texts into a chat template only if preprocess does."""
    if "message" not in model.modalities or "pair_template" in plan.task.settings(plan.info):
        return
    raise UserError(
        "chat_template of the model",
        f"must not be there, because {plan.task.loader} writes each text into it",
        given=plan.info.architecture,
        remedy="If the model was trained on texts alone, remove the template from a copy of its "
        "folder, and `message` from modality_config in sentence_bert_config.json",
    )


_Features = Mapping[str, Any]
"""Ids of a row, and their types and the length of its prompt if the library gives them."""


def _of_sentences(model: Any, info: ModelInfo, request: GateRequest) -> list[_Features]:
    """Return the features that sentence-transformers makes of a request."""
    chosen, role = request.parameters.get(PROMPT, ""), request.parameters.get(ROLE)
    text, *second = map(str, request.inputs.values())
    if info.roles:
        roles = ROLES if second else (str(role),)
        return [
            _of_role(model, info, own, each)
            for own, each in zip(roles, (text, *second), strict=True)
        ]
    prompt = info.prompts.get(chosen, chosen if info.free_prompt else "")
    if role is not None:
        prompt = info.prompts.get(role, "")
    if role == QUERY and info.has_query_weights:  # as `SparseStaticEmbedding` reads it
        encode = partial(model.tokenizer, truncation=True, max_length=model.max_seq_length)
        ids = encode(prompt + text, add_special_tokens=False)[IDS]
        return [{IDS: ids[:1] or [0], KEPT: sorted({*ids})}]
    features = model.preprocess([(text, *second) if second else text], prompt=prompt)
    made = {name: features[name][0].tolist() for name in (IDS, TYPES) if name in features}
    if info.has_query_weights:
        return [{**made, KEPT: []}]
    return [made if info.include_prompt else {**made, LENGTH: features.get(LENGTH, 0)}]


def _of_role(model: Any, info: ModelInfo, role: str, text: str) -> _Features:
    """Return the features of a text, with the tokens that have a vector as modules mark them."""
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    from triptych.models.loading import quiet

    with quiet():
        features = model.preprocess([text], prompt=info.prompts.get(role, ""), task=role)
    marked = dict(features)
    for module in model:
        if isinstance(module, MultiVectorMask):
            marked = module(marked, task=role)
    made = {name: features[name][0].tolist() for name in (IDS, TYPES) if name in features}
    kept = marked[MASK][0].bool().tolist()
    return {**made, ATTENDED: int(features[MASK].sum()), KEPT: kept}


def _of_pipeline(tokenizer: Any, plan: Plan, request: GateRequest) -> list[_Features]:
    """Return the features that a pipeline of transformers makes of a request, truncated."""
    text, *second = map(str, request.inputs.values())
    if labels := request.parameters.get("candidate_labels"):
        template = request.parameters["hypothesis_template"]
        second = [template.format(label) for label in labels]
    strategy = find_class(plan.task.rows).strategy
    padding = "max_length" if plan.info.architecture in PADDED_TOWERS else False
    encode = partial(tokenizer, max_length=plan.max_length, truncation=strategy, padding=padding)
    if strategy != "only_second":
        return [encode(text, other) for other in second or (None,)]
    # A long context has several windows.
    stride = min(plan.max_length // 2, MAX_STRIDE)
    windows = encode(text, *second, stride=stride, return_overflowing_tokens=True)
    names = [name for name in (IDS, TYPES) if name in windows]
    columns = zip(*(windows[name] for name in names), strict=True)
    return [dict(zip(names, column, strict=True)) for column in columns]


def _row_of(features: _Features, *, typed: bool) -> TokenRow:
    """Return a row; without types that a model reads, all its tokens are in the first segment.

    Of types other than 0 before 1, the first segment has -1 tokens.
    """
    ids, types = features[IDS], features.get(TYPES, [])
    first = len(ids)
    if typed and any(types):
        first = types.index(1) if types == sorted(types) and max(types) == 1 else -1
    attended = features.get(ATTENDED, 0)
    return TokenRow(tuple(ids), first, features.get(LENGTH, 0), attended % len(ids))


def _other_rows(request: GateRequest, wanted: Sequence[TokenRow], library: str) -> UserError:
    """Return the error for a request of which the reference makes other rows."""
    rows = [row for row in request.rows if isinstance(row, TokenRow)]
    differing = [(a, b) for a, b in zip(rows, wanted, strict=False) if a != b]
    given = f"{len(rows)} rows, there {len(wanted)}, or other tokens that have a vector"
    if differing:
        row, other = differing[0]
        given = f"{len(row.ids)} tokens {row.ids[:12]}, there {len(other.ids)} {other.ids[:12]}"
        if row.ids == other.ids:
            parts = [(each.first_segment, each.prompt, each.attended) for each in (row, other)]
            given = f"{parts[0]} tokens of type 0, of the prompt, attended, there {parts[1]}"
    return UserError(
        "model.source",
        f"must have a tokenizer that makes the same tokens as in {library}",
        given=f"{request.preview!r}: {given}",
        remedy="Save the model again with its library, or choose another model",
    )


def _graph_outputs(
    inputs: PipelineInputs, samples: Sequence[Sample], *, double: bool
) -> list[Expected]:
    """Return the outputs of the user's own graph for each row alone.

    Args:
        samples: Rows of the core.
        double: Whether to run with another rounding; see `open_own_model`.
    """
    spec = inputs.plan.spec
    if not is_own(spec):
        raise ValueError(f"{spec.name} has a model of transformers")
    run = open_own_model(spec, other_rounding=double)
    names = [tensor.name for tensor in inputs.plan.core.outputs]
    expected = []
    for sample in counted(samples, "rows", len(samples)):
        feed = core_feed([sample], inputs.plan.core_inputs, pad_token_id=0)
        try:
            outputs = run(feed)
        except UserError:
            raise
        except Exception as error:  # ONNX Runtime and PyTorch have many classes
            values = ", ".join(f"{name}={value.ravel()[:4]}" for name, value in feed.items())
            raise UserError(
                "inputs",
                "must have ranges in which the model runs: a row that it refuses fails its batch",
                given=f"{values}: {' '.join(str(error).split())[:300]}",
                remedy="Declare min, max or choices of the input, or refuse the value in "
                "preprocess with a ValueError",
            ) from error
        expected.append(tuple(outputs[name][0] for name in names))
    return expected


FILE = "expected.npz"
CODE = ("core/gate/reference.py",)


def reference_of(
    inputs: PipelineInputs,
    samples: Sequence[Sample],
    progress: Progress,
    *,
    double: bool = False,
    keep: bool = True,
    loaded: object = None,
) -> list[Expected]:
    """Return the core's expected outputs for each sample, by PyTorch in fp32, or fp64 if `double`.

    Without `keep`, the cache is neither read nor written. `loaded` is the result of `check_tokens`.

    Raises:
        UserError: transformers cannot load the model.
    """
    if not samples:
        return []
    plan = inputs.plan

    def run() -> list[Expected]:
        if plan.info.own is not None:
            return _graph_outputs(inputs, samples, double=double)
        return reference_outputs(
            inputs.model_folder,
            plan.info,
            plan.core,
            samples,
            loader=plan.task.loader,
            double=double,
            loaded=loaded,
        )

    if not keep:
        return run()
    key: dict[str, object] = {
        "facts": plan.info.of_core,
        "core": asdict(plan.core),
        "loader": plan.task.loader,
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
