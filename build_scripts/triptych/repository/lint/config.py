"""Lint: a single config says only what the target Triton takes."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from triptych.base.releases import fields_newer_than, parameters_newer_than
from triptych.repository.lint.flaw import Flaw, dims_text, error, names, warning
from triptych.repository.lint.snapshot import BACKENDS, ENSEMBLE, Model, enum_name, is_file


def triton_version(model: Model) -> Iterator[Flaw]:
    """No field is newer than the target Triton: one unknown field and it refuses the config.

    Parameters that its backend does not know yet are passed over without a word.
    """
    triton = model.repository.triton
    for field in fields_newer_than(model.config, triton):
        yield error(
            f"must hold only fields that Triton {triton} knows",
            f"{field.name}, new in {field.release}",
            f"Remove it, or target Triton {field.release} or later",
        )
    for parameter in parameters_newer_than(model.config, triton):
        yield warning(
            f"should hold only parameters that Triton {triton} knows: it takes no notice of others",
            f"parameter {parameter.name}, new in {parameter.release}",
            f"Remove it, or target Triton {parameter.release} or later",
        )


def backend_known(model: Model) -> Iterator[Flaw]:
    """Backend and platform name something that exists and belong together."""
    config, known = model.config, BACKENDS.get(model.backend)
    if not model.backend:
        yield error(
            "must name a backend, or hold a file to tell it from",
            f"platform {config.platform!r}, no backend",
            'Write backend: "onnxruntime" (or python, tensorrt, ...)',
        )
    elif model.is_ensemble and (config.platform != ENSEMBLE or config.backend):
        yield error(
            f'must have platform: "{ENSEMBLE}" and no backend to schedule an ensemble',
            f"platform {config.platform!r}, backend {config.backend!r}",
            f'Write platform: "{ENSEMBLE}" and remove backend',
        )
    elif model.is_ensemble:
        if not config.HasField("ensemble_scheduling"):
            yield error(
                "must have ensemble_scheduling when its platform is ensemble",
                "none",
                "Add ensemble_scheduling with its steps, or name a backend",
            )
    elif known is None:
        yield from _unknown_backend(model)
    elif config.platform and known.platforms and config.platform not in known.platforms:
        yield error(
            "must have a platform that goes with its backend",
            f"backend {model.backend}, platform {config.platform}",
            f"Remove platform, or write {known.platforms[0]}",
        )


def _unknown_backend(model: Model) -> Iterator[Flaw]:
    library = f"libtriton_{model.backend}.so"
    if any(is_file(folder / library) for folder in (model.folder, *model.served_folders)):
        return
    close = difflib.get_close_matches(model.backend, BACKENDS, n=1, cutoff=0.8)
    remedy = f"Install the backend in the server's backend folder; known: {names(BACKENDS)}"
    yield (error if close else warning)(
        "must name a backend that the server has",
        model.backend,
        f"Did you mean {close[0]}?" if close else remedy,
    )


def ensemble_fields(model: Model) -> Iterator[Flaw]:
    """An ensemble sets nothing that belongs to its steps."""
    present = {field.name for field, _ in model.config.ListFields()}
    forbidden = present & {"instance_group", "optimization", "model_warmup"}
    if forbidden:
        yield error(
            "must not set on an ensemble what belongs to its steps",
            names(forbidden),
            "Move it into the config of a step",
        )


def tensor_valid(model: Model) -> Iterator[Flaw]:
    """Inputs and outputs have names of their own, a dtype and dims of at least 1 or -1."""
    for kind in ("input", "output"):
        tensors = getattr(model.config, kind)
        twice = [name for name, n in Counter(t.name for t in tensors).items() if n > 1]
        if twice:
            rule = f"must give every {kind} a name of its own"
            yield error(rule, f"twice: {names(twice)}", "Rename or remove one")
        for index, tensor in enumerate(tensors):
            for rule, given in _tensor_faults(tensor):
                remedy = f"Correct the {kind} in {model.config_file}"
                yield error(rule, f"{kind} {tensor.name or index}: {given}", remedy)


def _tensor_faults(tensor: Any) -> Iterator[tuple[str, str]]:
    if not tensor.name:
        yield "must name every tensor", "no name"
    if enum_name(tensor, "data_type") == "TYPE_INVALID":
        yield "must give every tensor a data_type", "none"
    if not tensor.dims:
        yield "must give every tensor dims", "none; write [1] for one value a row"
    shapes = [tensor.dims, tensor.reshape.shape]
    wrong = [dim for shape in shapes for dim in shape if dim < 1 and dim != -1]
    if wrong:
        yield "must have dims of at least 1, or -1 for variable", names(wrong)
    elif tensor.HasField("reshape") and _blocks(tensor.dims) != _blocks(tensor.reshape.shape):
        yield (
            "must reshape to as many values as dims hold",
            f"dims {dims_text(tensor.dims)}, reshape {dims_text(tensor.reshape.shape)}",
        )


def _blocks(dims: Sequence[int]) -> list[int]:
    """The number of values between one variable dim and the next."""
    starts = [0, *(i + 1 for i, dim in enumerate(dims) if dim == -1)]
    ends = [*(i for i, dim in enumerate(dims) if dim == -1), len(dims)]
    return [prod(dims[start:end]) for start, end in zip(starts, ends, strict=True)]


def instance_group(model: Model) -> Iterator[Flaw]:
    """Instance groups have a count, GPUs only where they run on one, profiles only for TensorRT."""
    for index, group in enumerate(model.config.instance_group):
        label, kind = f"instance_group {group.name or index}", enum_name(group, "kind")
        if group.count < 1:
            yield warning(
                "should have a count of at least 1",
                f"{label}: count {group.count}, for which the server takes "
                f"{model.instances_of(group)}",
                "Write count: 1 or more",
            )
        if group.gpus and kind in ("KIND_CPU", "KIND_MODEL"):
            yield error(
                "must list gpus only for KIND_GPU",
                f"{label}: {kind} with gpus {names(group.gpus)}",
                "Remove gpus, or write kind: KIND_GPU",
            )
        negative = [gpu for gpu in group.gpus if gpu < 0]
        if negative:
            given = f"{label}: gpus {names(negative)}"
            yield error("must number gpus from 0", given, "Correct gpus")
        if group.profile:
            yield from _profile_flaws(model, group.profile, f"{label}: profile")


def _profile_flaws(model: Model, profiles: Sequence[str], label: str) -> Iterator[Flaw]:
    if model.backend != "tensorrt":
        yield error(
            "must name an optimization profile only for the tensorrt backend",
            f"{label} {names(profiles)}, backend {model.backend}",
            "Remove profile",
        )
    wrong = [profile for profile in profiles if not profile.isdecimal()]
    if wrong:
        yield error(
            "must name optimization profiles by their number",
            f"{label} {names(wrong)}",
            'Write for example profile: "0"',
        )
    if len(profiles) > 1 and model.ragged:
        yield warning(
            "should name one profile for a core with ragged inputs",
            f"{label} {names(profiles)}",
            "Keep the one that spans the packed lengths: the choice looks at the first request",
        )


def response_cache(model: Model) -> Iterator[Flaw]:
    """Responses are cached only where the server can."""
    config = model.config
    if not config.response_cache.enable:
        return
    obstacle = "sequence_batching" if config.HasField("sequence_batching") else ""
    obstacle = "decoupled" if config.model_transaction_policy.decoupled else obstacle
    if obstacle:
        yield error(
            "must not cache responses of a decoupled or sequence model",
            f"response_cache with {obstacle}",
            f"Remove response_cache, or {obstacle}",
        )
    steps = {step.model_name for step in config.ensemble_scheduling.step}
    models = model.repository.configured()
    uncached = steps - {each.name for each in models if each.config.response_cache.enable}
    if uncached:
        yield warning(
            "should enable the response cache on an ensemble only with that of all its steps",
            f"without response_cache: {names(uncached)}",
            "Add response_cache { enable: true } to the steps, or remove it here",
        )
