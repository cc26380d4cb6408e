"""Checks that an ensemble is wired completely, and that its steps agree on their tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from triptych.repository.lint.snapshot import (
    Flaw,
    Model,
    Repository,
    dims_text,
    enum_name,
    error,
    names,
    warning,
)


@dataclass(frozen=True)
class Step:
    """A step of an ensemble."""

    index: int  # Position in the config, from 0
    model_name: str
    model: Model | None  # Model that it runs; None if missing or if its config is unreadable
    inputs: dict[str, str]  # The ensemble's tensor for each input of the model, like `outputs`
    outputs: dict[str, str]

    @property
    def label(self) -> str:
        return f"step {self.index} ({self.model_name or 'no model_name'})"


class Wiring:
    """Connections between the steps of an ensemble.

    Attributes:
        producers: Steps that write a tensor of the ensemble.
        inputs: Names of the ensemble's own inputs, like `outputs`.
        tensors: All tensors with a source: the ensemble's inputs and the outputs of steps.
    """

    def __init__(self, ensemble: Model) -> None:
        models = {model.name: model for model in ensemble.repository.configured()}
        self.ensemble, self.where = ensemble, ensemble.where
        self.steps = tuple(
            Step(i, s.model_name, models.get(s.model_name), dict(s.input_map), dict(s.output_map))
            for i, s in enumerate(ensemble.config.ensemble_scheduling.step)
        )
        self.producers: dict[str, list[Step]] = defaultdict(list)
        for step in self.steps:
            for tensor in step.outputs.values():
                self.producers[tensor].append(step)
        self.inputs = {tensor.name for tensor in ensemble.config.input}
        self.outputs = {tensor.name for tensor in ensemble.config.output}
        self.tensors = self.inputs | self.producers.keys()

    def stages(self) -> list[list[Step]]:
        """Return the steps in the order they can run; steps of one stage run at the same time.

        Steps that wait for each other in a circle, or for such steps, are in no stage.
        """
        ready, waiting = set(self.inputs), list(self.steps)
        stages: list[list[Step]] = []
        while True:
            # A tensor without a source is reported separately, so it does not block a step here.
            stage = [
                step
                for step in waiting
                if all(t in ready or t not in self.producers for t in step.inputs.values())
            ]
            if not stage:
                return stages
            stages.append(stage)
            ready.update(tensor for step in stage for tensor in step.outputs.values())
            waiting = [step for step in waiting if step not in stage]

    def feeding(self, model: Model, inputs: set[str]) -> list[Step]:
        """Return the steps that write the tensors which the steps of `model` read as `inputs`."""
        read = [
            step.inputs[name]
            for step in self.steps
            if step.model is model
            for name in sorted(inputs & set(step.inputs))
        ]
        return [step for tensor in read for step in self.producers.get(tensor, [])]


def wirings(repository: Repository) -> Iterator[Wiring]:
    """Yield the wiring of every ensemble of the repository."""
    return (Wiring(ensemble) for ensemble in repository.ensembles())


def ensemble_steps(wiring: Wiring) -> Iterator[Flaw]:
    """Check that steps name existing models and versions, and no ensemble contains itself."""
    ensemble, models = wiring.ensemble, wiring.ensemble.repository.models
    scheduling = ensemble.config.ensemble_scheduling
    if not wiring.steps and ensemble.config.HasField("ensemble_scheduling"):
        yield error(
            "must have at least one step in ensemble_scheduling",
            "no step",
            "Add the steps, or give the model a backend instead of a platform",
        )
    for step in wiring.steps:
        if step.model_name not in models:
            yield error(
                "must name models of this repository in its steps",
                f"{step.label}; models here: {names(set(models) - {ensemble.name})}",
                "Correct model_name, or build the missing model into the repository",
            )
    for step in wiring.steps:
        wanted = scheduling.step[step.index].model_version
        if step.model and wanted != -1 and wanted not in step.model.served_versions:
            yield error(
                "must use versions that are served; without model_version a step uses version 0",
                f"{step.label} uses version {wanted}, served are "
                f"{names(step.model.served_versions)}",
                "Write model_version: -1 for the newest",
            )
    seen: set[str] = set()
    pending = [step.model_name for step in wiring.steps]
    while pending:
        model = models.get(pending.pop())
        if model is not None and model.config is not None and model.name not in seen:
            seen.add(model.name)
            pending += [step.model_name for step in model.config.ensemble_scheduling.step]
    if ensemble.name in seen:
        yield error(
            "must not contain itself among its steps",
            f"{ensemble.name} needs {names(seen)}",
            "Remove the step that leads back to it",
        )


def ensemble_wiring(wiring: Wiring) -> Iterator[Flaw]:
    """Check that every tensor has one source and a reader, and nothing is circular.

    Every required input must be mapped.
    """
    for step in wiring.steps:
        yield from _check_maps(wiring, step)
    yield from _check_tensors(wiring)
    runnable = [step for stage in wiring.stages() for step in stage]
    blocked = [step.label for step in wiring.steps if step not in runnable]
    if blocked:
        yield error(
            "must not have steps that wait for each other in a circle",
            ", ".join(blocked),
            "Map an input of one of them to a tensor that does not depend on it",
        )


def _check_maps(wiring: Wiring, step: Step) -> Iterator[Flaw]:
    if not step.inputs or not step.outputs:
        yield error(
            "must have an input_map and an output_map in every step",
            f"{step.label} lacks {'an output_map' if step.inputs else 'an input_map'}",
            "Map the step's inputs and outputs to tensors of the ensemble",
        )
    for kind, mapped in (("input", step.inputs), ("output", step.outputs)):
        declared = getattr(step.model.config, kind) if step.model else ()
        # Tensors that the server completes at load cannot be compared.
        if step.model is None or (not declared and step.model.completes_itself):
            continue
        existing = {tensor.name for tensor in declared}
        unknown = set(mapped) - existing
        if unknown:
            yield error(
                f"must name {kind}s of the step's model as keys of {kind}_map",
                f"{step.label} has no {kind} {names(unknown)}; it has: {names(existing)}",
                f"Correct the key, or {step.model.where}",
            )
        optional = {t.name for t in wiring.ensemble.config.input if t.optional}
        needed = [
            t.name
            for t in declared
            if kind == "input" and not t.optional and mapped.get(t.name) in optional
        ]
        if needed:
            yield error(
                "must declare an optional input of the ensemble as optional in the step, too: "
                "requests without it fail there",
                f"{step.label} requires {names(needed)}",
                f"Add optional: true in {step.model.where}, or remove it from the ensemble",
            )
        unmapped = {t.name for t in declared if kind == "input" and not t.optional} - set(mapped)
        if unmapped and mapped:
            yield error(
                "must map every required input of a step",
                f"{step.label} leaves out {names(unmapped)}; mapped: {names(mapped)}",
                f'Add input_map {{ key: "{min(unmapped)}" value: "..." }}; tensors to map: '
                f"{names(wiring.tensors)}",
            )


def _check_tensors(wiring: Wiring) -> Iterator[Flaw]:
    for tensor, steps in sorted(wiring.producers.items()):
        writers = [step.label for step in steps]
        writers += ["the ensemble's own input"] if tensor in wiring.inputs else []
        if len(writers) > 1:
            yield error(
                "must produce every tensor once",
                f"{tensor} comes from {', '.join(writers)}",
                "Give each a unique name in output_map",
            )
    read = {t: step.label for step in wiring.steps for t in step.inputs.values()}
    read.update(dict.fromkeys(wiring.outputs, "the ensemble's output"))
    for tensor in sorted(set(read) - wiring.tensors):
        yield error(
            "must produce every tensor that is read",
            f"{read[tensor]} reads {tensor!r}; tensors there are: {names(wiring.tensors)}",
            "Correct the name in the map, or map an output of a step to it",
        )
    for tensor in sorted(wiring.tensors - set(read)):
        own = tensor in wiring.inputs
        source = "an input" if own else f"output of {wiring.producers[tensor][0].label}"
        yield error(
            "must use every tensor: as an input of a step or an output of the ensemble",
            f"nothing reads {tensor!r}, {source}",
            "Remove it from output_map or input, or map it to an input of a step",
        )


@dataclass(frozen=True)
class _End:
    """One end of a connection: a tensor as one model declares it."""

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


def ensemble_tensors(wiring: Wiring) -> Iterator[Flaw]:
    """Check that both ends of every connection have the same dtype and dims."""
    wires: dict[str, list[_End]] = {}
    for tensor, end in _ends(wiring):
        wires.setdefault(tensor, []).append(end)
    for source, *others in wires.values():
        for end in others:
            if source.data_type != end.data_type:
                rule, change = "must have one dtype at both ends of a wire", "data_type"
            elif not (_join(source.dims, end.dims) or _join(source.full_dims, end.full_dims)):
                rule, change = "must have dims that fit at both ends of a wire", "dims"
            else:
                continue
            yield error(
                rule,
                f"{source.text} feeds {end.text}",
                f"Change {change} in {source.owner.where} or {end.owner.where}",
            )


def _ends(wiring: Wiring) -> Iterator[tuple[str, _End]]:
    """Yield the ensemble's tensors, each with one end; a source comes before its readers."""

    def end(model: Model, tensor: Any, *, own: bool = False) -> _End:
        dims = tensor.reshape.shape if own and tensor.HasField("reshape") else tensor.dims
        return _End(model, tensor.name, enum_name(tensor, "data_type"), tuple(dims))

    ensemble, models = wiring.ensemble, [(s, s.model) for s in wiring.steps if s.model]
    yield from ((t.name, end(ensemble, t, own=True)) for t in ensemble.config.input)
    for step, model in models:
        mapped = [t for t in model.config.output if t.name in step.outputs]
        yield from ((step.outputs[t.name], end(model, t)) for t in mapped)
    for step, model in models:
        mapped = [t for t in model.config.input if t.name in step.inputs]
        yield from ((step.inputs[t.name], end(model, t)) for t in mapped)
    yield from ((t.name, end(ensemble, t, own=True)) for t in ensemble.config.output)


def _join(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    pairs = zip(left, right, strict=False)
    return len(left) == len(right) and all(a == b or -1 in (a, b) for a, b in pairs)


def ensemble_batch(wiring: Wiring) -> Iterator[Flaw]:
    """Check that every step accepts batches of the ensemble's size."""
    allowed = wiring.ensemble.config.max_batch_size
    for step in wiring.steps:
        limit = step.model.config.max_batch_size if step.model else allowed
        given = f"{wiring.ensemble.name} takes {allowed} rows, {step.label} takes {limit}"
        if 0 < limit < allowed:
            yield error(
                "must not take more rows than its steps do",
                given,
                f"Set max_batch_size of {step.model_name} to at least {allowed}, or the ensemble's "
                f"to {limit}",
            )
        elif limit == 0 < allowed and step.model and step.model.backend != "openvino":
            yield warning(
                "should batch if its ensemble does",
                given,
                f"Set max_batch_size: {allowed}: with 0 every request runs alone",
                f"{step.model_name}/config.pbtxt",
            )
