"""Checks that an ensemble is wired completely, and that its steps take its batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.repository.lint.snapshot import (
    Flaw,
    Model,
    Repository,
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


def ensemble_wiring(wiring: Wiring) -> Iterator[Flaw]:
    """Check that every tensor that is read has one source, and nothing is circular.

    Every required input must be mapped. A server says by itself which models, names, types and
    shapes do not fit.
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
    # Tensors that the server completes at load cannot be compared.
    if step.model is None or (not step.model.config.input and step.model.completes_itself):
        return
    required = [each.name for each in step.model.config.input if not each.optional]
    optional = {each.name for each in wiring.ensemble.config.input if each.optional}
    needed = [name for name in required if step.inputs.get(name) in optional]
    if needed:
        yield error(
            "must declare an optional input of the ensemble as optional in the step, too: "
            "requests without it fail there",
            f"{step.label} requires {names(needed)}",
            f"Add optional: true in {step.model.where}, or remove it from the ensemble",
        )
    unmapped = set(required) - set(step.inputs)
    if unmapped and step.inputs:
        yield error(
            "must map every required input of a step",
            f"{step.label} leaves out {names(unmapped)}; mapped: {names(step.inputs)}",
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
