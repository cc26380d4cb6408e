"""LoRA adapters of a pipeline that generates text: find, check against the model, merge."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.base.cache import cached_stage, code_hash, sha256_of, versions_of
from triptych.base.errors import Progress, UserError, closest
from triptych.models.source import find_folder
from triptych.spec.generation_fields import GenerationSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 512
"""Maximum rank of an adapter in vLLM."""

NOT_PLAIN = (
    *("use_dora", "lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens"),
    *("layer_replication", "modules_to_save", "trainable_token_indices", "target_parameters"),
    *("rank_pattern", "alpha_pattern"),
)
"""Settings of PEFT that compute other weights than W + scale·B·A, or that some releases of vLLM
ignore without an error."""

PLAIN_STARTS = ("gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that do not change the weights of the model."""

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_MODULES = "modules.json"


@dataclass(frozen=True)
class Adapter:
    """Adapter that changes the weights of a module to W + `scale`·B·A."""

    name: str
    folder: Path
    sha256: str  # SHA-256 hash of its files, in hex
    rank: int  # Number of rows of A
    scale: float

    @property
    def files(self) -> tuple[Path, Path]:
        """Paths of the files that an engine reads."""
        return self.folder / CONFIG, self.folder / WEIGHTS


def read_adapters(
    spec: GenerationSpec, weights: Path, sha256: str, progress: Progress
) -> tuple[Adapter, ...]:
    """Find and check the adapters of a pipeline.

    Args:
        spec: Spec of the pipeline.
        weights: Folder of the model's files.
        sha256: SHA-256 hash of the model's files.
        progress: Receives a line for each adapter.

    Raises:
        UserError: An adapter is missing, is not a plain LoRA, or does not fit the model.
    """
    if not spec.adapters:
        return ()
    modules = _read_modules(weights, sha256, progress)
    found = []
    for name, source in spec.adapters.items():
        field = f"adapters.{name}"
        try:
            folder = find_folder(source, spec.folder)
        except UserError as error:
            remedy = error.remedy.replace("model.source", field)
            raise UserError(field, error.rule, given=error.given, remedy=remedy) from error
        adapter = read_adapter(name, folder, modules)
        progress("source", f"adapter {name}: rank {adapter.rank}, from {source.source}")
        found.append(adapter)
    return tuple(found)


def read_adapter(name: str, folder: Path, modules: Mapping[str, tuple[int, int]]) -> Adapter:
    """Read and check one adapter.

    Args:
        name: Name of the adapter in the spec.
        folder: Folder of its files.
        modules: Name of each linear module of the model to its numbers of inputs and outputs.

    Raises:
        UserError: The adapter is not a plain LoRA, or does not fit the model.
    """
    field = f"adapters.{name}"
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise UserError(
                field,
                f"must hold {CONFIG} and {WEIGHTS}",
                given=f"{folder}: no {file}",
                remedy="Name the folder that PEFT's `save_pretrained` wrote",
            )
    config = _read_config(field, folder / CONFIG)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise UserError(
            field,
            f"must have a rank r between 1 and {MAX_RANK}",
            given=rank,
            remedy="Train the adapter with such a rank, or merge it into the model",
        )
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise UserError(
            field,
            "must have a finite number as lora_alpha",
            given=alpha,
            remedy=f"Correct lora_alpha in {CONFIG}, or save the adapter again with PEFT",
        )
    _check_tensors(field, _read_shapes(field, folder / WEIGHTS), rank, modules)
    digest = hashlib.sha256((sha256_of(folder / CONFIG) + sha256_of(folder / WEIGHTS)).encode())
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return Adapter(name, folder, digest.hexdigest(), rank, alpha / divisor)


def merge(model: PreTrainedModel, adapter: Adapter) -> None:
    """Add an adapter to the weights of a model of transformers."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(adapter.folder / WEIGHTS)
    for key, inner in tensors.items():
        found = _TENSOR.fullmatch(key)
        if found is None or found[2] == "B":
            continue
        outer = tensors[key.replace(".lora_A.", ".lora_B.")]
        change = adapter.scale * (outer.float() @ inner.float())
        module = model.get_submodule(found[1])
        # Conv1D, the linear module of GPT-2, stores its weights transposed.
        module.weight.data += change if isinstance(module, torch.nn.Linear) else change.T


def _read_config(field: str, path: Path) -> Mapping[str, object]:
    try:
        found: object = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(
            field,
            f"must have valid JSON in {CONFIG}",
            given=error,
            remedy="Save the adapter again with PEFT",
        ) from error
    config = found if isinstance(found, dict) else {}
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UserError(
            field,
            "must be an adapter of peft_type LORA",
            given=kind,
            remedy="Choose a LoRA adapter",
        )
    more = [name for name in NOT_PLAIN if config.get(name)]
    if config.get("bias", "none") != "none":
        more.append("bias")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start not in PLAIN_STARTS:
        more.append(f"init_lora_weights {start}")
    if more:
        raise UserError(
            field,
            "must be a plain LoRA adapter, with one rank and no further weights",
            given=", ".join(more),
            remedy="Merge it into the model (PEFT's merge_and_unload) and serve the result",
        )
    return dict(config)


def _read_shapes(field: str, path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(
            field,
            f"must have valid safetensors in {WEIGHTS}",
            given=error,
            remedy="Save the adapter again",
        ) from error


def _check_tensors(
    field: str,
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    modules: Mapping[str, tuple[int, int]],
) -> None:
    sides: dict[str, set[str]] = {}
    for key, shape in shapes.items():
        found = _TENSOR.fullmatch(key)
        if found is None:
            raise UserError(
                field,
                "must only have tensors lora_A and lora_B of linear modules",
                given=key,
                remedy="Train the adapter without modules_to_save and without embeddings",
            )
        module, side = found[1], found[2]
        if module not in modules:
            raise UserError(
                field,
                "must only change modules of the model",
                given=module,
                remedy=f"{closest(module, modules)}Choose an adapter of this model",
            )
        inputs, outputs = modules[module]
        wanted = (rank, inputs) if side == "A" else (outputs, rank)
        if shape != wanted:
            raise UserError(
                field,
                f"must have the model's sizes: lora_{side} of {module} {list(wanted)}",
                given=list(shape),
                remedy=f"Choose an adapter of this model, or correct r in {CONFIG}",
            )
        sides.setdefault(module, set()).add(side)
    halves = sorted(module for module, found in sides.items() if len(found) < 2)
    if halves or not sides:
        raise UserError(
            field,
            "must have both lora_A and lora_B for each module",
            given=f"one of them for {halves[0]}" if halves else "no tensors",
            remedy="Save the adapter again",
        )


def _read_modules(folder: Path, sha256: str, progress: Progress) -> dict[str, tuple[int, int]]:
    """Return the numbers of inputs and outputs of each linear module, by its name."""
    inputs = {
        "model": sha256,
        "versions": versions_of("transformers"),
        "code": code_hash("building/generation/adapters.py"),
    }

    def work(target: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.pytorch_utils import Conv1D

        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        sizes = {}
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                sizes[name] = (module.in_features, module.out_features)
            elif isinstance(module, Conv1D):
                sizes[name] = tuple(module.weight.shape)
        (target / _MODULES).write_text(json.dumps(sizes), encoding="utf-8")

    stage = cached_stage("generation-modules", inputs, work, progress)
    sizes = json.loads((stage.folder / _MODULES).read_bytes())
    return {name: (inputs, outputs) for name, (inputs, outputs) in sizes.items()}
