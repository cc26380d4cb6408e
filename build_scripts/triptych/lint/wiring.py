"""How an ensemble wires its steps: who produces and who consumes each of its tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.lint.snapshot import Model, Repository


@dataclass(frozen=True)
class Step:
    """One step of an ensemble.

    Attributes:
        index: position in the config, from 0.
        model_name: the model it runs.
        model: that model; None when it is missing or its config unreadable.
        inputs: the model's input -> the ensemble's tensor.
        outputs: the model's output -> the ensemble's tensor.
    """

    index: int
    model_name: str
    model: Model | None
    inputs: dict[str, str]
    outputs: dict[str, str]

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"step {self.index} ({self.model_name or 'no model_name'})"


class Wiring:
    """The dataflow of one ensemble.

    Attributes:
        ensemble: the model with `ensemble_scheduling`.
        config_file: its.
        steps: in the order of the config.
        producers: the ensemble's tensor -> the steps that write it.
        consumers: the ensemble's tensor -> the steps that read it.
        inputs: names of the ensemble's own inputs.
        outputs: names of the ensemble's own outputs.
        tensors: all that have a source: the ensemble's inputs and what the steps write.
    """

    def __init__(self, ensemble: Model) -> None:
        models = {model.name: model for model in ensemble.repository.configured()}
        self.ensemble, self.config_file = ensemble, ensemble.config_file
        self.steps = tuple(
            Step(
                index,
                step.model_name,
                models.get(step.model_name),
                dict(step.input_map),
                dict(step.output_map),
            )
            for index, step in enumerate(ensemble.config.ensemble_scheduling.step)
        )
        self.producers: dict[str, list[Step]] = defaultdict(list)
        self.consumers: dict[str, list[Step]] = defaultdict(list)
        for step in self.steps:
            for tensor in step.outputs.values():
                self.producers[tensor].append(step)
            for tensor in step.inputs.values():
                self.consumers[tensor].append(step)
        self.inputs = {tensor.name for tensor in ensemble.config.input}
        self.outputs = {tensor.name for tensor in ensemble.config.output}
        self.tensors = self.inputs | self.producers.keys()

    def stages(self) -> list[list[Step]]:
        """The steps in the order they can run: those of one stage run at the same time.

        Steps that wait for each other in a circle, or behind one, are in none.
        """
        ready, waiting = set(self.inputs), list(self.steps)
        stages: list[list[Step]] = []
        while True:
            # A tensor without any source is another fault: it blocks nothing here.
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
        """The steps that write what the steps of `model` read as `inputs`."""
        read = [
            step.inputs[name]
            for step in self.steps
            if step.model is model
            for name in sorted(inputs & set(step.inputs))
        ]
        return [step for tensor in read for step in self.producers.get(tensor, [])]


def wirings(repository: Repository) -> Iterator[Wiring]:
    """The wiring of every ensemble of the repository."""
    return (Wiring(ensemble) for ensemble in repository.ensembles())
