"""LoRA adapters of a pipeline that generates text: found, held to the model's sizes, merged."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.base.cache import cached_stage, code_hash, sha256_of, versions_of
from triptych.base.errors import Progress, UserError, closest
from triptych.spec.generation_fields import GenerationSpec
from triptych.spec.model_source import find_folder

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 512
"""That vLLM makes room for."""

NOT_PLAIN = (
    *("use_dora", "lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens"),
    *("layer_replication", "modules_to_save", "trainable_token_indices", "target_parameters"),
    *("rank_pattern", "alpha_pattern"),
)
"""Settings of PEFT that make an answer other than W + scale·B·A does, or that some releases of vLLM
pass over in silence."""

PLAIN_STARTS = ("gaussian", "eva", "orthogonal")
"""Ways to begin a training that leave the model's own weights as they are."""

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_MODULES = "modules.json"


@dataclass(frozen=True)
class Adapter:
    """One adapter: the weights of a module are W + `scale`·B·A with it.

    Attributes:
        sha256: of its files.
        rank: rows of A.
    """

    name: str
    folder: Path
    sha256: str
    rank: int
    scale: float

    @property
    def files(self) -> tuple[Path, Path]:
        """What an engine reads of it."""
        return self.folder / CONFIG, self.folder / WEIGHTS


def read_adapters(
    spec: GenerationSpec, weights: Path, sha256: str, progress: Progress
) -> tuple[Adapter, ...]:
    """Find and check the adapters of a pipeline.

    Args:
        spec: of the pipeline.
        weights: folder of the model's files.
        sha256: of these.
        progress: told of each adapter.

    Raises:
        UserError: one is not there, is no plain LoRA, or does not fit the model.
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
    """Check one adapter.

    Args:
        name: in the spec.
        folder: of its files.
        modules: of the model: inputs and outputs of each linear one.

    Raises:
        UserError: it is no plain LoRA, or does not fit the model.
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
        raise UserError(field, f"must have a rank r from 1 to {MAX_RANK}", given=rank)
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise UserError(field, "must have a number as lora_alpha", given=alpha)
    _check_tensors(field, _read_shapes(field, folder / WEIGHTS), rank, modules)
    digest = hashlib.sha256((sha256_of(folder / CONFIG) + sha256_of(folder / WEIGHTS)).encode())
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return Adapter(name, folder, digest.hexdigest(), rank, alpha / divisor)


def merge(model: Any, adapter: Adapter) -> None:
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
        # GPT-2's own kind of module has its weights the other way round.
        module.weight.data += change if isinstance(module, torch.nn.Linear) else change.T


def _read_config(field: str, path: Path) -> Mapping[str, Any]:
    try:
        config: Any = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(field, f"must have JSON in {CONFIG}", given=error) from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise UserError(
            field, "must be an adapter of peft_type LORA", given=kind, remedy="Choose another one"
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
            "must be a plain LoRA, of one rank and without further weights",
            given=", ".join(more),
            remedy="Merge it into the model (PEFT's merge_and_unload) and serve that",
        )
    return dict(config)


def _read_shapes(field: str, path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(
            field, f"must have safetensors in {WEIGHTS}", given=error, remedy="Save it again"
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
                "must have lora_A and lora_B of linear modules, and no other tensors",
                given=key,
                remedy="Train it without modules_to_save and without embeddings",
            )
        module, side = found[1], found[2]
        if module not in modules:
            raise UserError(
                field,
                "must be for modules that the model has",
                given=module,
                remedy=f"{closest(module, modules)}It was trained on another model",
            )
        inputs, outputs = modules[module]
        wanted = (rank, inputs) if side == "A" else (outputs, rank)
        if shape != wanted:
            raise UserError(
                field,
                f"must have the model's sizes: lora_{side} of {module} {list(wanted)}",
                given=list(shape),
                remedy="It was trained on a model of another size, or r is not its rank",
            )
        sides.setdefault(module, set()).add(side)
    halves = sorted(module for module, found in sides.items() if len(found) < 2)
    if halves or not sides:
        raise UserError(
            field,
            "must have lora_A and lora_B of each module",
            given=f"one of them for {halves[0]}" if halves else "no tensors",
            remedy="Save it again",
        )


def _read_modules(folder: Path, sha256: str, progress: Progress) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each linear module of a model, by transformers' name of it."""
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
