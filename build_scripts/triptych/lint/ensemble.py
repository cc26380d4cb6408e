"""Lint: an ensemble closes, and its steps agree on names, dtypes, dims and batch sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from triptych.lint.flaw import Flaw, dims_text, error, names, warning
from triptych.lint.snapshot import Model, Repository, enum_name
from triptych.lint.wiring import Step, Wiring, wirings


def ensemble_steps(repository: Repository) -> Iterator[Flaw]:
    """Every step names a model and version of this repository, and no ensemble contains itself."""
    for wiring in wirings(repository):
        file = wiring.ensemble.config_file
        if not wiring.steps and wiring.ensemble.config.HasField("ensemble_scheduling"):
            yield error(
                file,
                "must have at least one step in ensemble_scheduling",
                given="no step",
                remedy="Add the steps, or give the model a backend instead of a platform",
            )
        for step in wiring.steps:
            if step.model_name not in repository.models:
                others = set(repository.models) - {wiring.ensemble.name}
                yield error(
                    file,
                    "must name models of this repository in its steps",
                    given=f"{step.label}; models here: {names(others)}",
                    remedy="Correct model_name, or build the missing model into the repository",
                )
        yield from _missing_versions(wiring)
        yield from _contains_itself(repository, wiring)


def _missing_versions(wiring: Wiring) -> Iterator[Flaw]:
    for step in wiring.steps:
        wanted = wiring.ensemble.config.ensemble_scheduling.step[step.index].model_version
        if step.model is None or wanted == -1 or wanted in step.model.served_versions:
            continue
        yield error(
            wiring.ensemble.config_file,
            "must ask for versions that are served; without model_version a step asks for 0",
            given=f"{step.label} asks for version {wanted}, served are "
            f"{names(step.model.served_versions)}",
            remedy="Write model_version: -1 for the newest",
        )


def _contains_itself(repository: Repository, wiring: Wiring) -> Iterator[Flaw]:
    seen: set[str] = set()
    pending = [step.model_name for step in wiring.steps]
    while pending:
        model = repository.models.get(pending.pop())
        if model is None or model.config is None or model.name in seen:
            continue
        seen.add(model.name)
        pending += [step.model_name for step in model.config.ensemble_scheduling.step]
    if wiring.ensemble.name in seen:
        yield error(
            wiring.ensemble.config_file,
            "must not contain itself among its steps",
            given=f"{wiring.ensemble.name} needs {names(seen)}",
            remedy="Remove the step that leads back to it",
        )


def ensemble_closes(repository: Repository) -> Iterator[Flaw]:
    """Every tensor has one source and a reader, every required input is mapped, nothing circles."""
    for wiring in wirings(repository):
        for step in wiring.steps:
            yield from _check_maps(wiring, step)
        yield from _check_sources(wiring)
        yield from _check_readers(wiring)
        runnable = [step for stage in wiring.stages() for step in stage]
        blocked = [step for step in wiring.steps if step not in runnable]
        if blocked:
            yield error(
                wiring.ensemble.config_file,
                "must not have steps that wait for each other in a circle",
                given=", ".join(step.label for step in blocked),
                remedy="Map an input of one of them to a tensor that does not depend on it",
            )


def _check_maps(wiring: Wiring, step: Step) -> Iterator[Flaw]:
    file = wiring.ensemble.config_file
    if not step.inputs or not step.outputs:
        yield error(
            file,
            "must have an input_map and an output_map in every step",
            given=f"{step.label} lacks {'an output_map' if step.inputs else 'an input_map'}",
            remedy="Map the step's inputs and outputs to tensors of the ensemble",
        )
    config = step.model.config if step.model else None
    # Tensors that the server finds out at load cannot be compared with.
    completes = step.model is not None and step.model.completes_itself
    if config is not None and (config.input or not completes):
        existing = {tensor.name for tensor in config.input}
        required = {tensor.name for tensor in config.input if not tensor.optional}
        yield from _unknown(file, step, "input", set(step.inputs) - existing, existing)
        unmapped = required - set(step.inputs)
        if unmapped and step.inputs:
            yield error(
                file,
                "must map every required input of a step",
                given=f"{step.label} leaves out {names(unmapped)}; mapped: {names(step.inputs)}",
                remedy=f'Add input_map {{ key: "{min(unmapped)}" value: "..." }}; tensors to map: '
                f"{names(wiring.tensors)}",
            )
    if config is not None and (config.output or not completes):
        existing = {tensor.name for tensor in config.output}
        yield from _unknown(file, step, "output", set(step.outputs) - existing, existing)


def _unknown(
    file: str, step: Step, kind: str, unknown: set[str], existing: set[str]
) -> Iterator[Flaw]:
    if unknown:
        yield error(
            file,
            f"must name {kind}s of the step's model as keys of {kind}_map",
            given=f"{step.label} has no {kind} {names(unknown)}; it has: {names(existing)}",
            remedy=f"Correct the key, or {step.model_name}/config.pbtxt",
        )


def _check_sources(wiring: Wiring) -> Iterator[Flaw]:
    file = wiring.ensemble.config_file
    for tensor, steps in sorted(wiring.producers.items()):
        writers = [step.label for step in steps]
        writers += ["the ensemble's own input"] if tensor in wiring.inputs else []
        if len(writers) > 1:
            yield error(
                file,
                "must produce every tensor once",
                given=f"{tensor} comes from {', '.join(writers)}",
                remedy="Give each a name of its own in output_map",
            )
    read = {t: step.label for step in wiring.steps for t in step.inputs.values()}
    read.update(dict.fromkeys(wiring.outputs, "the ensemble's output"))
    for tensor in sorted(set(read) - wiring.tensors):
        yield error(
            file,
            "must produce every tensor that is read",
            given=f"{read[tensor]} reads {tensor!r}; tensors there are: {names(wiring.tensors)}",
            remedy="Correct the name in the map, or map an output of a step to it",
        )


def _check_readers(wiring: Wiring) -> Iterator[Flaw]:
    unread = wiring.tensors - wiring.outputs - set(wiring.consumers)
    for tensor in sorted(unread):
        source = "an input" if tensor in wiring.inputs else f"output of {_writer(wiring, tensor)}"
        yield error(
            wiring.ensemble.config_file,
            "must use every tensor: as an input of a step or an output of the ensemble",
            given=f"nothing reads {tensor!r}, {source}",
            remedy="Remove it from output_map or input, or map it to an input of a step",
        )


def _writer(wiring: Wiring, tensor: str) -> str:
    return wiring.producers[tensor][0].label


@dataclass(frozen=True)
class _End:
    """One end of a wire: a tensor as one model declares it."""

    owner: Model
    name: str
    data_type: str
    dims: tuple[int, ...]

    @property
    def text(self) -> str:
        return f"{self.owner.name}.{self.name} {self.data_type} {dims_text(self.dims)}"

    @property
    def full_dims(self) -> tuple[int, ...]:
        return (-1, *self.dims) if self.owner.config.max_batch_size > 0 else self.dims


def ensemble_tensors(repository: Repository) -> Iterator[Flaw]:
    """Both ends of every wire have the same dtype and dims."""
    for wiring in wirings(repository):
        for ends in _wires(wiring).values():
            for end in ends[1:]:
                yield from _compare(wiring, ends[0], end)


def _wires(wiring: Wiring) -> dict[str, list[_End]]:
    """Tensor of the ensemble -> its ends, the source first."""
    config = wiring.ensemble.config
    found: list[tuple[str, _End]] = []
    found += [(t.name, _own_end(wiring.ensemble, t)) for t in config.input]
    found += [end for step in wiring.steps for end in _ends(step.model, "output", step.outputs)]
    found += [end for step in wiring.steps for end in _ends(step.model, "input", step.inputs)]
    found += [(t.name, _own_end(wiring.ensemble, t)) for t in config.output]
    wires: dict[str, list[_End]] = {}
    for tensor, end in found:
        wires.setdefault(tensor, []).append(end)
    return wires


def _own_end(ensemble: Model, tensor: Any) -> _End:
    dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
    return _End(ensemble, tensor.name, enum_name(tensor, "data_type"), tuple(dims))


def _ends(model: Model | None, kind: str, mapped: dict[str, str]) -> list[tuple[str, _End]]:
    declared = getattr(model.config, kind) if model else ()
    return [
        (mapped[t.name], _End(model, t.name, enum_name(t, "data_type"), tuple(t.dims)))
        for t in declared
        if model is not None and t.name in mapped
    ]


def _compare(wiring: Wiring, source: _End, end: _End) -> Iterator[Flaw]:
    if source.data_type != end.data_type:
        rule, change = "must have one dtype at both ends of a wire", "data_type"
    elif not (_fits(source.dims, end.dims) or _fits(source.full_dims, end.full_dims)):
        rule, change = "must have dims that fit at both ends of a wire", "dims"
    else:
        return
    yield error(
        wiring.ensemble.config_file,
        rule,
        given=f"{source.text} feeds {end.text}",
        remedy=f"Change {change} in {source.owner.config_file} or {end.owner.config_file}",
    )


def _fits(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    return len(left) == len(right) and all(
        a == b or -1 in (a, b) for a, b in zip(left, right, strict=True)
    )


def ensemble_batch(repository: Repository) -> Iterator[Flaw]:
    """Every step takes the batches that the ensemble takes."""
    for wiring in wirings(repository):
        allowed = wiring.ensemble.config.max_batch_size
        for step in wiring.steps:
            limit = step.model.config.max_batch_size if step.model else allowed
            given = f"{wiring.ensemble.name} takes {allowed} rows, {step.label} takes {limit}"
            if 0 < limit < allowed:
                yield error(
                    wiring.ensemble.config_file,
                    "must not take more rows than its steps do",
                    given=given,
                    remedy=f"Set max_batch_size of {step.model_name} to at least {allowed}, or "
                    f"the ensemble's to {limit}",
                )
            elif limit == 0 < allowed:
                yield warning(
                    f"{step.model_name}/config.pbtxt",
                    "should batch when the ensemble it is a step of does",
                    given=given,
                    remedy=f"Set max_batch_size: {allowed}: with 0 every request runs alone",
                )
