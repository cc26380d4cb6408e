"""Lint: a single config says only what the target Triton takes."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from triptych.lint.backends import BACKENDS, ENSEMBLE
from triptych.lint.flaw import Flaw, dims_text, error, names, warning
from triptych.lint.snapshot import Model, Repository, enum_name, is_file
from triptych.releases import (
    BACKEND_TYPES,
    TENSORRT_INT64,
    fields_newer_than,
    parameters_newer_than,
)


def triton_version(repository: Repository) -> Iterator[Flaw]:
    """No field is newer than the target Triton: one unknown field and it refuses the config.

    Parameters that its backend does not know yet are passed over without a word.
    """
    for model in repository.configured():
        for field in fields_newer_than(model.config, repository.triton):
            yield error(
                model.config_file,
                f"must hold only fields that Triton {repository.triton} knows",
                given=f"{field.name}, new in {field.release}",
                remedy=f"Remove it, or target Triton {field.release} or later",
            )
        for parameter in parameters_newer_than(model.config, repository.triton):
            yield warning(
                model.config_file,
                f"should hold only parameters that Triton {repository.triton} knows: it takes no "
                "notice of others",
                given=f"parameter {parameter.name}, new in {parameter.release}",
                remedy=f"Remove it, or target Triton {parameter.release} or later",
            )
        yield from _newer_types(repository, model)


def _newer_types(repository: Repository, model: Model) -> Iterator[Flaw]:
    used = {enum_name(t, "data_type") for t in (*model.config.input, *model.config.output)}
    for since in BACKEND_TYPES.get(model.backend, ()):
        if since.name in used and since.release > repository.triton:
            yield error(
                model.config_file,
                f"must have only data types that the backend has in Triton {repository.triton}",
                given=f"{since.name}, new in {since.release} for {model.backend}",
                remedy=f"Cast to TYPE_FP32, or target Triton {since.release} or later",
            )


def backend_known(repository: Repository) -> Iterator[Flaw]:
    """Backend and platform name something that exists and belong together."""
    for model in repository.configured():
        config = model.config
        known = BACKENDS.get(model.backend)
        if not model.backend:
            yield error(
                model.config_file,
                "must name a backend, or hold a file to tell it from",
                given=f"platform {config.platform!r}, no backend",
                remedy='Write backend: "onnxruntime" (or python, tensorrt, ...)',
            )
        elif model.is_ensemble:
            yield from _check_ensemble_platform(model)
        elif known is None:
            yield from _unknown_backend(model)
        elif config.platform and known.platforms and config.platform not in known.platforms:
            yield error(
                model.config_file,
                "must have a platform that goes with its backend",
                given=f"backend {model.backend}, platform {config.platform}",
                remedy=f"Remove platform, or write {known.platforms[0]}",
            )


def _check_ensemble_platform(model: Model) -> Iterator[Flaw]:
    config = model.config
    if config.platform != ENSEMBLE or config.backend:
        yield error(
            model.config_file,
            f'must have platform: "{ENSEMBLE}" and no backend to schedule an ensemble',
            given=f"platform {config.platform!r}, backend {config.backend!r}",
            remedy=f'Write platform: "{ENSEMBLE}" and remove backend',
        )
    elif not config.HasField("ensemble_scheduling"):
        yield error(
            model.config_file,
            "must have ensemble_scheduling when its platform is ensemble",
            given="none",
            remedy="Add ensemble_scheduling with its steps, or name a backend",
        )


def _unknown_backend(model: Model) -> Iterator[Flaw]:
    library = f"libtriton_{model.backend}.so"
    if any(is_file(folder / library) for folder in (model.folder, *model.served_folders)):
        return
    close = difflib.get_close_matches(model.backend, BACKENDS, n=1, cutoff=0.8)
    kind = error if close else warning
    yield kind(
        model.config_file,
        "must name a backend that the server has",
        given=model.backend,
        remedy=f"Did you mean {close[0]}?"
        if close
        else f"Install the backend in the server's backend folder; known: {names(BACKENDS)}",
    )


def ensemble_fields(repository: Repository) -> Iterator[Flaw]:
    """An ensemble sets nothing that belongs to its steps."""
    for model in repository.ensembles():
        present = {field.name for field, _ in model.config.ListFields()}
        forbidden = present & {"instance_group", "optimization", "model_warmup"}
        if forbidden:
            yield error(
                model.config_file,
                "must not set on an ensemble what belongs to its steps",
                given=names(forbidden),
                remedy="Move it into the config of a step",
            )


def tensor_valid(repository: Repository) -> Iterator[Flaw]:
    """Inputs and outputs have names of their own, a dtype and dims of at least 1 or -1."""
    for model in repository.configured():
        for kind in ("input", "output"):
            tensors = getattr(model.config, kind)
            twice = [name for name, n in Counter(t.name for t in tensors).items() if n > 1]
            if twice:
                yield error(
                    model.config_file,
                    f"must give every {kind} a name of its own",
                    given=f"twice: {names(twice)}",
                    remedy="Rename or remove one",
                )
            for index, tensor in enumerate(tensors):
                for rule, given in _tensor_faults(tensor):
                    yield error(
                        model.config_file,
                        rule,
                        given=f"{kind} {tensor.name or index}: {given}",
                        remedy=f"Correct the {kind} in {model.config_file}",
                    )


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


def instance_group(repository: Repository) -> Iterator[Flaw]:
    """Instance groups have a count, GPUs only where they run on one, profiles only for TensorRT."""
    for model in repository.executed():
        for index, group in enumerate(model.config.instance_group):
            for kind, rule, given, remedy in _group_faults(model, group):
                place = f"instance_group {group.name or index}: {given}"
                yield kind(model.config_file, rule, given=place, remedy=remedy)


def instances_of(model: Model, group: Any) -> int:
    """Instances the server starts for `group`, its own default included."""
    on_cpu = (model.backend, enum_name(group, "kind")) == ("onnxruntime", "KIND_CPU")
    return group.count if group.count > 0 else 2 if on_cpu else 1


def _group_faults(model: Model, group: Any) -> Iterator[tuple[Any, str, str, str]]:
    place = enum_name(group, "kind")
    if group.count < 1:
        default = instances_of(model, group)
        rule = "should have a count of at least 1"
        given = f"count {group.count}, for which the server takes {default}"
        yield warning, rule, given, "Write count: 1 or more"
    if group.gpus and place in ("KIND_CPU", "KIND_MODEL"):
        rule, remedy = "must list gpus only for KIND_GPU", "Remove gpus, or write kind: KIND_GPU"
        yield error, rule, f"{place} with gpus {names(group.gpus)}", remedy
    negative = [gpu for gpu in group.gpus if gpu < 0]
    if negative:
        yield error, "must number gpus from 0", f"gpus {names(negative)}", "Correct gpus"
    if group.profile:
        yield from _profile_faults(model, group.profile)


def _profile_faults(model: Model, profiles: Sequence[str]) -> Iterator[tuple[Any, str, str, str]]:
    given = f"profile {names(profiles)}"
    if model.backend != "tensorrt":
        rule = "must name an optimization profile only for the tensorrt backend"
        yield error, rule, f"{given}, backend {model.backend}", "Remove profile"
    wrong = [profile for profile in profiles if not profile.isdecimal()]
    if wrong:
        rule = "must name optimization profiles by their number"
        yield error, rule, f"profile {names(wrong)}", 'Write for example profile: "0"'
    if len(profiles) > 1 and any(tensor.allow_ragged_batch for tensor in model.config.input):
        rule = "should name one profile for a core with ragged inputs"
        remedy = "Keep the one that spans the packed lengths: the choice looks at the first request"
        yield warning, rule, given, remedy


def response_cache(repository: Repository) -> Iterator[Flaw]:
    """Responses are cached only where the server can."""
    for model in repository.configured():
        config = model.config
        if not config.response_cache.enable:
            continue
        obstacle = "sequence_batching" if config.HasField("sequence_batching") else ""
        obstacle = "decoupled" if config.model_transaction_policy.decoupled else obstacle
        if obstacle:
            yield error(
                model.config_file,
                "must not cache responses of a decoupled or sequence model",
                given=f"response_cache with {obstacle}",
                remedy=f"Remove response_cache, or {obstacle}",
            )
        steps = {step.model_name for step in config.ensemble_scheduling.step}
        cached = {m.name for m in repository.configured() if m.config.response_cache.enable}
        if steps - cached:
            yield warning(
                model.config_file,
                "should enable the response cache on an ensemble only with that of all its steps",
                given=f"without response_cache: {names(steps - cached)}",
                remedy="Add response_cache { enable: true } to the steps, or remove it here",
            )


def int64_tensor(repository: Repository) -> Iterator[Flaw]:
    """INT64 tensors of a plan need TensorRT 10."""
    if repository.triton >= TENSORRT_INT64:
        return
    for model in repository.executed():
        tensors = [*model.config.input, *model.config.output]
        wide = [t.name for t in tensors if enum_name(t, "data_type") == "TYPE_INT64"]
        if model.backend == "tensorrt" and wide:
            yield error(
                model.config_file,
                f"must have no INT64 tensor: Triton {repository.triton} has TensorRT 8",
                given=names(wide),
                remedy=f"Cast to TYPE_INT32, or target Triton {TENSORRT_INT64} or later",
            )
